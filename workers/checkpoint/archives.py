"""Finds the elements of the single tensor in an archive of torch.save, without torch, so that they can be used in
place.

Such an archive is a zip file of uncompressed records: `data.pkl`, a pickle that describes the tensor as a view of a
storage, and `data/KEY`, the storage's bytes. torch writes both headers within the first kilobytes, where they are
searched first, so that a file of many archives is read sequentially; otherwise the zip file's directory at its end is
used. The pickle is read with stand-ins for the few names that a tensor needs; no other name is resolved, so nothing in
it can run.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy

from manta.workers.checkpoint.checksums import ReadOnlyBytes

ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of an element, for the dtypes that a checkpoint holds, by torch's names."""
_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
}
BEGINNING_BYTES = 4096
"""The first bytes of an archive, in which the elements should begin."""
ORDER = b"little"
_HEADER, _HEADER_BYTES = b"PK\x03\x04", 30
"""Beginning of a record in a zip file, without name and extra field, whose lengths are its last two numbers."""

Read = Callable[[int, int], numpy.ndarray]
"""Reads bytes of an archive: (offset, count) -> [count] uint8, valid until the next call."""


@dataclass(frozen=True)
class Elements:
    """The elements of a contiguous tensor, in row-major order."""

    at: int
    """Offset of the first byte in the archive."""
    dtype: str
    sizes: tuple[int, ...]


def elements_of(read: Read, size: int) -> Elements:
    """Where the tensor is in the archive of `size` bytes that `read` reads. Raises ValueError, KeyError,
    zipfile.BadZipFile and pickle.UnpicklingError if it is not an archive of a contiguous tensor."""
    records = _Beginning(read(0, min(size, BEGINNING_BYTES)).tobytes())
    elements = records.elements()
    return _by_directory(read, size) if elements is None else elements


class _Beginning:
    """The first bytes of an archive, with consecutive records."""

    def __init__(self, content: bytes):
        self._content = content
        name = content[_HEADER_BYTES : _HEADER_BYTES + int.from_bytes(content[26:28], "little")]
        self._folder = name.removesuffix(b"data.pkl")

    def elements(self) -> Elements | None:
        """The tensor's elements; None if some of their description is missing."""
        pickled, order = self._begin("data.pkl"), self._begin("byteorder")
        if pickled is None:
            return None
        try:
            tensor = _tensor(self._content[pickled:])
        except EOFError:
            return None
        at = self._begin(f"data/{tensor.key}")
        if at is None:
            return None
        return tensor.elements(at, None, None if order is None else self._content[order : order + len(ORDER)])

    def _begin(self, record: str) -> int | None:
        """First byte of the record, if it begins here."""
        name = self._folder + record.encode()
        at = self._content.find(name) - _HEADER_BYTES
        header = self._content[max(0, at) : max(0, at) + _HEADER_BYTES]
        stored, of_name, extra = header[8:10] == b"\0\0", header[26:28], int.from_bytes(header[28:30], "little")
        if at < 0 or not header.startswith(_HEADER) or not stored or int.from_bytes(of_name, "little") != len(name):
            return None
        return at + _HEADER_BYTES + len(name) + extra


def _by_directory(read: Read, size: int) -> Elements:
    with zipfile.ZipFile(_Archive(read, size)) as archive:
        records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    tensor = _tensor(_content(read, records["data.pkl"]))
    order = _content(read, records["byteorder"]) if "byteorder" in records else None
    return tensor.elements(*_place(read, records[f"data/{tensor.key}"]), order)


def _content(read: Read, record: zipfile.ZipInfo) -> bytes:
    return read(*_place(read, record)).tobytes()


def _place(read: Read, record: zipfile.ZipInfo) -> tuple[int, int]:
    """First byte of a record, and its size."""
    header = read(record.header_offset, _HEADER_BYTES).tobytes()
    if not header.startswith(_HEADER) or record.compress_type != zipfile.ZIP_STORED:
        raise zipfile.BadZipFile(f"{record.filename} is not a stored record")
    variable = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    return record.header_offset + _HEADER_BYTES + variable, record.file_size


class _Archive(ReadOnlyBytes):
    """A file object over the bytes that `read` reads."""

    def __init__(self, read: Read, size: int):
        super().__init__(size)
        self._read = read

    def fill(self, wanted: memoryview, at: int) -> int:
        """All of it."""
        wanted[:] = self._read(at, len(wanted)).data
        return len(wanted)


@dataclass(frozen=True)
class _Storage:
    dtype: str
    key: str


@dataclass(frozen=True)
class _Tensor:
    dtype: str
    key: str
    offset: int
    """First element, in the storage `key`."""
    sizes: tuple[int, ...]

    def elements(self, at: int, storage_bytes: int | None, order: bytes | None) -> Elements:
        """The tensor's elements, in a storage that begins at `at`. Raises ValueError."""
        item = ITEM_BYTES[self.dtype]
        if order not in (None, ORDER):
            raise ValueError("its bytes are in the order of another machine")
        if storage_bytes is not None and (self.offset + math.prod(self.sizes)) * item > storage_bytes:
            raise ValueError("its storage is too small")
        return Elements(at + self.offset * item, self.dtype, self.sizes)


def _tensor(pickled: bytes) -> _Tensor:
    """The tensor described by the pickle at the beginning of `pickled`. Raises pickle.UnpicklingError, EOFError."""
    tensor = _Unpickler(io.BytesIO(pickled)).load()
    if not isinstance(tensor, _Tensor):
        raise pickle.UnpicklingError(f"it holds a {type(tensor).__name__}, not a tensor")
    return tensor


def _rebuilt(storage: Any, offset: Any, sizes: Any, strides: Any, *_: Any) -> _Tensor:
    """Stands in for torch's `_rebuild_tensor_v2`, and records its arguments."""
    if not isinstance(storage, _Storage) or not all(isinstance(n, int) and n >= 0 for n in (offset, *sizes, *strides)):
        raise pickle.UnpicklingError("it is not a tensor of a storage")
    expected = 1
    for length, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if length > 1 and stride != expected:
            raise pickle.UnpicklingError(f"its rows do not lie one after the other: {sizes} with strides {strides}")
        expected *= length
    return _Tensor(storage.dtype, storage.key, offset, tuple(sizes))


class _Unpickler(pickle.Unpickler):
    """Resolves only the names in the pickle of a tensor."""

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in. Raises pickle.UnpicklingError for any other name."""
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuilt
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no tensor needs, and was refused")

    def persistent_load(self, pid: Any) -> _Storage:
        """A storage: ("storage", kind, key, device, elements)."""
        kind, dtype, key, *_ = pid
        if kind != "storage" or dtype not in ITEM_BYTES or not isinstance(key, str):
            raise pickle.UnpicklingError("it asks for something that is not a storage")
        return _Storage(dtype, key)
