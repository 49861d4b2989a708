"""A job database as one file, and back. The file is an SQLite database with the same schema, whatever kind the database
is: common tools can read it, no tools for a server's version are needed, and it can move jobs between SQLite and
PostgreSQL."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import Connection, delete, func, insert, select, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from manta.service.revisions import newest_revision
from manta.service.states import JobState
from manta.service.store import events, jobs, leases
from manta.service.store.database import Store, open_database
from manta.service.store.errors import StoreUnusable
from manta.service.store.health import refuse_none
from manta.service.store.location import sqlite_url
from manta.service.store.postgresql import PostgresDatabase
from manta.service.store.restored import RESTORED
from manta.service.store.sqlite import SqliteDatabase, copy_to
from manta.service.store.tables import Base, Event, Job
from manta.workers.errors import MantaError

BATCH_ROWS = 5_000
CLOSING_SECONDS, POLL_SECONDS = 2.0, 0.05
"""Seconds that a closed connection may still be shown as open, and between checks of that."""
EVENT_IDS_SKIPPED = 10**9
"""Clients that follow the events have seen ids that the backup does not have: this many are skipped, so that none is
reused."""


class NotABackup(MantaError):
    """A file is not a job database of this release or an earlier one."""


class DatabaseInUse(MantaError):
    """The database to be replaced is in use."""


class DatabaseNotEmpty(MantaError):
    """The database to be replaced has jobs."""


def back_up(store: Store, file: Path) -> None:
    """Write the whole database, in one consistent state, to `file`, which must not exist. A service may be running.
    Raises FileExistsError, StoreUnusable."""
    if file.exists():
        raise FileExistsError(f"{file} is there already; name another file, or remove it")
    refuse_none(store)
    with _next_to(file) as working:
        try:
            if isinstance(store.database, SqliteDatabase):
                copy_to(store.database.file, working)
            else:
                _copy_out(store, working)
        except (OSError, sqlite3.Error, SQLAlchemyError) as error:
            raise StoreUnusable(store.location, error) from error
        working.rename(file)


def restore(url: str, file: Path, replace: bool, now: float) -> int:
    """Replace the database at `url` with the contents of `file`; returns how many of its jobs are not final. Each of
    these gets the event `restored`, and none starts by itself: it may be running already, or be over. `replace`: even
    if the database has jobs. Raises NotABackup, StoreOfNewerRelease, DatabaseInUse, DatabaseNotEmpty, StoreUnusable."""
    database = open_database(url)
    folder = database.file if isinstance(database, SqliteDatabase) else Path(tempfile.gettempdir()) / "manta.db"
    try:
        with _next_to(folder) as working:
            unfinished = _prepared(file, working, now)
            if isinstance(database, SqliteDatabase):
                _into_file(database, working, replace)
            else:
                _into_server(database, working, replace)
            return unfinished
    except (OSError, sqlite3.Error, SQLAlchemyError) as error:
        raise StoreUnusable(database.location, error) from error
    finally:
        database.close()


@contextlib.contextmanager
def _next_to(file: Path) -> Iterator[Path]:
    """A file in a new folder next to `file`, accessible by its owner only."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=f".{file.name}.") as folder:
        yield Path(folder) / "manta.db"


def _copy_out(store: Store, working: Path) -> None:
    if store.revision != newest_revision():
        raise StoreUnusable(store.location, ValueError(f"its revision is {store.revision}: `manta db upgrade`"))
    os.close(os.open(working, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    target = Store(sqlite_url(working))
    try:
        target.migrate()
        with store.read() as session:
            target.write(lambda into: _copy_rows(session.connection(), into.connection()))
    finally:
        target.close()
    _leave_log(working)


def _leave_log(working: Path) -> None:
    """Merge the log of an unused database into its file."""
    with contextlib.closing(sqlite3.connect(working)) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")


def _copy_rows(source: Connection, target: Connection) -> None:
    """Copy all rows of all tables, replacing existing ones."""
    for table in reversed(Base.metadata.sorted_tables):
        target.execute(delete(table))
    for table in Base.metadata.sorted_tables:
        rows = source.execution_options(yield_per=BATCH_ROWS).execute(select(table)).mappings()
        for some in rows.partitions():
            target.execute(insert(table), [dict(row) for row in some])


def _prepared(file: Path, working: Path, now: float) -> int:
    """Make `working` the future contents of the database; returns how many of its jobs are not final."""
    try:
        if not file.is_file():
            raise NotABackup(f"there is no file {file}")
        copy_to(file, working)
    except (OSError, sqlite3.Error) as error:
        raise NotABackup(f"{file} is not a backup of a job database: {error}") from error
    store = Store(sqlite_url(working))
    try:
        if store.revision is None:
            raise NotABackup(f"{file} is not a backup of a job database")
        store.migrate()
        made = datetime.fromtimestamp(file.stat().st_mtime, UTC).strftime("%Y-%m-%d %H:%M UTC")
        return store.write(lambda session: _mark(session, made, now))
    finally:
        store.close()
        _leave_log(working)


def _mark(session: Session, made: str, now: float) -> int:
    last = session.scalar(text("SELECT seq FROM sqlite_sequence WHERE name = 'events'"))
    if last is not None:
        skipped = text("UPDATE sqlite_sequence SET seq = :next WHERE name = 'events'")
        session.execute(skipped, {"next": int(last) + EVENT_IDS_SKIPPED})
    leases.clear_owners(session)
    unfinished = jobs.unfinished(session)
    for job in unfinished:
        message = f"the database was restored from a backup of {made}; what has happened to the job since is not known"
        events.append(session, job.id, RESTORED, message, generation=job.generation, step=job.step, at=now)
        if job.state == JobState.QUEUED:
            why = f"it was in the queue when the backup was made, and may have run since; `manta resume {job.id}`"
            jobs.transition(session, job.id, JobState.PAUSED, RESTORED, why)
    return len(unfinished)


def _into_file(database: SqliteDatabase, working: Path, replace: bool) -> None:
    if database.file.exists():
        # With other connections SQLite cannot leave its log mode.
        with contextlib.closing(sqlite3.connect(database.file, timeout=0.0)) as connection:
            try:
                connection.execute("PRAGMA journal_mode=DELETE")
            except sqlite3.OperationalError as error:
                raise DatabaseInUse(f"{database.location} is in use ({error}): stop the service first") from error
            except sqlite3.DatabaseError:
                pass  # it is damaged, which may be the reason for replacing it
            count = _jobs_in(connection)
        _refuse_jobs(database.location, count, replace)
    for log in ("-wal", "-shm"):  # of a file that was too damaged to be opened
        database.file.with_name(database.file.name + log).unlink(missing_ok=True)
    working.replace(database.file)


def _jobs_in(connection: sqlite3.Connection) -> int:
    try:
        return int(connection.execute("SELECT count(*) FROM jobs").fetchone()[0])
    except sqlite3.Error:
        return 0


def _into_server(database: PostgresDatabase, working: Path, replace: bool) -> None:
    made = Store(database.url)
    try:
        with database.writer.connect() as connection:
            _refuse_others(database, connection)
        made.migrate()
    finally:
        made.close()
    source = SqliteDatabase.of_file(working)
    try:
        with database.writer.begin() as target, source.readers.connect() as origin:
            database.begin_migration(target)
            _refuse_others(database, target)
            for table in Base.metadata.sorted_tables:  # a service that starts meanwhile waits
                target.exec_driver_sql(f"LOCK TABLE {table.name} IN ACCESS EXCLUSIVE MODE")
            _refuse_jobs(database.location, target.execute(select(func.count()).select_from(Job)).scalar_one(), replace)
            _copy_rows(origin, target)
            for table in Base.metadata.sorted_tables:
                _continue_sequence(origin, target, table.name)
    finally:
        source.close()


def _continue_sequence(origin: Connection, target: Connection, table: str) -> None:
    """Continue numbering the rows of `table` where the file left off."""
    if Base.metadata.tables[table].autoincrement_column is None:
        return
    sequence = target.exec_driver_sql("SELECT pg_get_serial_sequence(%s, 'id')", (table,)).scalar_one()
    last = target.exec_driver_sql(f"SELECT max(id) FROM {table}").scalar_one() or 0
    if table == Event.__tablename__:
        counted = "SELECT seq FROM sqlite_sequence WHERE name = 'events'"
        last = max(last, origin.exec_driver_sql(counted).scalar_one_or_none() or 0)
    target.exec_driver_sql("SELECT setval(%s, %s, false)", (sequence, last + 1))


def _refuse_others(database: PostgresDatabase, connection: Connection) -> None:
    """Raise DatabaseInUse if there are other connections that do not disappear: a connection that was just closed is
    shown for a moment."""
    until = time.monotonic() + CLOSING_SECONDS
    while others := _other_connections(connection):
        if time.monotonic() >= until:
            raise DatabaseInUse(
                f"{database.location} is in use: {others} other connections are open; stop all services first"
            )
        time.sleep(POLL_SECONDS)


def _other_connections(connection: Connection) -> int:
    """Number of other connections according to the server."""
    connection.exec_driver_sql("SELECT pg_stat_clear_snapshot()")  # otherwise it is constant within a transaction
    count: int = connection.exec_driver_sql(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
        "AND backend_type = 'client backend'"
    ).scalar_one()
    return count


def _refuse_jobs(location: str, count: int, replace: bool) -> None:
    if count and not replace:
        raise DatabaseNotEmpty(f"{location} has jobs ({count}); with --replace they make room for those of the backup")
