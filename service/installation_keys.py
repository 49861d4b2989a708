"""Keys that exist before anybody could ask for one. An embedded service creates one for its own user, in a file of its
home, which commands and clients of the same home use automatically. Another may have been generated with the other
secrets of an installation, before its service first ran."""

from __future__ import annotations

import os
import pwd
import time
from pathlib import Path

from sqlalchemy.orm import Session

from manta.service.identity import DEFAULT_PROJECT, Scope, digest_of, may_be_key, new_key
from manta.service.own_files import KEY_FILE, read_key, write_key
from manta.service.store import ApiKey, Store, audit, keys
from manta.service.store.audit import AuditRecord
from manta.workers.errors import MantaError


def ensure_automatic(store: Store, home: Path) -> None:
    """Make sure that `home` has a key that permits everything, and that the database knows it. A revoked key is
    replaced. Raises KeyFileUnsafe."""
    known = read_key(home)
    if known is None or not store.write(lambda session: _is_good(session, known)):
        made = new_key()
        write_key(home / KEY_FILE, made)
        store.write(lambda session: add_for_installation(session, made, "automatic", "the service"))


def _is_good(session: Session, secret: str) -> bool:
    """Whether the database accepts this key. A key that it does not know, since it is another database, is added."""
    key = keys.by_digest(session, digest_of(secret))
    if key is None:
        add_for_installation(session, secret, "automatic", "the service")
        return True
    return keys.is_valid(key, time.time())


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


class GivenKeyUnusable(MantaError):
    """The key cannot be made valid; the message says why."""


def add_existing_key(session: Session, secret: str, name: str, scope: Scope) -> ApiKey:
    """Make `secret` valid for all projects; repeating it changes nothing. Raises GivenKeyUnusable for a key that could
    be guessed, that was revoked or has expired, or that exists with another scope."""
    if not may_be_key(secret):
        raise GivenKeyUnusable(
            "the key is not valid: it must be manta_ and 43 to 128 random letters, digits, '-' and '_', such as "
            "manta_$(openssl rand -hex 32)"
        )
    known = keys.by_digest(session, digest_of(secret))
    if known is None:
        return add_for_installation(session, secret, name, user_name(), scope=scope)
    if not keys.is_valid(known, time.time()):
        raise GivenKeyUnusable(f"the key {known.id} ({known.name}) was revoked or has expired: draw another one")
    if not known.installation or known.scope != scope:
        raise GivenKeyUnusable(f"the key is known already, as {known.id} ({known.name}): draw another one")
    return known
