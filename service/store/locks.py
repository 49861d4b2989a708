"""Advisory locks of PostgreSQL: numbers on which all control planes of a database agree."""

from __future__ import annotations

_MANTA = 0x6D616E7461 << 8
"""Five letters, so that other users of the database do not take the same by chance."""

MIGRATION_LOCK = _MANTA + 1
"""Held by who brings the schema to another revision."""
EVENTS_LOCK = _MANTA + 2
"""Held, to the end of its transaction, by who appends events: their ids are committed in order."""
MEMBERS_LOCK = _MANTA + 3
"""Held by who adds or removes a control plane, and shared by who takes a lease, to the end of the transaction."""
