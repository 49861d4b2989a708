"""Files that somebody else has named, or could have replaced. Of others only regular ones are read, and no more than a
limit: a device may never end, a pipe may never begin, and a sparse file of any size costs nothing to make. In folders
of ours, what is found in the place of a file or folder holds nobody up and is replaced.

`tests/test_file_reads.py` lists every place that opens a file in another way.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from pathlib import Path
from typing import IO, Literal

MAX_SETTINGS_BYTES = 16 * 2**20
"""Maximum size of JSON with settings, such as a config.json or tokenizer_config.json."""
POINTER_BYTES = 1024
"""Maximum size of a pointer of Git LFS (https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md)."""
_POINTER = b"version https://git-lfs.github.com/spec/"
_BLOCK = 2**20
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a link",
}


def open_regular(
    path: str | os.PathLike[str], buffering: int = -1, follow: bool = True, mode: Literal["rb", "r+b"] = "rb"
) -> IO[bytes]:
    """Open a regular file that exists, without waiting for anything. `follow`: also at the end of a link. Raises
    OSError, whose `strerror` says what else it is."""
    _refuse_others(Path(path).stat(follow_symlinks=follow), path)  # first: opening a device can do something
    access = os.O_RDONLY if mode == "rb" else os.O_RDWR
    flags = access | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | (0 if follow else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    try:
        _refuse_others(os.fstat(descriptor), path)  # again: it may have been replaced
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, mode, buffering)


def read_regular(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """The content of a regular file of at most `max_bytes` bytes. Raises OSError, whose `strerror` names the limit, or
    says that it is a pointer of Git LFS."""
    content = bytearray()
    with open_regular(path, buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        while size <= max_bytes and (block := os.read(file.fileno(), _BLOCK)):  # what it says may be too little
            content += block
            size = max(size, len(content))
    if size > max_bytes:
        raise OSError(errno.EFBIG, f"it has {size} bytes or more, and at most {max_bytes} are read", os.fspath(path))
    _refuse_pointer(content, path)
    return bytes(content)


def refuse_pointer(path: str | os.PathLike[str]) -> None:
    """Raise OSError, whose `strerror` says so, if a file is a pointer of Git LFS instead of the content itself."""
    with open_regular(path, buffering=0) as file:
        if os.fstat(file.fileno()).st_size <= POINTER_BYTES:
            _refuse_pointer(file.read(len(_POINTER)), path)


def _refuse_pointer(content: bytes | bytearray, path: str | os.PathLike[str]) -> None:
    if len(content) <= POINTER_BYTES and content.startswith(_POINTER):
        missing = "a pointer of Git LFS, whose content is not here: git lfs pull fetches it"
        raise OSError(errno.ENODATA, missing, os.fspath(path))


def _refuse_others(status: os.stat_result, path: str | os.PathLike[str]) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        number = errno.EISDIR if stat.S_ISDIR(status.st_mode) else errno.EINVAL
        raise OSError(number, f"{kind}, not a regular file", os.fspath(path))


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
