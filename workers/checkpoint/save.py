"""One save of a checkpoint, as the thread knows it that carries it out: by the time it ends its ranks may be in a later
generation."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from workers.comm.shared_work import SharedWork


@dataclass
class Save:
    """Of the state of committed step `step`."""

    step: int
    path: str
    generation: int
    """That makes it."""
    ranks: SharedWork
    """Of that generation."""
    loss_scale: list[float] | None
    numbers: dict[str, Any] | None
    """What the manifest says of the numbers up to this step."""
    if_it_fails: str
    """What happens then, in words."""
    copied: threading.Event = field(default_factory=threading.Event)
    """Set once the state may change, which is being copied aside until then."""
    left_behind: bool = False
    """Whether its ranks have left each other and nothing waits for it any more."""


@dataclass
class Look:
    """For a save that generations before did not get to make."""

    step: int
    """Committed step at which it began."""
    is_missing: bool = False
    """What came of it."""
