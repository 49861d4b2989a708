"""Whether the files of an SQLite database are still those that were opened. SQLite itself would go on with files that
have no name any more, or with what is left of an emptied one."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import struct
import threading
from pathlib import Path

from service.store.errors import DatabaseLost

log = logging.getLogger(__name__)

_SHARED_LOCK = 0x40000002, 510
"""First byte and number of the bytes of its file that SQLite has locked while a connection is open."""
_EMPTIED = "was emptied"
_END = "you end the service (`kill`, after which jobs still train on)"


class OpenedFiles:
    """The files of one database in this process. Only looks at what their names lead to: to open and close one of them
    would give up SQLite's locks."""

    def __init__(self, file: Path):
        self._file = file
        self._logs = tuple(file.with_name(f"{file.name}{end}") for end in ("-wal", "-shm"))
        self._known: dict[Path, tuple[int, int]] = {}
        """Device and number of each file that was opened."""
        self._connections: set[int] = set()
        self._emptied = False
        """Once it was, SQLite's memory of it and its log do not fit what anyone may write into it later."""
        self._said: str | None = None
        self._saying = threading.Lock()

    def opened(self, connection: object) -> None:
        """`connection` was opened. Raises DatabaseLost if it leads to another file than the earlier ones."""
        self._note(self._file)
        self.refuse_others()
        self._connections.add(id(connection))

    def closed(self, connection: object) -> None:
        """`connection` was closed. With the last one SQLite removes its log; the next one begins another."""
        self._connections.discard(id(connection))
        if not self._connections:
            for file in self._logs:
                self._known.pop(file, None)

    def logged(self) -> None:
        """A connection is in the middle of a write, so the log is open, and no other process removes it."""
        for file in self._logs:
            self._note(file)

    def refuse_others(self) -> None:
        """Raise DatabaseLost unless the files are those that were opened. The log says so once, and when they are
        back."""
        found = self._problem()
        problem, advice = found or (None, "")
        with self._saying:
            is_news, self._said = problem != self._said, problem
        if is_news and problem is None:
            log.warning("the files of the database %s are back", self._file)
        elif is_news:
            log.error("%s: jobs train on, and nothing is read or written until %s", problem, advice)
        if problem is not None:
            raise DatabaseLost(problem)

    def keep_log(self) -> None:
        """Before the connections are closed: if the file was emptied, keep SQLite from writing its log into it then. It
        does not where others use the file, and a lock of another open file counts as that."""
        if self._emptied:
            handle = os.open(self._file, os.O_RDONLY)  # for as long as this process lives
            lock = struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, *_SHARED_LOCK, 0)
            fcntl.fcntl(handle, fcntl.F_OFD_SETLK, lock)

    def _note(self, file: Path) -> None:
        if file not in self._known:
            with contextlib.suppress(OSError):
                self._known[file] = _identity(file.stat())

    def _problem(self) -> tuple[str, str] | None:
        """What is wrong with the files, and until when; None if nothing is."""
        wrong = {file: what for file in (*self._logs, self._file) if (what := self._wrong_with(file)) is not None}
        if not wrong:
            return None
        file, what = wrong.popitem()  # if all were moved, the database, which was looked at last
        return f"the database's file {file} {what}", self._advice(file, what)

    def _wrong_with(self, file: Path) -> str | None:
        """What cannot be looked at is unknown."""
        known = self._known.get(file)
        if known is None:
            return None
        try:
            status = file.stat()
        except (FileNotFoundError, NotADirectoryError):
            return "is gone"
        except OSError:
            return None
        if _identity(status) != known:
            return "is not the one that was opened"
        self._emptied |= file == self._file and status.st_size == 0
        return _EMPTIED if file == self._file and self._emptied else None

    def _advice(self, file: Path, what: str) -> str:
        if what == _EMPTIED:
            return f"{_END}, restore a backup with `manta db restore FILE`, and start it again"
        if file == self._file:
            another = "start it again with another file there, such as one of `manta db restore FILE`"
            return f"that one is back, or {_END} and {another}"
        return f"that one is back, or {_END} and start it again, since it writes its log into the database when it ends"


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
