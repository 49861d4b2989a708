"""The file in a home that contains its automatic key (`automatic_key.py`), which only its owner can read."""

from __future__ import annotations

import os
from pathlib import Path

from service.home.own_files import write_private
from workers.errors import MantaError
from workers.system.regular_files import open_regular

FILE_NAME = "api.key"
_LONGEST = 200


class KeyFileUnsafe(MantaError):
    """Another user could have read the key, or could have put it there."""

    def __init__(self, path: Path, why: str):
        super().__init__(f"{path} {why}: remove it, and the next start of the service makes another key")


def read_key(home: Path) -> str | None:
    """The automatic key of `home`; None if there is none. Raises KeyFileUnsafe."""
    path = home / FILE_NAME
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
            return file.read(_LONGEST).decode().strip() or None
        except UnicodeDecodeError as error:
            raise KeyFileUnsafe(path, "is not text") from error


def write_key(path: Path, secret: str) -> None:
    """Write the automatic key, so that a partial one is never read. Raises HomeUnusable."""
    write_private(path.parent, path, secret + "\n")
