"""Identifies the caller before anything else is done with a request: nothing answers without a valid key, and no caller
gets more than its key permits."""

from __future__ import annotations

import logging

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from manta.api.problems import DATABASE_ERRORS, database_unavailable, problem_of
from manta.api.security.access import RequestOfCaller, Unauthenticated, attach
from manta.api.security.auditing import Audit
from manta.api.security.credentials import Identities, credential_in
from manta.api.security.permissions import DASHBOARD_PATH, is_anonymous
from manta.api.security.rate_limits import CallerLimits, TooManyRequests
from manta.api.security.sign_in import sign_in_page
from manta.service.identity import Identity

log = logging.getLogger(__name__)


class Identification:
    """ASGI middleware that lets requests pass together with what is known about their sender."""

    def __init__(self, app: ASGIApp, identities: Identities, limits: CallerLimits, audit: Audit):
        self._app = app
        self._identities, self._limits, self._audit = identities, limits, audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request pass, or answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        address = scope["client"][0] if scope.get("client") else None
        credential = credential_in(Headers(scope=scope))
        try:
            identity = None if credential is None else await self._identities.of(credential)
            ended = None
            if identity is None:
                self._limits.anonymous(address or "")
                if credential is not None:
                    ended = await self._identities.expiry_reason(credential)
            else:
                self._limits.begin_request(identity.key_id)
        except TooManyRequests as error:  # before the audit, which it would fill
            await problem_of(error)(scope, receive, send)
            return
        except DATABASE_ERRORS as error:
            cause = getattr(error, "orig", None) or error
            log.warning("cannot identify the sender of a request: the database does not respond (%s)", cause)
            await database_unavailable(error)(scope, receive, send)
            return
        if identity is not None:
            await self._of_a_caller(identity, RequestOfCaller(identity, address, credential), scope, receive, send)
        elif is_anonymous(scope["path"]):
            attach(scope, RequestOfCaller(None, address))
            await self._app(scope, receive, send)
        else:
            await _unauthenticated(scope, ended)(scope, receive, send)

    async def _of_a_caller(
        self, identity: Identity, about: RequestOfCaller, scope: Scope, receive: Receive, send: Send
    ) -> None:
        attach(scope, about)
        try:
            await self._app(scope, receive, self._audit.of(scope, about, send))
        except Exception:
            await self._audit.record_failure(scope, about)
            raise
        finally:
            self._limits.end_request(identity.key_id)
            if about.streams:
                self._limits.end_stream(identity.key_id)


def _unauthenticated(scope: Scope, ended: str | None) -> Response:
    """Browsers get a page that says what to do; `ended`: why the key that was sent is no longer valid."""
    path = scope["path"]
    if path in ("/", DASHBOARD_PATH) or path.startswith(f"{DASHBOARD_PATH}/"):
        return sign_in_page(str(scope.get("root_path", "")))
    return problem_of(Unauthenticated(ended))
