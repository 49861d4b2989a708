"""One save of a checkpoint, as seen by the thread that carries it out: by the time it ends, its ranks may be in a later
generation."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from manta.workers.comm.shared_work import SharedWork


@dataclass
class Save:
    """A save of the state of committed step `step`."""

    step: int
    path: str
    generation: int
    """The generation that saves."""
    ranks: SharedWork
    """Shared work of that generation."""
    small: dict[str, list[float]]
    """Values of the small parts of the state that a step may change, by name."""
    numbers: dict[str, Any] | None
    """The manifest's numbers, for the steps up to this one."""
    if_it_fails: str
    """The consequence of a failure, in words."""
    copied: threading.Event = field(default_factory=threading.Event)
    """Set once the state may change, since it has been copied."""
    abandoned: bool = False
    """Whether its ranks have left each other, and nothing waits for it any more."""


@dataclass
class SaveSearch:
    """A search for a save that earlier generations did not complete."""

    step: int
    """Committed step at which it began."""
    is_missing: bool = False
    """The result: whether the save is missing."""
