"""The job database in PostgreSQL (psycopg 3). Where it differs from SQLite, whose guarantees the rest of the service
relies on, this compensates: decision 0010."""

from __future__ import annotations

import logging
import select
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import psycopg
from sqlalchemy import URL, Connection, Engine, ExceptionContext, RootTransaction, create_engine, event
from sqlalchemy.exc import DBAPIError, InvalidatePoolError, OperationalError, SQLAlchemyError

from manta.service.store.errors import OutcomeUnknown, StoreUnusable
from manta.service.store.location import shown
from manta.service.store.locks import MIGRATION_LOCK
from manta.service.tasks import backoff

log = logging.getLogger(__name__)

T = TypeVar("T")

OLDEST_SERVER = 14
USUAL_NAME = "manta"
CONNECT_SECONDS = 10
STATEMENT_SECONDS = 20
"""Seconds that the server may spend on a statement; half as long for waiting for a lock."""
ANSWER_SECONDS = STATEMENT_SECONDS + 5.0
"""Seconds after which a server that exceeds that counts as gone."""
IDLE_SECONDS = 30
"""A control plane that stops within a transaction blocks the writes of others for this long."""
OUTCOME_SECONDS = 30.0
"""Seconds to find out what became of a commit without an answer."""
FRESH_CONNECTION_SECONDS = 1.0
"""Seconds for which an unused connection is trusted to be usable."""
POOLED_READERS, MAX_EXTRA_READERS = 5, 25
POOLED_WRITERS, MAX_EXTRA_WRITERS = 1, 1
"""Connections that stay open, and how many more may be opened."""
MAX_CONCURRENT_READS = 8
"""The server does the work."""
_CONFLICTS = ("40001", "40P01")
_NO_SUCH_TABLE = "42P01"
_SESSION = {
    "statement_timeout": f"{STATEMENT_SECONDS}s",
    "lock_timeout": f"{STATEMENT_SECONDS / 2:g}s",
    "idle_in_transaction_session_timeout": f"{IDLE_SECONDS}s",
    "jit": "off",  # it takes longer than any query here
    "max_parallel_workers_per_gather": "0",  # starting them takes longer, too
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
}
_CLIENT: dict[str, Any] = {
    "connect_timeout": CONNECT_SECONDS,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
}
_ADVICE = (
    ("password authentication failed", "check user and password in its URL, or in PGPASSFILE's file"),
    ("no password supplied", "put the password into its URL, or into PGPASSFILE's file"),
    ("Connection refused", "is the server running, and does it listen on that address?"),
    ("No such file or directory", "is the server running, and is its socket there?"),
    ("timeout expired", "nothing answers at that address"),
    ("permission denied for schema", "let the user own the database: ALTER DATABASE ... OWNER TO ..."),
)


class PostgresDatabase:
    """Connections to a server, and everything that only PostgreSQL needs or can do."""

    reads_at_once = MAX_CONCURRENT_READS
    """Number of reads that do not slow each other down."""
    most_readers = POOLED_READERS + MAX_EXTRA_READERS
    most_writers = POOLED_WRITERS + MAX_EXTRA_WRITERS

    def __init__(self, url: URL, name: str = USUAL_NAME):
        """`name`: of its connections, as shown by the server; a name other than the default identifies them to others,
        and takes precedence over one in the URL."""
        self.location, self._name = shown(url), url.database
        if name != USUAL_NAME or "application_name" not in url.query:
            url = url.update_query_dict({"application_name": name})
        self.url = url.render_as_string(hide_password=False)
        # Reads must see one consistent state, which needs more than READ COMMITTED. Writes do not: they lock the rows
        # that they depend on.
        readers = {"pool_size": POOLED_READERS, "max_overflow": MAX_EXTRA_READERS}
        writers = {"pool_size": POOLED_WRITERS, "max_overflow": MAX_EXTRA_WRITERS}
        self.readers = _engine(url, "REPEATABLE READ", read_only=True, **readers)
        self.single_readers = self.readers.execution_options(isolation_level="AUTOCOMMIT")
        self.writer = _engine(url, "READ COMMITTED", read_only=False, **writers)
        self._lease_engine = _engine(url, "AUTOCOMMIT", read_only=False, pool_size=1, max_overflow=0)
        self._closed = threading.Event()

    def refuse_unsuitable(self) -> None:
        """Raises StoreUnusable if the database cannot be reached, or cannot store everything."""
        try:
            with self.writer.connect() as connection:
                version = connection.exec_driver_sql("SHOW server_version_num").scalar_one()
                encoding = connection.exec_driver_sql("SHOW server_encoding").scalar_one()
        except SQLAlchemyError as error:
            raise StoreUnusable(self.location, error, self.advice(error)) from error
        problem = unsuitable(int(version), str(encoding))
        if problem is not None:
            raise StoreUnusable(self.location, ValueError(problem))

    def advice(self, error: Exception) -> str | None:
        """What to do about `error`; None if unknown."""
        text = str(getattr(error, "orig", None) or error)
        if f'database "{self._name}" does not exist' in text:
            return f"make it: createdb {self._name}"
        return next((advice for part, advice in _ADVICE if part in text), None)

    def begin_migration(self, connection: Connection) -> None:
        """Of control planes that start at the same time one migrates, and the others find it done. Waits as long as
        necessary."""
        self.disable_time_limit(connection)
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({MIGRATION_LOCK})")

    def disable_time_limit(self, connection: Connection) -> None:
        """Until the end of its transaction, statements of `connection` have no time limit."""
        for name in ("statement_timeout", "lock_timeout"):
            connection.exec_driver_sql(f"SET LOCAL {name} = 0")
        _driver(connection).answer_seconds = None

    def back_up(self, current: str, newest: str) -> None:
        """Makes no copy: the migration is one transaction, and copies of a server are its owner's concern."""
        log.warning(
            "the database is brought from revision %s to %s; only a backup goes back behind that", current, newest
        )

    def commit(self, connection: Connection, transaction: RootTransaction) -> None:
        """Commit; if the connection is lost before the answer, ask the server about the result. Raises OutcomeUnknown
        if that does not answer either."""
        number = connection.exec_driver_sql("SELECT CAST(pg_current_xact_id_if_assigned() AS text)").scalar_one()
        try:
            transaction.commit()
        except DBAPIError as error:
            if number is None or not error.connection_invalidated or not self._was_committed(str(number), error):
                raise
            log.warning("a commit was not answered, but took effect (transaction %s)", number)

    def _was_committed(self, number: str, error: DBAPIError) -> bool:
        deadline = time.monotonic() + OUTCOME_SECONDS
        for pause in backoff(0.05, 2.0):
            try:
                with self.writer.connect() as connection:
                    status = connection.exec_driver_sql("SELECT pg_xact_status(CAST(%s AS xid8))", (number,)).scalar()
            except SQLAlchemyError:
                status = None
            if status in ("committed", "aborted"):
                return status == "committed"
            if time.monotonic() > deadline or self._closed.wait(pause):
                break
        raise OutcomeUnknown(None, None, error.orig or error) from error

    @contextmanager
    def keeping(self, seconds: float) -> Iterator[Connection]:
        """A connection for renewals, which do not wait for other work here. An answer may take `seconds`."""
        with self._lease_engine.connect() as connection:
            _driver(connection).answer_seconds = seconds
            yield connection

    def wait_for_notification(self, connection: Connection, seconds: float) -> bool:
        """Whether a notification arrives on `connection` within `seconds`."""
        driver = _driver(connection)
        bound, driver.answer_seconds = driver.answer_seconds, None
        try:
            return any(True for _ in driver.notifies(timeout=seconds, stop_after=1))
        except psycopg.Error as error:
            connection.invalidate(error)
            raise OperationalError("waiting for a notification", None, error) from error
        finally:
            driver.answer_seconds = bound

    def is_conflict(self, error: BaseException) -> bool:
        """Whether the server aborted the transaction because of another one: it will succeed if repeated at once."""
        return isinstance(error, DBAPIError) and getattr(error.orig, "sqlstate", None) in _CONFLICTS

    def close(self) -> None:
        """Close all connections."""
        self._closed.set()
        self.readers.dispose()
        self.writer.dispose()
        self._lease_engine.dispose()


def unsuitable(version: int, encoding: str) -> str | None:
    """Why a server of this version (such as 150004 for 15.4), or a database of this encoding, is unsuitable; None if
    both are suitable."""
    if version < OLDEST_SERVER * 10_000:
        number = f"{version // 10_000}.{version % 10_000}" if version >= 100_000 else f"{version // 10_000}"
        return f"its server is PostgreSQL {number}, and Manta needs {OLDEST_SERVER} or later"
    if encoding != "UTF8":
        return f"its encoding is {encoding}, which has not all characters: make it with createdb -E UTF8 -T template0"
    return None


def _engine(url: URL, isolation: str, read_only: bool, **pool: int) -> Engine:
    own = {key: value for key, value in _CLIENT.items() if key not in url.query}
    given = url.query.get("options", ())
    options = [f"-c {name}={value}" for name, value in _SESSION.items()]
    options += [given] if isinstance(given, str) else given  # the user's options come last, and take precedence
    engine = create_engine(
        url.difference_update_query(["options"]),
        connect_args={**own, "options": " ".join(options)},
        isolation_level=isolation,
        pool_timeout=CONNECT_SECONDS,
        use_native_hstore=False,  # it is not used, and SQLAlchemy would look for it
        **pool,
    )

    @event.listens_for(engine, "do_connect")
    def connect(_dialect: Any, _record: Any, arguments: Sequence[Any], parameters: dict[str, Any]) -> Any:
        connection = _BoundedConnection.connect(*arguments, **parameters)
        connection.read_only = read_only
        return connection

    @event.listens_for(engine, "connect")
    @event.listens_for(engine, "checkin")
    def record_use(_connection: _BoundedConnection | None, record: Any) -> None:
        record.info["used_at"] = time.monotonic()

    @event.listens_for(engine, "checkout")
    def begin(connection: _BoundedConnection, record: Any, _proxy: Any) -> None:
        connection.answer_seconds = ANSWER_SECONDS
        # A restarted server must not cost a request. A server that has closed a connection has announced that on it.
        if time.monotonic() - record.info["used_at"] > FRESH_CONNECTION_SECONDS or connection.has_unread:
            _ping(engine, connection)

    event.listen(engine, "handle_error", _explain_missing_table)
    return engine


def _explain_missing_table(context: ExceptionContext) -> None:
    """A table that is missing from a migrated database says nothing about what was in it: something such as pg_restore
    is replacing it. Raises OperationalError, so that the operation is tried again and none counts as refused."""
    error = context.original_exception
    if getattr(error, "sqlstate", None) == _NO_SUCH_TABLE:
        raise OperationalError(context.statement, None, error)


def _ping(engine: Engine, connection: _BoundedConnection) -> None:
    """Raises InvalidatePoolError if the server no longer knows the connection; new ones are made then."""
    try:
        engine.dialect.do_ping(connection)  # type: ignore[arg-type]
    except psycopg.Error as error:
        raise InvalidatePoolError from error


def _driver(connection: Connection) -> _BoundedConnection:
    driver = connection.connection.driver_connection
    assert isinstance(driver, _BoundedConnection)
    return driver


class _BoundedConnection(psycopg.Connection[Any]):
    """psycopg's connection; a server that does not answer within `answer_seconds` counts as gone. The server's own
    limits (`statement_timeout`) do not help if it stands still, and neither do TCP's: its kernel still acknowledges
    everything."""

    answer_seconds: float | None = None
    """None: no limit."""

    @property
    def has_unread(self) -> bool:
        """Whether the server has sent something without a request, which most likely announces the end of the
        connection."""
        poll = select.poll()
        poll.register(self.pgconn.socket, select.POLLIN)
        return bool(poll.poll(0))

    def wait(self, gen: Generator[Any, Any, T], interval: float = 0.1) -> T:
        """Raises psycopg.OperationalError if it takes too long; the connection is then closed."""
        return super().wait(gen if self.answer_seconds is None else self._bounded(gen, self.answer_seconds), interval)

    def _bounded(self, gen: Generator[Any, Any, T], seconds: float) -> Generator[Any, Any, T]:
        deadline = time.monotonic() + seconds
        try:
            wanted = next(gen)
            while True:
                ready = yield wanted
                if not ready and time.monotonic() > deadline:
                    self.pgconn.finish()  # a late answer is not wanted
                    raise psycopg.OperationalError(f"the server gave no answer in {seconds:g} s")
                wanted = gen.send(ready)
        except StopIteration as end:
            value: T = end.value
            return value
