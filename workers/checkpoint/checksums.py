"""Files with checksums: a CRC-32 per block is computed when writing and verified when reading.

Checksums are computed from the bytes passed to the kernel, not from a file read back, so any corruption on the way to
the disk, on it, or on the way back is detected.
"""

from __future__ import annotations

import contextlib
import io
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from manta.workers.errors import CheckpointError
from manta.workers.storage.files import Reader, Writer, files_of
from manta.workers.storage.locations import Location

try:
    from zlib_ng.zlib_ng import crc32  # at about 20 GB/s
except ImportError:
    from zlib import crc32  # the same numbers, at about 4 GB/s; both release the interpreter's lock

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

FROZEN_PREFIX = "frozen-"
"""Beginning of the names of folders of parameters that are not trained, which checkpoints refer to."""
BLOCK_BYTES = 4 * 1024 * 1024
"""Size of a block, in bytes: the precision of locating damage, and the minimum that is read from a file."""
BUFFER_BYTES = 1024 * 1024


class ReadOnlyBytes(io.RawIOBase):
    """A read-only file object for readers that need one: a position in `size` bytes, which `fill` provides."""

    def __init__(self, size: int):
        self.size, self._position = size, 0

    @abstractmethod
    def fill(self, wanted: memoryview, at: int) -> int:
        """Copy the bytes from `at` on into `wanted`, which does not extend past the end; returns how many."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        if position < 0:
            raise ValueError(f"there is no byte {position}")
        self._position = position
        return position

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Fill `buffer`; shorter only at the end."""
        wanted = memoryview(buffer).cast("B")[: max(0, self.size - self._position)]
        count = self.fill(wanted, self._position)
        self._position += count
        return count


class DamagedCheckpoint(CheckpointError):
    """A checkpoint is not as it was written; the message has the file and the byte. An older one may be usable."""


class UnreadableCheckpoint(CheckpointError):
    """A checkpoint cannot be read at present, so it is unknown whether it is complete: its folder is missing (moved,
    not mounted) or not accessible, or its storage does not respond. It may be readable later."""

    failure_kind = "unreadable_checkpoint"


def damaged(file: Location, problem: str) -> DamagedCheckpoint:
    """The error for a problem of `file` of a checkpoint."""
    is_frozen = file.parent.name.startswith(FROZEN_PREFIX)
    what = f"the frozen weights at {file.parent} are" if is_frozen else f"the checkpoint at {file.parent} is"
    return DamagedCheckpoint(f"{what} damaged: {file.name} {problem}")


def unreadable(file: Location, error: OSError, at: int = 0) -> CheckpointError:
    """The error for an OSError about `file`, from byte `at` on: damage if the file is gone from a folder that exists;
    anything else, such as missing permissions or a failing medium, is UnreadableCheckpoint, since it says nothing about
    what was written."""
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
        try:
            files_of(file).check_folder(file.parent)
        except NotADirectoryError:
            pass  # a file in the place of the folder is an answer too
        except FileNotFoundError:
            why = "it is not there (newer ones may have replaced it, or its folder was moved or is not mounted)"
            return UnreadableCheckpoint(f"the checkpoint at {file.parent} cannot be read: {why}")
        except OSError as gone:
            return UnreadableCheckpoint(f"the checkpoint at {file.parent} cannot be read: {gone.strerror or gone}")
        return damaged(file, "is missing")
    where = f" from byte {at}" if at else ""
    reason = f"{file.name}{where}: {error.strerror or error}"
    return UnreadableCheckpoint(f"the checkpoint at {file.parent} cannot be read: {reason}")


@dataclass(frozen=True)
class FileSums:
    """Size and checksums of a file."""

    size: int
    """Bytes."""
    blocks: tuple[int, ...] | None
    """CRC-32 of each block; None: it was written before there were any."""
    block_bytes: int
    """Bytes of each block except the last."""


class SummingFile(io.RawIOBase):
    """A new file that computes checksums while it is written sequentially."""

    def __init__(self, file: Writer, wrote: Callable[[], object] = lambda: None, block_bytes: int | None = None):
        """`wrote` is called after each write. `block_bytes`: of each block; None: BLOCK_BYTES."""
        self._file, self._wrote = file, wrote
        self._block_bytes = BLOCK_BYTES if block_bytes is None else block_bytes
        self._blocks: list[int] = []
        self._size = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def write(self, data: ReadableBuffer, /) -> int:
        """See io.RawIOBase."""
        content = memoryview(data).cast("B")
        count = self._file.write(content) or 0
        content = content[:count]
        while content:
            filled = self._size % self._block_bytes
            if filled == 0:
                self._blocks.append(0)
            part = content[: self._block_bytes - filled]
            self._blocks[-1] = crc32(part, self._blocks[-1])
            self._size += len(part)
            content = content[len(part) :]
        self._wrote()
        return count

    @property
    def sums(self) -> FileSums:
        """Checksums of the bytes written so far."""
        return FileSums(self._size, tuple(self._blocks), self._block_bytes)


class SummedFiles:
    """New files whose checksums are computed while they are written."""

    def __init__(self, wrote: Callable[[], object] = lambda: None, block_bytes: int | None = None) -> None:
        """`wrote` is called after each write to any of them. `block_bytes`: as in SummingFile."""
        self._wrote, self._block_bytes = wrote, block_bytes
        self.sums: dict[str, FileSums] = {}
        """By name, for completed files."""

    @contextmanager
    def create(self, file: Location) -> Iterator[io.BufferedWriter[SummingFile]]:
        """A new file, which is durable once the block has ended. Raises OSError."""
        with files_of(file).writer(file) as opened:
            summing = SummingFile(opened, self._wrote, self._block_bytes)
            with io.BufferedWriter(summing, BUFFER_BYTES) as stream:
                yield stream
        self.sums[file.name] = summing.sums


class CheckedFile(ReadOnlyBytes):
    """Reads a file block by block; returns no byte of a block before the whole block is verified."""

    def __init__(self, file: Location, stream: Reader, sums: FileSums):
        super().__init__(sums.size)
        self._file, self._stream, self._sums = file, stream, sums
        # The last two blocks, newest last: readers of archives go from their ends to their beginnings and back.
        self._blocks = [(-1, memoryview(b"")) for _ in range(2)]

    @property
    def block_bytes(self) -> int:
        """Bytes of each block except the last."""
        return self._sums.block_bytes

    def fill(self, wanted: memoryview, at: int) -> int:
        """All of it. Raises DamagedCheckpoint."""
        done = 0
        while done < len(wanted):
            number, offset = divmod(at + done, self._sums.block_bytes)
            part = self._checked(number)[offset : offset + len(wanted) - done]
            wanted[done : done + len(part)] = part
            done += len(part)
        return done

    def expect(self, pieces: Iterable[tuple[int, int]]) -> None:
        """(First byte, count) of all that will be read, in the file's order: distant storage is read ahead."""
        size = self._sums.block_bytes
        numbers = dict.fromkeys(block for at, count in pieces for block in range(at // size, -(-(at + count) // size)))
        self._stream.expect((n * size, min(size, self.size - n * size)) for n in numbers)

    def check(self) -> None:
        """Read and verify the whole file. Raises DamagedCheckpoint at the first damaged block."""
        self.expect([(0, self.size)])
        for number in range(-(-self.size // self._sums.block_bytes)):
            self._checked(number)

    def _checked(self, number: int) -> memoryview:
        if number == self._blocks[0][0]:
            self._blocks.reverse()
        elif number != self._blocks[1][0]:
            _, buffer = self._blocks.pop(0)
            buffer = buffer or memoryview(bytearray(min(self._sums.block_bytes, self.size)))
            self._blocks.append((-1, buffer))
            self.read_block(number, buffer)
            self._blocks[1] = (number, buffer)
        return self._blocks[1][1][: self.size - number * self._sums.block_bytes]

    def read_block(self, number: int, buffer: memoryview) -> None:
        """Fill the beginning of `buffer` with block `number`. Raises DamagedCheckpoint, UnreadableCheckpoint."""
        at = number * self._sums.block_bytes
        block = buffer[: self.size - at]
        try:
            count = self._stream.read_into(block, at)
        except OSError as error:
            raise unreadable(self._file, error, at) from error
        if count != len(block):
            raise damaged(self._file, f"is cut off at byte {at + count}: it should have {self.size} bytes")
        if self._sums.blocks is not None and crc32(block) != self._sums.blocks[number]:
            raise damaged(self._file, f"is not what was written, in the {len(block)} bytes from byte {at}")


class Window(ReadOnlyBytes):
    """`size` bytes of `stream` from `start` on, as a separate file object."""

    def __init__(self, stream: CheckedFile, start: int, size: int):
        super().__init__(size)
        self._stream, self._start = stream, start

    def fill(self, wanted: memoryview, at: int) -> int:
        """Raises DamagedCheckpoint."""
        self._stream.seek(self._start + at)
        return self._stream.readinto(wanted)

    def read(self, size: int | None = -1, /) -> bytes:
        """See io.RawIOBase. It is defined here because torch.load, after an error in `readinto`, looks for a `read`
        that is not inherited, and raises an error about that instead."""
        left = max(0, self.size - self.tell())
        content = bytearray(left if size is None or size < 0 else min(size, left))
        return bytes(content[: self.readinto(content)])


@contextmanager
def checked(file: Location, sums: FileSums) -> Iterator[CheckedFile]:
    """`file`, open for reading. Raises DamagedCheckpoint if it is missing or its size differs from that in `sums`."""
    with contextlib.ExitStack() as stack:
        try:
            stream = stack.enter_context(files_of(file).reader(file))
        except OSError as error:
            raise unreadable(file, error) from error
        if stream.size != sums.size:
            what = "is cut off at byte" if stream.size < sums.size else "continues to byte"
            raise damaged(file, f"{what} {stream.size}: it should have {sums.size} bytes")
        yield stack.enter_context(CheckedFile(file, stream, sums))
