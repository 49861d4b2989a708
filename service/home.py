"""Writing to the home of a service, which may be full or read-only."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from workers.errors import MantaError


class HomeUnusable(MantaError):
    """A service cannot write to its home."""

    def __init__(self, home: Path, error: OSError):
        super().__init__(
            f"the home {home} cannot be used ({error.filename or home}: {error.strerror}): see to it that it can be "
            "written and has room, or name another one in MANTA_HOME"
        )


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
