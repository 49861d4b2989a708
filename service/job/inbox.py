"""What a running job is asked for, as values, and the inbox in which its supervisor finds them.

A request says that something has changed; what exactly is in the database, where it was written first. So one that is
repeated changes nothing, and one that is lost with its control plane is found there by the next.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Cancel:
    """The job is CANCELLING, or CANCELLED before it had an owner: stop it."""


@dataclass(frozen=True)
class Pause:
    """The job is PAUSING, or PAUSED before it had an owner: have it save its state and give its places back."""


@dataclass(frozen=True)
class Resize:
    """The size or place of the job may have to change, or may be able to: check."""


@dataclass(frozen=True)
class Trace:
    """A trace of the job may have been requested."""


@dataclass(frozen=True)
class NodeLost:
    """A node is lost, and with it all agents there."""

    node: str
    why: str


@dataclass(frozen=True)
class NodeDraining:
    """A node is being drained."""

    node: str
    seconds: float | None
    """Within which it will be gone; None: unknown."""
    reason: str = ""
    """In words; empty if none was given."""


JobRequest = Cancel | Pause | Resize | Trace | NodeLost | NodeDraining


@dataclass(frozen=True)
class TimeUp:
    """The job has taken as long as it may (`max_duration`): save its state, and end."""


@dataclass(frozen=True)
class WaitInQueue:
    """All ranks save their state and end, and the job waits in the queue for places: its nodes are being drained, and
    there is no room elsewhere."""

    why: str
    """In words."""


@dataclass(frozen=True)
class Overdue:
    """The job, which is to save its state and leave, has had long enough to do so."""


Note = JobRequest | TimeUp | WaitInQueue | Overdue
LEAVE = (Pause, TimeUp, WaitInQueue)
"""Classes of notes that all have the job save its state and give its places back (`leave.py`)."""


class Inbox:
    """Requests to one job, and notes that the parts of its supervision leave for each other: the newest of each class.
    For one event loop."""

    def __init__(self) -> None:
        self._notes: dict[type[Note], Note] = {}
        self._next = asyncio.Event()

    def put(self, note: Note) -> None:
        """Add `note`, in place of an earlier one of its class."""
        self._notes[type(note)] = note
        self._next.set()
        self._next = asyncio.Event()

    def remove(self, kind: type[Note]) -> None:
        """Remove the note of this class, if there is one: it is being handled."""
        self._notes.pop(kind, None)

    def has(self, *kinds: type[Note]) -> bool:
        """Whether there is a note of any of these classes."""
        return not self._notes.keys().isdisjoint(kinds)

    async def wait(self, *kinds: type[Note], seconds: float | None = None) -> None:
        """Return when there is a note of any of these classes, or after `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self.has(*kinds):
                    await self._next.wait()

    @property
    def no_room(self) -> str:
        """Why it will wait in the queue after leaving; empty if it leaves for another reason, or does not leave."""
        note = self._notes.get(WaitInQueue)
        return note.why if isinstance(note, WaitInQueue) else ""
