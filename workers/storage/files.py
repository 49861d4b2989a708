"""Operations on durable files, wherever they are stored. A failure is an OSError, as for a local file: it is
FileNotFoundError exactly if the store says that there is no such thing, never if the store does not answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from workers.storage.places import Place

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


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

    def names(self, folder: Place) -> list[str]:
        """Names of all files and folders in `folder`. Raises FileNotFoundError if it does not exist, OSError."""
        ...

    def check_folder(self, folder: Place) -> None:
        """Raises FileNotFoundError if `folder` does not exist, NotADirectoryError, OSError."""
        ...

    def is_there(self, folder: Place) -> bool:
        """Whether `folder` exists. Raises OSError if that is not known."""
        ...

    def bytes_in(self, folder: Place) -> int:
        """Size of all files in `folder`, at any depth; 0 if it does not exist. Raises OSError."""
        ...

    def newest(self, folder: Place) -> float | None:
        """When anything in `folder`, at any depth, was last written, in Unix seconds; None if nothing is there. Raises
        OSError."""
        ...

    def make_folder(self, folder: Place) -> None:
        """Create `folder` if it is missing, in places that have folders. Raises OSError."""
        ...

    def read(self, file: Place) -> bytes:
        """The whole contents. Raises OSError."""
        ...

    def sizes(self, folder: Place, names: Iterable[str]) -> Iterator[tuple[str, int | OSError]]:
        """For each of these files (name, bytes), or in place of the bytes why they are not known or the file may not be
        read."""
        ...

    def reader(self, file: Place) -> AbstractContextManager[Reader]:
        """`file`, open for reading. Raises OSError."""
        ...

    def writer(self, file: Place) -> AbstractContextManager[Writer]:
        """A new file. When the block has ended, it survives anything that happens to the machine; if the block has
        raised, it is unusable. Raises OSError, also at the block's end."""
        ...

    def write_whole(self, file: Place, content: bytes) -> None:
        """Write `content` completely or not at all; it survives anything that happens to the machine. Raises
        OSError."""
        ...

    def remove(self, file: Place) -> None:
        """Remove a file; a file that is gone is not an error. Raises OSError."""
        ...

    def remove_folder(self, folder: Place) -> None:
        """Remove `folder` with everything in it, as far as possible."""
        ...


def files_of(place: Place) -> Files:
    """The operations for files in `place`."""
    if isinstance(place, Path):
        from workers.storage.local_files import LocalFiles

        return LocalFiles()
    from workers.storage.object_files import object_files

    return object_files(place.scheme)
