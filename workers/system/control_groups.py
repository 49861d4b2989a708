"""The control groups that limit what this process may use, as in containers (cgroups(7)). Pure Python."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


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
