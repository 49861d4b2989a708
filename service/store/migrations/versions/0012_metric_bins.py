"""Metrics in bins: of each few steps the one with the highest loss, so that a long series need not be read in full."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"

_OF_JOBS = ("binned_until", "binned_generation")


def upgrade() -> None:
    """The bins of the metrics that are there are made later, a piece at a time: until then those are read one by one.
    Releases before, which know of no bins, can go on using the database."""
    op.create_table(
        "metric_bins",
        sa.Column("job_id", sa.String(32), nullable=False),
        sa.Column("level", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("bin", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("loss", sa.Double()),
        sa.PrimaryKeyConstraint("job_id", "level", "bin", name=op.f("pk_metric_bins")),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_metric_bins_job_id"), ondelete="CASCADE"),
    )
    with op.batch_alter_table("jobs", recreate="never") as jobs:
        for name in _OF_JOBS:
            jobs.add_column(sa.Column(name, sa.BigInteger(), nullable=False, server_default="0"))


def downgrade() -> None:
    """Forget the bins; all of the metrics are still there."""
    with op.batch_alter_table("jobs", recreate="never") as jobs:
        for name in _OF_JOBS:
            jobs.drop_column(name)
    op.drop_table("metric_bins")
