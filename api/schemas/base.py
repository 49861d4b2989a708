"""What all answers have: times, numbers, problems, pages of lists."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Generic, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer, WithJsonSchema

from workers.nonfinite import number, spell

T = TypeVar("T")


def rfc3339(moment: datetime) -> str:
    """`moment` as RFC 3339 in UTC, with microseconds and a Z."""
    return moment.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


Time = Annotated[
    datetime,
    PlainSerializer(rfc3339, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "format": "date-time"}),
]
"""A moment; RFC 3339 in UTC on the wire."""


_NUMBER_SCHEMA = {"anyOf": [{"type": "number"}, {"enum": ["nan", "inf", "-inf"]}, {"type": "null"}]}


Number = Annotated[
    int | float | None,
    BeforeValidator(number),
    PlainSerializer(spell, when_used="json"),
    WithJsonSchema(_NUMBER_SCHEMA),
]
"""A number or null; the non-finite ones are the strings "nan", "inf" and "-inf" on the wire."""


Direction = Literal["asc", "desc"]
"""Direction of a sort order."""


class Answer(BaseModel):
    """Base of all answers. Fields that this client does not know are ignored."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class FieldProblem(Answer):
    """One thing that is wrong with a request."""

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
    """What the status means."""
    status: int
    """HTTP status."""
    detail: str
    """One sentence that says what to do next."""
    errors: list[FieldProblem] = []
    """One entry for each thing that is wrong."""


class Items(Answer, Generic[T]):
    """A page of a list."""

    items: list[T]
    """The items."""
    next_cursor: str | None = None
    """Pass this as `cursor` for the next page; null on the last one."""


class Stream(Items[T], Generic[T]):
    """A page of a list that still grows."""

    resume_cursor: str
    """Pass this as `cursor` to read only what came after this page, also when it is the last one for now."""


class Health(Answer):
    """Whether the process is alive, or the service ready."""

    status: str
    """ok or ready."""
