"""The job database in one SQLite file: readers next to one writer, waiting instead of failing. SQLite itself would go
on with files that have no name any more, or with what is left of an emptied one; `OpenedFiles` notices."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import sqlite3
import struct
import threading
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, ExceptionContext, RootTransaction, create_engine, event, make_url
from sqlalchemy.exc import OperationalError

from manta.service.store.errors import DatabaseLost, OutcomeUnknown, StoreUnusable
from manta.service.store.location import file_of, shown, sqlite_url

log = logging.getLogger(__name__)

BUSY_MILLISECONDS = 10_000
MAX_CONCURRENT_READS = 2
"""A read is work of this process, and releases the interpreter's lock for each row: threads that take turns make each
other slower (1,000 points of a series for eight clients at once: 57 ms with 2 threads, 75 ms with 8)."""
_CACHE_KIBIBYTES = 16_000
"""Size of the page cache of each connection: 1,000 points of a long series are on 2,000 pages of 4 KiB."""
_ONE_STATEMENT = "manta_one_statement"
_POOLED_READERS, _MAX_EXTRA_READERS = 5, 60
_POOLED_WRITERS, _MAX_EXTRA_WRITERS = 1, 1
_SHARED_LOCK = 0x40000002, 510
"""First byte and number of the bytes of its file that SQLite has locked while a connection is open."""
_EMPTIED = "was emptied"
_END = "you end the service (`kill`, after which jobs still train on)"


class SqliteDatabase:
    """Connections to a file, and everything that only SQLite needs or can do."""

    reads_at_once = MAX_CONCURRENT_READS
    """Number of reads that do not slow each other down."""
    most_readers = _POOLED_READERS + _MAX_EXTRA_READERS
    most_writers = _POOLED_WRITERS + _MAX_EXTRA_WRITERS

    def __init__(self, url: URL):
        """Creates the file's folder. Raises StoreUnusable if that fails."""
        self.location, file = shown(url), file_of(url)
        assert file is not None
        self.file: Path = file
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreUnusable(self.location, error) from error
        self._files = OpenedFiles(self.file)
        self.readers = self._engine(url, "BEGIN", pool_size=_POOLED_READERS, max_overflow=_MAX_EXTRA_READERS)
        self.single_readers = self.readers.execution_options(**{_ONE_STATEMENT: True})
        # Writers take the lock at once: SQLite refuses to let a read wait for becoming a write.
        self.writer = self._engine(url, "BEGIN IMMEDIATE", pool_size=_POOLED_WRITERS, max_overflow=_MAX_EXTRA_WRITERS)

    @classmethod
    def of_file(cls, file: Path) -> SqliteDatabase:
        """The database in `file`."""
        return cls(make_url(sqlite_url(file)))

    def _engine(self, url: URL, begin: str, **pool: int) -> Engine:
        engine = create_engine(url, **pool)
        event.listen(engine, "handle_error", _explain_damage)
        event.listen(engine, "do_connect", lambda *_: self._files.refuse_others())
        event.listen(engine, "connect", _configure)
        event.listen(engine, "connect", lambda connection, _: self._files.opened(connection))
        event.listen(engine, "close", lambda connection, _: self._files.closed(connection))

        @event.listens_for(engine, "begin")
        def begin_transaction(connection: Connection) -> None:
            self._files.refuse_others()
            if _ONE_STATEMENT not in connection.get_execution_options():
                connection.exec_driver_sql(begin)

        return engine

    def refuse_unsuitable(self) -> None:
        """Any SQLite that Python comes with is suitable."""

    def begin_migration(self, connection: Connection) -> None:
        """The transaction already holds the writer's lock."""

    def disable_time_limit(self, connection: Connection) -> None:
        """Statements have no time limit here."""

    def back_up(self, current: str, newest: str) -> None:
        """Copy the database, which is at revision `current`, to a file next to it, for users who want to go back.
        Raises StoreUnusable."""
        copy = self.file.with_name(f"{self.file.name}.{current}")
        try:
            copy.unlink(missing_ok=True)
            copy_to(self.file, copy)
        except (OSError, sqlite3.Error) as error:
            raise StoreUnusable(self.location, error) from error
        log.warning("the database is brought from revision %s to %s; %s is as it was", current, newest, copy)

    def commit(self, connection: Connection, transaction: RootTransaction) -> None:
        """Raises DatabaseLost, and OutcomeUnknown if the file was lost in the middle."""
        self._files.logged()
        self._files.refuse_others()
        transaction.commit()
        try:
            self._files.refuse_others()
        except DatabaseLost as error:
            raise OutcomeUnknown(None, None, error.orig or error) from error

    def is_conflict(self, error: BaseException) -> bool:
        """Always False: there is one writer at a time."""
        return False

    def close(self) -> None:
        """Close all connections."""
        self._files.preserve_log()
        self.readers.dispose()
        self.writer.dispose()


def copy_to(file: Path, copy: Path) -> None:
    """Copy the database in `file`, which may be in use, to the new file `copy`, accessible by its owner only. Raises
    OSError, sqlite3.Error."""
    os.close(os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    with contextlib.closing(sqlite3.connect(file, timeout=BUSY_MILLISECONDS / 1000)) as connection:
        connection.execute("VACUUM INTO ?", (str(copy),))


def _explain_damage(context: ExceptionContext) -> None:
    """A damaged file says nothing about the operation, and may be replaced. Raises OperationalError, so that the
    operation is tried again and none counts as refused."""
    error = context.original_exception
    if type(error) is sqlite3.DatabaseError:  # the other errors are of its subclasses
        raise OperationalError(context.statement, None, error)


def _configure(connection: Any, _record: Any) -> None:
    """Readers next to the writer (WAL), waiting instead of failing, foreign keys, and transactions with our own
    BEGIN."""
    connection.isolation_level = None
    for pragma in (
        "journal_mode=WAL",
        f"busy_timeout={BUSY_MILLISECONDS}",
        "foreign_keys=ON",
        "synchronous=NORMAL",
        f"cache_size=-{_CACHE_KIBIBYTES}",
    ):
        connection.execute(f"PRAGMA {pragma}")


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

    def preserve_log(self) -> None:
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
        wrong = {file: what for file in (*self._logs, self._file) if (what := self._problem_of_file(file)) is not None}
        if not wrong:
            return None
        file, what = wrong.popitem()  # if all were moved, the database, which was looked at last
        return f"the database's file {file} {what}", self._advice(file, what)

    def _problem_of_file(self, file: Path) -> str | None:
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
