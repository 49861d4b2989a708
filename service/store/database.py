"""The job database: connections, migrations, and the one thread that writes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session, sessionmaker

from service.store.errors import StoreOfNewerRelease, StoreUnusable

log = logging.getLogger(__name__)
T = TypeVar("T")
FIRST_RELEASED = "0006"
"""Revision of the first release. Databases from before it are of no release."""
OLDEST_READER = "0009"
"""What the newest migration leaves in the table `compatibility`."""
MIGRATIONS = Path(__file__).parent / "migrations"
_BUSY_MILLISECONDS = 10_000
_MOST_EXTRA_CONNECTIONS = 60


class Store:
    """The job database. Any thread may read; one thread of its own does all writing, one transaction at a time.

    Rows that come out of it stay usable after their session is closed.
    """

    def __init__(self, url: str):
        """Open the database at the SQLAlchemy `url`, such as `sqlite:////home/me/.manta/manta.db`.

        The folder of an SQLite file is made. Call `migrate` before anything else. Raises StoreUnusable when the
        folder cannot be made.
        """
        location = make_url(url)
        self._location = location.render_as_string(hide_password=True)
        is_sqlite = location.get_backend_name() == "sqlite"
        self._file = Path(location.database) if is_sqlite and location.database else None
        if self._file is not None:
            _make_folder(self._file.parent, self._location)
        # Many readers at once never keep the writer waiting for a connection.
        self._engine = create_engine(location, max_overflow=_MOST_EXTRA_CONNECTIONS)
        if is_sqlite:
            event.listen(self._engine, "connect", _configure_sqlite)
            event.listen(self._engine, "begin", _begin_sqlite)
        self._writing_engine = self._engine.execution_options(manta_writes=True)
        self._read_session = sessionmaker(self._engine, expire_on_commit=False)
        self._write_session = sessionmaker(self._writing_engine, expire_on_commit=False)
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="manta-writer")
        self._writer_thread: int = self._writer.submit(threading.get_ident).result()

    @property
    def engine(self) -> Engine:
        """The SQLAlchemy engine."""
        return self._engine

    def migrate(self, revision: str = "head") -> None:
        """Bring the schema to `revision`: the newest by default, `base` for an empty database.

        Whatever is there is copied before it is brought to a newer schema. A database that a newer release has brought
        to a schema of its own stays as it is, where that release says that this one can use it. Raises StoreUnusable
        when the database cannot be opened, and StoreOfNewerRelease.
        """
        current = self._revision()
        if revision == "head" and current is not None:
            if current == newest_revision():
                return  # a control plane that is restarted has jobs to look after, and alembic takes long to import
            if current > newest_revision():
                self._use_newer(current)
                return
            self._keep_copy(current)
        from alembic import command
        from alembic.config import Config
        from alembic.util import CommandError

        config = Config()
        config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))

        def run() -> None:
            with self._writing_engine.begin() as connection:
                config.attributes["connection"] = connection
                (command.downgrade if revision == "base" else command.upgrade)(config, revision)

        try:
            self._writer.submit(run).result()
        except (SQLAlchemyError, CommandError) as error:
            raise StoreUnusable(self._location, error) from error

    @property
    def shuts_out_release_before(self) -> bool:
        """Whether the release that used the database last cannot do so any more once it is migrated."""
        current = self._revision()
        return current is not None and FIRST_RELEASED <= current < newest_revision() and current < OLDEST_READER

    def _use_newer(self, current: str) -> None:
        """Use a database of a revision that is not known here. Raises StoreOfNewerRelease."""
        try:
            with self._engine.connect() as connection:
                oldest = connection.exec_driver_sql("SELECT oldest_reader FROM compatibility").scalar_one()
        except SQLAlchemyError:
            oldest = current
        if newest_revision() < str(oldest):
            raise StoreOfNewerRelease(self._location, current, newest_revision())
        log.warning("a newer release has brought the database to revision %s, which this one can use", current)

    def _keep_copy(self, current: str) -> None:
        """Copy the database to a file beside it, for those who want to go back. Raises StoreUnusable."""
        if self._file is None:
            return
        copy = self._file.with_name(f"{self._file.name}.{current}")
        try:
            copy.unlink(missing_ok=True)
            with contextlib.closing(sqlite3.connect(self._file, timeout=_BUSY_MILLISECONDS / 1000)) as connection:
                connection.execute("VACUUM INTO ?", (str(copy),))
        except (OSError, sqlite3.Error) as error:
            raise StoreUnusable(self._location, error) from error
        log.warning("the database is brought from revision %s to %s; %s is as it was", current, newest_revision(), copy)

    def _revision(self) -> str | None:
        """Of the schema as it is; None where there is none, or no database that can be opened."""
        try:
            with self._engine.connect() as connection:
                revision = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar_one_or_none()
        except SQLAlchemyError:
            return None
        return None if revision is None else str(revision)

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A session that sees one consistent state of the database. Nothing done in it is kept."""
        with self._read_session() as session:
            yield session

    def write(self, operation: Callable[[Session], T]) -> T:
        """Run `operation` in the writer thread, in one transaction, and return its result.

        Commits when it returns and rolls back when it raises; the exception comes out here. Raises RuntimeError
        when called from inside an operation, which would wait for itself.
        """
        return self._submit(operation).result()

    async def write_async(self, operation: Callable[[Session], T]) -> T:
        """As `write`, without blocking the event loop."""
        return await asyncio.wrap_future(self._submit(operation))

    def ping(self) -> None:
        """Ask the database for nothing. Raises sqlalchemy.exc.SQLAlchemyError when it cannot answer."""
        with self.read() as session:
            session.execute(text("SELECT 1"))

    def close(self) -> None:
        """Finish the writes that wait, then close all connections."""
        self._writer.shutdown(wait=True)
        self._engine.dispose()

    def _submit(self, operation: Callable[[Session], T]) -> Future[T]:
        if threading.get_ident() == self._writer_thread:
            raise RuntimeError("write() inside a write operation would wait for itself; use the operation's session")
        return self._writer.submit(self._run, operation)

    def _run(self, operation: Callable[[Session], T]) -> T:
        with self._write_session.begin() as session:
            return operation(session)


def newest_revision() -> str:
    """Of the schema that this version works with: migrations are numbered in order by their files' names."""
    return max(path.name.partition("_")[0] for path in (MIGRATIONS / "versions").glob("[0-9]*.py"))


def _make_folder(folder: Path, location: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreUnusable(location, error) from error


def _configure_sqlite(connection: Any, _record: Any) -> None:
    """Readers beside the writer (WAL), waiting instead of failing, foreign keys, and transactions by our own BEGIN."""
    connection.isolation_level = None
    for pragma in ("journal_mode=WAL", f"busy_timeout={_BUSY_MILLISECONDS}", "foreign_keys=ON", "synchronous=NORMAL"):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: Connection) -> None:
    """Writers take the lock at once: a read that turns into a write may not wait, SQLite would refuse it."""
    writes = connection.get_execution_options().get("manta_writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
