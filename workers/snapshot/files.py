"""What a job keeps on a node: its snapshot files and the steps in them, and the named pipes that tell of new ones. Pure
Python, for agents without torch."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import select
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manta.workers.config import JobSpec, ParallelConfig
from manta.workers.config.fields import Section
from manta.workers.paths import rank_stem
from manta.workers.snapshot.node_memory import in_node_memory
from manta.workers.snapshot.snapshot_file import committed_steps
from manta.workers.system.regular_files import make_folder, remove

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


def stored_steps(folder: str | Path, rank: int, layout: str | None = None) -> list[int]:
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


def _chosen(section: Section, without: frozenset[str] = frozenset()) -> dict[str, Any]:
    """What differs from the defaults, so that state keeps its identity when a release adds keys."""
    return section.model_dump(mode="json", exclude_defaults=True, exclude=set(without))


def layout_tag(layout: ParallelConfig) -> str:
    """Eight hexadecimal digits that distinguish the layout of a job from its other layouts."""
    text = json.dumps(_chosen(layout, _OF_NO_STATE), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def fingerprint(spec: JobSpec, rank: int) -> bytes:
    """16 bytes that distinguish states that do not fit each other: of the model, the layout and the rank. Ranks with
    the same state (`grid.state_peers`) have that of the first of them."""
    parts = [_chosen(spec.model), _chosen(spec.layout, _OF_NO_STATE), _chosen(spec.data), spec.train.precision, rank]
    text = json.dumps(parts, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def notification_path(folder: str | Path, rank: int) -> Path:
    """The pipe through which the trainer of `rank` announces that a snapshot has its checksums."""
    return Path(folder) / f"{rank_stem(rank)}.bell"


def notify(path: Path) -> None:
    """Wake the listener at `path`, if there is one."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return  # nothing listens
    # The pipe is full of unread notifications, or the listener has just left.
    with contextlib.suppress(BlockingIOError, BrokenPipeError):
        os.write(descriptor, b"!")
    os.close(descriptor)


class NotificationPipe:
    """The listener's end of a named pipe that any process can write to: shared memory has no events, and polling would
    use too much CPU time."""

    def __init__(self, path: Path):
        """Create the pipe at `path`, replacing an existing one."""
        self.path = path
        make_folder(path.parent)
        remove(path)
        os.mkfifo(path, 0o600)
        self._descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)

    def notify(self) -> None:
        """Wake this listener, even if another pipe is at its path by now."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._descriptor, b"!")

    def wait(self, timeout: float | None = None, connection: socket.socket | None = None) -> bool:
        """Return True after a notification since the last wait, or when data or the end of `connection` arrives; False
        after `timeout` seconds."""
        watched = [self._descriptor] if connection is None else [self._descriptor, connection.fileno()]
        ready, _, _ = select.select(watched, [], [], timeout)
        with contextlib.suppress(BlockingIOError):
            while os.read(self._descriptor, 4096):
                continue
        return bool(ready)

    def close(self) -> None:
        """Remove the pipe, unless another one is at its path by now."""
        with contextlib.suppress(OSError):
            if self.path.stat().st_ino == os.fstat(self._descriptor).st_ino:
                self.path.unlink()
        os.close(self._descriptor)
