"""Who submitted a job, and its labels, so that lists can be filtered by both."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"

_OWNERS = "ix_jobs_owner_id"


def upgrade() -> None:
    """Of the jobs that are there nobody knows who submitted them, and none has labels. Releases before can go on using
    the database."""
    with op.batch_alter_table("jobs", recreate="never") as jobs:
        jobs.add_column(sa.Column("owner", sa.String(100)))
    op.create_index(_OWNERS, "jobs", ["owner", "id"])
    op.create_table(
        "job_labels",
        sa.Column("job_id", sa.String(32), nullable=False),
        sa.Column("key", sa.String(320), nullable=False),
        sa.Column("value", sa.String(63), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "key", name=op.f("pk_job_labels")),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_job_labels_job_id"), ondelete="CASCADE"),
    )
    op.create_index(op.f("ix_job_labels_key_value_job_id"), "job_labels", ["key", "value", "job_id"])


def downgrade() -> None:
    """Forget both; labels are still in the specs."""
    op.drop_table("job_labels")
    op.drop_index(_OWNERS, table_name="jobs")
    with op.batch_alter_table("jobs", recreate="never") as jobs:
        jobs.drop_column("owner")
