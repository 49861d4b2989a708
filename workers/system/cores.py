"""How many processors this process may use. Pure Python."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def usable_cores(root: Path = ROOT) -> int:
    """Processors that this process may keep busy, at least 1: those that it is bound to, or fewer where a control group
    limits its time, as containers do. `root`: where proc and sys are."""
    limits = [limit for folder in _control_groups(root) if (limit := _limit(folder)) is not None]
    return max(1, int(min([len(os.sched_getaffinity(0)), *limits])))


def _control_groups(root: Path) -> Iterator[Path]:
    """The groups that share out processor time to this process, and those that they are in (cgroups(7)). In a container
    the path may be one that only the machine outside knows; then the topmost is the container's own."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / controllers
        group = top / path.strip("/")
        yield group
        yield from (parent for parent in group.parents if parent.is_relative_to(top))


def _limit(group: Path) -> float | None:
    """How many processors the group may keep busy; None where it does not say, or may use all."""
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):  # no such group, or "max"
        return None
