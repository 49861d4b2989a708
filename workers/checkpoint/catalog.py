"""Durable checkpoints as folders: their names and manifests, and which of them are usable. Pure Python.

A checkpoint is the folder `step-<step>-generation-<generation>`. Its `manifest.json` is written last and atomically, so
a folder without one is an interrupted save and is never used. The manifest holds the size of every file and checksums
of its blocks, and ends with a checksum of itself.

Parameters that a job does not train are written once, into a folder `frozen-<step>-generation-<generation>` beside its
checkpoints, which has a manifest of its own. A checkpoint of such a job names that folder, and the checksum of its
manifest, in its file `frozen.json`.

What cannot be read is unknown, not absent: if a folder was moved, is not mounted or cannot be accessed, nothing is
concluded about the checkpoints in it.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

from manta.workers.checkpoint.checksums import (
    BLOCK_BYTES,
    FROZEN_PREFIX,
    DamagedCheckpoint,
    FileSums,
    SummedFiles,
    UnreadableCheckpoint,
    checked,
    damaged,
    unreadable,
)
from manta.workers.errors import CheckpointError
from manta.workers.storage.files import files_of
from manta.workers.storage.locations import Location, parse_location

MANIFEST = "manifest.json"
FROZEN_WEIGHTS = "frozen.json"
_FOLDER = re.compile(r"^step-(\d{8,})-generation-(\d+)$")
_FROZEN_FOLDER = re.compile(rf"^{FROZEN_PREFIX}(\d{{8,}})-generation-(\d+)$")
_MANIFEST_SUM = b', "crc32": '


@dataclass(frozen=True)
class FrozenWeights:
    """Parameters that a job does not train, in a folder beside the checkpoints that refer to it."""

    folder: str
    """Name of the folder."""
    manifest: Manifest
    """What is in it."""
    crc32: int
    """CRC-32 of its manifest as it was written."""

    def beside(self, checkpoint: Location) -> Location:
        """The folder, for that checkpoint."""
        return checkpoint.parent / self.folder


@dataclass(frozen=True)
class Manifest:
    """The manifest of a complete checkpoint."""

    job: str
    generation: int
    step: int
    """Committed step of its state."""
    files: dict[str, int]
    """Bytes of each file."""
    spec: dict[str, Any]
    """JobSpec of the job that wrote it."""
    loss_scale: list[float] | None = None
    """State of fp16's loss scaling: factor, and finite steps since it last changed. None: other precisions."""
    router_bias: list[float] | None = None
    """What the choice of experts adds to their scores, layer by layer; None if it adds nothing."""
    blocks: dict[str, list[int]] | None = None
    """CRC-32 of each block of each file; None: an older checkpoint, for which only sizes can be checked."""
    block_bytes: int = BLOCK_BYTES
    """Bytes of a block."""
    numbers: dict[str, Any] | None = None
    """What the judgement of later steps' numbers and the order of samples depend on (`bad_numbers.NumericsHistory`)."""
    frozen: FrozenWeights | None = None
    """Where the parameters are that the job does not train, unless they are among `files`. It is not written with the
    manifest, but in the file `frozen.json`: releases that do not know it refuse to load the rest, and keep it."""

    @property
    def small(self) -> dict[str, list[float]]:
        """Values of the small parts of the state (`StatePart`) that a step may change, by name."""
        parts = {"loss_scale": self.loss_scale, "router_bias": self.router_bias}
        return {name: values for name, values in parts.items() if values is not None}

    @property
    def bytes(self) -> int:
        """Total size, in bytes, without parameters in another folder."""
        return sum(self.files.values())

    @property
    def all_bytes(self) -> int:
        """Total size, in bytes."""
        return self.bytes + (0 if self.frozen is None else self.frozen.manifest.bytes)

    @property
    def data_files(self) -> dict[str, int]:
        """Bytes of each file in which tensors may be."""
        return self.files if self.frozen is None else {**self.frozen.manifest.files, **self.files}

    def place(self, checkpoint: Location, name: str) -> Location:
        """Where the file `name` of `data_files` of this `checkpoint` is."""
        return checkpoint / name if self.frozen is None or name in self.files else self.frozen.beside(checkpoint) / name

    def sums(self, file: Location) -> FileSums:
        """Size and checksums of `file`. Raises DamagedCheckpoint if it is not a file of this checkpoint."""
        if self.frozen is not None and file.parent.name == self.frozen.folder:
            return self.frozen.manifest.sums(file)
        if file.name not in self.files:
            raise damaged(file, f"is not in {MANIFEST}")
        blocks = tuple(self.blocks[file.name]) if self.blocks else None
        return FileSums(self.files[file.name], blocks, self.block_bytes)


class RemovedCheckpoint(CheckpointError):
    """A checkpoint was removed while it was read, by its job's pruning or by a user."""

    def __init__(self, path: Location):
        super().__init__(
            f"the checkpoint at {path} is not there any more: it was removed while it was read (newer ones of its job "
            "replace it), or its folder was moved; take a newer one, or let the job keep more (checkpoint.keep)"
        )


class Condition(Enum):
    """Condition of a checkpoint on disk."""

    COMPLETE = "whole"
    """The checkpoint's manifest exists, and all files with the sizes in the manifest."""
    INCOMPLETE = "not whole"
    """The checkpoint's save was interrupted, it is damaged, or it is missing from a folder in which others can be
    read."""
    UNKNOWN = "unknown"
    """The checkpoint cannot be read at present."""


@dataclass(frozen=True)
class ListedCheckpoint:
    """A checkpoint in a folder of checkpoints."""

    path: Location
    step: int
    """From its name."""
    generation: int
    """From its name."""
    condition: Condition
    manifest: Manifest | None = None
    """None if it is not complete."""
    problem: str = ""
    """One sentence: why it is not complete, or why that is unknown."""


@dataclass(frozen=True)
class Listing:
    """The contents of a folder of checkpoints."""

    folder: Location
    checkpoints: tuple[ListedCheckpoint, ...] = ()
    """In order of creation."""
    problem: str | None = None
    """Why the folder cannot be listed; None: it was listed, or it does not exist."""
    exists: bool = True
    """Whether the folder exists, as far as known."""

    @property
    def complete(self) -> list[tuple[Location, Manifest]]:
        """The complete checkpoints."""
        return [
            (checkpoint.path, checkpoint.manifest) for checkpoint in self.checkpoints if checkpoint.manifest is not None
        ]

    def condition_of(self, path: str, saved: Collection[str]) -> tuple[Condition, str]:
        """The condition of the checkpoint at `path`, and why it is not complete. `saved`: paths of checkpoints that are
        known to have been complete here; they distinguish the folder in which they were saved from an empty one in its
        place."""
        for checkpoint in self.checkpoints:
            if str(checkpoint.path) == path:
                return checkpoint.condition, checkpoint.problem
        problem = self.problem or self._not_that_folder(saved)
        if problem is not None:
            return Condition.UNKNOWN, problem
        return Condition.INCOMPLETE, f"the checkpoint at {path} is gone"

    def _not_that_folder(self, saved: Collection[str]) -> str | None:
        """Why this does not seem to be the folder that held `saved`; None if it does: one of them is here, in any
        state, or another complete checkpoint."""
        read = [checkpoint for checkpoint in self.checkpoints if checkpoint.condition is not Condition.UNKNOWN]
        if not saved or any(each.manifest is not None or str(each.path) in saved for each in read):
            return None
        if not self.exists:
            return f"the folder {self.folder} is not there"
        return f"the folder {self.folder} holds none of the checkpoints that were saved in it"


def checkpoint_path(folder: str | Location, step: int, generation: int) -> Location:
    """Path of the checkpoint of `step` saved by `generation`."""
    return parse_location(folder) / _name(step, generation)


def frozen_path(folder: str | Location, step: int, generation: int) -> Location:
    """Path of the folder of parameters that are not trained, written with the checkpoint of `step` by `generation`."""
    return parse_location(folder) / f"{FROZEN_PREFIX}{step:08d}-generation-{generation}"


def is_frozen_folder(name: str) -> bool:
    """Whether a folder of this name beside checkpoints is one of parameters that are not trained."""
    return _FROZEN_FOLDER.match(name) is not None


def _name(step: int, generation: int) -> str:
    return f"step-{step:08d}-generation-{generation}"


def generation_of(path: str | Location) -> int | None:
    """The generation that saved the checkpoint at `path`; None if it is not a checkpoint's name."""
    match = _FOLDER.match(parse_location(path).name)
    return int(match[2]) if match else None


def is_checkpoint(location: Location) -> bool:
    """Whether `location` is a single checkpoint, complete or not: by its name, or by its manifest, since a copy may
    have another name. Raises UnreadableCheckpoint if that is unknown."""
    file = location / MANIFEST
    try:
        return generation_of(location) is not None or files_of(file).is_there(file)
    except OSError as error:
        raise UnreadableCheckpoint(f"{file} cannot be read: {error.strerror or error}") from error


def refer(path: Location, frozen: FrozenWeights, sums: SummedFiles) -> None:
    """Write into the checkpoint at `path`, with these `sums`, where the parameters are that the job does not train.
    Raises OSError."""
    with sums.create(path / FROZEN_WEIGHTS) as stream:
        document = {"folder": frozen.folder, "crc32": frozen.crc32, "bytes": frozen.manifest.bytes}
        stream.write(json.dumps(document).encode())


def seal(path: Location, manifest: Manifest) -> int:
    """Write the manifest of a checkpoint whose files are complete; returns its CRC-32. It is durable when this returns.
    Raises OSError, also if files are missing here, and CheckpointError if the frozen weights are not as they were."""
    files = files_of(path)
    if manifest.frozen is not None:
        check_frozen(path, manifest.frozen)
    for name, size in files.sizes(path, manifest.files):
        if size != manifest.files[name]:
            raise OSError(f"{path / name} is not here as it was written: all nodes must share {path.parent}")
    document = asdict(replace(manifest, frozen=None))
    del document["frozen"]
    if manifest.router_bias is None:  # releases that do not know it read the rest
        del document["router_bias"]
    text = json.dumps(document).encode()[:-1]
    content = text + _manifest_sum(text)
    files.write_atomically(path / MANIFEST, content)
    return zlib.crc32(content)


def _manifest_sum(text: bytes) -> bytes:
    return _MANIFEST_SUM + str(zlib.crc32(text)).encode() + b"}"


def manifest_of(path: Location) -> Manifest:
    """The manifest of the checkpoint at `path`, regardless of the state of its files. Raises DamagedCheckpoint if there
    is none or it is not as written; UnreadableCheckpoint if that is unknown."""
    file = path / MANIFEST
    try:
        content = files_of(file).read(file)
    except OSError as error:
        what = unreadable(file, error)
        if isinstance(what, DamagedCheckpoint) and not isinstance(error, IsADirectoryError):
            what = damaged(file, "is missing, so its save was interrupted")
        raise what from error
    manifest = _manifest_in(content, file)
    name = _name(manifest.step, manifest.generation)
    if generation_of(path) is not None and path.name != name:
        raise damaged(file, f"is that of {name} of {manifest.job}: another checkpoint was copied into this folder")
    return manifest if FROZEN_WEIGHTS not in manifest.files else replace(manifest, frozen=_frozen_of(path, manifest))


def _frozen_of(path: Location, manifest: Manifest) -> FrozenWeights:
    """The parameters that the checkpoint at `path` refers to. Raises DamagedCheckpoint if they are not there,
    UnreadableCheckpoint if that is unknown."""
    file = path / FROZEN_WEIGHTS
    with checked(file, manifest.sums(file)) as stream:
        content = stream.read()
    try:
        document = json.loads(content)
        folder, crc32 = str(document["folder"]), int(document["crc32"])
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(file, "makes no sense") from error
    if not is_frozen_folder(folder):
        raise damaged(file, f"names {folder[:100]!r}, which is not a folder of frozen weights")
    return _frozen_in(path, folder, crc32)


def _frozen_in(checkpoint: Location, folder: str, crc32: int) -> FrozenWeights:
    place = checkpoint.parent / folder / MANIFEST
    try:
        content = files_of(place).read(place)
    except (FileNotFoundError, NotADirectoryError) as error:  # the folder it is in has just been read
        what = f"refers to the frozen weights in {place.parent}, which are not there: they belong beside it"
        raise damaged(checkpoint / FROZEN_WEIGHTS, what) from error
    except OSError as error:
        raise unreadable(place, error) from error
    if zlib.crc32(content) != crc32:
        raise damaged(place, f"is not the one that {checkpoint.name} refers to")
    return FrozenWeights(folder, _manifest_in(content, place), crc32)


def check_frozen(checkpoint: Location, frozen: FrozenWeights) -> None:
    """Check that the frozen weights beside `checkpoint`, which may be yet to be written, are there with their sizes.
    Raises DamagedCheckpoint if they are not, UnreadableCheckpoint if that is unknown."""
    _frozen_in(checkpoint, frozen.folder, frozen.crc32)
    _check_sizes(frozen.beside(checkpoint), frozen.manifest)


def _check_sizes(path: Location, manifest: Manifest) -> None:
    for name, size in files_of(path).sizes(path, manifest.files):
        _check_size(path / name, size, manifest.files[name])


def _manifest_in(content: bytes, file: Location) -> Manifest:
    """The manifest in the `content` of `file`. Raises DamagedCheckpoint."""
    try:
        document = json.loads(content)
    except ValueError as error:
        at = getattr(error, "pos", getattr(error, "start", 0))
        raise damaged(file, f"makes no sense from byte {at}") from error
    if not isinstance(document, dict):
        raise damaged(file, "is not a manifest")
    if document.pop("crc32", None) is not None:  # older ones have none
        text, _, _ = content.rpartition(_MANIFEST_SUM)
        if content != text + _manifest_sum(text):
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
    if not isinstance(manifest.files, dict) or not isinstance(manifest.spec, dict) or manifest.frozen is not None:
        return False
    if any(name in ("", ".", "..") or "/" in name for name in manifest.files):  # a copy of it stays in its folder
        return False
    if manifest.numbers is not None and not isinstance(manifest.numbers, dict):
        return False
    if not all(isinstance(size, int) for size in (manifest.step, manifest.generation, *manifest.files.values())):
        return False
    if not _has_valid_sums(manifest):
        return False
    for numbers in manifest.small.values():
        if not isinstance(numbers, list) or not all(
            isinstance(each, float) and math.isfinite(each) for each in numbers
        ):
            return False
    return manifest.loss_scale is None or len(manifest.loss_scale) == 2


def _has_valid_sums(manifest: Manifest) -> bool:
    """Whether each file has the sums of all its blocks, or none has any."""
    size, sums = manifest.block_bytes, manifest.blocks
    if not isinstance(size, int) or size < 1 or not isinstance(sums, dict | None):
        return False
    if not sums:
        return True
    of_files = [(sums.get(name), -(-length // size)) for name, length in manifest.files.items()]
    return all(isinstance(blocks, list) and len(blocks) == count for blocks, count in of_files)


@contextmanager
def while_read(path: Location) -> Iterator[None]:
    """Within the block, the checkpoint at `path`, which was complete, is read. If it is removed meanwhile, files that
    are missing are no damage: raises RemovedCheckpoint instead of what they raised."""
    try:
        yield
    except (CheckpointError, OSError) as error:
        if _is_removed(path):
            raise RemovedCheckpoint(path) from error
        raise


def _is_removed(path: Location) -> bool:
    """Whether it is certain that there is no manifest, which is what pruning removes first."""
    try:
        files_of(path).read(path / MANIFEST)
    except FileNotFoundError:
        return True
    except OSError:
        pass
    return False


def inspect(path: Location, job: str | None = None) -> tuple[Condition, Manifest | None, str]:
    """The condition of the checkpoint at `path`, with its manifest if it is complete, otherwise with the problem. Only
    sizes and permissions of its files are checked. `job`: the job that must have saved it; None: any."""
    try:
        manifest = manifest_of(path)
        if job not in (None, manifest.job):
            raise damaged(path / MANIFEST, f"is of {manifest.job}, and not of {job}: it was copied into this folder")
        _check_sizes(path, manifest)
        if manifest.frozen is not None:
            _check_sizes(manifest.frozen.beside(path), manifest.frozen.manifest)
    except DamagedCheckpoint as error:
        return Condition.INCOMPLETE, None, str(error)
    except UnreadableCheckpoint as error:
        return Condition.UNKNOWN, None, str(error)
    return Condition.COMPLETE, manifest, ""


def _check_size(file: Location, size: int | OSError, expected: int) -> None:
    """Raise DamagedCheckpoint if `file` is missing or its size is not `expected`, UnreadableCheckpoint if that is
    unknown or it cannot be opened."""
    if isinstance(size, OSError):
        raise unreadable(file, size) from size
    if size != expected:
        raise damaged(file, f"has {size} bytes and should have {expected}")


def verify(path: Location) -> Manifest:
    """Verify every byte of the checkpoint at `path` and return its manifest. Reads all files sequentially. Raises
    DamagedCheckpoint with the first damaged file and byte, UnreadableCheckpoint."""
    manifest = manifest_of(path)
    frozen = manifest.frozen
    others = [] if frozen is None else [(frozen.beside(path), frozen.manifest)]
    for place, own in [(path, manifest), *others]:
        for name in own.files:
            with checked(place / name, own.sums(place / name)) as file:
                if own.blocks:
                    file.check()
    return manifest


def newest_usable(
    folder: str | Location, use: Callable[[Location, int], object] = lambda path, step: verify(path)
) -> tuple[Location | None, list[str]]:
    """The newest checkpoint in `folder` that `use`(path, step) accepts, and the problems of those skipped.

    `use` raises DamagedCheckpoint to skip a checkpoint; other errors end the search, since an older checkpoint would
    not help or, with UnreadableCheckpoint, would lose steps that may exist. It is called for interrupted checkpoints,
    too. By default a checkpoint is read and verified completely; a `use` that loads it saves the second read, and if it
    fails on all ranks alike, they agree on the result. Raises UnreadableCheckpoint if `folder` cannot be listed.
    """
    skipped = []
    for path, step, _ in reversed(_folders(parse_location(folder)) or ()):
        try:
            use(path, step)
        except DamagedCheckpoint as error:
            skipped.append(str(error))
        else:
            return path, skipped
    return None, skipped


def list_checkpoints(folder: str | Location, job: str | None = None) -> Listing:
    """The contents of `folder`; with `job`, those of other jobs count as damaged. Raises nothing: errors are part of
    the result."""
    folder = parse_location(folder)
    try:
        named = _folders(folder)
    except UnreadableCheckpoint as error:
        return Listing(folder, problem=str(error))
    if named is None:
        return Listing(folder, exists=False)
    listed = (ListedCheckpoint(path, step, made_by, *inspect(path, job)) for path, step, made_by in named)
    return Listing(folder, tuple(listed))


def checkpoint_at(location: Location) -> Location:
    """The checkpoint at `location`, or the newest complete one in that folder. Raises CheckpointError."""
    if is_checkpoint(location):
        return location
    listing = list_checkpoints(location)
    if listing.problem is not None:
        raise CheckpointError(listing.problem)
    skipped = []
    for checkpoint in reversed(listing.checkpoints):
        if checkpoint.condition is Condition.COMPLETE:
            return checkpoint.path
        if checkpoint.condition is Condition.UNKNOWN:  # otherwise an older one would be taken for the newest
            raise CheckpointError(checkpoint.problem)
        skipped.append(checkpoint.problem)
    raise CheckpointError("; ".join([f"there is no complete checkpoint at {location}", *skipped]))


def complete_checkpoints(folder: str | Location) -> list[tuple[Location, Manifest]]:
    """All checkpoints in `folder` that are known to be complete, in order of creation."""
    return list_checkpoints(folder).complete


def next_generation(folder: str | Location) -> int:
    """A generation number above that of every checkpoint in `folder`, complete or not; 1 if there is none. Raises
    UnreadableCheckpoint."""
    return 1 + max((generation for _, _, generation in _folders(parse_location(folder)) or ()), default=0)


def frozen_folders(folder: str | Location) -> list[tuple[Location, int, int]]:
    """(path, step, generation) of all folders of frozen weights, complete or not, in order of creation. Raises
    UnreadableCheckpoint if `folder` cannot be listed."""
    return _folders(parse_location(folder), _FROZEN_FOLDER) or []


def _folders(folder: Location, named: re.Pattern[str] = _FOLDER) -> list[tuple[Location, int, int]] | None:
    """(path, step, generation) of all checkpoints, complete or not, in order of creation; None if the folder does not
    exist. Raises UnreadableCheckpoint if it cannot be listed.

    They are ordered by generation before step: if a generation begins at an earlier step than that of an existing
    checkpoint, the latter could not be used, so everything that the generation saves is newer.
    """
    try:
        matches = [(folder / name, named.match(name)) for name in files_of(folder).names(folder)]
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnreadableCheckpoint(f"the folder {folder} cannot be listed: {error.strerror or error}") from error
    folders = [(path, int(match[1]), int(match[2])) for path, match in matches if match]
    return sorted(folders, key=lambda item: (item[2], item[1]))
