"""Displayed data of jobs as plain rows, which are cheap: comparing them shows whether anything has changed, without
parsing them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, Text, bindparam, cast, func, select, type_coerce
from sqlalchemy.types import NullType

from service.ids import is_job_id
from service.store import job_filters
from service.store.errors import JobNotFound
from service.store.job_filters import EVERY_JOB, NEWEST_FIRST, JobFilter, JobOrder
from service.store.paging import Page
from service.store.tables import Job
from service.store.types import Document, Numbers

_MAX_STATEMENTS = 256
JobRow = Row[Any]
"""The displayed data of a job as the database has it, with `id` first: equal to another one if nothing displayed has
changed."""

NOT_SHOWN = frozenset(
    {
        *("submitted", "not_default", "report_cursor", "idempotency_key", "body_digest"),
        *("wanted_replicas", "retried_at", "binned_until", "binned_generation"),
    }
)
FOLLOWS = frozenset({"spec"})
"""Displayed columns that only change together with others, by `edits.edit`. They are as long as all the rest."""


def _as_stored(column: Any) -> ColumnElement[Any]:
    """A column as the driver returns it; JSON as text."""
    plain = cast(column, Text) if isinstance(column.type, Document | Numbers) else type_coerce(column, NullType())
    return plain.label(column.key)


_UNDERSTOOD = [column for column in Job.__table__.columns if column.key not in NOT_SHOWN]
_SHOWN = [_as_stored(column) for column in _UNDERSTOOD if column.key not in FOLLOWS]
# Built once: building a statement takes longer than running it.
_ONE = select(*_SHOWN).where(Job.__table__.columns.id == bindparam("id"))
_SOME = (
    select(*_UNDERSTOOD)
    .where(Job.__table__.columns.id.in_(bindparam("ids", expanding=True)))
    .order_by(Job.__table__.columns.id.desc())
)


def one(connection: Connection, job_id: str) -> JobRow:
    """The row of a job. Raises JobNotFound."""
    row = connection.execute(_ONE, {"id": job_id}).one_or_none() if is_job_id(job_id) else None
    if row is None:
        raise JobNotFound(job_id)
    return row


def understood(connection: Connection, job_ids: Collection[str]) -> Sequence[Row[Any]]:
    """The rows of these jobs as far as they exist, newest first, with everything that a list displays, with names and
    types as in `jobs.get`."""
    return connection.execute(_SOME, {"ids": list(job_ids)}).all()


def page(
    connection: Connection,
    wanted: JobFilter = EVERY_JOB,
    order: JobOrder = NEWEST_FIRST,
    limit: int = 50,
    cursor: str | None = None,
) -> Page[JobRow]:
    """Rows of the `wanted` jobs. Raises InvalidCursor, ForeignCursor."""
    statement, values = _asked(wanted, order, limit, cursor)
    # In one call: row by row, the threads of other requests would take turns in between.
    rows = connection.execute(statement, values).all()
    cursors = job_filters.cursors(wanted, order)
    return Page.of(list(rows), limit, cursors, lambda row: order.place_of(connection, row.id))


def page_as_text(
    connection: Connection,
    wanted: JobFilter = EVERY_JOB,
    order: JobOrder = NEWEST_FIRST,
    limit: int = 50,
    cursor: str | None = None,
) -> str:
    """The rows of that page as one text, which is equal to another one if nothing displayed has changed. The database
    builds it: for fifty rows the interpreter's lock would be released and taken again fifty times, each time behind the
    threads of other requests. SQLite's JSON has 15 digits of a number, so a time that changed alone by less than 10
    microseconds is not noticed. Raises the errors of `page`."""
    statement, values = _asked(wanted, order, limit, cursor, connection.dialect.name)
    return connection.execute(statement, values).scalar_one() or ""


def counts(connection: Connection, wanted: JobFilter = EVERY_JOB) -> dict[str, int]:
    """Number of `wanted` jobs by state; states without jobs are left out."""
    return {row[0]: row[1] for row in connection.execute(_counted(wanted.shape), wanted.values)}


def moved(connection: Connection, job_ids: Collection[str], bound: str | None = None) -> dict[str, Row[Any]]:
    """For those of these jobs that exist, or are of the project `bound`: id, newest step, generation, and when its row
    last changed, which it does with every row of metrics."""
    columns = Job.__table__.columns
    query = select(columns.id, columns.step, columns.generation, columns.updated_at).where(columns.id.in_(job_ids))
    query = query if bound is None else query.where(columns.project == bound)
    rows: list[Row[Any]] = list(connection.execute(query))
    return {row.id: row for row in rows}


def _asked(
    wanted: JobFilter, order: JobOrder, limit: int, cursor: str | None, dialect: str | None = None
) -> tuple[Select[Any], dict[str, Any]]:
    """A statement and the values of its parameters; with `dialect` for the rows as one text."""
    place = None if cursor is None else job_filters.cursors(wanted, order).decode(cursor)
    values = {} if place is None else order.values_at(place)
    after = None if place is None else "last" in values
    shape = wanted.shape
    statement = _listed(shape, order, after) if dialect is None else _listed_as_text(shape, order, after, dialect)
    return statement, {**wanted.values, **values, "rows": limit + 1}


@lru_cache(_MAX_STATEMENTS)
def _listed_as_text(shape: JobFilter, order: JobOrder, after: bool | None, dialect: str) -> Select[Any]:
    rows = _listed(shape, order, after).subquery()
    if dialect == "sqlite":
        return select(func.json_group_array(func.json_array(*rows.c)))
    return select(cast(func.json_agg(func.json_build_array(*rows.c)), Text))


@lru_cache(_MAX_STATEMENTS)
def _listed(shape: JobFilter, order: JobOrder, after: bool | None) -> Select[Any]:
    """Jobs of one shape of filter; `after`: only those after a place in the order, and whether the value at that place
    is known."""
    columns, keys = Job.__table__.columns, order.keys()
    chosen = select(columns.id).where(*shape.conditions()).order_by(*map(order.directed, keys))
    chosen = chosen.limit(bindparam("rows"))
    if after is not None:
        chosen = chosen.where(order.after(unknown=not after))
    if order.sort == "created" and shape.search is None:
        return chosen.with_only_columns(*_SHOWN)  # they are read in that order anyway
    # Rows are long: only those that are displayed are read completely.
    page = chosen.add_columns(*(key.label(f"key{place}") for place, key in enumerate(keys))).subquery()
    ordered = (order.directed(page.c[f"key{place}"]) for place in range(len(keys)))
    return select(*_SHOWN).join(page, columns.id == page.c.id).order_by(*ordered)


@lru_cache(_MAX_STATEMENTS)
def _counted(shape: JobFilter) -> Select[Any]:
    state = Job.__table__.columns.state
    return select(state, func.count()).where(*shape.conditions()).group_by(state)
