"""With which tensor- and pipeline-parallel sizes a job runs, where it had to go on with smaller ones."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

_COLUMNS = ("tensor", "pipeline")


def upgrade() -> None:
    """Add both; unknown means: as the spec says."""
    with op.batch_alter_table("jobs", recreate="never") as jobs:
        for name in _COLUMNS:
            jobs.add_column(sa.Column(name, sa.Integer()))


def downgrade() -> None:
    """Drop both."""
    with op.batch_alter_table("jobs", recreate="never") as jobs:
        for name in _COLUMNS:
            jobs.drop_column(name)
