"""Files that a child process uploads (`upload_process.py`): a step of the training is not held up by what
sums and sends them. What lies in the memory that both see is not copied."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING

from workers.checkpoint.checksums import BUFFER_BYTES, FileSums
from workers.checkpoint.shared_room import Room
from workers.checkpoint.upload_process import BYTES, END, MEMORY, PIECE
from workers.storage.object_files import OPTIONS
from workers.storage.places import ObjectPath

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


ABORT_SECONDS = 10.0
"""That the process gets to have a store forget the parts of what it was uploading, which would be paid for."""


ENDING_SECONDS = 1.0
"""That the exit code of a process may take to be known behind its last word."""


class Uploads:
    """Uploads one file after the other. Of one thread, but for `give_up`."""

    def __init__(self, room: Room):
        """`room`: the memory in which most of what is written lies."""
        self.room = room
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._ending: list[threading.Thread] = []
        """Each sees a process out that still aborts an upload."""

    def start(self) -> None:
        """Have the process ready; otherwise it is started with the first file. Raises OSError."""
        self._running()

    @contextmanager
    def create(self, file: ObjectPath, wrote: Callable[[], object], sums: dict[str, FileSums]) -> Iterator[IO[bytes]]:
        """A new file, whose sums are in `sums` once the block has ended and it is there. Until then what is written
        from the room stays as it is. `wrote` is called whenever some of it was taken. Raises OSError, and what `wrote`
        raises, by which the file is given up."""
        process = self._running()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(str(file)).encode() + b"\n")
            pieces = _Pieces(process.stdin, self.room)
            with io.BufferedWriter(pieces, BUFFER_BYTES) as stream:
                yield stream
            process.stdin.write(PIECE.pack(END, 0, 0))
            process.stdin.flush()
        except BrokenPipeError as error:
            raise self._ended(process) from error
        except BaseException:
            self._end()  # the file is not whole, and the process must not take it for that
            raise
        sums[file.name] = self._answer(process, wrote)

    def give_up(self) -> None:
        """From any thread: the caller that uploads a file gets an OSError, whatever the store does."""
        self._end()

    def close(self) -> None:
        """End the process, and wait for uploads that are being aborted."""
        self._end()
        for ending in self._ending:
            ending.join()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            descriptor = self.room.descriptor
            command = [sys.executable, "-m", "workers.checkpoint.upload_process"]
            arguments = [str(descriptor), str(self.room.bytes), json.dumps(OPTIONS)]
            self._process = subprocess.Popen(
                [*command, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[descriptor],
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
                self._end()  # its further answers are not those about the next file
                raise
        raise self._ended(process)

    def _ended(self, process: subprocess.Popen[bytes]) -> OSError:
        self._end()
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDING_SECONDS)
        code = "" if process.returncode is None else f" with exit code {process.returncode}"
        return OSError(f"the process that uploads has ended{code}")

    def _end(self) -> None:
        """An upload under way is aborted, on another thread: who leaves a generation has less time than a store may
        take for that."""
        with self._lock:
            process, self._process = self._process, None
            if process is not None:
                process.terminate()
                self._ending = [each for each in self._ending if each.is_alive()]
                self._ending.append(threading.Thread(target=_see_out, args=(process,), daemon=True))
                self._ending[-1].start()


def _see_out(process: subprocess.Popen[bytes]) -> None:
    """Return once a process that was asked to end has ended; it is killed when that takes too long."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(ABORT_SECONDS)
    process.kill()
    process.communicate()


class _Pieces(io.RawIOBase):
    """Passes on what is written: where it is, or what it is."""

    def __init__(self, requests: IO[bytes], room: Room):
        self._requests, self._room, self._size = requests, room, 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def write(self, data: ReadableBuffer, /) -> int:
        """As any file's."""
        content = memoryview(data).cast("B")
        offset = self._room.offset_of(content) if content else None
        if offset is None:
            self._requests.write(PIECE.pack(BYTES, len(content), 0))
            self._requests.write(content)
        else:
            self._requests.write(PIECE.pack(MEMORY, offset, len(content)))
        self._size += len(content)
        return len(content)
