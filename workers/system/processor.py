"""What this machine computes with. Pure Python."""

from __future__ import annotations

import platform
import re
from pathlib import Path

from workers.system.cores import usable_cores


def processor_name() -> str:
    """The processor's name according to the kernel."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "cpu"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "cpu")


def node_type() -> str:
    """A name for all machines that compute like this one without GPUs: processor and number of cores."""
    name = re.sub(r"[^a-z0-9]+", "-", processor_name().lower()).strip("-") or "cpu"
    return f"{name[:80]}-{usable_cores()}"
