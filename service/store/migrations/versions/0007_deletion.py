"""Jobs can be deleted: since when one is being deleted, which ones were, and event ids that are never given twice."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Nothing is being deleted, and nothing was."""
    with op.batch_alter_table("jobs", recreate="never") as jobs:
        jobs.add_column(sa.Column("deletion_began_at", sa.Double()))
    op.create_table(
        "deleted_jobs",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("deleted_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_deleted_jobs")),
    )
    if op.get_bind().dialect.name == "sqlite":  # it gives the id of the newest row again once that row is gone
        with op.batch_alter_table("events", recreate="always", table_kwargs={"sqlite_autoincrement": True}):
            pass


def downgrade() -> None:
    """Forget all of it."""
    if op.get_bind().dialect.name == "sqlite":
        with op.batch_alter_table("events", recreate="always"):
            pass
    op.drop_table("deleted_jobs")
    with op.batch_alter_table("jobs", recreate="never") as jobs:
        jobs.drop_column("deletion_began_at")
