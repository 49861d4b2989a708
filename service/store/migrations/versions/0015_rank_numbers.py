"""How the ranks of a job are doing: their own time of a step and their memory, over the last some hundred samples."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    """Releases before can go on using the database."""
    op.create_table(
        "rank_numbers",
        sa.Column("job_id", sa.String(32), nullable=False),
        sa.Column("slot", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("time", sa.Double(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("own_seconds", sa.Text()),
        sa.Column("memory_bytes", sa.Text(), nullable=False),
        sa.Column("stragglers", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "slot", name=op.f("pk_rank_numbers")),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_rank_numbers_job_id"), ondelete="CASCADE"),
    )


def downgrade() -> None:
    """Forget them."""
    op.drop_table("rank_numbers")
