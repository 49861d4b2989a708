"""That a machine is to be taken: what is said about it, and who says so."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from workers.errors import MantaError


class SourceUnavailable(MantaError):
    """A source of notices does not answer, or not as it should: whether the machine is to be taken is unknown."""


@dataclass(frozen=True)
class Notice:
    """The machine goes."""

    id: str
    """The same as long as the same is meant."""
    seconds: float | None
    """For how long it can still be counted on, from when that was asked; None where that is not said."""
    reason: str
    """Why, in words."""


class NoticeSource(Protocol):
    """A service that knows whether the machine is to be taken away."""

    @property
    def name(self) -> str:
        """As `MANTA_NODE_NOTICES` names it."""
        ...

    def notice(self, now: datetime) -> Notice | None:
        """What is said at `now`, by this machine's clock; None where the machine stays. Raises SourceUnavailable."""
        ...


def most_urgent(notices: list[Notice]) -> Notice | None:
    """The one that leaves the least time; one that says nothing about time leaves the most."""
    return min(notices, key=lambda notice: (notice.seconds is None, notice.seconds or 0.0), default=None)
