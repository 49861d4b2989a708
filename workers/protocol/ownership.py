"""Who may give orders to an agent: of several control planes, the one that took over its job last.

Each call carries the epoch of the caller's lease. Agents of earlier releases do not know this argument and ignore it;
calls of earlier releases do not have it and are served: these know of only one control plane.
"""

from __future__ import annotations

from workers.errors import MantaError
from workers.protocol.json_codec import JsonObject

EPOCH = "owner_epoch"
FOR_ALL = frozenset({"describe", "progress", "stacks", "snapshot_steps", "snapshot_files", "backup_progress", "arm"})
"""Calls that are answered for every caller: they change nothing, or inject a fault, which a user may ask any control
plane for."""


class StaleOwner(MantaError):
    """Another control plane has taken over in the meantime; drop the order and the job."""


class Ownership:
    """The highest epoch seen so far."""

    def __init__(self) -> None:
        self.epoch = 0

    def admit(self, method: str, arguments: JsonObject) -> None:
        """Record the epoch of a call. Raises StaleOwner if it is lower than the newest owner's and the call is not
        for all."""
        epoch = arguments.get(EPOCH)
        if not isinstance(epoch, int):
            return
        if epoch < self.epoch and method not in FOR_ALL:
            raise StaleOwner(f"{method} was refused: its caller has epoch {epoch}, and another one {self.epoch} by now")
        self.epoch = max(self.epoch, epoch)
