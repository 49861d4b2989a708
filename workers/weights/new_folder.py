"""A folder that appears completely or not at all: it is written under another name next to its place, and renamed at
the end."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from workers.errors import WeightsError

_END = ".unfinished"


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `target` when the block ends without an error. At most an empty folder may
    be there before. What killed attempts have left next to it is removed; what others are still writing is not.

    Raises WeightsError if something is there, OSError.
    """
    _check(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_left_over(target)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=_END, dir=target.parent))
    try:
        lock = _locked(folder)
        assert lock is not None, "no other process knows the folder"
        try:
            yield folder
            folder.chmod(0o777 & ~_umask())
            _sync(folder)
            _check(target)
            folder.rename(target)  # replaces an empty folder, nothing else
            _sync(target.parent)
        finally:
            os.close(lock)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check(target: Path) -> None:
    if target.is_symlink() or (target.exists() and not (target.is_dir() and not any(target.iterdir()))):
        raise WeightsError(f"there is something at {target} already: name another place, or remove it")


def _remove_left_over(target: Path) -> None:
    for folder in target.parent.glob(f".{_escaped(target.name)}.*{_END}"):
        lock = None
        with suppress(OSError):
            lock = _locked(folder)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _escaped(name: str) -> str:
    return "".join(f"[{each}]" if each in "*?[" else each for each in name)


def _locked(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock, which ends with the process; None if another process has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _umask() -> int:
    """The umask of this process; the only way to read it is to set it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
