"""Weights of checkpoints that were written for others, or are being written."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    """Releases before can go on using the database."""
    op.create_table(
        "exports",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("job_id", sa.String(32), nullable=False),
        sa.Column("checkpoint_id", sa.String(80), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("format", sa.String(16), nullable=False),
        sa.Column("dtype", sa.String(16)),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("message", sa.Text()),
        sa.Column("done_bytes", sa.BigInteger(), nullable=False),
        sa.Column("total_bytes", sa.BigInteger()),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_exports")),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_exports_job_id"), ondelete="CASCADE"),
    )
    op.create_index(op.f("ix_exports_job_id_id"), "exports", ["job_id", "id"])


def downgrade() -> None:
    """Forget them; what was written stays where it is."""
    op.drop_table("exports")
