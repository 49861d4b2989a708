"""The location of the job database: its URL, and the part of it that may be shown."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from manta.service.own_files import read_own
from manta.workers.errors import MantaError

_POSTGRESQL = ("postgresql", "postgres", "postgresql+psycopg")
_SQLITE = ("sqlite", "sqlite+pysqlite")
_FORMS = "postgresql://USER:PASSWORD@HOST:PORT/NAME or sqlite:////absolute/path/of/manta.db"
RECORD = "database"
"""In the home: where its jobs are."""


class InvalidDatabaseUrl(MantaError):
    """An invalid URL of the job database. The message says what a valid one looks like, and repeats nothing of the
    given one but the kind of database, since there may be a password in it."""

    def __init__(self, problem: str):
        super().__init__(f"the database's URL {problem}; it has the form {_FORMS}")


def sqlite_url(file: Path) -> str:
    """The URL of an SQLite file."""
    return URL.create("sqlite", database=str(file)).render_as_string(hide_password=False)


def url_in(home: Path, wanted: str | None) -> str:
    """The URL of the database of `home`: the `wanted` one, or the SQLite file there."""
    return wanted or sqlite_url(home / "manta.db")


def parse_url(text: str) -> URL:
    """The URL of a job database: SQLite in a file, or PostgreSQL by way of psycopg. Raises InvalidDatabaseUrl."""
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        raise InvalidDatabaseUrl("cannot be read") from None  # the error repeats the URL
    if url.drivername in _POSTGRESQL:
        if text.count("@") > 1 or "#" in text:
            raise InvalidDatabaseUrl("has an @ or # in the user's name or password, which is written as %40 or %23")
        if not url.database:
            raise InvalidDatabaseUrl("names no database")
        return url.set(drivername="postgresql+psycopg")
    if url.drivername in _SQLITE:
        if not url.database or url.database == ":memory:":
            raise InvalidDatabaseUrl("names no file")
        if not Path(url.database).is_absolute():
            raise InvalidDatabaseUrl("names a file by a relative path")
        return url.set(drivername="sqlite")
    raise InvalidDatabaseUrl(f"begins with {url.drivername[:30]!r}, a kind of database that Manta does not work with")


def recorded_location(home: Path) -> str | None:
    """The database, as `shown`, that the jobs of `home` were in when a service last started there; None before that."""
    return read_own(home / RECORD) or None


def file_of(url: URL) -> Path | None:
    """The file of an SQLite database; None for PostgreSQL."""
    return Path(url.database) if url.get_backend_name() == "sqlite" and url.database else None


def shown(url: URL) -> str:
    """`url` for people and logs: without the password, wherever it is in the URL."""
    parts = url.set(
        drivername=url.get_backend_name(), query={key: url.query[key] for key in ("host",) if key in url.query}
    )
    return parts.render_as_string(hide_password=True)
