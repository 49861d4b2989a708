"""What this process may use of its machine (cores, memory, open files), what other processes use of it, and what the
kernel has killed for want of memory."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import resource
import time
from collections.abc import Iterator
from pathlib import Path

from manta.workers.errors import OpenFilesError

ROOT = Path("/")

_IDLE = slice(3, 5)
"""Columns of the first line of /proc/stat: idle, and waiting for disks."""
_COUNTED = 8
"""Number of its columns up to time that a hypervisor took; later columns are included in the first two."""

RESERVED_FILES = 256
"""Number of files that a process opens besides its connections: data, snapshots, libraries, the store."""


def control_groups(controller: str, root: Path) -> Iterator[Path]:
    """The groups in which `controller` (cpu, memory) controls this process, and the groups that contain them. In a
    container the path may only be meaningful on the host; then the topmost group is the container's own. `root`: where
    proc and sys are."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / controllers
        group = top / path.strip("/")
        yield group
        yield from (parent for parent in group.parents if parent.is_relative_to(top))


def usable_cores(root: Path = ROOT) -> int:
    """Processors that this process may keep busy, at least 1: those that it is bound to, or fewer if a control group
    limits its time, as in containers. `root`: where proc and sys are."""
    limits = [limit for folder in control_groups("cpu", root) if (limit := _core_limit(folder)) is not None]
    return max(1, int(min([len(os.sched_getaffinity(0)), *limits])))


def _core_limit(group: Path) -> float | None:
    """How many processors the group may keep busy; None if it does not say, or may use all."""
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):  # no such group, or "max"
        return None


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


class OtherCpuLoad:
    """Counts, from its creation on, the computing of processes other than this one and the children that it has waited
    for."""

    def __init__(self) -> None:
        self._began, self._busy, self._own = time.monotonic(), _busy_seconds(), _own_seconds()

    def cores(self) -> float | None:
        """Mean number of cores that others have kept busy since then; None if the kernel does not say."""
        busy = _busy_seconds()
        if busy is None or self._busy is None:
            return None
        others = (busy - self._busy) - (_own_seconds() - self._own)
        return max(0.0, others / max(1e-3, time.monotonic() - self._began))


def _busy_seconds() -> float | None:
    """Of all cores together, since the machine started."""
    try:
        columns = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1 : 1 + _COUNTED]
    except OSError:
        return None
    ticks = [int(column) for column in columns]
    return (sum(ticks) - sum(ticks[_IDLE])) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def raise_limit(wanted: int) -> int:
    """Raise the limit to `wanted` if it is lower, as far as permitted; returns how many of `wanted` are permitted."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if soft == resource.RLIM_INFINITY or soft >= allowed:
        return wanted if soft == resource.RLIM_INFINITY else min(soft, wanted)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed


def reserve_files(connections: int) -> None:
    """Make room for this many connections in addition to everything else. Raises OpenFilesError."""
    wanted = connections + RESERVED_FILES
    allowed = raise_limit(wanted)
    if allowed < wanted:
        raise OpenFilesError(
            f"{connections} connections to other ranks take {wanted} open files, and this process may have {allowed}: "
            f"start the node with `ulimit -n {wanted}` or more (nofile in limits.conf, LimitNOFILE in systemd)"
        )
