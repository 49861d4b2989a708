"""One row for each request that changes something, or would have changed it: written before the answer is sent."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable

from fastapi import Request
from sqlalchemy.orm import Session
from starlette.types import Message, Scope, Send

from manta.api.problems import MEDIA_TYPE
from manta.api.security.access import RequestOfCaller, caller_of, request_of_caller
from manta.api.security.permissions import DASHBOARD_PATH, shown
from manta.service.identity import Identity
from manta.service.store import Store, audit
from manta.service.store.audit import AuditRecord

log = logging.getLogger(__name__)

WRITE_SECONDS = 2.0
"""Seconds that an answer waits for its row. Later the row is still written, or logged."""
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_LONGEST = 200
_TARGETS = ("job_id", "key_id", "node_id")  # path parameters that identify something and are not secret


class Audit:
    """Writes the rows of one service."""

    def __init__(self, store: Callable[[], Store]):
        self._store = store
        self._writes: set[asyncio.Task[None]] = set()

    def of(self, scope: Scope, about: RequestOfCaller, send: Send) -> Send:
        """`send`, which writes the row before the answer; just `send` if no row is needed."""
        if about.identity is None or not _may_change(scope):
            return send
        identity, held = about.identity, list[Message]()

        async def send_recording_status(message: Message) -> None:
            if message["type"] == "http.response.start":
                held.append(message)
                return
            if held:
                start = held.pop()
                await self._note(identity, about, _record(scope, about, start, message.get("body", b"")))
                await send(start)
            await send(message)

        return send_recording_status

    async def record_failure(self, scope: Scope, about: RequestOfCaller) -> None:
        """Write the row of a request that failed with an internal error; does nothing if no row is needed."""
        if about.identity is not None and _may_change(scope):
            failure = AuditRecord(_operation(scope), _target(scope, about), about.address, 500, "internal_error")
            await self._note(about.identity, about, failure)

    async def _note(self, identity: Identity, about: RequestOfCaller, record: AuditRecord) -> None:
        if about.changes_nothing or about.audited:
            return
        write = asyncio.create_task(self._write(identity, record))
        self._writes.add(write)
        write.add_done_callback(self._writes.discard)
        await asyncio.wait({write}, timeout=WRITE_SECONDS)

    async def _write(self, identity: Identity, record: AuditRecord) -> None:
        try:
            await self._store().write_async(lambda session: audit.append(session, identity, record))
        except Exception:  # the answer is sent even if its row could not be stored
            log.exception("the audit of %s by %s could not be stored: %s", record.operation, identity.key_id, record)


def append_with_change(session: Session, request: Request, target: str, status: int) -> None:
    """Write the row of a request that changes `target` in the same transaction as the change. When it is stored, set
    `audited` of the request."""
    about = request_of_caller(request)
    record = AuditRecord(_operation(request.scope), target, about.address, status)
    audit.append(session, caller_of(request), record)


def _may_change(scope: Scope) -> bool:
    """Whether a request may change something. Those for the dashboard's own pages do not; their calls of the API are
    audited like all others."""
    return (
        scope["type"] == "http" and scope["method"] not in _SAFE and not scope["path"].startswith(f"{DASHBOARD_PATH}/")
    )


def _record(scope: Scope, about: RequestOfCaller, start: Message, body: bytes) -> AuditRecord:
    status: int = start["status"]
    return AuditRecord(_operation(scope), _target(scope, about), about.address, status, _code(start, body))


def _operation(scope: Scope) -> str:
    """The operation's name, if the request reached its route."""
    return getattr(scope.get("route"), "name", "unmatched")


def _target(scope: Scope, about: RequestOfCaller) -> str | None:
    named = scope.get("path_params", {})
    target = about.target or next((named[name] for name in _TARGETS if name in named), None)
    if target is None and "route" not in scope:
        target = shown(scope["path"])
    return None if target is None else str(target)[:_LONGEST]


def _code(start: Message, body: bytes) -> str | None:
    """The code of a problem document, which is always a single message."""
    media_types = [value for name, value in start.get("headers", []) if name.lower() == b"content-type"]
    return json.loads(body)["code"] if media_types == [MEDIA_TYPE.encode()] else None
