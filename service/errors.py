"""Errors with which the service answers a request, each with the way in which REST tells it from others. Pure
Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from manta.workers.errors import MantaError


@dataclass(frozen=True)
class ErrorKind:
    """One kind of error, as programs tell it from others."""

    code: str
    """Stable name of the kind."""
    status: int
    """HTTP status of the answer."""
    meaning: str
    """When it is used, for the description of the REST API."""


class ServiceError(MantaError):
    """Base of errors with which the service answers a request. The message is complete, and part of the answer."""

    kind: ClassVar[ErrorKind]
    """How REST answers with it."""
    retry_seconds: float | None = None
    """Seconds after which the request may be sent again; None: as usual for the status."""

    @property
    def rules(self) -> Sequence[tuple[str, str]]:
        """Path of each field that the request is refused for, and the rule that it breaks."""
        return ()


class InvalidParameter(ServiceError):
    """A parameter of a request, or a field of its body, breaks a rule."""

    kind = ErrorKind(
        "invalid_parameter", 422, "a parameter or a field of the body breaks a rule; `errors` has each of them"
    )
    field: ClassVar[str]
    """Name of the parameter or field."""

    @property
    def rules(self) -> Sequence[tuple[str, str]]:
        """The field with the message."""
        return ((self.field, str(self)),)
