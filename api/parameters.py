"""What routes take from requests: the control plane, JSON bodies, page parameters. The caller, and which jobs it may
access, are in `api/security/access.py`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Annotated, Any, NoReturn, TypeVar

from fastapi import Depends, Header, Path, Query, Request
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

from manta.api.app_state import state_of
from manta.api.problems import MalformedJson
from manta.api.streams import MAX_WAIT_SECONDS
from manta.service.control.control_plane import ControlPlane
from manta.service.store.errors import InvalidCursor

Model = TypeVar("Model", bound=BaseModel)
_MAX_INTEGER = 2**63 - 1
MAX_CURSOR_CHARACTERS = 60_000  # the HTTP server accepts no address of more than 64 KiB


async def control_of(request: Request) -> ControlPlane:
    """The control plane that the app was created with."""
    return state_of(request.app).control


async def only_known_parameters(request: Request) -> None:
    """Raises RequestValidationError for query parameters that a REST call does not have: with a misspelled filter, a
    list would contain everything."""
    if not request.query_params or not request.url.path.startswith("/v1/"):
        return
    known = sorted(_query_of(request.scope["route"].dependant))
    rule = f"unknown parameter; known are {', '.join(known)}" if known else "unknown parameter; this call has none"
    unknown = [name for name in request.query_params.keys() if name not in known]  # noqa: SIM118
    if unknown:
        raise RequestValidationError([{"loc": ("query", name), "msg": rule, "type": "unknown"} for name in unknown])


def _query_of(dependant: Dependant) -> set[str]:
    """Names of the query parameters of a route and its dependencies."""
    return {each.alias for each in dependant.query_params}.union(*map(_query_of, dependant.dependencies))


async def json_body(request: Request) -> Any:
    """The body as JSON. Raises MalformedJson unless it is strict JSON in UTF-8, with each key of an object once."""
    body = await request.body()
    if not body:
        raise MalformedJson("the request needs a JSON body")
    try:
        document = json.loads(body, parse_constant=_no_constant, object_pairs_hook=_object)
        digest_of(document)  # also finds invalid Unicode, which could be stored but never sent back
    except _Repeated:
        key = next(_repeated_in(json.loads(body, object_pairs_hook=_Pairs), ""))
        raise MalformedJson(f"the body has the key {key[:200]} twice: leave one of them out") from None
    except (ValueError, RecursionError) as error:
        raise MalformedJson(f"the body is not valid JSON: {str(error) or 'nested too deeply'}") from error
    return document


class _Repeated(Exception):
    """An object has a key twice."""


class _Pairs(list[tuple[str, Any]]):
    """The members of an object."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises _Repeated. Python would take the last one of several members."""
    document = dict(pairs)
    if len(document) < len(pairs):
        raise _Repeated
    return document


def _repeated_in(value: Any, path: str) -> Iterator[str]:
    """Paths of the keys that are there twice; `path`: that of `value`, with a dot."""
    known = set()
    for key, part in value if isinstance(value, _Pairs) else enumerate(value) if isinstance(value, list) else ():
        if key in known:
            yield f"{path}{key}"
        known.add(key)
        yield from _repeated_in(part, f"{path}{key}.")


def digest_of(document: Any) -> str:
    """SHA-256 of a JSON value, the same for every way of writing it. Raises ValueError for invalid Unicode."""
    canonical = json.dumps(document, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("utf-8")).hexdigest()


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def refused(parameter: str, rule: str) -> RequestValidationError:
    """The error for a query parameter that breaks a rule."""
    return RequestValidationError([{"loc": ("query", parameter), "msg": rule, "type": "value_error"}])


def event_number(last_event_id: str) -> int:
    """The id of an event in a Last-Event-ID header. Raises InvalidCursor."""
    if not (last_event_id.isascii() and last_event_id.isdigit() and len(last_event_id) < 19):
        raise InvalidCursor
    return int(last_event_id)


def versions_in(if_match: str | None) -> set[str] | None:
    """The versions in an If-Match header; None if any version matches. Weak ones match nothing (RFC 9110, 13.1.1)."""
    if if_match is None or if_match.strip() == "*":
        return None
    tags = (tag.strip() for tag in if_match.split(","))
    return {tag[1:-1] for tag in tags if len(tag) > 2 and tag[0] == tag[-1] == '"'}


Control = Annotated[ControlPlane, Depends(control_of)]
Body = Annotated[Any, Depends(json_body)]


def body_as(model: type[Model]) -> Callable[..., Awaitable[Model]]:
    """A dependency that reads the body as `model`. FastAPI's own would answer some invalid bodies with a 500, and the
    others with a 422."""

    async def read(document: Body) -> Model:
        try:
            return model.model_validate(document)
        except ValidationError as error:
            raise RequestValidationError(
                [{**entry, "loc": ("body", *entry["loc"])} for entry in error.errors()]
            ) from error

    return read


Limit = Annotated[int, Query(ge=1, le=1000, description="Most items on a page")]
Cursor = Annotated[
    str | None,
    Query(
        min_length=1,
        max_length=MAX_CURSOR_CHARACTERS,
        description="next_cursor of the page before, of the same list",
    ),
]
CheckpointId = Annotated[str, Path(max_length=80, description="id of a checkpoint of the job")]
ExportId = Annotated[str, Path(max_length=80, description="id of an export of the job")]
AfterStep = Annotated[int, Query(ge=0, le=_MAX_INTEGER, description="Only steps above this one")]
RankNumber = Annotated[int | None, Query(ge=0, le=10**8, description="Only this rank")]
LastEventId = Annotated[
    str | None,
    Header(max_length=MAX_CURSOR_CHARACTERS, description="id of the last event that a broken stream delivered"),
]
IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1, max_length=200, description="A second request with the same key and body returns the same job"
    ),
]
IfMatch = Annotated[
    str | None, Header(max_length=1000, description="Only if the job's ETag is (one of) these, or * for any")
]
WaitSeconds = Annotated[
    float,
    Query(
        ge=0,
        le=MAX_WAIT_SECONDS,
        allow_inf_nan=False,
        description="Answer when the job's state is another than `state`, or final; after that many seconds anyway",
    ),
]
Follow = Annotated[bool, Query(description="Stream as text/event-stream until the job is final")]
