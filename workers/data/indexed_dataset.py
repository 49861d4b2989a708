"""Megatron-LM's indexed datasets (`megatron/core/datasets/indexed_dataset.py`): tokens end to end in a .bin file, and
an .idx file with the beginnings of sequences and documents.

The .idx, all little-endian: MMIDIDX and two zero bytes; version 1 (u64); type of the tokens (u8); number of sequences
(u64); number of document boundaries (u64); tokens in each sequence (i32 each); byte at which each begins (i64 each);
first sequence of each document, and one past the last (i64 each). The tokens of a corpus that Manta has tokenized are
stored in one too: a document encoded in pieces is several sequences.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from manta.workers.data.read_errors import read_error
from manta.workers.data.unchanged_file import CachedFile, UnchangedFile
from manta.workers.errors import DataError
from manta.workers.system.regular_files import open_regular

MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<QBQQ")
_TYPES: dict[int, npt.DTypeLike] = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Token types by Megatron's number; its floating-point types cannot be tokens."""
_MAX_BYTES = 16 * 2**30
"""Maximum size of an index: enough for 800 million documents."""
_BLOCK = 2**20
"""Sequences whose lengths are read at a time."""
_NUMBERS = {np.dtype(name): number for number, name in _TYPES.items()}


@dataclass(frozen=True)
class Index:
    """Contents of an .idx."""

    dtype: np.dtype
    """Type of the tokens in the .bin."""
    lengths: npt.NDArray[np.int32]
    """Tokens of each sequence."""
    documents: npt.NDArray[np.int64]
    """First sequence of each document, and one past the last."""

    @property
    def tokens(self) -> int:
        """Tokens in all sequences."""
        return int(self.lengths.sum(dtype=np.int64))


def read_index(prefix: str | Path) -> Index:
    """The index of the dataset `prefix`. Raises DataError if it is invalid, or its tokens are not contiguous."""
    with _opened(prefix) as index:
        lengths = np.concatenate([np.zeros(0, "<i4"), *_lengths(index)])
        documents = np.frombuffer(_part(index, index.at + 12 * index.sequences, 8 * index.boundaries), "<i8")
        return Index(index.dtype, lengths, documents)


def tokens_in(prefix: str | Path) -> int:
    """Number of tokens of the dataset, whose index, of any size, is read a part at a time. Raises DataError if its two
    files do not match."""
    with _opened(prefix) as index:
        tokens = sum(int(lengths.sum(dtype=np.int64)) for lengths in _lengths(index))
    _check_size(prefix, index.dtype, tokens)
    return tokens


@dataclass(frozen=True)
class _Open:
    """An .idx whose header is valid."""

    path: str
    file: IO[bytes]
    dtype: np.dtype
    sequences: int
    boundaries: int
    at: int = len(MAGIC) + _HEADER.size
    """Where the lengths begin."""


@contextlib.contextmanager
def _opened(prefix: str | Path) -> Iterator[_Open]:
    path = f"{prefix}.idx"
    try:
        with open_regular(path, buffering=0) as file:
            size, head = os.fstat(file.fileno()).st_size, os.pread(file.fileno(), _Open.at, 0)
            if size > _MAX_BYTES:
                raise DataError(f"{path} has {size} bytes, and at most {_MAX_BYTES} are read: divide the dataset")
            if len(head) < _Open.at or not head.startswith(MAGIC):
                raise DataError(f"{path} is not an index of Megatron-LM's: it does not begin with MMIDIDX")
            version, number, sequences, boundaries = _HEADER.unpack_from(head, len(MAGIC))
            if version != 1 or number not in _TYPES:
                raise DataError(f"{path} is of version {version} with tokens of type {number}, which are not known")
            if size < _Open.at + 12 * sequences + 8 * boundaries:
                raise DataError(f"{path} is cut short: {sequences} sequences do not fit into its {size} bytes")
            yield _Open(path, file, np.dtype(_TYPES[number]), sequences, boundaries)
    except OSError as error:
        raise read_error(path, error) from error


def _lengths(index: _Open) -> Iterator[npt.NDArray[np.int32]]:
    """Tokens of each sequence, a block at a time. Raises DataError if one does not begin where the one before ends."""
    end = 0
    for first in range(0, index.sequences, _BLOCK):
        count = min(_BLOCK, index.sequences - first)
        lengths = np.frombuffer(_part(index, index.at + 4 * first, 4 * count), "<i4")
        pointers = np.frombuffer(_part(index, index.at + 4 * index.sequences + 8 * first, 8 * count), "<i8")
        begins = _begins(lengths, index.dtype) + end
        wrong = np.flatnonzero((pointers != begins[:-1]) | (lengths < 0))
        if len(wrong):
            raise DataError(
                f"{index.path}: sequence {first + wrong[0]} does not begin where the one before it ends; rewrite the "
                "dataset with its sequences end to end"
            )
        end = int(begins[-1])
        yield lengths


def _part(index: _Open, start: int, count: int) -> bytes:
    parts = []
    while count and (part := os.pread(index.file.fileno(), count, start)):
        parts.append(part)
        start, count = start + len(part), count - len(part)
    if count:
        raise DataError(f"{index.path} became shorter while it was read")
    return b"".join(parts)


def _check_size(prefix: str | Path, dtype: np.dtype, tokens: int) -> None:
    path = f"{prefix}.bin"
    try:
        size = Path(path).stat().st_size
    except OSError as error:
        raise read_error(path, error) from error
    needed = tokens * dtype.itemsize
    if size != needed:
        kind = "cut short" if size < needed else "longer than its index says"
        raise DataError(f"{path} is {kind}: {size} bytes, where {tokens} tokens take {needed}")


def write_index(
    prefix: str | Path, dtype: npt.DTypeLike, lengths: npt.NDArray[np.int32], documents: npt.NDArray[np.int64]
) -> None:
    """Write the .idx of a dataset whose sequences are contiguous in the .bin."""
    kept = np.dtype(dtype)
    with Path(f"{prefix}.idx").open("wb") as file:
        file.write(MAGIC + _HEADER.pack(1, _NUMBERS[kept], len(lengths), len(documents)))
        file.write(lengths.astype("<i4").tobytes())
        file.write(_begins(lengths, kept)[:-1].astype("<i8").tobytes())
        file.write(documents.astype("<i8").tobytes())
        file.flush()
        os.fsync(file.fileno())


def _begins(lengths: npt.NDArray[np.int32], dtype: np.dtype) -> npt.NDArray[np.int64]:
    """Byte at which each sequence begins, and the end of the last one."""
    begins = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, dtype=np.int64, out=begins[1:])
    return begins * dtype.itemsize


class IndexedTokens:
    """The tokens of a dataset as one row. Stays readable when its files are deleted.

    Read and not mapped: where a disk does not work, reading raises, and touching a mapping kills the process.
    """

    def __init__(self, prefix: str | Path, known: tuple[str, int] | None = None, digest: str | None = None):
        """`known`: type and number of the tokens, if the index need not be read for them, of a dataset that can be made
        anew, and `digest` of samples of its .bin (`unchanged_file.digest_of`). Raises DataError if the files cannot be
        read, or do not match."""
        self.prefix = str(prefix)
        if known is None:
            index = read_index(prefix)
            self._dtype, self._length = index.dtype, index.tokens
        else:
            self._dtype, self._length = np.dtype(known[0]), known[1]
        _check_size(prefix, self._dtype, self._length)
        kind = UnchangedFile if known is None else CachedFile
        self._file = kind(f"{prefix}.bin", self._length * self._dtype.itemsize, digest)

    def __len__(self) -> int:
        """Number of tokens."""
        return self._length

    def read(self, start: int, length: int) -> npt.NDArray[np.int64]:
        """Tokens [start, start + length) as int64. Raises IndexError outside the row, DataError if the file was
        truncated or overwritten, DataUnreadable if its disk or mount does not work."""
        if start < 0 or start + length > self._length:
            raise IndexError(f"tokens {start} to {start + length} of a row of {self._length}")
        return self._stored(start, length).astype(np.int64)

    def bounds(self, start: int, stop: int) -> tuple[int, int]:
        """Lowest and highest id of tokens [start, stop), of which there must be some. Raises as `read` does."""
        part = self._stored(start, stop - start)
        return int(part.min()), int(part.max())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _stored(self, start: int, length: int) -> npt.NDArray[Any]:
        tokens = np.empty(length, self._dtype)
        self._file.read_into(tokens.view(np.uint8).data, start * self._dtype.itemsize)
        return tokens


def boundaries(ends: Sequence[npt.NDArray[np.bool_]]) -> npt.NDArray[np.int64]:
    """First sequence of each document, and one past the last; `ends`: whether a document ends with each sequence."""
    marks = np.flatnonzero(np.concatenate([*ends, np.zeros(0, bool)])) + 1
    return np.concatenate([np.zeros(1, np.int64), marks])
