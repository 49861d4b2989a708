"""The contents of a checkpoint: which rectangle of which tensor is where in which of its files.

They are written as `contents.json`, which the manifest's checksums cover like any other file, and are all that loading
needs. Nothing in it can be executed. Pure Python.

A gang of thousands of ranks writes a million rectangles. So the rectangles of each rank stay text until they are needed
for a tensor: rank 0 joins texts, and a loading rank parses those of its own stage.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from manta.workers.checkpoint.catalog import Manifest
from manta.workers.protocol.json_codec import MalformedMessage, from_json, to_json

CONTENTS = "contents.json"
_OF_ROWS = frozenset("[],0123456789")


@dataclass(frozen=True)
class StoredRectangle:
    """A rectangle of a tensor, and the bytes that hold it: a separate archive in the format of torch.save."""

    offsets: tuple[int, ...]
    """First index in each dimension."""
    sizes: tuple[int, ...]
    """Length in each dimension."""
    file: str
    """Name within the checkpoint's folder."""
    at: int
    """First byte in the file."""
    bytes: int
    """Bytes of the archive."""


@dataclass(frozen=True)
class StoredTensor:
    """A layout-free tensor."""

    shape: tuple[int, ...]
    dtype: str
    """torch's name, without "torch."."""
    rectangles: tuple[StoredRectangle, ...]
    """Together they hold each element once."""

    def overlapping(self, first: int, end: int) -> list[StoredRectangle]:
        """The rectangles that overlap with rows [first, end)."""
        in_order, firsts, furthest = self._by_row
        # No rectangle before the first one with `furthest` > `first` can overlap.
        some = in_order[bisect_right(furthest, first) : bisect_left(firsts, end)]
        return [each for each in some if each.offsets[0] + each.sizes[0] > first]

    @cached_property
    def _by_row(self) -> tuple[list[StoredRectangle], list[int], list[int]]:
        """The rectangles by their first row; these rows; and the furthest end of all rectangles up to each."""
        in_order = sorted(self.rectangles, key=lambda each: each.offsets[0])
        ends = accumulate((each.offsets[0] + each.sizes[0] for each in in_order), max)
        return in_order, [each.offsets[0] for each in in_order], list(ends)


@dataclass(frozen=True)
class EncodedRectangles:
    """The rectangles of a tensor that one rank has written."""

    shape: tuple[int, ...]
    dtype: str
    rows: str
    """JSON without blanks: for each rectangle a list of its offsets, sizes, first byte and number of bytes."""


@dataclass(frozen=True)
class _Entry:
    """A tensor as it is in the file."""

    shape: tuple[int, ...]
    dtype: str
    rows: dict[str, str]
    """Rectangles by file, as in EncodedRectangles."""


@dataclass(frozen=True)
class _OldContents:
    """The former format of the file: all rectangles as objects."""

    tensors: dict[str, StoredTensor]


class Tensors(MutableMapping[str, StoredTensor]):
    """Tensors by name, parsed when they are first accessed, which may raise MalformedMessage."""

    def __init__(self, tensors: Mapping[str, StoredTensor], entries: Mapping[str, _Entry]):
        self._read, self._entries = dict(tensors), dict(entries)
        self._files: Mapping[str, int] | None = None

    def check(self, files: Mapping[str, int]) -> None:
        """Everything must be within `files`, given with their sizes. Raises MalformedMessage, now or when a tensor is
        parsed."""
        self._files = files
        for name, tensor in self._read.items():
            _check(name, tensor, files)

    def add(self, other: Tensors) -> None:
        """Take over all tensors of `other`."""
        self._read |= other._read
        self._entries |= other._entries

    def __getitem__(self, name: str) -> StoredTensor:
        if name not in self._read:
            tensor = _stored(name, self._entries[name])
            if self._files is not None:
                _check(name, tensor, self._files)
            self._read[name] = tensor
        return self._read[name]

    def __setitem__(self, name: str, tensor: StoredTensor) -> None:
        self._read[name] = tensor

    def __delitem__(self, name: str) -> None:
        self._read.pop(name, None)
        self._entries.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries | self._read)

    def __len__(self) -> int:
        return len(self._entries | self._read)


class Contents:
    """All tensors of a checkpoint."""

    def __init__(self, tensors: Mapping[str, StoredTensor], entries: Mapping[str, _Entry] | None = None):
        """`entries`: more tensors, as text."""
        self.tensors = Tensors(tensors, entries or {})
        """By name."""

    def to_bytes(self) -> bytes:
        """The content of the file."""
        return _to_bytes({name: _entry(tensor) for name, tensor in self.tensors.items()})

    @classmethod
    def from_bytes(cls, content: bytes) -> Contents:
        """From the output of `to_bytes`, also that of older releases. Raises MalformedMessage and ValueError."""
        document = json.loads(content)
        tensors = document.get("tensors") if isinstance(document, dict) else None
        if not isinstance(tensors, dict):
            raise MalformedMessage(f"{CONTENTS} is a JSON object with tensors")
        if any("rectangles" in entry for entry in tensors.values() if isinstance(entry, dict)):
            return cls(from_json(_OldContents, document).tensors)
        return cls({}, {name: from_json(_Entry, entry) for name, entry in tensors.items()})

    def check(self, manifest: Manifest) -> None:
        """Raise MalformedMessage unless everything is within the files of the checkpoint with this `manifest`; for
        tensors that are still text, when they are parsed."""
        self.tensors.check(manifest.data_files)


def checked_types(tensors: dict[str, StoredTensor]) -> Contents:
    """Contents made of tensors from elsewhere. Raises MalformedMessage if a field has another type."""
    return Contents(from_json(_OldContents, to_json(_OldContents(tensors))).tensors)


def as_text(shape: tuple[int, ...], dtype: str, rectangles: Iterable[StoredRectangle]) -> EncodedRectangles:
    """The `rectangles` of a tensor that a rank has written to its single file."""
    rows = [[*rectangle.offsets, *rectangle.sizes, rectangle.at, rectangle.bytes] for rectangle in rectangles]
    return EncodedRectangles(shape, dtype, json.dumps(rows, separators=(",", ":")))


@dataclass(frozen=True)
class Merged:
    """What all ranks have written."""

    content: bytes
    """Content of the file."""
    rectangles: int


def merged(parts: Iterable[tuple[str, Mapping[str, EncodedRectangles]]]) -> Merged:
    """What all ranks have written: (file, tensors) of each, in order. Raises MalformedMessage if they disagree about a
    tensor, or a list is invalid."""
    entries: dict[str, _Entry] = {}
    count = 0
    for file, tensors in parts:
        for name, tensor in tensors.items():
            entry = entries.setdefault(name, _Entry(tensor.shape, tensor.dtype, {}))
            if (entry.shape, entry.dtype) != (tensor.shape, tensor.dtype):
                one, other = (entry.shape, entry.dtype), (tensor.shape, tensor.dtype)
                raise MalformedMessage(f"{name} is {one} for one rank and {other} for another")
            if not _OF_ROWS.issuperset(tensor.rows):
                raise MalformedMessage(f"what lies in {file} of {name} is not a list of numbers")
            entry.rows[file] = tensor.rows
            count += max(0, tensor.rows.count("[") - 1)
    return Merged(_to_bytes(entries), count)


def _to_bytes(entries: Mapping[str, _Entry]) -> bytes:
    return json.dumps({"tensors": {name: to_json(entry) for name, entry in entries.items()}}).encode()


def _entry(tensor: StoredTensor) -> _Entry:
    by_file: dict[str, list[StoredRectangle]] = {}
    for rectangle in tensor.rectangles:
        by_file.setdefault(rectangle.file, []).append(rectangle)
    rows = {file: as_text(tensor.shape, tensor.dtype, those).rows for file, those in by_file.items()}
    return _Entry(tensor.shape, tensor.dtype, rows)


def _stored(name: str, entry: _Entry) -> StoredTensor:
    rectangles, dimensions = [], len(entry.shape)
    for file, text in entry.rows.items():
        try:
            rows = json.loads(text)
        except ValueError:
            rows = None
        if not _is_table(rows, 2 * dimensions + 2):
            raise MalformedMessage(f"what lies in {file} of {name} is not a list of rectangles: {text:.80}")
        for row in rows:
            offsets, sizes = tuple(row[:dimensions]), tuple(row[dimensions:-2])
            rectangles.append(StoredRectangle(offsets, sizes, file, row[-2], row[-1]))
    return StoredTensor(entry.shape, entry.dtype, tuple(rectangles))


def _is_table(rows: Any, columns: int) -> bool:
    """Whether it is a list of lists of `columns` integers."""
    if not isinstance(rows, list):
        return False
    return all(isinstance(row, list) and len(row) == columns and {type(n) for n in row} <= {int} for row in rows)


def _check(name: str, tensor: StoredTensor, files: Mapping[str, int]) -> None:
    for rectangle in tensor.rectangles:
        if Path(rectangle.file).name != rectangle.file or rectangle.file not in files:
            raise MalformedMessage(
                f"a part of {name} lies in {rectangle.file!r}, which is not a file of this checkpoint"
            )
        if rectangle.at < 0 or rectangle.bytes < 0 or rectangle.at + rectangle.bytes > files[rectangle.file]:
            raise MalformedMessage(f"a part of {name} goes beyond the end of {rectangle.file}")
        dimensions = zip(rectangle.offsets, rectangle.sizes, tensor.shape, strict=False)
        fits = all(at >= 0 and length > 0 and at + length <= size for at, length, size in dimensions)
        if not fits or not len(rectangle.offsets) == len(rectangle.sizes) == len(tensor.shape):
            raise MalformedMessage(f"a part of {name} lies outside of its shape {tensor.shape}")
