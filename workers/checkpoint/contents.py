"""What a checkpoint contains and where: which rectangle of which tensor lies where in which of its files.

It is written as `contents.json`, which the manifest's checksums cover like any other file, and is all that loading
needs to know. Nothing in it can run. Pure Python.

A gang of thousands of ranks writes a million rectangles. So what a rank says of its own stays text until it is asked
for for that tensor: rank 0 joins texts, and a rank that loads reads those of its own stage.
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

from workers.checkpoint.catalog import Manifest
from workers.protocol.json_codec import MalformedMessage, from_json, to_json

CONTENTS = "contents.json"
_OF_ROWS = frozenset("[],0123456789")


@dataclass(frozen=True)
class StoredRectangle:
    """A rectangle of a tensor, and the bytes that hold it: an archive of its own, as torch.save writes one."""

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
    """As torch calls it, without the "torch."."""
    rectangles: tuple[StoredRectangle, ...]
    """Together they hold each element once."""

    def overlapping(self, first: int, end: int) -> list[StoredRectangle]:
        """Those in which something of the rows [first, end) lies."""
        in_order, firsts, furthest = self._by_row
        # None ends behind `first` before the first one that `furthest` says so of.
        some = in_order[bisect_right(furthest, first) : bisect_left(firsts, end)]
        return [each for each in some if each.offsets[0] + each.sizes[0] > first]

    @cached_property
    def _by_row(self) -> tuple[list[StoredRectangle], list[int], list[int]]:
        """The rectangles by their first row; these rows; where the furthest of those up to each ends."""
        in_order = sorted(self.rectangles, key=lambda each: each.offsets[0])
        ends = accumulate((each.offsets[0] + each.sizes[0] for each in in_order), max)
        return in_order, [each.offsets[0] for each in in_order], list(ends)


@dataclass(frozen=True)
class WrittenRectangles:
    """The rectangles of a tensor that one rank has written."""

    shape: tuple[int, ...]
    dtype: str
    rows: str
    """JSON without blanks: of each rectangle a list of its offsets, its sizes, its first byte and its bytes."""


@dataclass(frozen=True)
class _Entry:
    """A tensor as the file has it."""

    shape: tuple[int, ...]
    dtype: str
    rows: dict[str, str]
    """By file: as in WrittenRectangles."""


@dataclass(frozen=True)
class _OldContents:
    """What the file held before: all rectangles as objects."""

    tensors: dict[str, StoredTensor]


class Tensors(MutableMapping[str, StoredTensor]):
    """Tensors by name, read from their text when they are asked for, which raises MalformedMessage."""

    def __init__(self, tensors: Mapping[str, StoredTensor], entries: Mapping[str, _Entry]):
        self._read, self._entries = dict(tensors), dict(entries)
        self._files: Mapping[str, int] | None = None

    def check(self, files: Mapping[str, int]) -> None:
        """All of it has to lie within `files`, by their bytes. Raises MalformedMessage, now or when it is read."""
        self._files = files
        for name, tensor in self._read.items():
            _check(name, tensor, files)

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
        """As the file holds it."""
        return _to_bytes({name: _entry(tensor) for name, tensor in self.tensors.items()})

    @classmethod
    def from_bytes(cls, content: bytes) -> Contents:
        """From what `to_bytes` made, also that of older releases. Raises MalformedMessage and ValueError."""
        document = json.loads(content)
        tensors = document.get("tensors") if isinstance(document, dict) else None
        if not isinstance(tensors, dict):
            raise MalformedMessage(f"{CONTENTS} is a JSON object with tensors")
        if any("rectangles" in entry for entry in tensors.values() if isinstance(entry, dict)):
            return cls(from_json(_OldContents, document).tensors)
        return cls({}, {name: from_json(_Entry, entry) for name, entry in tensors.items()})

    def check(self, manifest: Manifest) -> None:
        """Raise MalformedMessage unless all of it lies within the files of the checkpoint with this `manifest`: of what
        is text yet, when that is read."""
        self.tensors.check(manifest.files)


def checked_types(tensors: dict[str, StoredTensor]) -> Contents:
    """Contents of tensors that come from elsewhere. Raises MalformedMessage where a field is of another type."""
    return Contents(from_json(_OldContents, to_json(_OldContents(tensors))).tensors)


def as_text(shape: tuple[int, ...], dtype: str, rectangles: Iterable[StoredRectangle]) -> WrittenRectangles:
    """What a rank says of its `rectangles` of a tensor, which all lie in its one file."""
    rows = [[*each.offsets, *each.sizes, each.at, each.bytes] for each in rectangles]
    return WrittenRectangles(shape, dtype, json.dumps(rows, separators=(",", ":")))


@dataclass(frozen=True)
class Merged:
    """What all ranks have written."""

    content: bytes
    """Of the file."""
    rectangles: int


def merged(parts: Iterable[tuple[str, Mapping[str, WrittenRectangles]]]) -> Merged:
    """What all ranks have written, (file, tensors) of each in their order. Raises MalformedMessage where they disagree
    about a tensor, or what one says is no list of numbers."""
    entries: dict[str, _Entry] = {}
    count = 0
    for file, tensors in parts:
        for name, each in tensors.items():
            entry = entries.setdefault(name, _Entry(each.shape, each.dtype, {}))
            if (entry.shape, entry.dtype) != (each.shape, each.dtype):
                one, other = (entry.shape, entry.dtype), (each.shape, each.dtype)
                raise MalformedMessage(f"{name} is {one} for one rank and {other} for another")
            if not _OF_ROWS.issuperset(each.rows):
                raise MalformedMessage(f"what lies in {file} of {name} is not a list of numbers")
            entry.rows[file] = each.rows
            count += max(0, each.rows.count("[") - 1)
    return Merged(_to_bytes(entries), count)


def _to_bytes(entries: Mapping[str, _Entry]) -> bytes:
    return json.dumps({"tensors": {name: to_json(entry) for name, entry in entries.items()}}).encode()


def _entry(tensor: StoredTensor) -> _Entry:
    by_file: dict[str, list[StoredRectangle]] = {}
    for each in tensor.rectangles:
        by_file.setdefault(each.file, []).append(each)
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
    """Whether it is a list of lists of so many integers."""
    if not isinstance(rows, list):
        return False
    return all(isinstance(row, list) and len(row) == columns and {type(n) for n in row} <= {int} for row in rows)


def _check(name: str, tensor: StoredTensor, files: Mapping[str, int]) -> None:
    for each in tensor.rectangles:
        if Path(each.file).name != each.file or each.file not in files:
            raise MalformedMessage(f"a part of {name} lies in {each.file!r}, which is not a file of this checkpoint")
        if each.at < 0 or each.bytes < 0 or each.at + each.bytes > files[each.file]:
            raise MalformedMessage(f"a part of {name} goes beyond the end of {each.file}")
        dimensions = zip(each.offsets, each.sizes, tensor.shape, strict=False)
        fits = all(at >= 0 and length > 0 and at + length <= size for at, length, size in dimensions)
        if not fits or not len(each.offsets) == len(each.sizes) == len(tensor.shape):
            raise MalformedMessage(f"a part of {name} lies outside of its shape {tensor.shape}")
