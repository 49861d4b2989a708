"""Memory of this machine: what is left for this process, what was killed for want of it, and how the C library handles
large blocks."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from pathlib import Path

from manta.workers.system.resources import ROOT, control_groups

# From glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_NEVER = -1
# Larger blocks still come from the kernel and go back to it.
_LARGEST_KEPT_BYTES = 1 << 30


def keep_freed_memory() -> None:
    """Let this process keep the memory that it frees, for its next step. Does nothing if malloc is not glibc's.

    glibc gives large blocks back to the kernel as soon as they are freed, so each step's activations would use fresh
    pages, with a fault for every 4096 bytes: hundreds to ten thousands a step, about 2 us each.
    """
    adjust = getattr(ctypes.CDLL(None), "mallopt", None)
    if adjust is not None:
        adjust(_TRIM_THRESHOLD, _NEVER)
        adjust(_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)


def memory_available(root: Path = ROOT) -> int:
    """Bytes of memory that are available without swapping: by the kernel's own estimate, or fewer if a control group
    limits this process, as in containers. `root`: where proc and sys are."""
    limits = (_left_in(group) for group in control_groups("memory", root))
    return min([_memory_of_machine(root), *(left for left in limits if left is not None)])


def killed_for_memory(root: Path = ROOT) -> int | None:
    """How many processes of this machine, including those in its containers, the kernel has killed for lack of memory
    since it started; None if it does not say. `root`: where proc is."""
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def _memory_of_machine(root: Path) -> int:
    with contextlib.suppress(OSError):
        for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return sys.maxsize


def _left_in(group: Path) -> int | None:
    """What the group may still use, including pages of files that the kernel can drop; None if it has no limit."""
    second = (group / "memory.max").exists()
    most, used = ("memory.max", "memory.current") if second else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    try:
        limit, taken = int((group / most).read_text()), int((group / used).read_text())
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        droppable = int(counts.get("inactive_file" if second else "total_inactive_file", 0))
    except (OSError, ValueError):  # no such group, or "max"
        return None
    return max(0, limit - taken + droppable)
