"""The place of a job in the queue is counted in an index, not in the rows of all that wait."""

from __future__ import annotations

from alembic import op

revision = "0013"
down_revision = "0012"

_INDEX = "ix_jobs_state_priority_id"


def upgrade() -> None:
    """Releases before can go on using the database."""
    op.create_index(_INDEX, "jobs", ["state", "priority", "id"])


def downgrade() -> None:
    """Count in the rows again."""
    op.drop_index(_INDEX, table_name="jobs")
