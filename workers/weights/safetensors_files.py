"""New safetensors files, whose tensors' bytes may be written in any order and from several threads, with an index if
there are several files. Pure Python.

Format: workers/weights/folder.py. Files and index have the names that transformers looks for.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING

from workers.weights.folder import BYTES, ONE_FILE

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

NAMES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""Names of the written dtypes in a file's header, by torch's names."""
FLUSH_BYTES = 64 * 2**20
"""After this many bytes of a file, those so far are sent to the disk in the background: otherwise writing would stop
for that."""
_ALIGNMENT = 8


@dataclass(frozen=True)
class NewTensor:
    """A tensor to be written."""

    name: str
    shape: tuple[int, ...]


def plan_files(tensors: Sequence[NewTensor], dtype: str, most_bytes: int) -> dict[str, list[NewTensor]]:
    """Which file contains which tensors, in their order: as few files as possible, each of at most `most_bytes`, or
    with a single tensor that is larger."""
    shards: list[list[NewTensor]] = [[]]
    room = most_bytes
    for tensor in tensors:
        size = math.prod(tensor.shape) * BYTES[NAMES[dtype]]
        if shards[-1] and size > room:
            shards.append([])
            room = most_bytes
        shards[-1].append(tensor)
        room -= size
    if len(shards) == 1:
        return {ONE_FILE: shards[0]}
    stem = ONE_FILE.removesuffix(".safetensors")
    return {f"{stem}-{n:05d}-of-{len(shards):05d}.safetensors": shard for n, shard in enumerate(shards, start=1)}


def index_of(files: dict[str, list[NewTensor]], dtype: str) -> str:
    """The text of the index of `files`."""
    sizes = [math.prod(tensor.shape) for tensors in files.values() for tensor in tensors]
    index = {
        "metadata": {"total_size": sum(sizes) * BYTES[NAMES[dtype]], "total_parameters": sum(sizes)},
        "weight_map": {tensor.name: file for file, tensors in files.items() for tensor in tensors},
    }
    return json.dumps(index, indent=2) + "\n"


class NewFiles:
    """Files (by `plan_files`) that are created in a folder for the duration of a `with` block. What is not written is
    zero. Everything is on disk when the block has ended without an error; after an error the files should not be
    used."""

    def __init__(
        self,
        folder: Path,
        files: dict[str, list[NewTensor]],
        dtype: str,
        wrote: Callable[[int], object] = lambda count: None,
    ):
        """`wrote` is called with the bytes of each piece, never by two threads at once."""
        self._folder, self._files, self._dtype, self._wrote = folder, files, dtype, wrote
        self._at: dict[str, tuple[IO[bytes], int, int]] = {}
        """File, first byte in it and number of bytes, by tensor."""
        self._unflushed: dict[IO[bytes], int] = {}
        self._flushes: list[Future[None]] = []
        self._lock = threading.Lock()
        self._open = ExitStack()
        self._flusher = ThreadPoolExecutor(1, "flush")

    def __enter__(self) -> NewFiles:
        """Create the files. Raises OSError."""
        with ExitStack() as stack:
            stack.callback(self._flusher.shutdown, cancel_futures=True)
            for name, tensors in self._files.items():
                stream = stack.enter_context((self._folder / name).open("xb", buffering=0))
                self._make(stream, tensors)
            self._open = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Raises OSError."""
        with self._open:
            if kind is None:
                for stream in self._unflushed:
                    put_on_disk(stream)
                for flush in self._flushes:
                    flush.result()

    def _make(self, stream: IO[bytes], tensors: Iterable[NewTensor]) -> None:
        header, places, end = _header(tensors, self._dtype)
        _write_at(stream.fileno(), header, 0)
        # Space on the disk, allocated at once: a disk that is too small says so now, and no space is searched for
        # later.
        os.posix_fallocate(stream.fileno(), 0, len(header) + end)
        self._unflushed[stream] = 0
        for name, (first, last) in places.items():
            self._at[name] = stream, len(header) + first, last - first

    def write(self, name: str, at: int, content: ReadableBuffer) -> None:
        """Write `content`, C-contiguous, from byte `at` of the tensor `name` on. Raises OSError, ValueError if the
        tensor ends before that."""
        stream, first, size = self._at[name]
        view = memoryview(content).cast("B")
        if at < 0 or at + len(view) > size:
            raise ValueError(f"{name} has {size} bytes, not {at + len(view)}")
        _write_at(stream.fileno(), view, first + at)
        with self._lock:
            self._unflushed[stream] += len(view)
            if self._unflushed[stream] >= FLUSH_BYTES:
                self._unflushed[stream] = 0
                self._flushes.append(self._flusher.submit(os.fdatasync, stream.fileno()))
            self._wrote(len(view))


def _write_at(descriptor: int, content: bytes | memoryview, at: int) -> None:
    view = memoryview(content)
    while view:
        count = os.pwrite(descriptor, view, at)
        view, at = view[count:], at + count


def _header(tensors: Iterable[NewTensor], dtype: str) -> tuple[bytes, dict[str, tuple[int, int]], int]:
    """The beginning of a file; each tensor's first byte after it, and the one after its last; the end of the file."""
    at, header, places = 0, {"__metadata__": {"format": "pt"}}, {}
    for tensor in tensors:
        end = at + math.prod(tensor.shape) * BYTES[NAMES[dtype]]
        places[tensor.name] = at, end
        header[tensor.name] = {"dtype": NAMES[dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}  # type: ignore[dict-item]
        at = end
    content = json.dumps(header, separators=(",", ":")).encode()
    content += b" " * (-len(content) % _ALIGNMENT)
    return len(content).to_bytes(8, "little") + content, places, at


def write_text(path: Path, text: str) -> None:
    """Create a file with this text, which is on disk when this returns. Raises OSError."""
    with path.open("xb") as stream:
        stream.write(text.encode())
        put_on_disk(stream)


def put_on_disk(stream: IO[bytes]) -> None:
    """Return once everything that was written to the file is on disk. Raises OSError."""
    stream.flush()
    os.fsync(stream.fileno())
