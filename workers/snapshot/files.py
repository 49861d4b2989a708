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

BACKUP_PREFIX = "replica-"
"""Start of the name of a backup; what follows is the name of the rank's own file."""
_NAME = re.compile(rf"({BACKUP_PREFIX})?rank-(\d{{5,}})\.(?:([0-9a-f]{{8}})\.)?snapshot")


def snapshot_path(folder: str | Path, rank: int, layout: str = "") -> Path:
    """The snapshot file of `rank` in the layout with tag `layout` (`layout_tag`). Each layout has files of its own, so
    a new one can be written while the old one is read."""
    tag = f".{layout}" if layout else ""
    return Path(folder) / f"rank-{rank:05d}{tag}.snapshot"


def backup_path(folder: str | Path, rank: int, layout: str) -> Path:
    """The copy of the snapshot file of `rank` that is kept on another node than its own."""
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
    """Whether the rank lives on another node."""


def snapshot_files(folder: str | Path) -> list[SnapshotEntry]:
    """All snapshot files of a job on this node, those in the memory of its daemon included."""
    folder = Path(folder)
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    there = [path for path in paths if not path.is_symlink() or in_node_memory(path)]
    names = [(path, _NAME.fullmatch(path.name)) for path in there]
    return [SnapshotEntry(path, int(match[2]), match[3] or "", match[1] is not None) for path, match in names if match]


def steps_kept(folder: str | Path, rank: int, layout: str | None = None) -> list[int]:
    """Committed steps of `rank` that are whole in its own files on this node, ascending; with `layout`, the tag of
    one, only those of that layout."""
    own = [file for file in snapshot_files(folder) if file.rank == rank and not file.is_backup]
    wanted = [file.path for file in own if layout in (None, file.layout)]
    return sorted({step for path in wanted for step in committed_steps(path)})


def remove_other_layouts(folder: str | Path, layout: str) -> bool:
    """Remove the files of all layouts but the one with tag `layout`, once they are not needed any more; whether some of
    them lay with the node's daemon."""
    others = [file.path for file in snapshot_files(folder) if file.layout != layout]
    with_daemon = any(in_node_memory(path) for path in others)
    for path in others:
        path.unlink(missing_ok=True)
    return with_daemon


_OF_NO_STATE = frozenset({"gather", "stage_accelerators"})
"""Keys of `parallel` that say when something is done, or on which nodes, and not where what lies."""


def _layout_of(spec: dict[str, Any]) -> dict[str, Any]:
    """A key that is null says nothing, so that a layout keeps its tag when there are further ones."""
    kept = {key: value for key, value in spec["parallel"].items() if key not in _OF_NO_STATE}
    return {key: value for key, value in kept.items() if value is not None or key == "sequence_parallel"}


def layout_tag(spec: dict[str, Any]) -> str:
    """Eight hexadecimal digits that tell the layout of a job, a JobSpec as JSON, from its other layouts."""
    text = json.dumps(_layout_of(spec), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def fingerprint(spec: dict[str, Any], rank: int) -> bytes:
    """16 bytes that tell apart states that do not fit each other: the model, the layout and the rank, of several with
    the same state (`grid.state_peers`) the first."""
    text = json.dumps([spec["model"], _layout_of(spec), spec["data"], spec["train"]["precision"], rank], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
