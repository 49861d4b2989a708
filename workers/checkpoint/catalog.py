"""Durable checkpoints as folders: their names, manifests, and which of them can be used. Pure Python.

A checkpoint is the folder `step-<step>-generation-<generation>`. Its `manifest.json` is written last and at once, so a
folder without one was interrupted and is never used. The manifest holds the size of every file and checksums of
its blocks, and ends with a checksum of itself.

What cannot be read is unknown, not absent: a folder that was moved away, is not mounted or may not be read says nothing
about what was saved in it.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from workers.checkpoint.checksums import (
    BLOCK_BYTES,
    DamagedCheckpoint,
    FileSums,
    UnreadableCheckpoint,
    checked,
    damaged,
    unreadable,
)
from workers.storage.files import files_of
from workers.storage.places import Place, place_of

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
    """What the judgement of later steps' numbers and the order of samples depend on (`bad_numbers.NumericsHistory`)."""

    @property
    def bytes(self) -> int:
        """Bytes in all."""
        return sum(self.files.values())

    def sums(self, file: Place) -> FileSums:
        """What is known of `file`. Raises DamagedCheckpoint where it is no file of this checkpoint."""
        if file.name not in self.files:
            raise damaged(file, f"is not in {MANIFEST}")
        blocks = tuple(self.blocks[file.name]) if self.blocks else None
        return FileSums(self.files[file.name], blocks, self.block_bytes)


class Condition(Enum):
    """What the disk says about a checkpoint."""

    WHOLE = "whole"
    """Its manifest is there, and all files with the sizes that it says."""
    NOT_WHOLE = "not whole"
    """Its save was interrupted, it is damaged, or it is gone from a folder in which others can be read."""
    UNKNOWN = "unknown"
    """It cannot be read now."""


@dataclass(frozen=True)
class ListedCheckpoint:
    """A checkpoint that lies in a folder of checkpoints."""

    path: Place
    step: int
    """As its name says."""
    generation: int
    """As its name says."""
    condition: Condition
    manifest: Manifest | None = None
    """Of a whole one."""
    problem: str = ""
    """One sentence: why it is not whole, or why that is not known."""


@dataclass(frozen=True)
class Listing:
    """What a folder of checkpoints holds."""

    folder: Place
    checkpoints: tuple[ListedCheckpoint, ...] = ()
    """In the order of their making."""
    problem: str | None = None
    """Why the folder, which may be there, cannot be listed; None: it was, or there is none."""
    exists: bool = True
    """Whether there is such a folder, where that can be known."""

    @property
    def whole(self) -> list[tuple[Place, Manifest]]:
        """The whole ones."""
        return [(each.path, each.manifest) for each in self.checkpoints if each.manifest is not None]

    def look_up(self, path: str, saved: Collection[str]) -> tuple[Condition, str]:
        """What is known of the checkpoint at `path`, and why it is no more. `saved`: paths of checkpoints that are
        known to have been whole here, which tell the folder that they were saved in from an empty one in its place."""
        for each in self.checkpoints:
            if str(each.path) == path:
                return each.condition, each.problem
        problem = self.problem or self._not_that_folder(saved)
        if problem is not None:
            return Condition.UNKNOWN, problem
        return Condition.NOT_WHOLE, f"the checkpoint at {path} is gone"

    def _not_that_folder(self, saved: Collection[str]) -> str | None:
        """Why this does not seem to be the folder that held `saved`; None where it does: one of them is here, in
        whatever state, or another that is whole."""
        read = [each for each in self.checkpoints if each.condition is not Condition.UNKNOWN]
        if not saved or any(each.manifest is not None or str(each.path) in saved for each in read):
            return None
        if not self.exists:
            return f"the folder {self.folder} is not there"
        return f"the folder {self.folder} holds none of the checkpoints that were saved in it"


def checkpoint_path(folder: str | Place, step: int, generation: int) -> Place:
    """The folder of the checkpoint of `step` by `generation`."""
    return place_of(folder) / f"step-{step:08d}-generation-{generation}"


def generation_of(path: str | Place) -> int | None:
    """The generation that made the checkpoint at `path`; None where that is no name of one."""
    match = _FOLDER.match(place_of(path).name)
    return int(match[2]) if match else None


def seal(path: Place, manifest: Manifest) -> None:
    """Write the manifest of a checkpoint whose files are all there; when this returns it survives a power cut.
    Raises OSError, also when the files are not all here."""
    files = files_of(path)
    for name, size in files.sizes(path, manifest.files):
        if size != manifest.files[name]:
            raise OSError(f"{path / name} is not here as it was written: all nodes must share {path.parent}")
    text = json.dumps(asdict(manifest)).encode()[:-1]
    files.write_whole(path / MANIFEST, text + _own_sum(text))


def _own_sum(text: bytes) -> bytes:
    return _OWN_SUM + str(zlib.crc32(text)).encode() + b"}"


def manifest_of(path: Place) -> Manifest:
    """The manifest of the checkpoint at `path`, whatever state its files are in. Raises DamagedCheckpoint when there
    is none in the folder, or it is not what was written; UnreadableCheckpoint when that cannot be known."""
    file = path / MANIFEST
    try:
        content = files_of(file).read(file)
    except OSError as error:
        what = unreadable(file, error)
        if isinstance(what, DamagedCheckpoint) and not isinstance(error, IsADirectoryError):
            what = damaged(file, "is missing, so its save was interrupted")
        raise what from error
    try:
        document = json.loads(content)
    except ValueError as error:
        at = getattr(error, "pos", getattr(error, "start", 0))
        raise damaged(file, f"makes no sense from byte {at}") from error
    if not isinstance(document, dict):
        raise damaged(file, "is not a manifest")
    if document.pop("crc32", None) is not None:  # older ones have none
        text, _, _ = content.rpartition(_OWN_SUM)
        if content != text + _own_sum(text):
            raise damaged(file, f"is not what was written, in the {len(content)} bytes from byte 0")
    try:
        manifest = Manifest(**document)
    except TypeError as error:
        raise damaged(file, "is not a manifest") from error
    if not _is_valid(manifest):
        raise damaged(file, "is not a manifest")
    return manifest


def _is_valid(manifest: Manifest) -> bool:
    """Whether the fields of a manifest, which may be without a checksum, have values of the right types."""
    if not isinstance(manifest.files, dict) or not isinstance(manifest.spec, dict):
        return False
    if any(name in ("", ".", "..") or "/" in name for name in manifest.files):  # a copy of it stays in its folder
        return False
    if manifest.numbers is not None and not isinstance(manifest.numbers, dict):
        return False
    if not all(isinstance(size, int) for size in (manifest.step, manifest.generation, *manifest.files.values())):
        return False
    if manifest.loss_scale is None:
        return True
    numbers = manifest.loss_scale if isinstance(manifest.loss_scale, list) else []
    return len(numbers) == 2 and all(isinstance(value, float) and math.isfinite(value) for value in numbers)


def look_at(path: Place) -> tuple[Condition, Manifest | None, str]:
    """The condition of the checkpoint at `path`, its manifest where it is whole, else what is wrong with it. Of its
    files only the sizes are compared, and whether they may be read."""
    try:
        manifest = manifest_of(path)
        for name, size in files_of(path).sizes(path, manifest.files):
            _check_size(path / name, size, manifest.files[name])
    except DamagedCheckpoint as error:
        return Condition.NOT_WHOLE, None, str(error)
    except UnreadableCheckpoint as error:
        return Condition.UNKNOWN, None, str(error)
    return Condition.WHOLE, manifest, ""


def _check_size(file: Place, size: int | OSError, expected: int) -> None:
    """Raise DamagedCheckpoint where `file` is missing or has not the `expected` bytes, UnreadableCheckpoint where that
    cannot be known or it cannot be opened."""
    if isinstance(size, OSError):
        raise unreadable(file, size) from size
    if size != expected:
        raise damaged(file, f"has {size} bytes and should have {expected}")


def verify(path: Place) -> Manifest:
    """The manifest of the checkpoint at `path`, every byte of which is as it was written. Reads all of its files, one
    after the other. Raises DamagedCheckpoint naming the first damaged file and byte, UnreadableCheckpoint."""
    manifest = manifest_of(path)
    for name in manifest.files:
        with checked(path / name, manifest.sums(path / name)) as file:
            if manifest.blocks:
                file.check()
    return manifest


def newest_usable(
    folder: str | Place, use: Callable[[Place, int], object] = lambda path, step: verify(path)
) -> tuple[Place | None, list[str]]:
    """The newest checkpoint in `folder` that `use`(path, step) accepts, and what is wrong with those skipped.

    `use` raises DamagedCheckpoint for one that is skipped; other errors end the search, since an older checkpoint
    would not cure them, or, with UnreadableCheckpoint, would lose steps that may be there. It is given interrupted ones
    too. By default a checkpoint is read and checked as a whole; a `use` that loads it spares the second reading, and
    where it fails on all ranks alike they agree on the result. Raises UnreadableCheckpoint where `folder` cannot be
    listed.
    """
    skipped = []
    for path, step, _ in reversed(_folders(place_of(folder)) or ()):
        try:
            use(path, step)
        except DamagedCheckpoint as error:
            skipped.append(str(error))
        else:
            return path, skipped
    return None, skipped


def list_checkpoints(folder: str | Place) -> Listing:
    """What `folder` holds. Raises nothing: what the system does not say is part of the answer."""
    folder = place_of(folder)
    try:
        named = _folders(folder)
    except UnreadableCheckpoint as error:
        return Listing(folder, problem=str(error))
    if named is None:
        return Listing(folder, exists=False)
    listed = (ListedCheckpoint(path, step, made_by, *look_at(path)) for path, step, made_by in named)
    return Listing(folder, tuple(listed))


def whole_checkpoints(folder: str | Place) -> list[tuple[Place, Manifest]]:
    """All whole checkpoints in `folder` of which that is known now, in the order of their making."""
    return list_checkpoints(folder).whole


def next_generation(folder: str | Place) -> int:
    """A generation number above that of every checkpoint in `folder`, whole or not; 1 where there is none. Raises
    UnreadableCheckpoint."""
    return 1 + max((generation for _, _, generation in _folders(place_of(folder)) or ()), default=0)


def _folders(folder: Place) -> list[tuple[Place, int, int]] | None:
    """(path, step, generation) of all checkpoints, whole or not, in the order of their making; None where there is no
    such folder. Raises UnreadableCheckpoint where it cannot be listed.

    Generations come before steps: where a generation begins at an earlier step than one that is on disk, that one
    could not be used, and what is made now is newer than it.
    """
    try:
        matches = [(folder / name, _FOLDER.match(name)) for name in files_of(folder).names(folder)]
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnreadableCheckpoint(f"the folder {folder} cannot be listed: {error.strerror or error}") from error
    folders = [(path, int(match[1]), int(match[2])) for path, match in matches if match]
    return sorted(folders, key=lambda item: (item[2], item[1]))
