"""Files in folders of ours: what is found in the place of one, such as a folder or a named pipe, holds nobody up and is
replaced. Pure Python."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from pathlib import Path


def make_folder(folder: Path) -> None:
    """Make `folder` unless it is there, for this user alone. Raises OSError."""
    if not folder.parent.exists():
        make_folder(folder.parent)  # mkdir(parents=True) would open it to others
    try:
        folder.mkdir(exist_ok=True, mode=0o700)
    except FileExistsError:
        with contextlib.suppress(IsADirectoryError):  # another process was faster
            folder.unlink(missing_ok=True)
        folder.mkdir(exist_ok=True, mode=0o700)
    mode = folder.stat().st_mode
    if mode & stat.S_IRWXU != stat.S_IRWXU:
        folder.chmod(stat.S_IMODE(mode) | stat.S_IRWXU)


def remove(path: Path) -> None:
    """Remove what is at `path`, if there is anything. Raises OSError."""
    try:
        path.unlink(missing_ok=True)
    except IsADirectoryError:
        shutil.rmtree(path)


def open_to_append(path: Path) -> int:
    """A descriptor of the file at `path` to append to, which is made unless it is there. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(path.lstat().st_mode):
            remove(path)
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY, 0o666)


def put(file: Path, path: Path) -> None:
    """Rename `file` to `path`, in the place of what is there. Raises OSError."""
    try:
        file.rename(path)
    except IsADirectoryError:
        shutil.rmtree(path)
        file.rename(path)
