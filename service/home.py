"""Writing to the home of a service, which may be full or read-only."""

from __future__ import annotations

import contextlib
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
