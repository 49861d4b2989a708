"""Uploads files in a child process (`upload_process.py`), so that checksums and network traffic do not hold up a
training step. Shared memory is not copied."""

from __future__ import annotations

import io
import json
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Protocol

import numpy
import torch

from manta.workers.checkpoint.checksums import BUFFER_BYTES, FileSums
from manta.workers.checkpoint.upload_process import BYTES, END, MEMORY, PIECE
from manta.workers.storage.locations import ObjectPath
from manta.workers.storage.object_files import OPTIONS

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

ABORT_SECONDS = 10.0
"""Seconds that the process gets to have a store delete the parts of an aborted upload, which would cost money."""
ENDING_SECONDS = 1.0
"""Seconds until the exit code of a process is known after its last message."""


class StagingBuffer(Protocol):
    """Memory as an open file: a process that receives the file sees every byte."""

    bytes: int
    """Size of the memory in bytes."""
    descriptor: int
    """File descriptor, to be passed on."""

    def offset_of(self, content: memoryview) -> int | None:
        """Where `content`, bytes, begins in this memory; None if it is elsewhere."""
        ...


def offset_within(start: int, size: int, content: memoryview) -> int | None:
    """Where `content`, bytes, begins in `size` bytes at the address `start`; None if it is elsewhere."""
    offset: int = numpy.frombuffer(content, numpy.uint8).ctypes.data - start
    return offset if offset >= 0 and offset + len(content) <= size else None


class MappedFile:
    """A file that this process has mapped anyway, as shared memory."""

    def __init__(self, descriptor: int, memory: mmap.mmap):
        """`memory`: all of the file `descriptor`, mapped for writing."""
        self.descriptor, self.bytes = descriptor, len(memory)
        self._start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()

    def offset_of(self, content: memoryview) -> int | None:
        """See StagingBuffer."""
        return offset_within(self._start, self.bytes, content)


class SharedBuffer:
    """A tensor in memory shared with a child process, without a name by which others could open it. The memory is freed
    with the last process that uses it."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype):
        """Filled with zeros, so that all pages are allocated now."""
        self.bytes = max(1, dtype.itemsize * torch.Size(shape).numel())
        self.descriptor = os.memfd_create("manta-checkpoint")
        """File descriptor of the memory, to be passed on."""
        os.ftruncate(self.descriptor, self.bytes)
        self._memory = mmap.mmap(self.descriptor, self.bytes)
        count = torch.Size(shape).numel()
        self.tensor = torch.frombuffer(self._memory, dtype=dtype, count=count).view(shape).zero_()
        """The tensor, with the requested shape."""

    def offset_of(self, content: memoryview) -> int | None:
        """See StagingBuffer."""
        return offset_within(self.tensor.data_ptr(), self.bytes, content)

    def close(self) -> None:
        """Stop passing it on. The memory exists as long as the tensor does."""
        os.close(self.descriptor)


class Uploads:
    """Uploads one file after the other. For one thread, except for `abort`."""

    def __init__(self, buffer: StagingBuffer):
        """`buffer`: the memory that most written data is in."""
        self.buffer = buffer
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._ending: list[threading.Thread] = []
        """Threads that wait for processes that still abort an upload."""

    def start(self) -> None:
        """Start the process now; otherwise it is started with the first file. Raises OSError."""
        self._running()

    @contextmanager
    def create(self, file: ObjectPath, wrote: Callable[[], object], sums: dict[str, FileSums]) -> Iterator[IO[bytes]]:
        """A new file, whose checksums are in `sums` once the block has ended and the file exists. Until then data
        written from the shared memory must not change. `wrote` is called whenever some of it was accepted. Raises
        OSError, and the errors of `wrote`, which abort the upload."""
        process = self._running()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(str(file)).encode() + b"\n")
            pieces = _Pieces(process.stdin, self.buffer)
            with io.BufferedWriter(pieces, BUFFER_BYTES) as stream:
                yield stream
            process.stdin.write(PIECE.pack(END, 0, 0))
            process.stdin.flush()
        except BrokenPipeError as error:
            raise self._ended(process) from error
        except BaseException:
            self._end()  # the file is incomplete, and the process must not complete it
            raise
        sums[file.name] = self._answer(process, wrote)

    def abort(self) -> None:
        """From any thread: the caller that uploads a file gets an OSError, even if the store does not answer."""
        self._end(in_use=True)

    def close(self) -> None:
        """End the process, and wait for uploads that are being aborted."""
        self._end()
        for ending in self._ending:
            ending.join()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            descriptor = self.buffer.descriptor
            command = [sys.executable, "-P", "-m", "manta.workers.checkpoint.upload_process"]
            arguments = [str(descriptor), str(self.buffer.bytes), json.dumps(OPTIONS)]
            self._process = subprocess.Popen(
                [*command, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[descriptor]
            )
        return self._process

    def _answer(self, process: subprocess.Popen[bytes], wrote: Callable[[], object]) -> FileSums:
        assert process.stdout is not None
        for line in process.stdout:
            answer = json.loads(line)
            if "error" in answer:
                raise OSError(answer["error"])
            if "sums" in answer:
                size, blocks, block_bytes = answer["sums"]
                return FileSums(size, tuple(blocks), block_bytes)
            try:
                wrote()
            except BaseException:
                self._end()  # its further answers would be taken for those about the next file
                raise
        raise self._ended(process)

    def _ended(self, process: subprocess.Popen[bytes]) -> OSError:
        self._end()
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDING_SECONDS)
        code = "" if process.returncode is None else f" with exit code {process.returncode}"
        return OSError(f"the process that uploads has ended{code}")

    def _end(self, in_use: bool = False) -> None:
        """Abort an upload in progress, on another thread: a rank that leaves a generation has less time than a store
        may need for that. `in_use`: whether another thread may be using the process's pipes; they are then not closed,
        so that it finds their other end closed, which is an OSError, and not its own, which is a ValueError."""
        with self._lock:
            process, self._process = self._process, None
            if process is not None:
                process.terminate()
                self._ending = [thread for thread in self._ending if thread.is_alive()]
                self._ending.append(threading.Thread(target=_wait_for_exit, args=(process, in_use), daemon=True))
                self._ending[-1].start()


def _wait_for_exit(process: subprocess.Popen[bytes], in_use: bool) -> None:
    """Return when a process that was asked to end has ended; it is killed if that takes too long."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(ABORT_SECONDS)
    process.kill()
    if in_use:
        process.wait()
    else:
        process.communicate()


class _Pieces(io.RawIOBase):
    """Forwards written data: its position in shared memory, or its content."""

    def __init__(self, requests: IO[bytes], buffer: StagingBuffer):
        self._requests, self._buffer, self._size = requests, buffer, 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def write(self, data: ReadableBuffer, /) -> int:
        """See io.RawIOBase."""
        content = memoryview(data).cast("B")
        offset = self._buffer.offset_of(content) if content else None
        if offset is None:
            self._requests.write(PIECE.pack(BYTES, len(content), 0))
            self._requests.write(content)
        else:
            self._requests.write(PIECE.pack(MEMORY, offset, len(content)))
        self._size += len(content)
        return len(content)
