"""Durable checkpoints as folders: their names, manifests, and which of them can be used. Pure Python.

A checkpoint is the folder `step-<step>-generation-<generation>`. Its `manifest.json` is written last and by rename,
so a folder without one was interrupted and is never used. The manifest holds the size of every file and checksums of
its blocks, and ends with a checksum of itself.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from workers.checkpoint.checksums import BLOCK_BYTES, DamagedCheckpoint, FileSums, checked, damaged, unreadable
from workers.errors import CheckpointError

MANIFEST = "manifest.json"
_FOLDER = re.compile(r"^step-(\d{8,})-generation-(\d+)$")
_OWN_SUM = b', "crc32": '


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
    """State of fp16's loss scaling: factor, and good steps since it last changed. None: other precisions."""
    blocks: dict[str, list[int]] | None = None
    """CRC-32 of each block of each file; None: an older checkpoint, of which only sizes can be checked."""
    block_bytes: int = BLOCK_BYTES
    """Bytes of a block."""
    numbers: dict[str, Any] | None = None
    """What the judgement of later steps' numbers and the order of samples depend on (`bad_numbers.Numbers`)."""

    @property
    def bytes(self) -> int:
        """Bytes in all."""
        return sum(self.files.values())

    def sums(self, file: Path) -> FileSums:
        """What is known of `file`. Raises DamagedCheckpoint where it is no file of this checkpoint."""
        if file.name not in self.files:
            raise damaged(file, f"is not in {MANIFEST}")
        return FileSums(self.files[file.name], self.blocks[file.name] if self.blocks else None, self.block_bytes)


def checkpoint_path(folder: str | Path, step: int, generation: int) -> Path:
    """The folder of the checkpoint of `step` by `generation`."""
    return Path(folder) / f"step-{step:08d}-generation-{generation}"


def generation_of(path: str | Path) -> int | None:
    """The generation that made the checkpoint at `path`; None where that is no name of one."""
    match = _FOLDER.match(Path(path).name)
    return int(match[2]) if match else None


def seal(path: Path, manifest: Manifest) -> None:
    """Write the manifest of a checkpoint whose files are all on disk; when this returns it survives a power cut.
    Raises OSError, also when the files are not all here."""
    for name, size in manifest.files.items():
        if _size_of(path / name) != size:
            raise OSError(f"{path / name} is not here as it was written: all nodes must share {path.parent}")
    text = json.dumps(asdict(manifest)).encode()[:-1]
    temporary = path / f".{MANIFEST}"
    with temporary.open("wb") as file:
        file.write(text + _own_sum(text))
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path / MANIFEST)
    for folder in (path, path.parent):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _own_sum(text: bytes) -> bytes:
    return _OWN_SUM + str(zlib.crc32(text)).encode() + b"}"


def manifest_of(path: Path) -> Manifest:
    """The manifest of the checkpoint at `path`, whatever state its files are in. Raises DamagedCheckpoint when there
    is none, or it is not what was written."""
    file = path / MANIFEST
    try:
        content = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise damaged(file, "is missing, so its save was interrupted") from error
    except OSError as error:
        raise unreadable(file, error) from error
    try:
        document = json.loads(content)
    except ValueError as error:
        at = getattr(error, "pos", getattr(error, "start", 0))
        raise damaged(file, f"makes no sense from byte {at}") from error
    if not isinstance(document, dict):
        raise damaged(file, "is no manifest")
    if document.pop("crc32", None) is not None:  # older ones have none
        text, _, _ = content.rpartition(_OWN_SUM)
        if content != text + _own_sum(text):
            raise damaged(file, f"is not what was written, in the {len(content)} bytes from byte 0")
    try:
        manifest = Manifest(**document)
    except TypeError as error:
        raise damaged(file, "is no manifest") from error
    if not _is_valid(manifest):
        raise damaged(file, "is no manifest")
    return manifest


def _is_valid(manifest: Manifest) -> bool:
    """Whether the fields of a manifest, which may be without a checksum, have values of the right types."""
    if not isinstance(manifest.files, dict) or not isinstance(manifest.spec, dict):
        return False
    if manifest.numbers is not None and not isinstance(manifest.numbers, dict):
        return False
    if not all(isinstance(size, int) for size in (manifest.step, manifest.generation, *manifest.files.values())):
        return False
    if manifest.loss_scale is None:
        return True
    numbers = manifest.loss_scale if isinstance(manifest.loss_scale, list) else []
    return len(numbers) == 2 and all(isinstance(value, float) and math.isfinite(value) for value in numbers)


def read_manifest(path: Path) -> Manifest | None:
    """The manifest of the checkpoint at `path`, or None when it is not whole: no manifest, or a file is missing or
    has another size than the manifest says. Reads nothing else."""
    try:
        manifest = manifest_of(path)
    except CheckpointError:
        return None
    return manifest if all(_size_of(path / name) == size for name, size in manifest.files.items()) else None


def _size_of(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def verify(path: Path) -> Manifest:
    """The manifest of the checkpoint at `path`, every byte of which is as it was written. Reads all of its files, one
    after the other. Raises DamagedCheckpoint naming the first damaged file and byte."""
    manifest = manifest_of(path)
    for name in manifest.files:
        with checked(path / name, manifest.sums(path / name)) as file:
            if manifest.blocks:
                file.check()
    return manifest


def newest_usable(
    folder: str | Path, use: Callable[[Path, int], object] = lambda path, step: verify(path)
) -> tuple[Path | None, list[str]]:
    """The newest checkpoint in `folder` that `use`(path, step) accepts, and what is wrong with those skipped.

    `use` raises DamagedCheckpoint for one that is skipped; other errors end the search, since an older checkpoint
    would not cure them. It is given interrupted ones too. By default a checkpoint is read and checked as a whole; a
    `use` that loads it spares the second reading, and where it fails on all ranks alike they agree on the result.
    """
    skipped = []
    for path, step, _ in reversed(_folders(Path(folder))):
        try:
            use(path, step)
        except DamagedCheckpoint as error:
            skipped.append(str(error))
        else:
            return path, skipped
    return None, skipped


def whole_checkpoints(folder: str | Path) -> list[tuple[Path, Manifest]]:
    """All whole checkpoints in `folder`, in the order of their making."""
    manifests = [(path, read_manifest(path)) for path, _, _ in _folders(Path(folder))]
    return [(path, manifest) for path, manifest in manifests if manifest is not None]


def next_generation(folder: str | Path) -> int:
    """A generation number above that of every checkpoint in `folder`, whole or not; 1 where there is none."""
    return 1 + max((generation for _, _, generation in _folders(Path(folder))), default=0)


def prune(folder: str | Path, keep: int, generation: int, undoes: int = 0) -> list[Path]:
    """Delete all but the newest `keep` whole checkpoints, and the interrupted ones of generations before
    `generation`. Returns what was deleted; what cannot be stays.

    `undoes`: how many steps may yet be undone, with their checkpoints; one from before those is kept too, and one that
    takes its place in time.
    """
    checkpoints = whole_checkpoints(folder)
    whole = [path for path, _ in checkpoints]
    to_delete = whole[:-keep]
    if undoes:
        safe = [path for path, manifest in checkpoints if manifest.step <= checkpoints[-1][1].step - undoes]
        successors = [path for path in to_delete if path not in safe]
        to_delete = [path for path in to_delete if path not in (*safe[-1:], *successors[:1])]
    to_delete += [path for path, _, made_by in _folders(Path(folder)) if path not in whole and made_by < generation]
    return _removed(to_delete)


def remove_after(folder: str | Path, step: int) -> list[Path]:
    """Delete the whole checkpoints of steps above `step`. Returns what was deleted; what cannot be stays."""
    return _removed([path for path, manifest in whole_checkpoints(folder) if manifest.step > step])


def _removed(to_delete: list[Path]) -> list[Path]:
    for path in to_delete:
        with contextlib.suppress(OSError):
            (path / MANIFEST).unlink()  # first, so that a half-deleted one is never taken for whole
        shutil.rmtree(path, ignore_errors=True)
    return [path for path in to_delete if not path.exists()]


def _folders(folder: Path) -> list[tuple[Path, int, int]]:
    """(path, step, generation) of all checkpoints, whole or not, in the order of their making.

    Generations come before steps: where a generation begins at an earlier step than one that is on disk, that one
    could not be used, and what is made now is newer than it.
    """
    if not folder.is_dir():
        return []
    matches = [(path, _FOLDER.match(path.name)) for path in folder.iterdir()]
    folders = [(path, int(match[1]), int(match[2])) for path, match in matches if match]
    return sorted(folders, key=lambda item: (item[2], item[1]))
