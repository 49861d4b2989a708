"""How many processors this process may use. Pure Python."""

from __future__ import annotations

import os
from pathlib import Path

from workers.system.control_groups import ROOT, control_groups


def usable_cores(root: Path = ROOT) -> int:
    """Processors that this process may keep busy, at least 1: those that it is bound to, or fewer if a control group
    limits its time, as in containers. `root`: where proc and sys are."""
    limits = [limit for folder in control_groups("cpu", root) if (limit := _limit(folder)) is not None]
    return max(1, int(min([len(os.sched_getaffinity(0)), *limits])))


def _limit(group: Path) -> float | None:
    """How many processors the group may keep busy; None if it does not say, or may use all."""
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):  # no such group, or "max"
        return None
