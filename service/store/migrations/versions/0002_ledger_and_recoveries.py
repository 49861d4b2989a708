"""What the ledger is made of: state changes, running sums of each generation, and a record of each recovery."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_COUNTS = ("committed_steps", "redone_steps")
_SECONDS = (
    "compute_seconds",
    "data_wait_seconds",
    "snapshot_stall_seconds",
    "checkpoint_stall_seconds",
    "redo_seconds",
)
_TIMES = ("trained_from", "trained_until")


def upgrade() -> None:
    """Add two tables and the sums; fill them, as far as is known, for the jobs that are there."""
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
    # Never by copying the table, as Alembic would on SQLite: dropping the old one would drop all rows that refer to it.
    with op.batch_alter_table("generations", recreate="never") as generations:
        for name in _TIMES:
            generations.add_column(sa.Column(name, sa.Double()))
        for name in _COUNTS:
            generations.add_column(sa.Column(name, sa.BigInteger(), nullable=False, server_default="0"))
        for name in _SECONDS:
            generations.add_column(sa.Column(name, sa.Double(), nullable=False, server_default="0"))
    _fill_state_changes()
    _fill_sums()
    with op.batch_alter_table("jobs", recreate="never") as jobs:
        jobs.drop_column("compute_seconds")


def _fill_state_changes() -> None:
    """From the events, which tell every change."""
    connection = op.get_bind()
    events = sa.table(
        "events",
        sa.column("id", sa.BigInteger),
        sa.column("job_id", sa.String),
        sa.column("time", sa.Double),
        sa.column("type", sa.String),
        sa.column("data", sa.JSON),
    )
    changes = sa.table(
        "state_changes", sa.column("job_id", sa.String), sa.column("time", sa.Double), sa.column("state", sa.String)
    )
    jobs = sa.table("jobs", sa.column("id", sa.String), sa.column("created_at", sa.Double))
    rows: list[dict[str, Any]] = [
        {"job_id": job_id, "time": at, "state": "QUEUED"}
        for job_id, at in connection.execute(sa.select(jobs.c.id, jobs.c.created_at))
    ]
    transitions = sa.select(events.c.job_id, events.c.time, events.c.data).where(events.c.type == "state_changed")
    rows += [
        {"job_id": job_id, "time": at, "state": data["to"]}
        for job_id, at, data in connection.execute(transitions.order_by(events.c.id))
    ]
    if rows:
        op.bulk_insert(changes, rows)


def _fill_sums() -> None:
    """From the metrics, of which each step has those of the generation that committed it last."""
    own = "FROM metrics WHERE metrics.job_id = generations.job_id AND metrics.generation = generations.generation"
    op.execute(
        f"UPDATE generations SET committed_steps = (SELECT COUNT(*) {own}), "
        f"compute_seconds = COALESCE((SELECT SUM(step_seconds) {own}), 0), "
        f"trained_from = (SELECT MIN(time - COALESCE(step_seconds, 0)) {own}), "
        f"trained_until = (SELECT MAX(time) {own})"
    )


def downgrade() -> None:
    """Drop what was added; the sum of all steps comes back."""
    with op.batch_alter_table("jobs", recreate="never") as jobs:
        jobs.add_column(sa.Column("compute_seconds", sa.Double(), nullable=False, server_default="0"))
    op.execute(
        "UPDATE jobs SET compute_seconds = COALESCE((SELECT SUM(compute_seconds) FROM generations "
        "WHERE generations.job_id = jobs.id), 0)"
    )
    with op.batch_alter_table("generations", recreate="never") as generations:
        for name in (*_TIMES, *_COUNTS, *_SECONDS):
            generations.drop_column(name)
    op.drop_table("recoveries")
    op.drop_index("ix_state_changes_job_id_id", table_name="state_changes")
    op.drop_table("state_changes")
