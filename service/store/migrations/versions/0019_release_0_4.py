"""The schema of release 0.4.0: the context and expert sizes that a job runs with, which release 0.3.0 may ignore."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"


def upgrade() -> None:
    """Jobs that are there have the sizes of their spec."""
    with op.batch_alter_table("jobs", recreate="never") as jobs:
        for size in ("context", "expert"):
            jobs.add_column(sa.Column(size, sa.Integer()))


def downgrade() -> None:
    """Forget them."""
    with op.batch_alter_table("jobs", recreate="never") as jobs:
        for size in ("context", "expert"):
            jobs.drop_column(size)
