"""The schema of release 0.2.0."""

from __future__ import annotations

import secrets

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = None

_SORTED = sa.String(length=32).with_variant(sa.String(length=32, collation="C"), "postgresql")
"""Text that is in the order of its characters, in whatever language the database sorts."""
_TABLES = (
    *("installation", "recoveries", "state_changes", "ranks", "metrics", "generations", "events", "checkpoints"),
    "jobs",
)


def upgrade() -> None:
    """Make all tables, and this installation's id."""
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
        sa.Column("report_cursor", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double()),
        sa.Column("finished_at", sa.Double()),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.Column("replicas", sa.Integer()),
        sa.Column("wanted_replicas", sa.Integer()),
        sa.Column("tensor", sa.Integer()),
        sa.Column("pipeline", sa.Integer()),
        sa.Column("retried_at", sa.Double()),
        sa.Column("memory_kept_until", sa.Double()),
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
        sa.Column("trained_from", sa.Double()),
        sa.Column("trained_until", sa.Double()),
        sa.Column("committed_steps", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("redone_steps", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("compute_seconds", sa.Double(), nullable=False, server_default="0"),
        sa.Column("data_wait_seconds", sa.Double(), nullable=False, server_default="0"),
        sa.Column("snapshot_stall_seconds", sa.Double(), nullable=False, server_default="0"),
        sa.Column("checkpoint_stall_seconds", sa.Double(), nullable=False, server_default="0"),
        sa.Column("redo_seconds", sa.Double(), nullable=False, server_default="0"),
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
    op.create_table(
        "state_changes",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("job_id", sa.String(length=32), nullable=False),
        sa.Column("time", sa.Double(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_state_changes_job_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name="pk_state_changes"),
    )
    op.create_index("ix_state_changes_job_id_id", "state_changes", ["job_id", "id"])
    op.create_table(
        "recoveries",
        sa.Column("job_id", sa.String(length=32), nullable=False),
        sa.Column("generation", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("cause", sa.Text(), nullable=False),
        sa.Column("node", sa.String(length=200)),
        sa.Column("forked", sa.JSON(), nullable=False),
        sa.Column("kept", sa.Integer(), nullable=False),
        sa.Column("source", sa.String(length=32), nullable=False),
        sa.Column("resume_step", sa.BigInteger(), nullable=False),
        sa.Column("steps_redone", sa.BigInteger()),
        sa.Column("wait_seconds", sa.Double(), nullable=False),
        sa.Column("failed_at", sa.Double()),
        sa.Column("noticed_at", sa.Double(), nullable=False),
        sa.Column("rested_at", sa.Double()),
        sa.Column("launched_at", sa.Double()),
        sa.Column("connected_at", sa.Double()),
        sa.Column("restored_at", sa.Double()),
        sa.Column("first_step_at", sa.Double()),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_recoveries_job_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "generation", name="pk_recoveries"),
    )
    installation = op.create_table(
        "installation",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("ray_namespace", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_installation")),
    )
    made = secrets.token_hex(8)
    op.bulk_insert(installation, [{"id": made, "ray_namespace": f"manta-{made}"}])


def downgrade() -> None:
    """Drop all tables."""
    for table in _TABLES:
        op.drop_table(table)
