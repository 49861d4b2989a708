"""What this machine computes with. Pure Python."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path


def cores_here() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def processor_name() -> str:
    """As the kernel has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "cpu"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "cpu")


def node_type() -> str:
    """A name for all machines that compute as this one does without GPUs: processor and cores."""
    name = re.sub(r"[^a-z0-9]+", "-", processor_name().lower()).strip("-") or "cpu"
    return f"{name[:80]}-{cores_here()}"
