"""Reads rows of a checkpoint's tensors, independent of the layout that wrote them, as arrays and without torch.

Every block of a file that contains something requested is verified as it is read. It is read once if rows and tensors
are requested in the files' order (`in_file_order`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType

import numpy

from manta.workers.checkpoint.archives import ITEM_BYTES, Elements, elements_of
from manta.workers.checkpoint.catalog import Manifest
from manta.workers.checkpoint.checksums import BLOCK_BYTES, CheckedFile
from manta.workers.checkpoint.contents import Contents, StoredRectangle, StoredTensor
from manta.workers.checkpoint.opening import explained, opened
from manta.workers.errors import CheckpointError
from manta.workers.storage.locations import Location

MAX_OPEN = 4
"""Files that stay open when others are read, since they will probably be needed again."""
RAW = {"float64": "<f8", "float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}
"""Array dtypes of elements, by torch's names; numpy has no bfloat16, so its bits are integers here."""

ALIGNMENT = 64
"""Alignment in bytes of the address of a piece for which memory is allocated; others are wherever their block is."""
SPAN_BYTES = 4 * BLOCK_BYTES + 2 * ALIGNMENT
"""Memory of a span, unless a piece needs more: several blocks, since a part of the last one is moved to the beginning
when memory runs out; but few, so that they stay in the processor's cache."""


class CheckedSpan:
    """The most recently read blocks of one verified file, contiguous in memory, so that they can be used in place. If
    pieces are requested in the file's order, everything is read and verified once: blocks that the next piece also
    needs are kept."""

    def __init__(self, file: CheckedFile):
        self._file = file
        self._memory = numpy.empty(0, numpy.uint8)
        self._start = 0
        """First block in memory."""
        self._first, self._end = 0, 0
        """Blocks in memory: [first, end)."""

    def piece(self, at: int, count: int) -> numpy.ndarray:
        """Bytes [at, at + count) of the file, [count] uint8, valid until the next call. Raises DamagedCheckpoint,
        UnreadableCheckpoint, or ValueError if the file is shorter."""
        if at < 0 or count < 0 or at + count > self._file.size:
            raise ValueError(f"there are no bytes {at} to {at + count}")
        size = self._file.block_bytes
        first, end = at // size, max(at // size + 1, -(-(at + count) // size))
        if not self._first <= first <= self._end or self._start + (end - self._first) * size > len(self._memory):
            self._make_room(first, end, -(at - first * size) % ALIGNMENT)
        for number in range(self._end, end):
            begin = self._start + (number - self._first) * size
            self._file.read_block(number, self._memory[begin : begin + size].data)
            self._end = number + 1
        begin = self._start + at - self._first * size
        return self._memory[begin : begin + count]

    def _make_room(self, first: int, end: int, start: int) -> None:
        """Keep the blocks from `first` on, and have memory up to `end`; the first one must be `start` bytes after an
        aligned address."""
        size = self._file.block_bytes
        kept = self._end - first if self._first <= first < self._end else 0
        held = self._start + (first - self._first) * size
        memory, room = self._memory, 2 * ALIGNMENT + (end - first) * size
        if len(memory) < room:
            memory = numpy.empty(max(room, min(SPAN_BYTES, 2 * ALIGNMENT + self._file.size)), numpy.uint8)
        start += -memory.ctypes.data % ALIGNMENT
        count = min(kept * size, self._file.size - first * size)
        if kept:
            memory[start : start + count] = self._memory[held : held + count]  # numpy handles the overlap
        self._memory, self._start, self._first, self._end = memory, start, first, first + kept


@dataclass(frozen=True)
class Part:
    """Some of the requested rows, or some columns of them."""

    rows: slice
    """Index of the first row, relative to the first requested one."""
    columns: slice
    values: numpy.ndarray
    """[rows, columns], with a dtype of `RAW`; valid until the next part."""


def rows_and_columns(shape: tuple[int, ...]) -> tuple[int, int]:
    """Of a tensor as a matrix; a vector has one column. Raises ValueError for other tensors."""
    if len(shape) not in (1, 2):
        raise ValueError(f"{shape} is neither a vector nor a matrix")
    return shape[0], (shape[1] if len(shape) == 2 else 1)


def in_file_order(tensors: Iterable[tuple[str, StoredTensor]]) -> list[str]:
    """The names, in the order in which the tensors begin in their files."""

    def begin(entry: tuple[str, StoredTensor]) -> tuple[str, int]:
        return min(((rectangle.file, rectangle.at) for rectangle in entry[1].rectangles), default=("", 0))

    return [name for name, _ in sorted(tensors, key=begin)]


def peak_memory(tensors: Iterable[StoredTensor], rows_bytes: int) -> int:
    """Most bytes that a `StoredRows` uses for these tensors, of which `rows_bytes` are read at a time."""
    files = max((len(_adjacent_files(tensor)) for tensor in tensors), default=1)
    return max(files, MAX_OPEN) * max(SPAN_BYTES, rows_bytes + 2 * BLOCK_BYTES) + 2 * BLOCK_BYTES


def _adjacent_files(tensor: StoredTensor) -> set[str]:
    """For the row that is spread over most files, these files."""
    firsts = {rectangle.offsets[0] for rectangle in tensor.rectangles}
    rows = ({rectangle.file for rectangle in tensor.overlapping(row, row + 1)} for row in firsts)
    return max(rows, key=len, default=set())


class StoredRows:
    """Reads rows of one checkpoint's tensors. For one thread, and as long as the `with` block lasts."""

    def __init__(self, location: Location, manifest: Manifest, contents: Contents):
        self._location, self._manifest, self._contents = location, manifest, contents
        self._open: dict[str, tuple[ExitStack, CheckedFile, CheckedSpan]] = {}
        """By name: files that the last rows were in, the last used one at the end."""
        self._known: dict[StoredRectangle, Elements] = {}
        """Of the last tensor."""
        self._name = ""
        self._expected: set[str] = set()
        """Files that know which parts of that tensor will be requested."""

    def __enter__(self) -> StoredRows:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(list(self._open))

    def shape(self, name: str) -> tuple[int, int]:
        """Rows and columns of the tensor `name`. Raises CheckpointError if there is none."""
        if name not in self._contents.tensors:
            raise CheckpointError(f"the checkpoint at {self._location} has no {name}")
        return rows_and_columns(self._contents.tensors[name].shape)

    def read(self, name: str, first: int, end: int) -> Iterator[Part]:
        """Rows [first, end) of the tensor `name`, in parts that together are all of them. Raises CheckpointError."""
        tensor = self._contents.tensors[name]
        here = tensor.overlapping(first, end)
        self._prepare(name, tensor, {rectangle.file for rectangle in here})
        count = 0
        for rectangle in here:
            part = self._part(tensor, rectangle, first, end)
            count += part.values.size
            yield part
        if count != (end - first) * rows_and_columns(tensor.shape)[1]:
            raise CheckpointError(f"the checkpoint at {self._location} does not hold all of {name}")

    def _prepare(self, name: str, tensor: StoredTensor, files: set[str]) -> None:
        """Open these `files` and inform them of what will be requested; of other files keep the last used ones."""
        if name != self._name:
            self._name, self._known, self._expected = name, {}, set()
        others = [file for file in self._open if file not in files]
        self._close(others[: max(0, len(others) + len(files) - MAX_OPEN)])
        for file in sorted(files):
            if file not in self._open:
                stack = ExitStack()
                stream = stack.enter_context(opened(self._manifest.place(self._location, file), self._manifest))
                self._open[file] = stack, stream, CheckedSpan(stream)
            self._open[file] = self._open.pop(file)
            if file not in self._expected:
                self._expected.add(file)
                here = ((rectangle.at, rectangle.bytes) for rectangle in tensor.rectangles if rectangle.file == file)
                self._open[file][1].expect(sorted(here))

    def _close(self, files: list[str]) -> None:
        for file in files:
            self._open.pop(file)[0].close()

    def _part(self, tensor: StoredTensor, rectangle: StoredRectangle, first: int, end: int) -> Part:
        low, high = max(first, rectangle.offsets[0]), min(end, rectangle.offsets[0] + rectangle.sizes[0])
        _, width = rows_and_columns(rectangle.sizes)
        column = rectangle.offsets[1] if len(rectangle.offsets) == 2 else 0
        _, stream, span = self._open[rectangle.file]
        with explained(self._manifest.place(self._location, rectangle.file), self._manifest, stream):
            row_bytes = width * ITEM_BYTES[tensor.dtype]
            at = rectangle.at + self._elements(span, tensor, rectangle).at + (low - rectangle.offsets[0]) * row_bytes
            content = span.piece(at, (high - low) * row_bytes)
        values = content.view(RAW[tensor.dtype]).reshape(high - low, width)
        return Part(slice(low - first, high - first), slice(column, column + width), values)

    def _elements(self, span: CheckedSpan, tensor: StoredTensor, rectangle: StoredRectangle) -> Elements:
        """Where the rectangle's elements are in its archive."""
        if rectangle not in self._known:
            elements = elements_of(lambda at, count: span.piece(rectangle.at + at, count), rectangle.bytes)
            if elements.sizes != rectangle.sizes or elements.dtype != tensor.dtype:
                raise ValueError(f"no {tensor.dtype}{rectangle.sizes} begins at byte {rectangle.at}")
            self._known[rectangle] = elements
        return self._known[rectangle]
