"""A disk or mount that does not work."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch


@contextmanager
def away(folder: Path, number: int = errno.EIO) -> Iterator[None]:
    """Whatever is asked about `folder` and what is in it ends with an error of the system."""

    def failing(call: Callable[..., Any]) -> Callable[..., Any]:
        def instead(path: Any, *args: Any, **more: Any) -> Any:
            if isinstance(path, str | Path) and Path(path).is_relative_to(folder):
                raise OSError(number, os.strerror(number), str(path))
            return call(path, *args, **more)

        return instead

    of_paths = {name: failing(getattr(Path, name)) for name in ("open", "stat")}
    of_the_system = {name: failing(getattr(os, name)) for name in ("open", "scandir")}
    with patch.multiple(Path, **of_paths), patch.multiple(os, **of_the_system):
        yield
