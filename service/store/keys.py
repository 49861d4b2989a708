"""All queries about API keys, and about how browsers sign in: links that work once, and the sessions that they begin.
All are stored as digests only; links and sessions are valid as long as the key that requested the link."""

from __future__ import annotations

import secrets
import time

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from manta.service.identity import DEFAULT_PROJECT, Identity, Scope
from manta.service.ids import is_key_id, next_key_id
from manta.service.store import projects
from manta.service.store.errors import InvalidCursor, KeyNotFound, LinkInvalid
from manta.service.store.installation_tables import ApiKey, BrowserToken
from manta.service.store.paging import Cursors, Page

LINK_SECONDS = 600.0
"""Seconds that a link is valid."""
SESSION_SECONDS = 12 * 3600.0
"""Seconds that a browser stays signed in."""


def create(
    session: Session,
    digest: str,
    name: str,
    scope: Scope,
    project: str = DEFAULT_PROJECT,
    *,
    user: str | None = None,
    installation: bool = False,
    expires_at: float | None = None,
    highest_priority: int | None = None,
) -> ApiKey:
    """Store a new key with this digest. `expires_at`: Unix seconds; `highest_priority`: of its jobs, None: any. Raises
    ProjectNotFound."""
    projects.get(session, project)
    now = time.time()
    newest = session.scalar(select(func.max(ApiKey.id)))
    key = ApiKey(
        id=next_key_id(now, secrets.randbits(32), newest),
        digest=digest,
        name=name,
        user=user,
        project=project,
        scope=scope.value,
        installation=installation,
        created_at=now,
        expires_at=expires_at,
        highest_priority=highest_priority,
    )
    session.add(key)
    session.flush()
    return key


def is_valid(key: ApiKey, now: float) -> bool:
    """Whether the key is neither revoked nor expired at `now`, Unix seconds."""
    return key.revoked_at is None and (key.expires_at is None or now < key.expires_at)


def identity_of(key: ApiKey) -> Identity:
    """The identity of a request with this key."""
    allows = Scope(key.scope), key.installation, key.highest_priority
    return Identity(key.id, key.name, key.user, key.project, *allows)


def by_digest(session: Session, digest: str) -> ApiKey | None:
    """The key with this digest, valid or not; None if there is none."""
    return session.scalars(select(ApiKey).where(ApiKey.digest == digest)).one_or_none()


def may_administrate(session: Session, now: float) -> bool:
    """Whether there is a valid key for administering the installation."""
    query = select(ApiKey).where(ApiKey.installation, ApiKey.scope == Scope.ADMIN.value, ApiKey.revoked_at.is_(None))
    return any(is_valid(key, now) for key in session.scalars(query))


def revoke(session: Session, bound: str | None, key_id: str) -> ApiKey:
    """Make a key invalid; a revoked one is not changed. With `bound` only a key of that project. Raises KeyNotFound."""
    key = session.get(ApiKey, key_id, with_for_update=True) if is_key_id(key_id) else None
    if key is None or (bound is not None and (key.project != bound or key.installation)):
        raise KeyNotFound(key_id)
    if key.revoked_at is None:
        key.revoked_at = time.time()
    return key


def page(session: Session, bound: str | None, limit: int = 50, cursor: str | None = None) -> Page[ApiKey]:
    """Keys, newest first; with `bound` only those of that project. Raises InvalidCursor."""
    cursors = Cursors("keys", project=bound)
    query = select(ApiKey).order_by(ApiKey.id.desc()).limit(limit + 1)
    if bound is not None:
        query = query.where(ApiKey.project == bound, ApiKey.installation.is_(False))
    if cursor is not None:
        last = cursors.decode(cursor)
        if not is_key_id(last):
            raise InvalidCursor
        query = query.where(ApiKey.id < last)
    return Page.of(list(session.scalars(query)), limit, cursors, lambda key: key.id)


def add_link(session: Session, key_id: str, digest: str) -> BrowserToken:
    """A link with the rights of this key."""
    session.execute(delete(BrowserToken).where(BrowserToken.expires_at < time.time()))
    link = BrowserToken(digest=digest, kind="link", key_id=key_id, expires_at=time.time() + LINK_SECONDS)
    session.add(link)
    return link


def open_link(session: Session, link_digest: str, session_digest: str) -> tuple[ApiKey, BrowserToken]:
    """Exchange a link for a session; returns the key whose rights it has, and the session. Raises LinkInvalid."""
    now = time.time()
    link = session.get(BrowserToken, link_digest, with_for_update=True)
    key = None if link is None else session.get(ApiKey, link.key_id)
    if link is None or key is None or link.kind != "link" or now >= link.expires_at or not is_valid(key, now):
        raise LinkInvalid
    session.delete(link)
    until = min(now + SESSION_SECONDS, key.expires_at or now + SESSION_SECONDS)
    begun = BrowserToken(digest=session_digest, kind="session", key_id=key.id, expires_at=until)
    session.add(begun)
    return key, begun


def end_session(session: Session, digest: str) -> None:
    """Make a session invalid; ending one that is over is not an error."""
    session.execute(delete(BrowserToken).where(BrowserToken.digest == digest, BrowserToken.kind == "session"))


def key_of_session(session: Session, digest: str) -> tuple[ApiKey, float] | None:
    """The key whose rights this session has, valid or not, and when the session ends; None: there is no such
    session."""
    query = (
        select(ApiKey, BrowserToken.expires_at)
        .join(BrowserToken, BrowserToken.key_id == ApiKey.id)
        .where(BrowserToken.digest == digest, BrowserToken.kind == "session")
    )
    row = session.execute(query).one_or_none()
    return None if row is None else (row[0], row[1])
