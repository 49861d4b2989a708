"""What is shown of jobs as plain rows, which cost little: to find out whether anything is another than it was, nothing
of them has to be understood."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, Text, bindparam, cast, func, select, type_coerce
from sqlalchemy.types import NullType

from service.store.errors import InvalidCursor, JobNotFound
from service.store.ids import is_job_id
from service.store.paging import Cursors, Page
from service.store.tables import Job
from service.store.types import Document, Numbers

JobRow = Row[Any]
"""What tells whether a job is shown as before, `id` first, as the database has it: equal to another one where nothing
changed that is shown."""

NOT_SHOWN = frozenset(
    {
        *("submitted", "not_default", "report_cursor", "idempotency_key", "body_digest"),
        *("wanted_replicas", "retried_at", "binned_until", "binned_generation"),
    }
)
FOLLOWS = frozenset({"spec"})
"""Shown, and changed with others alone: by `edits.edit`. It is as long as all the rest together."""


def _as_stored(column: Any) -> ColumnElement[Any]:
    """A column as the driver yields it; JSON as the text that it is."""
    plain = cast(column, Text) if isinstance(column.type, Document | Numbers) else type_coerce(column, NullType())
    return plain.label(column.key)


_UNDERSTOOD = [column for column in Job.__table__.columns if column.key not in NOT_SHOWN]
_SHOWN = [_as_stored(column) for column in _UNDERSTOOD if column.key not in FOLLOWS]
# Made once: to put a statement together takes longer than to run it.
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
    """Those of these jobs that the database knows, newest first, with all that a list shows of them, by the names and
    in the form that `jobs.get` has."""
    return connection.execute(_SOME, {"ids": list(job_ids)}).all()


def page(
    connection: Connection,
    state: str | None = None,
    name: str | None = None,
    limit: int = 50,
    cursor: str | None = None,
    bound: str | None = None,
) -> Page[JobRow]:
    """Rows of jobs, newest first, optionally only those in `state`, called `name`, or of the project `bound`. Raises
    InvalidCursor, ForeignCursor."""
    cursors, given = _conditions(state, name, cursor, bound)
    # In one call: row by row, the threads of other requests would take turns in between.
    rows = connection.execute(_newest_first(frozenset(given)), {**given, "rows": limit + 1}).all()
    return Page.of(list(rows), limit, cursors, lambda row: row.id)


def page_as_text(
    connection: Connection,
    state: str | None = None,
    name: str | None = None,
    limit: int = 50,
    cursor: str | None = None,
    bound: str | None = None,
) -> str:
    """The rows of that page as one text, which is equal to another one where nothing changed that is shown. The
    database puts it together: of fifty rows the interpreter's lock would be let go of and taken again fifty times,
    each time to stand in line behind the threads of other requests. SQLite's JSON has 15 digits of a number, so a time
    that alone moved by less than 10 microseconds is not seen. Raises what `page` does."""
    _, given = _conditions(state, name, cursor, bound)
    statement = _newest_first_as_text(frozenset(given), connection.dialect.name)
    return connection.execute(statement, {**given, "rows": limit + 1}).scalar_one() or ""


def _conditions(
    state: str | None, name: str | None, cursor: str | None, bound: str | None
) -> tuple[Cursors, dict[str, str]]:
    cursors = Cursors("jobs", state=state, name=name, project=bound)
    last = None if cursor is None else cursors.decode(cursor)
    if last is not None and not is_job_id(last):
        raise InvalidCursor
    wanted = {"project": bound, "state": state, "name": name, "before": last}
    return cursors, {key: value for key, value in wanted.items() if value is not None}


@cache
def _newest_first_as_text(given: frozenset[str], dialect: str) -> Select[Any]:
    rows = _newest_first(given).subquery()
    if dialect == "sqlite":
        return select(func.json_group_array(func.json_array(*rows.c)))
    return select(cast(func.json_agg(func.json_build_array(*rows.c)), Text))


@cache
def _newest_first(given: frozenset[str]) -> Select[Any]:
    """Jobs that are as is `given`."""
    columns = Job.__table__.columns
    query = select(*_SHOWN).order_by(columns.id.desc()).limit(bindparam("rows"))
    query = query.where(*(columns[key] == bindparam(key) for key in ("project", "state", "name") if key in given))
    return query.where(columns.id < bindparam("before")) if "before" in given else query
