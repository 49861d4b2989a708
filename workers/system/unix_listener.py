"""A Unix socket on which a process listens for as long as it lives: who cleans /tmp may remove the socket's file, and
then the process lives on but cannot be reached. Pure Python."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

POLL_SECONDS = 1.0
"""Seconds between two looks whether a socket's file is still there."""


class UnixListener:
    """Listens at `path`, which only this user can reach; it replaces a socket that another process left there."""

    def __init__(self, path: Path):
        """Raises OSError, also if there is no folder for it."""
        self.path, self.socket = path, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            temporary.unlink(missing_ok=True)
            self.socket.bind(str(temporary))
            temporary.chmod(0o600)
            self.socket.listen(128)
            self._status = temporary.lstat()
            temporary.rename(path)
        except BaseException:
            self.socket.close()
            raise

    def successor(self) -> UnixListener | None:
        """A new listener if nobody can reach this one any more, which is then to be closed. None if it can still be
        reached, if another process answers at its path, or if none can be made at present."""
        if self._is_at_its_path() or _answers(self.path):
            return None
        with contextlib.suppress(OSError):
            return UnixListener(self.path)
        return None

    def close(self) -> None:
        """Stop listening, and remove the socket's file unless it is another's."""
        self.socket.close()
        with contextlib.suppress(OSError):
            if self._is_at_its_path():
                self.path.unlink()

    def _is_at_its_path(self) -> bool:
        try:
            return os.path.samestat(self.path.lstat(), self._status)
        except OSError:
            return False


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.setblocking(False)
        try:
            connection.connect(str(path))
        except BlockingIOError:
            return True  # it has more to accept than it can queue
        except OSError:
            return False
    return True
