"""Traces: single steps of jobs, recorded action by action."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"

_TRACES, _PARTS, _INDEX = "step_traces", "step_trace_parts", "ix_step_traces_state"


def upgrade() -> None:
    """Releases before, which know of no traces, can go on using the database."""
    op.create_table(
        _TRACES,
        sa.Column("job_id", sa.String(32), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("message", sa.Text()),
        sa.Column("steps", sa.Integer(), nullable=False),
        sa.Column("wanted_step", sa.BigInteger(), nullable=False),
        sa.Column("profiler_ranks", sa.JSON(), nullable=False),
        sa.Column("generation", sa.Integer()),
        sa.Column("first_step", sa.BigInteger()),
        sa.Column("parallel", sa.JSON()),
        sa.Column("nodes", sa.JSON()),
        sa.Column("slices", sa.BigInteger(), nullable=False),
        sa.Column("requested_at", sa.Double(), nullable=False),
        sa.Column("finished_at", sa.Double()),
        sa.PrimaryKeyConstraint("job_id", "number", name=op.f("pk_step_traces")),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_step_traces_job_id"), ondelete="CASCADE"),
    )
    op.create_index(_INDEX, _TRACES, ["state"])
    op.create_table(
        _PARTS,
        sa.Column("job_id", sa.String(32), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("rank", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("recording", sa.JSON()),
        sa.Column("profile", sa.LargeBinary()),
        sa.PrimaryKeyConstraint("job_id", "number", "rank", name=op.f("pk_step_trace_parts")),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_step_trace_parts_job_id"), ondelete="CASCADE"),
    )


def downgrade() -> None:
    """Forget all traces."""
    op.drop_table(_PARTS)
    op.drop_index(_INDEX, table_name=_TRACES)
    op.drop_table(_TRACES)
