"""A job that failed can be tried again: since when its failures count, and how long its snapshots are kept for that."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"

_COLUMNS = ("retried_at", "memory_kept_until")


def upgrade() -> None:
    """Add both; unknown means: never tried again, and nothing is kept."""
    with op.batch_alter_table("jobs", recreate="never") as jobs:
        for name in _COLUMNS:
            jobs.add_column(sa.Column(name, sa.Double()))


def downgrade() -> None:
    """Drop both."""
    with op.batch_alter_table("jobs", recreate="never") as jobs:
        for name in _COLUMNS:
            jobs.drop_column(name)
