"""What is shown of jobs as plain rows, which cost little: to find out whether anything is another than it was, nothing
of them has to be understood."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Row, Text, cast, select, type_coerce
from sqlalchemy.orm import Session
from sqlalchemy.types import NullType

from service.store.errors import InvalidCursor, JobNotFound
from service.store.ids import is_job_id
from service.store.paging import Cursors, Page
from service.store.tables import Job
from service.store.types import Document, Numbers

JobRow = Row[Any]
"""All columns that a list shows, `id` first, as the database has them; equal to another one where nothing changed."""

NOT_SHOWN = frozenset({"submitted", "not_default", "report_cursor"})


def _as_stored(column: Any) -> ColumnElement[Any]:
    """A column as the driver yields it; JSON as the text that it is."""
    plain = cast(column, Text) if isinstance(column.type, Document | Numbers) else type_coerce(column, NullType())
    return plain.label(column.key)


_SHOWN = [_as_stored(column) for column in Job.__table__.columns if column.key not in NOT_SHOWN]


def one(session: Session, job_id: str) -> JobRow:
    """The row of a job. Raises JobNotFound."""
    row = session.execute(select(*_SHOWN).where(Job.id == job_id)).one_or_none() if is_job_id(job_id) else None
    if row is None:
        raise JobNotFound(job_id)
    return row


def page(
    session: Session,
    state: str | None = None,
    name: str | None = None,
    limit: int = 50,
    cursor: str | None = None,
    bound: str | None = None,
) -> Page[JobRow]:
    """Rows of jobs, newest first, optionally only those in `state`, called `name`, or of the project `bound`. Raises
    InvalidCursor, ForeignCursor."""
    cursors = Cursors("jobs", state=state, name=name, project=bound)
    query = select(*_SHOWN).order_by(Job.id.desc()).limit(limit + 1)
    if bound is not None:
        query = query.where(Job.project == bound)
    if state is not None:
        query = query.where(Job.state == state)
    if name is not None:
        query = query.where(Job.name == name)
    if cursor is not None:
        last = cursors.decode(cursor)
        if not is_job_id(last):
            raise InvalidCursor
        query = query.where(Job.id < last)
    return Page.of(list(session.execute(query)), limit, cursors, lambda row: row.id)
