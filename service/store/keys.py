"""All queries about API keys. Only their digests are stored here, never the keys themselves."""

from __future__ import annotations

import secrets
import time

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from service.ids import is_key_id, next_key_id
from service.keys.identity import DEFAULT_PROJECT, Identity, Scope
from service.store import projects
from service.store.access_tables import ApiKey
from service.store.errors import InvalidCursor, KeyNotFound
from service.store.paging import Cursors, Page


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


def is_good(key: ApiKey, now: float) -> bool:
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
    return any(is_good(key, now) for key in session.scalars(query))


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
