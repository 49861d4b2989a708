"""A PostgreSQL server of a test session's own: on a socket in a temporary folder, and gone with the session."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg

NOT_FOUND = "no PostgreSQL server is installed (Debian: apt-get install postgresql)"
STOP_SECONDS = 20.0
_UNSAFE = (
    "fsync=off", "synchronous_commit=off", "full_page_writes=off", "autovacuum=off", "jit=off",
    "shared_buffers=16MB",
)  # fmt: skip
_TEMPLATE = "manta_template"


def programs() -> Path | None:
    """The folder of the newest server's programs; None where none is installed."""
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parents[1].name))
    on_path = shutil.which("initdb")
    return installed[-1].parent if installed else Path(on_path).resolve().parent if on_path else None


class PostgresServer:
    """A running server, whose databases are copies of one that was migrated."""

    def __init__(self, bin_folder: Path):
        """`bin_folder`: of its programs."""
        self._programs = bin_folder
        self.folder = Path(tempfile.mkdtemp(prefix="manta-pg-"))
        # It refuses to run as root; and it goes when this process is killed.
        self._as_user = ["setpriv"]
        if os.geteuid() == 0:
            shutil.chown(self.folder, "nobody", "nogroup")
            self._as_user += ["--reuid=nobody", "--regid=nogroup", "--clear-groups"]
        data = str(self.folder / "data")
        initdb = [
            str(bin_folder / "initdb"), "-D", data, "-U", "manta", "-A", "trust", "--no-sync", "--no-instructions",
        ]  # fmt: skip
        self._call([*self._as_user, *initdb, "--locale=C", "--encoding=UTF8"])
        self._data = data
        self._numbers = itertools.count(1)
        self._shared: str | None = None
        self._as_made: object = None
        self._kept: dict[str, Any] = {}
        self._to_empty: psycopg.Connection[Any] | None = None
        self.start()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        options = [f"-c{option}" for option in (*_UNSAFE, "listen_addresses=", "max_connections=100")]
        server = [str(self._programs / "postgres"), "-D", self._data, "-k", str(self.folder), *options]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [*self._as_user, "--pdeathsig=INT", *server], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        while not self._answers():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.02)
                raise RuntimeError((self.folder / "log").read_text())

    def _answers(self) -> bool:
        try:
            self.execute("SELECT 1")
        except psycopg.OperationalError:
            return False
        return True

    def stop(self) -> None:
        """End it, whoever is connected."""
        self.process.send_signal(2)
        self.process.wait(STOP_SECONDS)

    def close(self) -> None:
        """End it for good."""
        for database in self._kept.values():
            database.writer.dispose()
            database.readers.dispose()
        self._close_to_empty()
        self.stop()
        shutil.rmtree(self.folder)

    def url(self, name: str) -> str:
        """Of the database `name`."""
        return f"postgresql://manta@/{name}?host={self.folder}"

    def execute(self, statement: str, database: str = "postgres") -> list[tuple[object, ...]]:
        """What `statement` answers, outside of a transaction."""
        with self._connect(database) as connection:
            return _last_answer(connection.execute(statement))

    def _connect(self, database: str) -> psycopg.Connection[Any]:
        return psycopg.connect(host=str(self.folder), user="manta", dbname=database, autocommit=True)

    @contextlib.contextmanager
    def connections_kept(self) -> Iterator[None]:
        """Stores of the shared database that are opened meanwhile have the connections of those before: to make one
        takes longer than a test."""
        from manta.service.store import database

        def open_database(url: str, name: str = "manta") -> Any:
            if self._shared is None or url != self.url(self._shared) or name != "manta":
                return opened(url, name)
            if url not in self._kept:
                self._kept[url] = opened(url)
                self._kept[url].close = lambda: None
            return self._kept[url]

        opened, database.open_database = database.open_database, open_database
        try:
            yield
        finally:
            database.open_database = opened

    def make_empty(self, template: str = "template0") -> str:
        """A new database's name."""
        name = f"test_{next(self._numbers)}"
        self.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        return name

    def make_migrated(self) -> str:
        """The name of a new database with the newest schema."""
        if not self.execute(f"SELECT 1 FROM pg_database WHERE datname = '{_TEMPLATE}'"):
            from manta.service.store import Store

            self.execute(f"CREATE DATABASE {_TEMPLATE} TEMPLATE template0")
            store = Store(self.url(_TEMPLATE))
            store.migrate()
            store.close()
            self.execute("CREATE SCHEMA as_made", _TEMPLATE)
            for table in self._tables():
                self.execute(f"CREATE TABLE as_made.{table} AS TABLE public.{table}", _TEMPLATE)
        return self.make_empty(_TEMPLATE)

    def shared(self) -> str:
        """The name of a database as its migrations have made it: the same one again, since a copy takes longer than
        most tests, unless a test has changed more than rows."""
        if self._shared is not None:
            if self._made_anew(self._shared) == self._as_made:
                return self._shared
            self.drop(self._shared)
        self._shared = self.make_migrated()
        self._as_made = self._made_anew(self._shared)
        return self._shared

    def _tables(self) -> list[str]:
        """Each after those that it refers to."""
        from manta.service.store.tables import Base

        return [table.name for table in Base.metadata.sorted_tables]

    def _made_anew(self, name: str) -> object:
        """The schema of a database all of whose rows were made what they were; None where that fails."""
        tables = self._tables()
        statements = [
            *(f"DELETE FROM {table}" for table in reversed(tables)),
            *(f"INSERT INTO {table} SELECT * FROM as_made.{table}" for table in tables),
            "SELECT setval(oid::regclass, 1, false) FROM pg_class WHERE relkind = 'S'",
            """SELECT version_num, (SELECT string_agg(relname || '.' || attname, ' ' ORDER BY relname, attnum)
            FROM pg_class JOIN pg_attribute ON attrelid = pg_class.oid
            WHERE relnamespace = 'public'::regnamespace AND NOT attisdropped)
            FROM alembic_version""",
        ]
        try:
            if self._to_empty is None or self._to_empty.info.dbname != name:
                self._close_to_empty()
                self._to_empty = self._connect(name)
                self._to_empty.execute("SET lock_timeout = '5s'")  # a test that failed may have left a lock
            return _last_answer(self._to_empty.execute("; ".join(statements)))
        except psycopg.Error:
            return None

    def _close_to_empty(self) -> None:
        if self._to_empty is not None:
            self._to_empty.close()

    def drop(self, name: str) -> None:
        """A database goes, whoever is connected."""
        self.execute(f"DROP DATABASE {name} WITH (FORCE)")

    def _call(self, command: list[str]) -> None:
        done = subprocess.run(command, capture_output=True, text=True, cwd=self.folder)
        if done.returncode:
            raise RuntimeError(done.stderr)


def _last_answer(cursor: psycopg.Cursor[Any]) -> list[tuple[object, ...]]:
    while cursor.nextset():
        pass
    return cursor.fetchall() if cursor.description else []
