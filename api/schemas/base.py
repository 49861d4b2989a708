"""Common parts of all responses: times, numbers, problems, pages of lists."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Generic, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer, WithJsonSchema

from manta.workers.protocol.json_codec import number, spell

T = TypeVar("T")


def rfc3339(moment: datetime) -> str:
    """`moment` as RFC 3339 in UTC, with microseconds and a Z."""
    return moment.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _moment(value: object) -> object:
    """Unix seconds as a moment in UTC; anything else unchanged."""
    return datetime.fromtimestamp(value, UTC) if isinstance(value, int | float) else value


Time = Annotated[
    datetime,
    BeforeValidator(_moment),
    PlainSerializer(rfc3339, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "format": "date-time"}),
]
"""A time, which Unix seconds become too; in JSON as RFC 3339 in UTC."""


_NUMBER_SCHEMA = {"anyOf": [{"type": "number"}, {"enum": ["nan", "inf", "-inf"]}, {"type": "null"}]}


Number = Annotated[
    int | float | None,
    BeforeValidator(number),
    PlainSerializer(spell, when_used="json"),
    WithJsonSchema(_NUMBER_SCHEMA),
]
"""A number or null; in JSON non-finite numbers are the strings "nan", "inf" and "-inf"."""


Direction = Literal["asc", "desc"]
"""Direction of an order."""


class Answer(BaseModel):
    """Base of all responses. Unknown fields, from a newer service, are ignored."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class FieldProblem(Answer):
    """One problem of a request."""

    path: str
    """Dotted path of the field, or name of the parameter."""
    rule: str
    """The rule that is broken."""
    suggestion: str | None = None
    """The nearest value that works."""


class Problem(Answer):
    """An error (RFC 9457)."""

    code: str
    """Stable code."""
    title: str
    """Meaning of the status."""
    status: int
    """HTTP status."""
    detail: str
    """One sentence with what to do next."""
    errors: list[FieldProblem] = []
    """All problems of the request."""


class Items(Answer, Generic[T]):
    """A page of a list."""

    items: list[T]
    """The items."""
    next_cursor: str | None = None
    """Pass this as `cursor` for the next page; null on the last page."""


class Stream(Items[T], Generic[T]):
    """A page of a list that is still growing."""

    resume_cursor: str
    """Pass this as `cursor` to read only what was added after this page; also set on the last page."""


class Health(Answer):
    """Whether the process is alive, or the service is ready."""

    status: str
    """ok or ready."""
