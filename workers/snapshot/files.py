"""Finds the snapshot files of a job on a node, and the steps in them. Pure Python, for agents without torch."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.snapshot.node_memory import in_node_memory
from workers.snapshot.snapshot_file import committed_steps
from workers.system.own_files import remove

BACKUP_PREFIX = "replica-"
"""Beginning of the name of a backup; the rest is the name of the rank's own file."""
_NAME = re.compile(rf"({BACKUP_PREFIX})?rank-(\d{{5,}})\.(?:([0-9a-f]{{8}})\.)?snapshot")


def snapshot_path(folder: str | Path, rank: int, layout: str = "") -> Path:
    """The snapshot file of `rank` in the layout with tag `layout` (`layout_tag`). Each layout has its own files, so
    that a new one can be written while the old one is read."""
    tag = f".{layout}" if layout else ""
    return Path(folder) / f"rank-{rank:05d}{tag}.snapshot"


def backup_path(folder: str | Path, rank: int, layout: str) -> Path:
    """The copy of the snapshot file of `rank` on a node other than its own."""
    path = snapshot_path(folder, rank, layout)
    return path.with_name(f"{BACKUP_PREFIX}{path.name}")


@dataclass(frozen=True)
class SnapshotEntry:
    """A snapshot file of a job, by its name."""

    path: Path
    rank: int
    """The rank whose state it holds."""
    layout: str
    """Tag of the layout (`layout_tag`)."""
    is_backup: bool
    """Whether it is a backup, whose rank is on another node."""


def snapshot_files(folder: str | Path) -> list[SnapshotEntry]:
    """All snapshot files of a job on this node, including those in the memory of its daemon."""
    try:
        paths = sorted(Path(folder).iterdir())
    except OSError:  # there is no such folder, or what cannot be read is of no use to anybody
        paths = []
    there = [path for path in paths if not path.is_symlink() or in_node_memory(path)]
    names = [(path, _NAME.fullmatch(path.name)) for path in there]
    return [SnapshotEntry(path, int(match[2]), match[3] or "", match[1] is not None) for path, match in names if match]


def steps_kept(folder: str | Path, rank: int, layout: str | None = None) -> list[int]:
    """Committed steps of `rank` that are complete in its own files on this node, ascending; with `layout`, only those
    of the layout with that tag."""
    own = [file for file in snapshot_files(folder) if file.rank == rank and not file.is_backup]
    wanted = [file.path for file in own if layout in (None, file.layout)]
    return sorted({step for path in wanted for step in committed_steps(path)})


def remove_other_layouts(folder: str | Path, layout: str) -> bool:
    """Remove the files of all layouts except the one with tag `layout`, when they are no longer needed. Returns whether
    some of them were in the daemon's memory."""
    others = [file.path for file in snapshot_files(folder) if file.layout != layout]
    with_daemon = any(in_node_memory(path) for path in others)
    for path in others:
        remove(path)
    return with_daemon


_OF_NO_STATE = frozenset({"gather", "stage_accelerators"})
"""Keys of `parallel` that affect when something is done, or on which nodes, but not the state of any rank."""


def _layout_of(spec: dict[str, Any]) -> dict[str, Any]:
    """Keys with null are left out, so that a layout keeps its tag when new keys are introduced."""
    kept = {key: value for key, value in spec["parallel"].items() if key not in _OF_NO_STATE}
    return {key: value for key, value in kept.items() if value is not None or key == "sequence_parallel"}


def layout_tag(spec: dict[str, Any]) -> str:
    """Eight hexadecimal digits that distinguish the layout of a job (a JobSpec as JSON) from its other layouts."""
    text = json.dumps(_layout_of(spec), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def fingerprint(spec: dict[str, Any], rank: int) -> bytes:
    """16 bytes that distinguish states that do not fit each other: of the model, the layout and the rank. Ranks with
    the same state (`grid.state_peers`) have that of the first of them."""
    text = json.dumps([spec["model"], _layout_of(spec), spec["data"], spec["train"]["precision"], rank], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
