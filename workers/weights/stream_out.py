"""Copies rows of a checkpoint's tensors into new files, cast and in their order, band by band and on several threads.

One thread reads, checks, casts and writes a band, so that threads do not wait for each other; each has its own part of
the checkpoint, from beginning to end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy

from manta.workers.checkpoint.archives import ITEM_BYTES
from manta.workers.checkpoint.catalog import Manifest
from manta.workers.checkpoint.contents import Contents, StoredTensor
from manta.workers.checkpoint.stored_rows import RAW, StoredRows, in_file_order, peak_memory, rows_and_columns
from manta.workers.errors import CheckpointError, WeightsError
from manta.workers.storage.locations import Location
from manta.workers.weights.adapters import Merger, add
from manta.workers.weights.folder import NewFiles
from manta.workers.weights.mapping import ROUTER_BIAS, HuggingFaceTensor, Piece, uses_of

BAND_BYTES = 2 * 2**20
"""Bytes of a tensor's rows, as in the checkpoint, that are cast and written at a time, unless a row is larger."""
MEMORY_BYTES = 240 * 10**6
"""Memory that all threads together may use; a single one may use more. It suffices for MAX_THREADS if no row of a
tensor lies in more files than are kept open."""
MAX_THREADS = 3

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Dtypes in which weights are written: their names in a job, and in torch."""
CHUNK = 2**16
"""Number of elements that are cast at once, which fit into a core's cache together with intermediate results."""
_NOT_A_NUMBER = 0x7FC0
"""Of bfloat16."""


@dataclass(frozen=True)
class Source:
    """A checkpoint whose tensors are exported."""

    location: Location
    manifest: Manifest
    contents: Contents

    def stored(self, name: str) -> StoredTensor:
        """Our parameter with that name. Raises CheckpointError."""
        if f"model.{name}" not in self.contents.tensors:
            raise CheckpointError(f"the checkpoint at {self.location} has no {name}")
        return self.contents.tensors[f"model.{name}"]

    def rows(self) -> StoredRows:
        """A reader of its rows, for one thread."""
        return StoredRows(self.location, self.manifest, self.contents)


def write_tensors(
    source: Source,
    tensors: Sequence[HuggingFaceTensor],
    dtype: str,
    files: NewFiles,
    processors: int,
    adapters: Callable[[StoredRows], Merger],
) -> float:
    """Write `tensors`, made of the checkpoint's parameters with `adapters` merged in fp32, and then cast to `dtype` (as
    torch calls it), into `files`. Returns the largest absolute rounding of an element of what is merged.

    `processors`: how many there are. Raises CheckpointError, WeightsError, OSError.
    """
    uses = uses_of(tensors)
    _write_router_bias(source, uses.pop(ROUTER_BIAS, []), files)
    for name, parts in uses.items():
        _check(source, name, parts)
    stored = {name: source.stored(name) for name in uses}
    names = in_file_order(stored.items())
    threads = threads_for(stored.values(), processors)
    stop = threading.Event()

    def work(part: Sequence[str]) -> float:
        try:
            with source.rows() as rows, source.rows() as others:
                merger = adapters(others)
                out = (_write(rows, name, stored[name], uses[name], dtype, files, stop, merger) for name in part)
                return max(out, default=0.0)
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(threads, "export") as pool:
        try:
            begun = [pool.submit(work, part) for part in _shares(names, stored, threads)]
            return max(done.result() for done in begun)
        except BaseException:
            stop.set()  # also if the wait is interrupted
            raise


def _write_router_bias(source: Source, parts: list[tuple[HuggingFaceTensor, Piece]], files: NewFiles) -> None:
    """What is made of the numbers that the manifest has for the choice of experts. Raises CheckpointError."""
    stored = numpy.array(source.manifest.small.get(ROUTER_BIAS, []), numpy.float32)
    if len(stored) != sum(piece.length for _, piece in parts) and parts:
        raise CheckpointError(f"the checkpoint at {source.location} has no {ROUTER_BIAS} of this model's experts")
    for tensor, piece in parts:
        files.write(tensor.name, 0, stored[piece.first : piece.first + piece.length].data)


def threads_for(tensors: Iterable[StoredTensor], processors: int) -> int:
    """How many bring rows of these at the same time: as many as there is memory for, and at least one."""
    taken = peak_memory(tensors, BAND_BYTES) + 2 * BAND_BYTES
    return max(1, min(processors, MAX_THREADS, MEMORY_BYTES // taken))


def _check(source: Source, name: str, parts: list[tuple[HuggingFaceTensor, Piece]]) -> None:
    """Raise CheckpointError unless exactly the rows and columns that the parameter has are converted into theirs."""
    shape = source.stored(name).shape
    rows, columns = rows_and_columns(shape)
    for tensor, _ in parts:
        wide = tensor.rows_first[1] if len(tensor.shape) == 2 else 1
        if wide != columns or sum(piece.count * piece.length for _, piece in parts) != rows:
            raise CheckpointError(
                f"{source.location}: {tensor.name} should be {tensor.rows_first}, found {shape} as {name}"
            )


def _shares(names: Sequence[str], stored: Mapping[str, StoredTensor], threads: int) -> list[list[str]]:
    """The names in this many runs, of about the same number of bytes each."""
    sizes = [sum(rectangle.bytes for rectangle in stored[name].rectangles) for name in names]
    shares: list[list[str]] = [[] for _ in range(threads)]
    before, total = 0, max(1, sum(sizes))
    for name, size in zip(names, sizes, strict=True):
        shares[min(threads - 1, (before + size // 2) * threads // total)].append(name)
        before += size
    return shares


def _write(
    rows: StoredRows,
    name: str,
    stored: StoredTensor,
    parts: list[tuple[HuggingFaceTensor, Piece]],
    dtype: str,
    files: NewFiles,
    stop: threading.Event,
    merger: Merger,
) -> float:
    """Everything that is made of one parameter. Returns the largest rounding, if an adapter was merged into it."""
    adapters, rounding = merger.adapters_of(name), 0.0
    height, columns = rows_and_columns(stored.shape)
    step = max(1, BAND_BYTES // (columns * ITEM_BYTES[stored.dtype]))
    if any(tensor.transposed for tensor, _ in parts):
        step = height  # each of their rows contains something of each of ours
    band = numpy.empty((min(step, height), columns), RAW[dtype])
    exact = numpy.empty(band.shape, numpy.float32) if adapters else band
    read_as = "float32" if adapters else dtype
    for first in range(0, height, step):
        if stop.is_set():
            return rounding
        end = min(first + step, height)
        try:
            for part in rows.read(f"model.{name}", first, end):
                cast(part.values, stored.dtype, exact[part.rows, part.columns], read_as)
            if adapters:
                merged, cut = exact[: end - first], band[: end - first]
                add(adapters, first, merged)
                cast(merged, "float32", cut, dtype)
                rounding = max(rounding, float(numpy.abs(_single(cut, dtype) - merged).max()))
        except TooLarge as error:
            names = " or ".join(tensor.name for tensor, _ in parts)
            raise WeightsError(f"{names} has {error}, which fp16 cannot represent: use bf16 or fp32") from error
        for tensor, piece in parts:
            if not tensor.transposed:
                _write_rows(band, first, end, tensor, piece, files)
    for tensor in dict.fromkeys(tensor for tensor, _ in parts if tensor.transposed):
        _write_transposed(band, tensor, files)
    return rounding


def _write_rows(
    band: numpy.ndarray, first: int, end: int, tensor: HuggingFaceTensor, piece: Piece, files: NewFiles
) -> None:
    """The part of our rows [first, end), which are `band`, that is in the piece of theirs."""
    row_bytes = band.shape[1] * band.itemsize
    for row, theirs, count in piece.runs(first, end):
        files.write(tensor.name, theirs * row_bytes, band[row - first : row - first + count].data)


def _write_transposed(band: numpy.ndarray, tensor: HuggingFaceTensor, files: NewFiles) -> None:
    """A tensor whose file has all our rows, which are `band`, as columns."""
    turned = numpy.empty(tensor.shape, band.dtype)
    for piece in tensor.pieces:
        for row, theirs, count in piece.runs(0, len(band)):
            turned[:, theirs : theirs + count] = band[row : row + count].T
    files.write(tensor.name, 0, turned.data)


class TooLarge(ValueError):
    """A finite number is beyond the largest of the dtype, and would become infinite."""

    def __init__(self, value: float):
        super().__init__(f"a value of {value:.4g}")
        self.value = value


def cast(values: numpy.ndarray, dtype: str, into: numpy.ndarray, to: str) -> None:
    """Put `values` of `dtype` into `into`, of `to`, bit for bit as torch casts them (numpy has no bfloat16); both
    [rows, columns], as `stored_rows.RAW` says. Rounds to the nearest number, ties to even; fp64 becomes fp32 first, as
    in torch. Raises TooLarge for a finite number that fp16 cannot represent."""
    if dtype == to:
        into[...] = values
        return
    if into.flags.c_contiguous and values.flags.c_contiguous:
        values, into = values.reshape(1, -1), into.reshape(1, -1)
    rows, columns = values.shape
    height, width = max(1, CHUNK // max(1, columns)), min(columns, CHUNK)
    room = numpy.empty(height * width, numpy.uint32)
    for row in range(0, rows, height):
        for column in range(0, columns, CHUNK):
            where = slice(row, row + height), slice(column, column + CHUNK)
            _cast(values[where], dtype, into[where], to, room)


def _cast(values: numpy.ndarray, dtype: str, into: numpy.ndarray, to: str, room: numpy.ndarray) -> None:
    single = _single(values if values.flags.aligned else values.copy(), dtype)
    if to == "float32":
        into[...] = single
    elif to == "bfloat16":
        _to_bfloat16(single, into, room[: single.size].reshape(single.shape))
    else:
        with numpy.errstate(over="ignore"):
            into[...] = single.astype(RAW[to])
        infinite = numpy.isinf(into) & numpy.isfinite(single)
        if infinite.any():
            raise TooLarge(float(numpy.abs(single[infinite]).max()))


def _single(values: numpy.ndarray, dtype: str) -> numpy.ndarray:
    if dtype == "bfloat16":
        return (values.astype(numpy.uint32) << 16).view(numpy.float32)
    return values.astype(numpy.float32, copy=False)


def _to_bfloat16(single: numpy.ndarray, into: numpy.ndarray, room: numpy.ndarray) -> None:
    """The upper half of each number's bits, after adding half a unit of its last place, minus one bit if that place is
    even. `room`: uint32, of the same shape."""
    bits = single.view(numpy.uint32)
    numpy.right_shift(bits, 16, out=room)
    numpy.bitwise_and(room, 1, out=room)
    numpy.add(room, bits, out=room)
    numpy.add(room, 0x7FFF, out=room)
    numpy.right_shift(room, 16, out=room)
    numpy.copyto(into, room, casting="unsafe")
    if numpy.isnan(single.max()):  # the addition may have turned it into another number
        into[numpy.isnan(single)] = _NOT_A_NUMBER
