"""What a caller may do. Only this module decides which jobs a request may access: those of the caller's project, or of
all projects if the key is for the whole installation. Every other job is answered as if it did not exist."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Annotated, Any, cast

from fastapi import Depends, Path, Request
from fastapi.concurrency import run_in_threadpool
from sqlalchemy.exc import SQLAlchemyError
from starlette.types import Scope as AsgiScope

from manta.api.app_state import state_of
from manta.api.security.credentials import CACHE_SECONDS, Credential
from manta.api.security.permissions import RequiredPermission, is_anonymous, needs
from manta.service.errors import ErrorKind, InvalidParameter, ServiceError
from manta.service.identity import Identity
from manta.service.ids import is_job_id
from manta.service.store import Store, jobs
from manta.service.store.errors import JobNotFound

_REQUEST = "manta.request"
_MAX_CACHED = 10_000


class Unauthenticated(ServiceError):
    """A request without a valid key."""

    kind = ErrorKind("unauthenticated", 401, "there is no key with the request, or it is unknown, expired or revoked")

    def __init__(self, ended: str | None = None) -> None:
        """`ended`: which key was sent, and why it is no longer valid."""
        super().__init__(
            f"{'' if ended is None else f'the key {ended}: '}send a valid key: `Authorization: Bearer KEY`. The "
            "command and the client take it from MANTA_API_KEY, or from `api.key` in the home of a service on the same "
            "machine; for a browser `manta link` prints a link"
        )


class Forbidden(ServiceError):
    """The key does not permit the operation."""

    kind = ErrorKind("forbidden", 403, "the key does not allow this; `detail` names the scope that is needed")

    def __init__(self, need: RequiredPermission | None, identity: Identity):
        self.need = need
        has = RequiredPermission(identity.scope, identity.installation)
        super().__init__(f"this needs a key with scope {need}; {identity.key_name!r} ({identity.key_id}) has {has}")


class PriorityTooHigh(InvalidParameter):
    """The key does not permit such a priority for jobs or keys."""

    field = "priority"

    def __init__(self, identity: Identity):
        super().__init__(
            f"key {identity.key_name!r} ({identity.key_id}) allows priorities up to {identity.highest_priority}: use "
            "that, or have a user with a key for higher priorities (`manta keys list`) do it"
        )


def refuse_priority(identity: Identity, priority: int | None) -> None:
    """Raise PriorityTooHigh if the key does not permit this priority; None: the default one."""
    if not identity.may_give(priority):
        raise PriorityTooHigh(identity)


@dataclass
class RequestOfCaller:
    """What is known about a request in addition to its path and body."""

    identity: Identity | None
    """None: an anonymous caller, where that is allowed."""
    address: str | None
    """The caller's network address."""
    credential: Credential | None = None
    """How the caller was identified."""
    target: str | None = None
    """The subject of the request for the audit, if it is not part of the path."""
    changes_nothing: bool = False
    """Whether the request changed nothing in spite of its method, so that it needs no audit row."""
    audited: bool = False
    """Whether the audit row was stored together with the change."""
    streams: bool = False
    """Whether the request is counted as a stream."""


def attach(scope: AsgiScope, request: RequestOfCaller) -> None:
    """Attach `request` to a request on its way through the app."""
    scope[_REQUEST] = request


def is_stranger(scope: AsgiScope) -> bool:
    """Whether a request has come without a valid key."""
    about = cast(RequestOfCaller | None, scope.get(_REQUEST))
    return about is not None and about.identity is None


def request_of_caller(request: Request) -> RequestOfCaller:
    """What is known about a request."""
    return cast(RequestOfCaller, request.scope[_REQUEST])


def caller_of(request: Request) -> Identity:
    """Who asks. Raises Unauthenticated."""
    identity = request_of_caller(request).identity
    if identity is None:
        raise Unauthenticated
    return identity


def begin_stream(request: Request) -> None:
    """A request turns out to be a stream. Raises TooManyRequests."""
    about, limits = request_of_caller(request), state_of(request.app).limits
    limits.begin_stream(caller_of(request).key_id)
    about.streams = True


async def is_still_authorized(request: Request) -> bool:
    """Whether the key that a request was sent with is still valid. It counts as valid while the database does not
    answer."""
    about, identities = request_of_caller(request), state_of(request.app).identities
    try:
        return about.credential is not None and await identities.of(about.credential) is not None
    except SQLAlchemyError:
        return True


async def _refuse_if_ended(request: Request) -> None:
    """Raise Unauthenticated if the key is no longer valid."""
    credential = request_of_caller(request).credential
    if credential is not None and not await is_still_authorized(request):
        raise Unauthenticated(await state_of(request.app).identities.expiry_reason(credential))


async def while_authorized(request: Request, waiting: Coroutine[Any, Any, None]) -> None:
    """Wait for `waiting`, as long as the key is valid. Raises Unauthenticated, and what `waiting` raises."""
    task = asyncio.create_task(waiting)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=CACHE_SECONDS)
            await _refuse_if_ended(request)
    finally:
        task.cancel()
    await task


async def authorize(request: Request) -> None:
    """Let a request pass to its route. Raises Unauthenticated, also if the key was revoked while the body arrived;
    Forbidden."""
    if is_anonymous(request.scope["path"]):  # `request.url` is built from the Host header, which is not trusted
        return
    identity = caller_of(request)
    await _refuse_if_ended(request)
    need = needs(request.scope["route"].name)
    if need is None or not need.is_met_by(identity):
        raise Forbidden(need, identity)


class JobProjects:
    """Which job belongs to which project. That never changes, so the database is queried once per job."""

    def __init__(self, store: Callable[[], Store]):
        self._store = store
        self._known: OrderedDict[str, str] = OrderedDict()

    async def check(self, job_id: str, bound: str | None) -> None:
        """Raise JobNotFound if the job is not of project `bound`, or does not exist."""
        if bound is None:
            return
        project = self._known.get(job_id)
        if project is None:
            project = self._known[job_id] = await run_in_threadpool(self._read_project, job_id)
            if len(self._known) > _MAX_CACHED:
                self._known.popitem(last=False)
        if project != bound:
            raise JobNotFound(job_id)

    def _read_project(self, job_id: str) -> str:
        return self._store().query(jobs.project_of, job_id)


async def own_job_id(request: Request, job_id: Annotated[str, Path(description="Job id")]) -> str:
    """The job id in the path. Raises JobNotFound for text that cannot be an id, before it is used for anything, and for
    a job that the caller may not access."""
    if not is_job_id(job_id):
        raise JobNotFound(job_id)
    await state_of(request.app).job_projects.check(job_id, caller_of(request).bound)
    return job_id


async def _caller(request: Request) -> Identity:
    return caller_of(request)


Caller = Annotated[Identity, Depends(_caller)]
"""The caller, as a parameter of a route."""
JobId = Annotated[str, Depends(own_job_id)]
"""The id of a job that the caller may access, as a parameter of a route."""
