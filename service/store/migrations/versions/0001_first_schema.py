"""The first schema: jobs, their generations, ranks, events, metrics and checkpoints."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_SORTED = sa.String(length=32).with_variant(sa.String(length=32, collation="C"), "postgresql")
"""Text that is in the order of its characters, in whatever language the database sorts."""


def upgrade() -> None:
    """Make all tables."""
    op.create_table(
        "jobs",
        sa.Column("id", _SORTED, nullable=False),
        sa.Column("name", sa.String(length=100), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.String(length=64)),
        sa.Column("message", sa.Text()),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("steps", sa.BigInteger(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("restarts", sa.Integer(), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("idempotency_key", sa.String(length=200)),
        sa.Column("body_digest", sa.String(length=64)),
        sa.Column("waiting_for", sa.JSON()),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.Column("compute_seconds", sa.Double(), nullable=False),
        sa.Column("report_cursor", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double()),
        sa.Column("finished_at", sa.Double()),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_jobs"),
        sa.UniqueConstraint("idempotency_key", name="uq_jobs_idempotency_key"),
    )
    op.create_index("ix_jobs_name_id", "jobs", ["name", "id"])
    op.create_index("ix_jobs_state_id", "jobs", ["state", "id"])
    op.create_table(
        "checkpoints",
        sa.Column("id", sa.String(length=80), nullable=False),
        sa.Column("job_id", sa.String(length=32), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("bytes", sa.BigInteger()),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("completed_at", sa.Double()),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_checkpoints_job_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name="pk_checkpoints"),
    )
    op.create_index("ix_checkpoints_job_id_step", "checkpoints", ["job_id", "step"])
    op.create_table(
        "events",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("job_id", sa.String(length=32), nullable=False),
        sa.Column("time", sa.Double(), nullable=False),
        sa.Column("type", sa.String(length=64), nullable=False),
        sa.Column("generation", sa.Integer()),
        sa.Column("rank", sa.Integer()),
        sa.Column("step", sa.BigInteger()),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_events_job_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name="pk_events"),
    )
    op.create_index("ix_events_job_id_id", "events", ["job_id", "id"])
    op.create_table(
        "generations",
        sa.Column("job_id", sa.String(length=32), nullable=False),
        sa.Column("generation", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("cause", sa.Text(), nullable=False),
        sa.Column("resume_source", sa.String(length=16), nullable=False),
        sa.Column("resume_step", sa.BigInteger(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("first_step_at", sa.Double()),
        sa.Column("ended_at", sa.Double()),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_generations_job_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "generation", name="pk_generations"),
    )
    op.create_table(
        "metrics",
        sa.Column("job_id", sa.String(length=32), nullable=False),
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("time", sa.Double(), nullable=False),
        sa.Column("loss", sa.Double()),
        sa.Column("validation_loss", sa.Double()),
        sa.Column("grad_norm", sa.Double()),
        sa.Column("learning_rate", sa.Double()),
        sa.Column("tokens", sa.Double()),
        sa.Column("tokens_per_second", sa.Double()),
        sa.Column("step_seconds", sa.Double()),
        sa.Column("mfu_full", sa.Double()),
        sa.Column("mfu_causal", sa.Double()),
        sa.Column("hfu_full", sa.Double()),
        sa.Column("memory_bytes", sa.Double()),
        sa.Column("extra", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_metrics_job_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "step", name="pk_metrics"),
    )
    op.create_table(
        "ranks",
        sa.Column("job_id", sa.String(length=32), nullable=False),
        sa.Column("rank", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("tensor", sa.Integer(), nullable=False),
        sa.Column("pipeline", sa.Integer(), nullable=False),
        sa.Column("data", sa.Integer(), nullable=False),
        sa.Column("context", sa.Integer(), nullable=False),
        sa.Column("node", sa.String(length=200)),
        sa.Column("device", sa.String(length=100)),
        sa.Column("pid", sa.Integer()),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=32), nullable=False),
        sa.Column("actor", sa.String(length=200)),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_ranks_job_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "rank", name="pk_ranks"),
    )


def downgrade() -> None:
    """Drop all tables."""

    op.drop_table("ranks")
    op.drop_table("metrics")
    op.drop_table("generations")
    op.drop_index("ix_events_job_id_id", table_name="events")
    op.drop_table("events")
    op.drop_index("ix_checkpoints_job_id_step", table_name="checkpoints")
    op.drop_table("checkpoints")
    op.drop_index("ix_jobs_state_id", table_name="jobs")
    op.drop_index("ix_jobs_name_id", table_name="jobs")
    op.drop_table("jobs")
