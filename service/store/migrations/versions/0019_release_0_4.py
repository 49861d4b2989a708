"""The schema of release 0.4.0: the context size that a job runs with, which release 0.3.0 may ignore."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"


def upgrade() -> None:
    """Jobs that are there have the size of their spec."""
    with op.batch_alter_table("jobs", recreate="never") as jobs:
        jobs.add_column(sa.Column("context", sa.Integer()))


def downgrade() -> None:
    """Forget it."""
    with op.batch_alter_table("jobs", recreate="never") as jobs:
        jobs.drop_column("context")
