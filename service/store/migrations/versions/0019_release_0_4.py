"""The schema of release 0.4.0: the context and expert sizes that a job runs with, and the tokens of its experts, which
release 0.3.0 may ignore."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
_SIZES = ("context", "expert")


def upgrade() -> None:
    """Jobs that are there have the sizes of their spec, and no experts."""
    with op.batch_alter_table("jobs", recreate="never") as jobs:
        for size in _SIZES:
            jobs.add_column(sa.Column(size, sa.Integer()))
    with op.batch_alter_table("rank_numbers", recreate="never") as numbers:
        numbers.add_column(sa.Column("expert_tokens", sa.Text()))


def downgrade() -> None:
    """Forget them."""
    with op.batch_alter_table("rank_numbers", recreate="never") as numbers:
        numbers.drop_column("expert_tokens")
    with op.batch_alter_table("jobs", recreate="never") as jobs:
        for size in _SIZES:
            jobs.drop_column(size)
