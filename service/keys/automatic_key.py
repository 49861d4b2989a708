"""The key that an embedded service creates for its own user, in a file of its home (`key_file.py`). Commands and
clients of the same home use it automatically."""

from __future__ import annotations

import os
import pwd
import time
from pathlib import Path

from sqlalchemy.orm import Session

from service.keys.identity import DEFAULT_PROJECT, Scope, digest_of, new_key
from service.keys.key_file import FILE_NAME, read_key, write_key
from service.store import ApiKey, Store, audit, keys
from service.store.audit import AuditRecord


def ensure(store: Store, home: Path) -> None:
    """Make sure that `home` has a key that permits everything, and that the database knows it. A revoked key is
    replaced. Raises KeyFileUnsafe."""
    known = read_key(home)
    if known is None or not store.write(lambda session: _is_good(session, known)):
        made = new_key()
        write_key(home / FILE_NAME, made)
        store.write(lambda session: add_for_installation(session, made, "automatic", "the service"))


def _is_good(session: Session, secret: str) -> bool:
    """Whether the database accepts this key. A key that it does not know, since it is another database, is added."""
    key = keys.by_digest(session, digest_of(secret))
    if key is None:
        add_for_installation(session, secret, "automatic", "the service")
        return True
    return keys.is_good(key, time.time())


def add_for_installation(
    session: Session,
    secret: str,
    name: str,
    by: str,
    expires_at: float | None = None,
    scope: Scope = Scope.ADMIN,
) -> ApiKey:
    """Add to the database a key that is valid for all projects. `by`: who on the machine made it."""
    key = keys.create(session, digest_of(secret), name, scope, installation=True, expires_at=expires_at)
    audit.append_local(session, by, DEFAULT_PROJECT, AuditRecord("create_key", key.id, "local", 201))
    return key


def user_name() -> str:
    """Name of the user who runs this process, according to the machine."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())
