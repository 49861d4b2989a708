"""Notices that a machine is to be taken away, and who gives them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from workers.errors import MantaError


class SourceUnavailable(MantaError):
    """A source of notices does not answer, or gives an unexpected answer: it is unknown whether the machine is to be
    taken away."""


@dataclass(frozen=True)
class Notice:
    """The machine is going to be taken away."""

    id: str
    """Stays the same as long as the notice is about the same event."""
    seconds: float | None
    """How long the machine can still be relied on, counted from the request; None if that is not said."""
    reason: str
    """The reason, in words."""


class NoticeSource(Protocol):
    """A service that knows whether the machine is to be taken away."""

    @property
    def name(self) -> str:
        """Name of the service in `MANTA_NODE_NOTICES`."""
        ...

    def notice(self, now: datetime) -> Notice | None:
        """The notice at `now`, by this machine's clock; None if the machine stays. Raises SourceUnavailable."""
        ...


def most_urgent(notices: list[Notice]) -> Notice | None:
    """The notice that leaves the least time, where one without a time leaves the most; None if there are no notices."""
    return min(notices, key=lambda notice: (notice.seconds is None, notice.seconds or 0.0), default=None)
