"""What a caller may do. Only this module decides which jobs a request may concern: those of the caller's project, or
those of all projects where the key is of the installation. Every other job is answered as if it did not exist."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, cast

from fastapi import Depends, Path, Request
from fastapi.concurrency import run_in_threadpool
from sqlalchemy.exc import SQLAlchemyError
from starlette.types import Scope as AsgiScope

from api.credentials import Credential, Identities
from api.permissions import Need, is_anonymous, needs
from api.rate_limits import CallerLimits
from service.identity import Identity
from service.ids import is_job_id
from service.store import JobNotFound, Store, jobs
from workers.errors import MantaError

_REQUEST = "manta.request"
_MOST_KNOWN = 10_000


class Unauthenticated(MantaError):
    """A request without a key that is good."""

    def __init__(self, ended: str | None = None) -> None:
        """`ended`: which key was shown, and why it is not good any more."""
        super().__init__(
            f"{'' if ended is None else f'the key {ended}: '}send a key that is good: `Authorization: Bearer KEY`. The "
            "command and the client take it from MANTA_API_KEY, or from `api.key` in the home of a service on the same "
            "machine; for a browser `manta link` prints a link"
        )


class Forbidden(MantaError):
    """The key allows less than the operation needs."""

    def __init__(self, need: Need | None, who: Identity):
        self.need = need
        has = Need(who.scope, who.installation)
        super().__init__(f"this needs a key with scope {need}; {who.key_name!r} ({who.key_id}) has {has}")


class PriorityTooHigh(MantaError):
    """The key gives no job, and no key, such a priority."""

    def __init__(self, who: Identity):
        super().__init__(
            f"{who.key_name!r} ({who.key_id}) gives priorities of {who.highest_priority} at most: ask for that, or "
            "have a user with such a key (`manta keys list`) do it"
        )


def refuse_priority(who: Identity, priority: int | None) -> None:
    """Raise PriorityTooHigh where the key may not give it; None: any."""
    if not who.may_give(priority):
        raise PriorityTooHigh(who)


@dataclass
class RequestOfCaller:
    """What is known about a request besides its path and body."""

    who: Identity | None
    """None: an anonymous caller, where that is allowed."""
    address: str | None
    """Where it comes from."""
    credential: Credential | None = None
    """What showed who it comes from."""
    target: str | None = None
    """What it turned out to be about, for the audit, where that is not in its path."""
    changes_nothing: bool = False
    """Whether it turned out to change nothing whatever its method says, so that the audit needs no line for it."""
    audited: bool = False
    """Whether the audit's line was stored with the change itself."""
    streams: bool = False
    """Whether it is counted as a stream."""


def attach(scope: AsgiScope, request: RequestOfCaller) -> None:
    """Have `request` go with a request on its way through the app."""
    scope[_REQUEST] = request


def request_of_caller(request: Request) -> RequestOfCaller:
    """What is known about a request."""
    return cast(RequestOfCaller, request.scope[_REQUEST])


def caller_of(request: Request) -> Identity:
    """Who asks. Raises Unauthenticated."""
    who = request_of_caller(request).who
    if who is None:
        raise Unauthenticated
    return who


def begin_stream(request: Request) -> None:
    """A request turns out to be a stream. Raises TooManyRequests."""
    about, limits = request_of_caller(request), cast(CallerLimits, request.app.state.limits)
    limits.begin_stream(caller_of(request).key_id)
    about.streams = True


async def is_still_authorized(request: Request) -> bool:
    """Whether the key that a stream was opened with is still good. While the database does not answer, it is."""
    about, identities = request_of_caller(request), cast(Identities, request.app.state.identities)
    try:
        return about.credential is not None and await identities.of(about.credential) is not None
    except SQLAlchemyError:
        return True


async def authorize(request: Request) -> None:
    """Let a request through to its route. Raises Unauthenticated, Forbidden."""
    if is_anonymous(request.scope["path"]):  # `request.url` is built with the Host header, which is not trusted
        return
    who = caller_of(request)
    need = needs(request.scope["route"].name)
    if need is None or not need.is_met_by(who):
        raise Forbidden(need, who)


class JobProjects:
    """Which job belongs to which project. That never changes, so the database is asked once a job."""

    def __init__(self, store: Callable[[], Store]):
        self._store = store
        self._known: OrderedDict[str, str] = OrderedDict()

    async def check(self, job_id: str, bound: str | None) -> None:
        """Raise JobNotFound where the job is of another project than `bound`, or there is none."""
        if bound is None:
            return
        project = self._known.get(job_id)
        if project is None:
            project = self._known[job_id] = await run_in_threadpool(self._look, job_id)
            if len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)
        if project != bound:
            raise JobNotFound(job_id)

    def _look(self, job_id: str) -> str:
        with self._store().read() as session:
            return jobs.project_of(session, job_id)


async def own_job_id(request: Request, job_id: Annotated[str, Path(description="Job id")]) -> str:
    """The job id in the path. Raises JobNotFound for text that cannot be one, before it is used for anything, and for
    a job that is none of the caller's."""
    if not is_job_id(job_id):
        raise JobNotFound(job_id)
    job_projects: JobProjects = request.app.state.job_projects
    await job_projects.check(job_id, caller_of(request).bound)
    return job_id


async def _caller(request: Request) -> Identity:
    return caller_of(request)


Caller = Annotated[Identity, Depends(_caller)]
"""Who asks, as a parameter of a route."""
JobId = Annotated[str, Depends(own_job_id)]
"""The id of a job of the caller's, as a parameter of a route."""
