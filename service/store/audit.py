"""All queries about the audit: who changed what, when, from where, and whether it was allowed."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

from sqlalchemy import insert, select
from sqlalchemy.orm import Session

from manta.service.identity import Identity
from manta.service.store.installation_tables import AuditEntry
from manta.service.store.paging import Cursors, Page

_INSERT = insert(AuditEntry)


@dataclass(frozen=True)
class AuditRecord:
    """A request that was carried out or refused. It contains nothing of a request's body, and no secret."""

    operation: str
    """The operation, such as `cancel_job`."""
    target: str | None
    """Id of the job, key or node, or name of the project, that it was about."""
    address: str | None
    """Where the request came from."""
    status: int
    """HTTP status of the answer."""
    code: str | None = None
    """Code of the problem document, if it was refused."""


def append(session: Session, identity: Identity, record: AuditRecord) -> None:
    """Record a request with a key."""
    _append(session, record, identity.project, identity.key_name, identity.key_id, identity.user)


def append_local(session: Session, user: str, project: str, record: AuditRecord) -> None:
    """Record what a user of the machine, `user`, did directly with the database."""
    _append(session, record, project, "on the machine", user=user)


def append_of_service(session: Session, project: str, record: AuditRecord) -> None:
    """Record something that the service did by itself."""
    _append(session, record, project, "the service")


def _append(
    session: Session,
    record: AuditRecord,
    project: str,
    key_name: str,
    key_id: str | None = None,
    user: str | None = None,
) -> None:
    identity = {"project": project, "key_id": key_id, "key_name": key_name, "user_name": user}
    session.connection().execute(_INSERT, {"time": time.time(), **identity, **asdict(record)})


def page(
    session: Session,
    bound: str | None,
    key_id: str | None = None,
    target: str | None = None,
    limit: int = 50,
    cursor: str | None = None,
) -> Page[AuditEntry]:
    """Entries, newest first, optionally only those of one key or about one target; with `bound` only those of that
    project's keys. Raises InvalidCursor."""
    cursors = Cursors("audit", project=bound, key=key_id, target=target)
    query = select(AuditEntry).order_by(AuditEntry.id.desc()).limit(limit + 1)
    given = ((AuditEntry.project, bound), (AuditEntry.key_id, key_id), (AuditEntry.target, target))
    for column, value in given:
        if value is not None:
            query = query.where(column == value)
    if cursor is not None:
        query = query.where(AuditEntry.id < cursors.decode_number(cursor))
    return Page.of(list(session.scalars(query)), limit, cursors, lambda entry: str(entry.id))
