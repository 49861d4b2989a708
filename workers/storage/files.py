"""Operations on durable files, wherever they are stored, and those on files in folders. A failure is an OSError, as for
a local file: it is FileNotFoundError exactly if the store says that there is no such thing, never if the store does not
answer."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol

from manta.workers.storage.locations import Location
from manta.workers.system.regular_files import open_regular, read_regular

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_MAX_BYTES = 2**30
"""Maximum size of a file that is read as a whole: indices, records and manifests, not weights."""


class Writer(Protocol):
    """Receives a new file's bytes, from beginning to end."""

    def write(self, data: ReadableBuffer, /) -> int | None:
        """How many bytes of `data` were accepted, from its first on. Raises OSError."""
        ...


class Reader(Protocol):
    """An open file."""

    size: int
    """Size in bytes."""

    def read_into(self, buffer: memoryview, at: int) -> int:
        """Fill `buffer` with bytes from `at` on; returns how many there were, fewer only at the end. Raises OSError."""
        ...

    def expect(self, pieces: Iterable[tuple[int, int]]) -> None:
        """(First byte, count) of each piece that will be requested next, in this order."""
        ...


class Files(Protocol):
    """Files in one kind of place."""

    def names(self, folder: Location) -> list[str]:
        """Names of all files and folders in `folder`. Raises FileNotFoundError if it does not exist, OSError."""
        ...

    def check_folder(self, folder: Location) -> None:
        """Raises FileNotFoundError if `folder` does not exist, NotADirectoryError, OSError."""
        ...

    def is_there(self, folder: Location) -> bool:
        """Whether `folder` exists. Raises OSError if that is not known."""
        ...

    def bytes_in(self, folder: Location) -> int:
        """Size of all files in `folder`, at any depth; 0 if it does not exist. Raises OSError."""
        ...

    def newest(self, folder: Location) -> float | None:
        """When anything in `folder`, at any depth, was last written, in Unix seconds; None if nothing is there. Raises
        OSError."""
        ...

    def make_folder(self, folder: Location) -> None:
        """Create `folder` if it is missing, in places that have folders. Raises OSError."""
        ...

    def read(self, file: Location) -> bytes:
        """The whole contents. Raises OSError."""
        ...

    def sizes(self, folder: Location, names: Iterable[str]) -> Iterator[tuple[str, int | OSError]]:
        """For each of these files (name, bytes), or in place of the bytes why they are not known or the file may not be
        read."""
        ...

    def reader(self, file: Location) -> AbstractContextManager[Reader]:
        """`file`, open for reading. Raises OSError."""
        ...

    def writer(self, file: Location) -> AbstractContextManager[Writer]:
        """A new file. When the block has ended, it survives anything that happens to the machine; if the block has
        raised, it is unusable. Raises OSError, also at the block's end."""
        ...

    def write_atomically(self, file: Location, content: bytes) -> None:
        """Write `content` completely or not at all; it survives anything that happens to the machine. Raises
        OSError."""
        ...

    def remove(self, file: Location) -> None:
        """Remove a file; a file that is gone is not an error. Raises OSError."""
        ...

    def remove_folder(self, folder: Location) -> None:
        """Remove `folder` with everything in it, as far as possible."""
        ...


def files_of(location: Location) -> Files:
    """The operations for files in `location`."""
    if isinstance(location, Path):
        return LocalFiles()
    from manta.workers.storage.object_files import object_files

    return object_files(location.scheme)


class LocalFiles:
    """Files of this machine, or of a mounted file system. See `Files` for what each method raises."""

    def names(self, folder: Location) -> list[str]:
        """Names of everything in `folder`."""
        return [each.name for each in _path(folder).iterdir()]

    def check_folder(self, folder: Location) -> None:
        """Raises an error if it is not there."""
        _path(folder).stat()

    def is_there(self, folder: Location) -> bool:
        """True also for a link that leads nowhere."""
        try:
            _path(folder).lstat()
        except FileNotFoundError:
            return False
        return True

    def bytes_in(self, folder: Location) -> int:
        """See the function `bytes_in`."""
        return bytes_in(_path(folder))

    def newest(self, folder: Location) -> float | None:
        """See `Files`; folders count as well."""
        if not self.is_there(folder):
            return None
        inside = (
            Path(at, name) for at, folders, names in os.walk(_path(folder), onerror=_raise) for name in folders + names
        )
        return max(each.lstat().st_mtime for each in (_path(folder), *inside))

    def make_folder(self, folder: Location) -> None:
        """With its parents."""
        _path(folder).mkdir(parents=True, exist_ok=True)

    def read(self, file: Location) -> bytes:
        """The whole contents."""
        return read_regular(_path(file), _MAX_BYTES)

    def sizes(self, folder: Location, names: Iterable[str]) -> Iterator[tuple[str, int | OSError]]:
        """Each file is opened: one that may not be read is of no use."""
        for name in names:
            try:
                with open_regular(_path(folder) / name) as file:
                    size: int | OSError = os.fstat(file.fileno()).st_size
            except OSError as error:
                size = error
            yield name, size

    @contextmanager
    def reader(self, file: Location) -> Iterator[Reader]:
        """The open file."""
        with open_regular(_path(file), buffering=0) as opened:
            yield _LocalReader(opened)

    @contextmanager
    def writer(self, file: Location) -> Iterator[Writer]:
        """On disk once the block has ended."""
        with io.FileIO(_path(file), "w") as opened:
            yield opened
            os.fsync(opened.fileno())

    def write_atomically(self, file: Location, content: bytes) -> None:
        """Through a file next to it that is then renamed; the folder, and its parent, survive a power cut too."""
        path = _path(file)
        temporary = path.with_name(f".{path.name}")
        with temporary.open("wb") as opened:
            opened.write(content)
            opened.flush()
            os.fsync(opened.fileno())
        temporary.rename(path)
        for folder in (path.parent, path.parent.parent):
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def remove(self, file: Location) -> None:
        """Remove one file."""
        _path(file).unlink(missing_ok=True)

    def remove_folder(self, folder: Location) -> None:
        """Remove everything in it that can be removed."""
        shutil.rmtree(_path(folder), ignore_errors=True)


def bytes_in(folder: Path) -> int:
    """Size of all files in `folder`, at any depth; links count as themselves. Raises OSError."""
    return sum(Path(location, name).lstat().st_size for location, _, names in os.walk(folder) for name in names)


class _LocalReader:
    def __init__(self, opened: IO[bytes]):
        self._opened = opened
        self.size = os.fstat(opened.fileno()).st_size

    def read_into(self, buffer: memoryview, at: int) -> int:
        return os.preadv(self._opened.fileno(), [buffer], at)

    def expect(self, pieces: Iterable[tuple[int, int]]) -> None:
        """The kernel reads ahead by itself."""


def _raise(error: OSError) -> None:
    raise error


def _path(location: Location) -> Path:
    assert isinstance(location, Path)
    return location
