"""Which folders of a service a node shares, and where it stores its own files. Pure Python.

A service marks its folders with the id of its installation. A node that finds the mark in a folder at the same path,
and may write there, shares it. Another machine, or another user on it, uses a separate folder instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from workers.paths import Paths, safe_name
from workers.system.regular_files import read_regular

MARK = ".installation"
_MAX_BYTES = 1000


def mark(folder: Path, installation: str) -> None:
    """Mark `folder`, which is created if it is missing, as one of the service with this id. Raises OSError."""
    file = folder / MARK
    folder.mkdir(parents=True, exist_ok=True)
    if not shares(folder, installation):
        file.write_text(installation, encoding="utf-8")


def shares(folder: Path, installation: str) -> bool:
    """Whether this process sees the `folder` that the service with this id has marked, and may write there. Without an
    id every folder counts as shared."""
    if not installation:
        return True
    try:
        return read_regular(folder / MARK, _MAX_BYTES).decode() == installation and os.access(folder, os.W_OK)
    except (OSError, ValueError):
        return False


def unshared(folders: Iterable[str], installation: str) -> tuple[str, ...]:
    """The `folders` that this process does not share."""
    return tuple(folder for folder in folders if not shares(Path(folder), installation))


def paths_on_node(home: str, installation: str) -> Paths:
    """Paths of the service on this node: in its `home` if the node shares that, otherwise in a folder of this user.
    Raises UnsafePath for an id that cannot be the name of a folder."""
    if shares(Path(home), installation):
        return Paths.of(home)
    return Paths.of(Path.home() / ".manta" / "nodes" / safe_name(installation))
