"""All queries about how browsers sign in: links that work once, and the sessions that they begin. Both are stored as
digests, and valid only as long as the key that requested the link."""

from __future__ import annotations

import time

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from service.store import keys
from service.store.access_tables import ApiKey, BrowserToken
from service.store.errors import LinkInvalid

LINK_SECONDS = 600.0
"""Seconds that a link is valid."""
SESSION_SECONDS = 12 * 3600.0
"""Seconds that a browser stays signed in."""


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
    if link is None or key is None or link.kind != "link" or now >= link.expires_at or not keys.is_good(key, now):
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
