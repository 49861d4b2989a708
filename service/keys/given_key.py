"""A key that was generated elsewhere, with the other secrets of an installation, before its service first ran."""

from __future__ import annotations

import time

from sqlalchemy.orm import Session

from service.keys import automatic_key
from service.keys.identity import Scope, digest_of, may_be_key
from service.store import ApiKey, keys
from workers.errors import MantaError


class GivenKeyUnusable(MantaError):
    """The key cannot be made valid; the message says why."""


def add(session: Session, secret: str, name: str, scope: Scope) -> ApiKey:
    """Make `secret` valid for all projects; repeating it changes nothing. Raises GivenKeyUnusable for a key that could
    be guessed, that was revoked or has expired, or that exists with another scope."""
    if not may_be_key(secret):
        raise GivenKeyUnusable(
            "the key is not valid: it must be manta_ and 43 to 128 random letters, digits, '-' and '_', such as "
            "manta_$(openssl rand -hex 32)"
        )
    known = keys.by_digest(session, digest_of(secret))
    if known is None:
        return automatic_key.add_for_installation(session, secret, name, automatic_key.user_name(), scope=scope)
    if not keys.is_good(known, time.time()):
        raise GivenKeyUnusable(f"the key {known.id} ({known.name}) was revoked or has expired: draw another one")
    if not known.installation or known.scope != scope:
        raise GivenKeyUnusable(f"the key is known already, as {known.id} ({known.name}): draw another one")
    return known
