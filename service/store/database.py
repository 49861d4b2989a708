"""The job database: connections, migrations, the one thread that writes, and retries of operations while it is locked,
unreachable, full or read-only."""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, NotSupportedError, ProgrammingError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as NoConnectionLeft
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import QueuePool

from manta.service.revisions import MIGRATIONS, all_revisions, newest_revision
from manta.service.store.errors import StoreOfNewerRelease, StoreUnusable
from manta.service.store.location import file_of, parse_url
from manta.service.store.sqlite import SqliteDatabase
from manta.service.tasks import backoff
from manta.workers.errors import MantaError

if TYPE_CHECKING:
    from manta.service.store.postgresql import PostgresDatabase

P = ParamSpec("P")
T = TypeVar("T")
log = logging.getLogger(__name__)

INITIAL_BACKOFF_SECONDS = 0.1
MAX_BACKOFF_SECONDS = 5.0
_REFUSALS = (DataError, IntegrityError, NotSupportedError, ProgrammingError)
FIRST_RELEASED = "0006"
"""Revision of the first release. Earlier databases belong to no release."""
OLDEST_READER = "0009"
"""The content of the table `compatibility` after the newest migration."""
_ADVICE = "restore a backup that a release has made, or begin anew with another database"
_CONFLICTS = 5
"""Immediate repetitions of a write that conflicted with another one."""


def may_pass(error: BaseException) -> bool:
    """Whether the database may accept the same operation later: it was locked, full, read-only or unreachable. False if
    it understood and refused the operation, and for errors of this program."""
    return isinstance(error, DBAPIError | NoConnectionLeft | OSError) and not isinstance(error, _REFUSALS)


async def until_done(operation: Callable[[], Awaitable[T]]) -> T:
    """The result of `operation`, which reads or writes the database; retried until the database accepts it. Raises
    permanent errors."""
    for pause in backoff(INITIAL_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS):
        try:
            return await operation()
        except Exception as error:
            if not may_pass(error):
                raise
            log.warning("the database does not answer (%s); again in %.1f s", in_a_line(error), pause)
        await asyncio.sleep(pause)
    raise AssertionError("the pauses have no end")


def in_a_line(error: Exception) -> str:
    """What a log says about `error`, without the values in its statement."""
    return " ".join(str(getattr(error, "orig", None) or error).split())


class Fence(Protocol):
    """Keeps a control plane from writing about what another one has taken over."""

    def check(self, session: Session) -> None:
        """Raise LeaseLost unless the writer may write; that does not change before the transaction ends."""
        ...

    async def until_certain(self) -> None:
        """Return when it is certain that the writer still may. Raises LeaseLost."""
        ...

    async def exceed(self, epoch: int) -> None:
        """Continue with an epoch above this one, unless it is already: the database is a backup, and has forgotten
        later owners. Raises LeaseLost."""
        ...


@dataclass(frozen=True)
class ConnectionPool:
    """Connections of one kind."""

    in_use: int
    most: int
    """Maximum number; further users wait."""


class Store:
    """The job database. Any thread may read; one thread of its own does all writing, one transaction at a time. Rows
    that come out of it stay usable after their session is closed."""

    def __init__(self, url: str, name: str = "manta"):
        """Open the database at `url`: `sqlite:////home/me/.manta/manta.db`, or `postgresql://me:secret@host/manta`.
        `name`: of the connections to a server, by which others identify them. The folder of an SQLite file is created.
        Call `migrate` before anything else. Raises InvalidDatabaseUrl, and StoreUnusable if the folder cannot be
        created."""
        self.database = open_database(url, name)
        """Connections to the database."""
        self._read_session = sessionmaker(self.database.readers, expire_on_commit=False)
        self._write_session = sessionmaker(expire_on_commit=False)
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="manta-writer")
        self._writer_thread: int = self._writer.submit(threading.get_ident).result()
        self._fence: Fence | None = None
        self.writes = WriteQueue()
        """Writes of this process, behind any fence."""

    def fenced(self, fence: Fence) -> Store:
        """This database for a writer that may only write as long as `fence` allows it. Closed together with this
        store."""
        store = copy.copy(self)
        store._fence = fence
        return store

    async def until_certain(self) -> None:
        """Return when it is certain that the writer of this store still may write. Raises LeaseLost if not."""
        if self._fence is not None:
            await self._fence.until_certain()

    @property
    def engine(self) -> Engine:
        """The SQLAlchemy engine that writes."""
        return self.database.writer

    @property
    def location(self) -> str:
        """URL of the database without the password."""
        return self.database.location

    def connections(self) -> dict[str, ConnectionPool]:
        """Use of the connections, by purpose."""
        database = self.database
        most = {"read": database.most_readers, "write": database.most_writers}
        used = {"read": _in_use(database.readers), "write": _in_use(database.writer)}
        return {name: ConnectionPool(used[name], most[name]) for name in most}

    def migrate(self, revision: str = "head") -> None:
        """Bring the schema up or down to `revision`: the newest by default, `base` for an empty database. An SQLite
        file is copied before its schema is upgraded. A database with the schema of a newer release stays as it is, if
        that release says that this one can use it. Raises StoreUnusable if the database cannot be opened, and
        StoreOfNewerRelease."""
        self.database.refuse_unsuitable()
        current = self.revision
        if revision == "head" and current is not None:
            if current == newest_revision():
                return  # a restarted control plane has jobs to supervise, and alembic takes long to import
            if current > newest_revision():
                self._use_newer(current)
                return
            if current not in all_revisions():
                raise StoreUnusable(self.location, MantaError(f"its revision {current} is that of no release"), _ADVICE)
            self.database.back_up(current, newest_revision())
        from alembic import command
        from alembic.config import Config
        from alembic.util import CommandError

        is_down = revision == "base" or (current is not None and current > revision)
        config = Config()
        config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))

        def run() -> None:
            with self.database.writer.begin() as connection:
                self.database.begin_migration(connection)
                config.attributes["connection"] = connection
                (command.downgrade if is_down else command.upgrade)(config, revision)

        try:
            self._writer.submit(run).result()
        except (SQLAlchemyError, CommandError) as error:
            raise StoreUnusable(self.location, error) from error

    @property
    def shuts_out_release_before(self) -> bool:
        """Whether the release that last used the database can no longer do so after a migration."""
        current = self.revision
        return current is not None and FIRST_RELEASED <= current < newest_revision() and current < OLDEST_READER

    def _use_newer(self, current: str) -> None:
        """Use a database with a revision that is unknown here."""
        try:
            with self.database.readers.connect() as connection:
                oldest = connection.exec_driver_sql("SELECT oldest_reader FROM compatibility").scalar_one()
        except SQLAlchemyError:
            oldest = current
        if newest_revision() < str(oldest):
            raise StoreOfNewerRelease(self.location, current, newest_revision())
        log.warning("a newer release has brought the database to revision %s, which this one can use", current)

    @property
    def revision(self) -> str | None:
        """Of the present schema; None if there is none, or no database that can be opened."""
        try:
            with self.database.readers.connect() as connection:
                revision = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar_one_or_none()
        except SQLAlchemyError:
            return None
        return None if revision is None else str(revision)

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A session that sees one consistent state of the database. Changes made in it are not kept."""
        with self._read_session() as session:
            yield session

    def query(self, query: Callable[Concatenate[Session, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `query` for a session like that of `read` and the other arguments."""
        with self.read() as session:
            return query(session, *args, **kwargs)

    async def read_async(self, query: Callable[[Session], T]) -> T:
        """Like `query`, without blocking the event loop."""
        return await asyncio.to_thread(self.query, query)

    @contextmanager
    def read_rows(self) -> Iterator[Connection]:
        """Like `read`, for plain rows: for a single query a session costs five times as much."""
        with self.database.readers.connect() as connection:
            yield connection

    @contextmanager
    def read_once(self) -> Iterator[Connection]:
        """Like `read_rows`, for one statement, which by itself sees one state of the database: a transaction around it
        would cost two more round trips to a server."""
        with self.database.single_readers.connect() as connection:
            yield connection

    def write(self, operation: Callable[[Session], T]) -> T:
        """Run `operation` in the writer thread, in one transaction, and return its result. Commits when it returns, and
        rolls back and raises its exception if it raises. Raises RuntimeError if called within an operation, which would
        wait for itself."""
        return self._submit(operation).result()

    async def write_async(self, operation: Callable[[Session], T]) -> T:
        """Like `write`, without blocking the event loop."""
        return await asyncio.wrap_future(self._submit(operation))

    def write_later(self, operation: Callable[[Session], None]) -> None:
        """Like `write`, without waiting, for writes whose result does not matter: a failure is logged."""
        self._submit(operation).add_done_callback(_log_failure)

    async def exceed(self, epoch: int) -> None:
        """Continue to write with a higher epoch than this one, which an agent knows; see `Fence.exceed`. Raises
        LeaseLost."""
        if self._fence is not None:
            await self._fence.exceed(epoch)

    def ping(self) -> None:
        """Check that the database answers. Raises sqlalchemy.exc.SQLAlchemyError if not."""
        with self.read() as session:
            session.execute(text("SELECT 1"))

    def close(self) -> None:
        """Finish pending writes, then close all connections."""
        self._writer.shutdown(wait=True)
        self.database.close()

    def _submit(self, operation: Callable[[Session], T]) -> Future[T]:
        if threading.get_ident() == self._writer_thread:
            raise RuntimeError("write() inside a write operation would wait for itself; use the operation's session")
        write = self._writer.submit(self._run, self._behind_fence(operation))
        self.writes.add(write)
        return write

    def _behind_fence(self, operation: Callable[[Session], T]) -> Callable[[Session], T]:
        fence = self._fence
        if fence is None:
            return operation

        def checked(session: Session) -> T:
            fence.check(session)
            return operation(session)

        return checked

    def _run(self, operation: Callable[[Session], T]) -> T:
        for _ in range(_CONFLICTS):
            try:
                return self._run_once(operation)
            except DBAPIError as error:
                if not self.database.is_conflict(error):
                    raise
                log.info("a write got into the way of another one, and is done again (%s)", error.orig)
        return self._run_once(operation)

    def _run_once(self, operation: Callable[[Session], T]) -> T:
        with self.database.writer.connect() as connection:
            transaction = connection.begin()
            with self._write_session(bind=connection) as session:
                result = operation(session)
                session.commit()  # within the transaction; rows stay usable in any case
            self.database.commit(connection, transaction)
            return result


def _in_use(engine: Engine) -> int:
    pool = engine.pool
    assert isinstance(pool, QueuePool)
    return pool.checkedout()


def _log_failure(written: Future[None]) -> None:
    error = None if written.cancelled() else written.exception()
    if error is not None:
        log.warning("a write in the background has failed (%s)", getattr(error, "orig", None) or error)


def open_database(url: str, name: str = "manta") -> SqliteDatabase | PostgresDatabase:
    """The database at `url`; `name`: of the connections to a server. Raises InvalidDatabaseUrl, StoreUnusable."""
    location = parse_url(url)
    if file_of(location) is not None:
        return SqliteDatabase(location)
    from manta.service.store.postgresql import PostgresDatabase  # with its driver, which SQLite does not need

    return PostgresDatabase(location, name)


class WriteQueue:
    """Counts the unfinished writes of one control plane. For any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._lock = clock, threading.Lock()
        self._requested_at: dict[Future[Any], float] = {}  # the oldest first
        self._done, self._seconds = 0, 0.0

    def add(self, write: Future[Any]) -> None:
        """A write was requested just now."""
        with self._lock:
            self._requested_at[write] = self._clock()
        write.add_done_callback(self._remove)

    def _remove(self, write: Future[Any]) -> None:
        with self._lock:
            self._seconds += self._clock() - self._requested_at.pop(write)
            self._done += 1

    @property
    def length(self) -> int:
        """Number of writes that wait or are being executed."""
        return len(self._requested_at)

    @property
    def oldest_seconds(self) -> float:
        """Seconds that the oldest of them has waited; 0 if there is none."""
        with self._lock:
            return self._clock() - next(iter(self._requested_at.values())) if self._requested_at else 0.0

    @property
    def done(self) -> tuple[int, float]:
        """Number of writes that have ended, successfully or not, and their total seconds, waiting included."""
        with self._lock:
            return self._done, self._seconds
