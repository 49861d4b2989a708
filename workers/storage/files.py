"""What can be done with durable files, wherever they lie. What cannot be done is an OSError as of a local file: it is
FileNotFoundError exactly where the store says that there is no such thing, never where it does not answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from workers.storage.places import Place

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class Writer(Protocol):
    """Takes a new file's bytes, from its beginning to its end."""

    def write(self, data: ReadableBuffer, /) -> int | None:
        """How many bytes of `data` were taken, from its first on. Raises OSError."""
        ...


class Reader(Protocol):
    """An open file."""

    size: int
    """Bytes."""

    def read_into(self, buffer: memoryview, at: int) -> int:
        """Fill `buffer` from byte `at` on; how many bytes there were, fewer only at the end. Raises OSError."""
        ...

    def expect(self, pieces: Iterable[tuple[int, int]]) -> None:
        """(First byte, count) of each piece that will be asked for next, in this order."""
        ...


class Files(Protocol):
    """Files of one kind of place."""

    def names(self, folder: Place) -> list[str]:
        """Of all files and folders in `folder`. Raises FileNotFoundError where it is not there, OSError."""
        ...

    def check_folder(self, folder: Place) -> None:
        """Raises FileNotFoundError where `folder` is not there, NotADirectoryError, OSError."""
        ...

    def is_there(self, folder: Place) -> bool:
        """Whether there is `folder`. Raises OSError where that is not known."""
        ...

    def bytes_in(self, folder: Place) -> int:
        """Of all files in `folder`, at any depth; 0 where it is not there. Raises OSError."""
        ...

    def newest(self, folder: Place) -> float | None:
        """When anything in `folder` was written last, at any depth, in Unix seconds; None where nothing is there.
        Raises OSError."""
        ...

    def make_folder(self, folder: Place) -> None:
        """Have `folder`, in all places that have folders. Raises OSError."""
        ...

    def read(self, file: Place) -> bytes:
        """All of it. Raises OSError."""
        ...

    def sizes(self, folder: Place, names: Iterable[str]) -> Iterator[tuple[str, int | OSError]]:
        """(Name, bytes) of each of these files, or why that is not known or it may not be read."""
        ...

    def reader(self, file: Place) -> AbstractContextManager[Reader]:
        """`file`, open for reading. Raises OSError."""
        ...

    def writer(self, file: Place) -> AbstractContextManager[Writer]:
        """A new file, which stays whatever happens to the machine once the block has ended, and is of no use where the
        block has raised. Raises OSError, also at the block's end."""
        ...

    def write_whole(self, file: Place, content: bytes) -> None:
        """Have all of `content` there, or nothing; it stays whatever happens to the machine. Raises OSError."""
        ...

    def remove(self, file: Place) -> None:
        """Remove a file; one that is gone is no error. Raises OSError."""
        ...

    def remove_folder(self, folder: Place) -> None:
        """Remove `folder` with all in it, as far as that can be done."""
        ...


def files_of(place: Place) -> Files:
    """The files where `place` is."""
    if isinstance(place, Path):
        from workers.storage.local_files import LocalFiles

        return LocalFiles()
    from workers.storage.object_files import object_files

    return object_files(place.scheme)
