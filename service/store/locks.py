"""Advisory locks of PostgreSQL: numbers that are the same for all control planes of a database."""

from __future__ import annotations

_MANTA = 0x6D616E7461 << 8
"""Five letters, so that other users of the database are unlikely to use the same number."""

MIGRATION_LOCK = _MANTA + 1
"""Held while the schema is migrated."""
EVENTS_LOCK = _MANTA + 2
"""Held, until the end of the transaction, while events are appended: their ids are committed in order."""
MEMBERS_LOCK = _MANTA + 3
"""Held, until the end of the transaction, while a control plane is added or removed, and shared while a lease is
taken."""
