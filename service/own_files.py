"""Writing to the home of a service, which may be full or read-only; and the file there that contains its automatic key
(`service/installation_keys.py`), which only its owner can read."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from manta.workers.errors import MantaError
from manta.workers.system.regular_files import open_regular, read_regular

_MAX_BYTES = 2**20
KEY_FILE = "api.key"
_MAX_KEY_CHARACTERS = 200


class HomeUnusable(MantaError):
    """A service cannot write to its home."""

    def __init__(self, home: Path, error: OSError):
        where = error.filename2 or error.filename or home
        super().__init__(
            f"the home {home} cannot be used ({where}: {error.strerror}): see to it that it can be written and has "
            "room, or name another one in MANTA_HOME"
        )


class OwnFileUnusable(MantaError):
    """A file of a home is not one that a service can have written."""

    def __init__(self, path: Path, why: str):
        super().__init__(f"{path} cannot be read ({why}): move it away, and put back the file that was there, if any")


def read_own(path: Path) -> str | None:
    """The text of a small file of a home; None if there is none. Raises OwnFileUnusable."""
    try:
        return read_regular(path, _MAX_BYTES).decode()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except UnicodeDecodeError as error:
        raise OwnFileUnusable(path, "it is not text") from error
    except OSError as error:
        raise OwnFileUnusable(path, str(error.strerror)) from error


@contextlib.contextmanager
def writing_in(home: Path) -> Iterator[None]:
    """The block writes to `home`. Raises HomeUnusable if that is not possible."""
    try:
        yield
    except OSError as error:
        raise HomeUnusable(home, error) from error


def write_private(home: Path, file: Path, text: str) -> None:
    """Write a file of `home`, for its user only, completely or not at all. The temporary file has a name that cannot be
    guessed. Raises HomeUnusable."""
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    with writing_in(home):
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
            temporary.rename(file)
        except OSError:
            temporary.unlink(missing_ok=True)  # no other attempt would find it
            raise


class KeyFileUnsafe(MantaError):
    """Another user could have read the key, or could have put it there."""

    def __init__(self, path: Path, why: str):
        super().__init__(f"{path} {why}: remove it, and the next start of the service makes another key")


def read_key(home: Path) -> str | None:
    """The automatic key of `home`; None if there is none. Raises KeyFileUnsafe."""
    path = home / KEY_FILE
    try:
        opened = open_regular(path, follow=False)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise KeyFileUnsafe(path, f"cannot be read ({error.strerror})") from error
    with opened as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid():
            raise KeyFileUnsafe(path, "belongs to another user")
        if status.st_mode & 0o077:
            raise KeyFileUnsafe(path, "can be read or written by others")
        try:
            return file.read(_MAX_KEY_CHARACTERS).decode("utf-8-sig").strip() or None
        except UnicodeDecodeError as error:
            raise KeyFileUnsafe(path, "is not text") from error


def write_key(path: Path, secret: str) -> None:
    """Write the automatic key, so that a partial one is never read. Raises HomeUnusable."""
    write_private(path.parent, path, secret + "\n")
