"""What a node's daemon holds for snapshots."""

from __future__ import annotations

import os

from manta.workers.snapshot.node_memory import MemoryServer


def held_bytes(keeper: MemoryServer) -> int:
    """Of all the memory that is held."""
    return sum(os.fstat(descriptor).st_size for descriptor in keeper._files)
