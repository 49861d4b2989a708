"""Credentials in requests, and their owners."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from fastapi.concurrency import run_in_threadpool
from starlette.requests import cookie_parser

from manta.service.identity import Identity, digest_of
from manta.service.store import Store, keys

CACHE_SECONDS = 1.0
"""Seconds that an answer of the database is used; a key that another process revoked is refused after that."""
_MAX_CACHED = 10_000


@dataclass(frozen=True)
class Credential:
    """A secret, by its digest."""

    digest: str
    """SHA-256 of the secret."""
    is_key: bool
    """Whether it is an API key; otherwise it is a browser session."""


@dataclass(frozen=True)
class _CachedIdentity:
    """The database's answer about a credential."""

    identity: Identity
    until: float
    """Unix seconds at which it expires."""
    checked_at: float


def cookie_name(host: str) -> str:
    """Name of the cookie with a browser session, at the service that the browser calls `host`. Browsers send cookies to
    all ports of a host, and two services on one machine must not mix up theirs."""
    try:
        port = urlsplit(f"//{host}").port
    except ValueError:
        port = None
    return f"manta_session_{'default' if port in (None, 80, 443) else port}"


def credential_in(headers: Mapping[str, str]) -> Credential | None:
    """The key or, without one, the session cookie in a request's headers."""
    kind, _, secret = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer" and secret.strip():
        return Credential(digest_of(secret.strip()), is_key=True)
    cookie = cookie_parser(headers.get("cookie", "")).get(cookie_name(headers.get("host", "")))
    return None if not cookie else Credential(digest_of(cookie), is_key=False)


class Identities:
    """Owners of credentials, according to a recent answer of the database."""

    def __init__(
        self,
        store: Callable[[], Store],
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`store`: the database; `now`: Unix seconds; `clock`: monotonic seconds."""
        self._store, self._now, self._clock = store, now, clock
        self._known: dict[Credential, _CachedIdentity] = {}

    async def of(self, credential: Credential) -> Identity | None:
        """The credential's owner; None: it is not valid, or no longer. Raises the database's errors."""
        known = self._known.get(credential)
        if known is None or self._clock() - known.checked_at >= CACHE_SECONDS:
            self._known.pop(credential, None)
            known = await run_in_threadpool(self._read, credential)
            if known is None:
                return None
            if len(self._known) >= _MAX_CACHED:
                self._known.clear()
            self._known[credential] = known
        return known.identity if self._now() < known.until else None

    async def expiry_reason(self, credential: Credential) -> str | None:
        """For a key that was valid once, for its owner: which key it is, and why it is no longer valid; None for any
        other credential. Raises the database's errors."""
        return await run_in_threadpool(self._read_expiry_reason, credential) if credential.is_key else None

    def _read_expiry_reason(self, credential: Credential) -> str | None:
        key = self._store().query(keys.by_digest, credential.digest)
        if key is None:
            return None
        return f"{key.name!r} ({key.id}) {'has expired' if key.revoked_at is None else 'was revoked'}"

    def forget(self) -> None:
        """Query the database about all callers again, since a key was revoked."""
        self._known.clear()

    def _read(self, credential: Credential) -> _CachedIdentity | None:
        checked_at = self._clock()
        ends = float("inf")
        with self._store().read() as session:
            if credential.is_key:
                key = keys.by_digest(session, credential.digest)
            else:
                key, ends = keys.key_of_session(session, credential.digest) or (None, ends)
        if key is None or not keys.is_valid(key, self._now()):
            return None
        return _CachedIdentity(keys.identity_of(key), min(ends, key.expires_at or ends), checked_at)
