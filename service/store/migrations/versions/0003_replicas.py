"""How many replicas a job runs with, and how many it shall run with."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

_COLUMNS = ("replicas", "wanted_replicas")


def upgrade() -> None:
    """Add both; unknown means: as many as the spec says."""
    with op.batch_alter_table("jobs", recreate="never") as jobs:
        for name in _COLUMNS:
            jobs.add_column(sa.Column(name, sa.Integer()))


def downgrade() -> None:
    """Drop both."""
    with op.batch_alter_table("jobs", recreate="never") as jobs:
        for name in _COLUMNS:
            jobs.drop_column(name)
