"""Durable checkpoints in torch.distributed.checkpoint's format, which is independent of the layout.

Every element of the parameters and of their moments is written once, as part of a rectangle of its layout-free tensor
(`model.NAME`, and such as `exp_avg.NAME`), so torch's own readers, and any other layout, can load it. Checksums
of all files are computed while they are written and verified while they are read. The positions of the rectangles are
written twice: to `contents.json`, which we read, and to `.metadata`, a pickle for torch's readers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import IO, cast

import torch
from torch.serialization import get_crc32_options, set_crc32_options

from manta.workers.checkpoint.catalog import Manifest, manifest_of
from manta.workers.checkpoint.checksums import CheckedFile, DamagedCheckpoint, FileSums, SummedFiles, Window
from manta.workers.checkpoint.contents import CONTENTS, Contents, EncodedRectangles, StoredRectangle, as_text, merged
from manta.workers.checkpoint.dcp_metadata import MAX_IN_METADATA, metadata_file
from manta.workers.checkpoint.opening import METADATA, opened, read_contents
from manta.workers.checkpoint.uploads import Uploads
from manta.workers.comm.shared_work import SharedWork
from manta.workers.errors import CheckpointError, first_line_of
from manta.workers.parallel.data.flat import FlatParameters, Range, Slot, answers_for, overlap
from manta.workers.parallel.data.state import FROZEN, MODEL
from manta.workers.storage.files import files_of
from manta.workers.storage.locations import Location, ObjectPath, parse_location


@dataclass(frozen=True)
class Rectangle:
    """A rectangle of a global tensor, and where its elements lie in this rank's part of the flat state."""

    name: str
    """Layout-free parameter name."""
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    offsets: tuple[int, ...]
    """First index of the rectangle in each dimension."""
    sizes: tuple[int, ...]
    """Length of the rectangle in each dimension."""
    start: int
    """First element in the rank's part."""
    stride: int
    """Elements from one row of the rectangle to the next, in the rank's part."""

    def view(self, part: torch.Tensor) -> torch.Tensor:
        """The rectangle's elements within `part` (1-D), as a tensor of `sizes`."""
        strides = (1,) if len(self.sizes) == 1 else (self.stride, 1)
        return part.as_strided(self.sizes, strides, part.storage_offset() + self.start)


Rectangles = Mapping[str, Sequence[Rectangle]]
"""Rectangles by the name of the part of the state (`StatePart`) within which they are."""


def rectangles_of(
    flat: FlatParameters, held: Sequence[Range], wanted: Sequence[Range], owned_only: bool, tensor_index: int
) -> list[Rectangle]:
    """The rectangles that make up the ranges `wanted` of the flat buffer, in a state that keeps the ranges `held` one
    after the other. Each wanted range lies within a held one.

    With ZeRO-1 ranges begin and end anywhere inside a parameter. A range of a row-major matrix is at most three
    rectangles: the rest of its first row, whole rows, the beginning of its last row.

    `owned_only` leaves out what another rank of the same replica answers for (copies of the tied embedding, and all
    but the first of equal parts on tensor ranks), so that over all ranks every element of the model appears once.
    """
    starts, position = [], 0
    for start, end in held:
        starts.append(position - start)
        position += end - start
    rectangles: list[Rectangle] = []
    for slot in (*flat.slots, *flat.frozen):
        if owned_only and not answers_for(slot.entry, tensor_index):
            continue
        for stored_range in wanted:
            first, last = overlap((slot.start, slot.end), stored_range)
            if first < last:
                shift = next(s for s, r in zip(starts, held, strict=True) if r[0] <= first and last <= r[1])
                rectangles += _rectangles(slot, first, last, shift)
    return rectangles


def _rectangles(slot: Slot, start: int, end: int, shift: int) -> Iterator[Rectangle]:
    local = tuple(slot.entry.parameter.shape)
    columns = local[1] if len(local) == 2 else 1
    position = start
    while position < end:
        row, column = divmod(position - slot.start, columns)
        if column or end - position < columns:
            rows, width = 1, min(columns - column, end - position)
        else:
            rows, width = (end - position) // columns, columns
        rectangle = _global_rectangle(slot, row, column, rows, width, position + shift, columns)
        if rectangle is not None:
            yield rectangle
        position += rows * width


def _global_rectangle(
    slot: Slot, row: int, column: int, rows: int, width: int, start: int, columns: int
) -> Rectangle | None:
    """The local rectangle in global indices, cut at the real size of a padded vocabulary."""
    shard, name = slot.entry.shard, slot.entry.name
    offsets, sizes = [row, column], [rows, width]
    if len(shard.shape) == 1:
        offsets, sizes = [row], [rows]
    if shard.split_dim is not None:
        offsets[shard.split_dim] += shard.start
        room = shard.shape[shard.split_dim] - offsets[shard.split_dim]
        sizes[shard.split_dim] = min(sizes[shard.split_dim], room)
    if min(sizes) <= 0:
        return None
    return Rectangle(name, shard.shape, tuple(offsets), tuple(sizes), start, columns)


@dataclass(frozen=True)
class RankFiles:
    """What one rank has written."""

    file: str
    tensors: dict[str, EncodedRectangles]
    """Contents of the file, by the tensor's name."""
    sums: dict[str, FileSums]
    """Checksums by file."""


def save(
    path: str,
    rectangles: Rectangles,
    parts: Callable[[], AbstractContextManager[dict[str, torch.Tensor]]],
    ranks: SharedWork,
    wrote: Callable[[], object] = lambda: None,
    uploads: Uploads | None = None,
    number: int = 0,
) -> dict[str, FileSums]:
    """Write this rank's `rectangles` of each of the `parts` (CPU tensors; entered once, and left when they are written)
    below `path`, together with all `ranks`. Returns, on rank 0, the checksums of all files of all ranks. `wrote` is
    called whenever some of it is written. If `path` is in an object store, `uploads` uploads the rectangles. `number`:
    of this rank's file, whose name is unique among all folders that a checkpoint refers to.

    Raises errors of the file system or, with several ranks, SharedWorkFailed on each of them.
    """
    files, folder = SummedFiles(wrote), parse_location(path)

    def created(file: Location) -> AbstractContextManager[IO[bytes]]:
        if uploads is not None and isinstance(file, ObjectPath):
            return uploads.create(file, wrote, files.sums)
        return files.create(file)

    def write() -> RankFiles:
        name = f"__{ranks.rank}_{number}.distcp"  # as DCP names a rank's files
        with parts() as state:
            files_of(folder).make_folder(folder)
            with created(folder / name) as stream:
                tensors = _write_rectangles(stream, name, rectangles, state)
        return RankFiles(name, tensors, files.sums)

    def finish(written: list[RankFiles]) -> list[dict[str, FileSums]]:
        contents = merged((each.file, each.tensors) for each in written)
        new = {CONTENTS: contents.content}
        if contents.rectangles <= MAX_IN_METADATA:
            new[METADATA] = metadata_file(Contents.from_bytes(contents.content))
        for name, content in new.items():
            with files.create(folder / name) as stream:
                stream.write(content)
        together = {name: sums for rank in written for name, sums in rank.sums.items()}
        return [together | files.sums, *({} for _ in written[1:])]

    return ranks.together(write, finish, (RankFiles, dict[str, FileSums]))


def _write_rectangles(
    stream: IO[bytes], file: str, rectangles: Rectangles, parts: dict[str, torch.Tensor]
) -> dict[str, EncodedRectangles]:
    """Append each rectangle of each part to the new `file` as a separate archive, and return where they are."""
    tensors: dict[str, tuple[tuple[int, ...], str, list[StoredRectangle]]] = {}
    for name, of_part in rectangles.items():
        part = parts[name]
        dtype = str(part.dtype).removeprefix("torch.")
        for each in of_part:
            at = stream.tell()
            with _without_sums():
                torch.save(_alone(each.view(part)), stream)
            stored = StoredRectangle(each.offsets, each.sizes, file, at, stream.tell() - at)
            tensors.setdefault(_name(name, each), (each.shape, dtype, []))[2].append(stored)
    return {tensor: as_text(*described) for tensor, described in tensors.items()}


def _name(part: str, rectangle: Rectangle) -> str:
    """Name of the tensor in a checkpoint."""
    return f"{MODEL if part == FROZEN else part}.{rectangle.name}"


@contextmanager
def _without_sums() -> Iterator[None]:
    """torch computes no checksums when it saves, and verifies none when it loads: ours cover every byte of a file."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


def _alone(view: torch.Tensor) -> torch.Tensor:
    """`view`, of a CPU tensor, with a storage that holds nothing else, since the whole storage is saved: the same
    memory if it is contiguous there."""
    if not view.is_contiguous() or view.dtype == torch.bfloat16:  # which numpy does not support
        return view.clone(memory_format=torch.contiguous_format)
    return torch.from_numpy(view.detach().numpy())


def load(
    path: str, rectangles: Rectangles, lengths: Mapping[str, int], moved: Callable[[], object] = lambda: None
) -> tuple[Manifest, dict[str, torch.Tensor]]:
    """Read `rectangles` from the checkpoint at `path` into new parts with these numbers of elements (by the same names,
    on the CPU; zero where there is no rectangle); returns them with its manifest. Each rank reads its own parts. A
    parameter that the checkpoint's job did not train has no moments there; they are zero then. `moved` is called for
    each rectangle.

    Every byte that is used is verified as it is read: the manifest, the contents, and those blocks of the data files (4
    MiB) that contain something the rank needs. That costs a CRC-32 of them, 0.3 s per GB, and no additional reading.
    Nothing that is read can be executed.

    Raises DamagedCheckpoint naming file and byte, CheckpointError if it is of another model or cannot be read.
    """
    manifest = manifest_of(parse_location(path))
    parts = {name: torch.zeros(lengths[name]) for name in rectangles}
    moments = [name for name in rectangles if name not in (MODEL, FROZEN)]
    try:
        contents = read_contents(path, manifest)
        reads = [
            read
            for name, part in parts.items()
            for rectangle in rectangles[name]
            if not (name in moments and _was_frozen(contents, moments, rectangle.name))
            for read in _reads(path, contents, _name(name, rectangle), rectangle, rectangle.view(part))
        ]
        _read(path, manifest, reads, moved)
    except CheckpointError:
        raise
    except Exception as error:
        kind = DamagedCheckpoint if manifest.blocks is None else CheckpointError
        raise kind(f"the checkpoint at {path} cannot be read: {first_line_of(error)}") from error
    return manifest, parts


def _was_frozen(contents: Contents, moments: Sequence[str], parameter: str) -> bool:
    """Whether the parameter is there and has none of the `moments`, because it was not trained."""
    there = contents.tensors
    return f"{MODEL}.{parameter}" in there and not any(f"{moment}.{parameter}" in there for moment in moments)


@dataclass(frozen=True)
class _Read:
    """The part of a stored rectangle that overlaps with a wanted one."""

    source: StoredRectangle
    dtype: str
    start: tuple[int, ...]
    """First index in the stored rectangle, in each dimension."""
    target: torch.Tensor
    """Where it is copied to."""

    def read(self, stream: CheckedFile) -> None:
        """Read it from its file. Raises the errors of torch.load, and ValueError if something else is there."""
        window = Window(stream, self.source.at, self.source.bytes)
        piece = torch.load(cast(IO[bytes], window), map_location="cpu", weights_only=True)
        if not isinstance(piece, torch.Tensor) or piece.shape != self.source.sizes or str(piece.dtype) != self.dtype:
            raise ValueError(f"no {self.dtype}{self.source.sizes} begins at byte {self.source.at}")
        for dim, (at, count) in enumerate(zip(self.start, self.target.shape, strict=True)):
            piece = piece.narrow(dim, at, count)
        self.target.copy_(piece)


def _reads(path: str, contents: Contents, name: str, wanted: Rectangle, view: torch.Tensor) -> Iterator[_Read]:
    """All overlaps of stored rectangles with `wanted`, which is to be copied into `view`. Raises CheckpointError if an
    element is missing."""
    stored = contents.tensors.get(name)
    if stored is None or stored.shape != wanted.shape:
        shape = stored.shape if stored is not None else "nothing"
        raise CheckpointError(
            f"the checkpoint at {path} is of another model: {name} should be {wanted.shape}, found {shape}"
        )
    count = 0
    first, end = wanted.offsets[0], wanted.offsets[0] + wanted.sizes[0]
    for each in stored.overlapping(first, end):
        low = [max(a, b) for a, b in zip(wanted.offsets, each.offsets, strict=True)]
        ends = zip(low, wanted.offsets, wanted.sizes, each.offsets, each.sizes, strict=True)
        lengths = [min(a + m, b + n) - at for at, a, m, b, n in ends]
        if min(lengths) > 0:
            count += math.prod(lengths)
            target = view
            for dim, (at, offset, size) in enumerate(zip(low, wanted.offsets, lengths, strict=True)):
                target = target.narrow(dim, at - offset, size)
            start = tuple(at - offset for at, offset in zip(low, each.offsets, strict=True))
            yield _Read(each, f"torch.{stored.dtype}", start, target)
    if count != math.prod(wanted.sizes):
        raise CheckpointError(f"the checkpoint at {path} does not hold all of {name}")


def _read(path: str, manifest: Manifest, reads: list[_Read], moved: Callable[[], object]) -> None:
    """Carry out `reads`, with each file read sequentially, so that each of its blocks is read once."""
    by_file: dict[str, list[_Read]] = {}
    for read in reads:
        by_file.setdefault(read.source.file, []).append(read)
    for name, here in sorted(by_file.items()):
        in_order = sorted(here, key=lambda each: each.source.at)
        with opened(manifest.place(parse_location(path), name), manifest) as stream:
            stream.expect((each.source.at, each.source.bytes) for each in in_order)
            for each in in_order:
                each.read(stream)
                moved()
