"""Identities of callers: scopes, and the secrets that prove an identity."""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass
from enum import StrEnum

DEFAULT_PROJECT = "default"
"""Project of the jobs from before there were any, and of all jobs where no other is created."""
PROJECT_PATTERN = "[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
"""Regular expression of a project's name."""
_SECRET_BYTES = 32
_KEY_PREFIX, _TOKEN_PREFIX = "manta_", "manta_browser_"
_KEY = re.compile(f"{_KEY_PREFIX}[A-Za-z0-9_-]{{43,128}}")  # 43 characters of these have room for 256 bits


class Scope(StrEnum):
    """What a key allows; each one allows what those before it do."""

    READ = "read"
    """See the project's jobs."""
    SUBMIT = "submit"
    """Submit, change and end them."""
    ADMIN = "admin"
    """Make and revoke the project's keys, read its audit, make faults in its jobs."""

    def covers(self, needed: Scope) -> bool:
        """Whether this scope allows what needs `needed`."""
        order = list(Scope)
        return order.index(self) >= order.index(needed)


@dataclass(frozen=True)
class Identity:
    """Who a request comes from: what its key says."""

    key_id: str
    """Id of the key."""
    key_name: str
    """Its name."""
    user: str | None
    """Whom the key was made for."""
    project: str
    """Project that it submits into."""
    scope: Scope
    """What it allows."""
    installation: bool
    """Whether it allows that in all projects."""
    highest_priority: int | None = None
    """The highest priority that it gives jobs; None: any."""

    @property
    def owner(self) -> str:
        """Whose the jobs are that it submits: the user's, else the key's by its name."""
        return self.user or self.key_name

    def may_give(self, priority: int | None) -> bool:
        """Whether it may give a job this priority, or a key this as its highest; None: any."""
        if self.highest_priority is None:
            return True
        return priority is not None and priority <= self.highest_priority

    @property
    def bound(self) -> str | None:
        """The one project whose jobs it sees and changes; None: it does so in all."""
        return None if self.installation else self.project


def new_key() -> str:
    """A new API key: 256 random bits, behind a prefix by which those who look for leaked secrets know it."""
    return _KEY_PREFIX + secrets.token_urlsafe(_SECRET_BYTES)


def may_be_key(text: str) -> bool:
    """Whether `text` looks like a key that was drawn well: the prefix, and room for 256 random bits."""
    return _KEY.fullmatch(text) is not None and not text.startswith(_TOKEN_PREFIX)


def new_browser_token() -> str:
    """A new secret for a one-time link, or for the cookie that it is exchanged for."""
    return _TOKEN_PREFIX + secrets.token_urlsafe(_SECRET_BYTES)


def digest_of(secret: str) -> str:
    """What is kept of a secret: SHA-256 in hexadecimal. 256 random bits cannot be guessed, so it needs no slower
    one."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()
