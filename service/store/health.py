"""Whether a job database is intact, and has the schema that this release expects."""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import Connection, exists, func, inspect, select
from sqlalchemy.exc import SQLAlchemyError

from manta.service.revisions import newest_revision
from manta.service.store.database import Store
from manta.service.store.errors import StoreEmpty, StoreUnusable
from manta.service.store.installation_tables import Compatibility, Installation
from manta.service.store.sqlite import SqliteDatabase
from manta.service.store.tables import Base, DeletedJob, Job

_MAKE = "`manta up` and `manta db upgrade` make one"
_ONE_ROW = (Installation, Compatibility)


def problems(store: Store) -> list[str]:
    """Problems with the database, one sentence each; reads all of it once. Raises StoreUnusable."""
    refuse_none(store)
    revision = store.revision
    if revision != newest_revision():
        return [f"its revision is {revision}, and that of this release {newest_revision()}: `manta db upgrade`"]
    try:
        with store.database.readers.connect() as connection:
            store.database.disable_time_limit(connection)
            return [*_schema(connection), *_content(connection)]
    except SQLAlchemyError as error:
        raise StoreUnusable(store.location, error) from error


def refuse_none(store: Store) -> None:
    """Raise StoreUnusable if the database cannot be reached, or does not exist; it is not created then."""
    database = store.database
    if isinstance(database, SqliteDatabase) and not database.file.exists():
        raise StoreEmpty(store.location, FileNotFoundError("there is no such file"), _MAKE)
    database.refuse_unsuitable()
    try:
        with database.readers.connect() as connection:
            is_there = inspect(connection).has_table("alembic_version")
    except SQLAlchemyError as error:
        raise StoreUnusable(store.location, error) from error
    if not is_there:
        raise StoreEmpty(store.location, ValueError("it has neither jobs nor tables for them"), _MAKE)


def never_had_jobs(store: Store) -> bool:
    """Whether the database is a file that is missing, empty or has no job, not even a deleted one; it is not created
    then. False for a server, and for a file that cannot be read."""
    database = store.database
    if not isinstance(database, SqliteDatabase):
        return False
    if not database.file.exists() or database.file.stat().st_size == 0:
        return True
    try:
        with database.readers.connect() as connection:
            present = set(inspect(connection).get_table_names())
            tables = [table for table in (Job, DeletedJob) if table.__tablename__ in present]
            return not any(connection.execute(select(exists().select_from(table))).scalar_one() for table in tables)
    except SQLAlchemyError:
        return False


def _schema(connection: Connection) -> Iterator[str]:
    from alembic.autogenerate import compare_metadata  # takes long to import
    from alembic.migration import MigrationContext

    for difference in compare_metadata(MigrationContext.configure(connection), Base.metadata):
        yield f"its schema is not that of this release: {difference}"


def _content(connection: Connection) -> Iterator[str]:
    if connection.dialect.name == "sqlite":
        for row in connection.exec_driver_sql("PRAGMA integrity_check"):
            if row[0] != "ok":
                yield f"the file is damaged: {row[0]}"
        for table, number, parent, _ in connection.exec_driver_sql("PRAGMA foreign_key_check"):
            yield f"row {number} of {table} belongs to nothing in {parent}"
    present = set(inspect(connection).get_table_names())
    for table in Base.metadata.sorted_tables:
        if table.name in present:  # PostgreSQL detects damage when reading
            connection.execute(select(func.count()).select_from(table)).scalar_one()
    for kind in _ONE_ROW:
        count = connection.execute(select(func.count()).select_from(kind)).scalar_one()
        if count != 1:
            yield f"{kind.__tablename__} has {count} rows, and must have one"
