"""Identities of callers: scopes, and the secrets that prove an identity."""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass
from enum import StrEnum

DEFAULT_PROJECT = "default"
"""The default project: that of jobs older than projects, and of all jobs if no other project is created."""
PROJECT_PATTERN = "[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
"""Regular expression of a project's name."""
_SECRET_BYTES = 32
_KEY_PREFIX, _TOKEN_PREFIX = "manta_", "manta_browser_"
_KEY = re.compile(f"{_KEY_PREFIX}[A-Za-z0-9_-]{{43,128}}")  # 43 characters of these have room for 256 bits


class Scope(StrEnum):
    """What a key permits; each scope includes the ones before it."""

    READ = "read"
    """See the project's jobs."""
    SUBMIT = "submit"
    """Submit, change and end jobs."""
    ADMIN = "admin"
    """Create and revoke the project's keys, read its audit log, inject faults into its jobs."""

    def covers(self, needed: Scope) -> bool:
        """Whether this scope permits what requires the scope `needed`."""
        order = list(Scope)
        return order.index(self) >= order.index(needed)


@dataclass(frozen=True)
class Identity:
    """Who sent a request, according to its key."""

    key_id: str
    """Id of the key."""
    key_name: str
    """Name of the key."""
    user: str | None
    """The user for whom the key was created."""
    project: str
    """Project that it submits into."""
    scope: Scope
    """What the key permits."""
    installation: bool
    """Whether this applies to all projects."""
    highest_priority: int | None = None
    """The highest priority that it may give jobs; None: any."""

    @property
    def owner(self) -> str:
        """The owner of the jobs that it submits: the user, or the key's name if there is none."""
        return self.user or self.key_name

    def may_give(self, priority: int | None) -> bool:
        """Whether it may give a job this priority, or a key this maximum priority; None: any."""
        if self.highest_priority is None:
            return True
        return priority is not None and priority <= self.highest_priority

    @property
    def bound(self) -> str | None:
        """The only project whose jobs it sees and changes; None: all projects."""
        return None if self.installation else self.project


def new_key() -> str:
    """A new API key: 256 random bits, after a prefix by which scanners for leaked secrets recognise it."""
    return _KEY_PREFIX + secrets.token_urlsafe(_SECRET_BYTES)


def may_be_key(text: str) -> bool:
    """Whether `text` looks like a properly generated key: the prefix, and enough characters for 256 random bits."""
    return _KEY.fullmatch(text) is not None and not text.startswith(_TOKEN_PREFIX)


def new_browser_token() -> str:
    """A new secret for a one-time link, or for the cookie that it is exchanged for."""
    return _TOKEN_PREFIX + secrets.token_urlsafe(_SECRET_BYTES)


def digest_of(secret: str) -> str:
    """The stored form of a secret: SHA-256 in hexadecimal. 256 random bits cannot be guessed, so no slower hash is
    needed."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()
