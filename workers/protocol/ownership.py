"""Who may give orders to an agent: of several control planes, the one that took over its job last.

Each call carries the epoch of the caller's lease. It is an argument that agents of releases before do not know, and
ignore; calls of releases before do not have it, and are served: those know of one control plane only.
"""

from __future__ import annotations

from workers.errors import MantaError
from workers.protocol.json_codec import JsonObject

EPOCH = "owner_epoch"
READS = frozenset({"describe", "progress", "stacks", "snapshot_steps", "snapshot_files", "backup_progress"})
"""Calls that change nothing, and are answered to every caller."""


class StaleOwner(MantaError):
    """Another control plane has taken over since; drop the order and the job."""


class Ownership:
    """The highest epoch that was seen."""

    def __init__(self) -> None:
        self.epoch = 0

    def admit(self, method: str, arguments: JsonObject) -> None:
        """Take note of the epoch of a call. Raises StaleOwner where it is none of the newest owner's, and not a
        read."""
        epoch = arguments.get(EPOCH)
        if not isinstance(epoch, int):
            return
        if epoch < self.epoch and method not in READS:
            raise StaleOwner(f"{method} was refused: its caller has epoch {epoch}, and another one {self.epoch} by now")
        self.epoch = max(self.epoch, epoch)
