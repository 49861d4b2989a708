"""Durable checkpoints as folders: their names, manifests, and which of them are whole. Pure Python.

A checkpoint is the folder `step-<step>-generation-<generation>`. Its `manifest.json` is written last and by rename,
so a folder without one was interrupted and is never used.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
_FOLDER = re.compile(r"^step-(\d{8,})-generation-(\d+)$")


@dataclass(frozen=True)
class Manifest:
    """What a whole checkpoint says about itself."""

    job: str
    generation: int
    step: int
    """Committed step whose state it holds."""
    files: dict[str, int]
    """Bytes of each file."""
    spec: dict[str, Any]
    """JobSpec of the job that wrote it."""
    loss_scale: list[float] | None = None
    """State of fp16's loss scaling: factor, and good steps since it last changed."""

    @property
    def bytes(self) -> int:
        """Bytes in all."""
        return sum(self.files.values())


def checkpoint_path(folder: str | Path, step: int, generation: int) -> Path:
    """The folder of the checkpoint of `step` by `generation`."""
    return Path(folder) / f"step-{step:08d}-generation-{generation}"


def seal(
    path: Path, job: str, generation: int, step: int, spec: dict[str, Any], loss_scale: list[float] | None = None
) -> Manifest:
    """Write the manifest of a checkpoint whose files are all on disk. Raises OSError."""
    files = {entry.name: entry.stat().st_size for entry in sorted(path.iterdir()) if entry.name != MANIFEST}
    manifest = Manifest(job, generation, step, files, spec, loss_scale)
    temporary = path / f".{MANIFEST}"
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(asdict(manifest), file)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path / MANIFEST)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return manifest


def read_manifest(path: Path) -> Manifest | None:
    """The manifest of the checkpoint at `path`, or None when it is not whole: no manifest, or a file is missing or
    has another size than the manifest says."""
    manifest = _written_manifest(path)
    return None if manifest is None or damaged_files(path) else manifest


def damaged_files(path: Path) -> list[str]:
    """Files of the checkpoint at `path` that are missing or have another size than its manifest says."""
    manifest = _written_manifest(path)
    return [name for name, size in manifest.files.items() if _size_of(path / name) != size] if manifest else []


def _written_manifest(path: Path) -> Manifest | None:
    try:
        return Manifest(**json.loads((path / MANIFEST).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _size_of(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def whole_checkpoints(folder: str | Path) -> list[tuple[Path, Manifest]]:
    """All whole checkpoints in `folder`, oldest first."""
    found = [(path, read_manifest(path)) for path, _, _ in _folders(Path(folder))]
    whole = [(path, manifest) for path, manifest in found if manifest is not None]
    return sorted(whole, key=lambda item: (item[1].step, item[1].generation))


def next_generation(folder: str | Path) -> int:
    """A generation number above that of every checkpoint in `folder`, whole or not; 1 where there is none."""
    return 1 + max((generation for _, _, generation in _folders(Path(folder))), default=0)


def prune(folder: str | Path, keep: int, generation: int) -> list[Path]:
    """Delete all but the newest `keep` whole checkpoints, and the interrupted ones of generations before
    `generation`. Returns what was deleted."""
    whole = [path for path, _ in whole_checkpoints(folder)]
    doomed = whole[:-keep]
    doomed += [path for path, _, made_by in _folders(Path(folder)) if path not in whole and made_by < generation]
    for path in doomed:
        (path / MANIFEST).unlink(missing_ok=True)  # first, so that a half-deleted one is never taken for whole
        shutil.rmtree(path, ignore_errors=True)
    return doomed


def _folders(folder: Path) -> list[tuple[Path, int, int]]:
    if not folder.is_dir():
        return []
    matches = [(path, _FOLDER.match(path.name)) for path in folder.iterdir()]
    return [(path, int(match[1]), int(match[2])) for path, match in matches if match]
