"""The schema of release 0.3.0, which release 0.2.0 cannot use: deletion of jobs, identities, several control planes,
labels and owners, metrics in bins, numbers of ranks, exports, step traces."""

from __future__ import annotations

import time
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0006"

OLDEST_READER = "0009"
"""A release whose newest revision is lower cannot use the database. A later migration that only adds what may be
ignored leaves it as it is."""
DEFAULT_PROJECT = "default"
_INDEXES_OF_JOBS = {
    "ix_jobs_project_id": ["project", "id"],
    "ix_jobs_project_state_id": ["project", "state", "id"],
    "ix_jobs_state_priority_id": ["state", "priority", "id"],
    "ix_jobs_owner_id": ["owner", "id"],
}
_TABLES = (
    *("step_trace_parts", "step_traces", "exports", "rank_numbers", "job_labels", "metric_bins", "leases"),
    *("control_planes", "audit", "browser_tokens", "api_keys", "projects", "compatibility", "deleted_jobs"),
)


def upgrade() -> None:
    """Jobs that are there belong to the default project; who submitted them, and what their users wrote, is unknown.
    Bins of their metrics are made later, a piece at a time."""
    # Never by copying the table, as Alembic would on SQLite: dropping the old one would drop all rows that refer to it.
    with op.batch_alter_table("jobs", recreate="never") as jobs:
        for column in _columns_of_jobs():
            jobs.add_column(column)
    for name, columns in _INDEXES_OF_JOBS.items():
        op.create_index(op.f(name), "jobs", columns)
    with op.batch_alter_table("installation", recreate="never") as installation:
        installation.add_column(sa.Column("home", sa.Text()))
    if op.get_bind().dialect.name == "sqlite":  # it gives the id of the newest row again once that row is gone
        with op.batch_alter_table("events", recreate="always", table_kwargs={"sqlite_autoincrement": True}):
            pass
    _create_what_outlives_jobs()
    _create_identities()
    _create_control_planes()
    _create_what_jobs_have()
    _create_step_traces()


def _columns_of_jobs() -> list[sa.Column[Any]]:
    return [
        sa.Column("deletion_began_at", sa.Double()),
        sa.Column("submitted", sa.JSON()),
        sa.Column("not_default", sa.JSON()),
        sa.Column("project", sa.String(64), nullable=False, server_default=DEFAULT_PROJECT),
        sa.Column("binned_until", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("binned_generation", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("owner", sa.String(100)),
    ]


def _create_what_outlives_jobs() -> None:
    op.create_table(
        "deleted_jobs",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("deleted_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_deleted_jobs")),
    )
    compatibility = op.create_table(
        "compatibility",
        sa.Column("oldest_reader", sa.String(32), nullable=False),
        sa.PrimaryKeyConstraint("oldest_reader", name=op.f("pk_compatibility")),
    )
    op.bulk_insert(compatibility, [{"oldest_reader": OLDEST_READER}])


def _create_identities() -> None:
    projects = op.create_table(
        "projects",
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_projects")),
    )
    op.bulk_insert(projects, [{"name": DEFAULT_PROJECT, "created_at": time.time()}])
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("user_name", sa.String(100)),
        sa.Column("project", sa.String(64), nullable=False),
        sa.Column("scope", sa.String(16), nullable=False),
        sa.Column("installation", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double()),
        sa.Column("revoked_at", sa.Double()),
        sa.Column("highest_priority", sa.Integer()),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("digest", name=op.f("uq_api_keys_digest")),
        sa.ForeignKeyConstraint(["project"], ["projects.name"], name=op.f("fk_api_keys_project")),
    )
    op.create_index(op.f("ix_api_keys_project_id"), "api_keys", ["project", "id"])
    op.create_table(
        "browser_tokens",
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("key_id", sa.String(32), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_browser_tokens")),
        sa.ForeignKeyConstraint(["key_id"], ["api_keys.id"], name=op.f("fk_browser_tokens_key_id")),
    )
    op.create_table(
        "audit",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("time", sa.Double(), nullable=False),
        sa.Column("project", sa.String(64), nullable=False),
        sa.Column("key_id", sa.String(32)),
        sa.Column("key_name", sa.Text(), nullable=False),
        sa.Column("user_name", sa.Text()),
        sa.Column("operation", sa.String(64), nullable=False),
        sa.Column("target", sa.String(200)),
        sa.Column("address", sa.String(64)),
        sa.Column("status", sa.Integer(), nullable=False),
        sa.Column("code", sa.String(64)),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_audit_project_id"), "audit", ["project", "id"])


def _create_control_planes() -> None:
    op.create_table(
        "control_planes",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("place", sa.Text(), nullable=False),
        sa.Column("ray", sa.Text(), nullable=False),
        sa.Column("lease_until", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_control_planes")),
    )
    op.create_table(
        "leases",
        sa.Column("name", sa.String(32), nullable=False),
        sa.Column("owner", sa.String(32)),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_leases")),
    )


def _create_what_jobs_have() -> None:
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
    op.create_table(
        "job_labels",
        sa.Column("job_id", sa.String(32), nullable=False),
        sa.Column("key", sa.String(320), nullable=False),
        sa.Column("value", sa.String(63), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "key", name=op.f("pk_job_labels")),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_job_labels_job_id"), ondelete="CASCADE"),
    )
    op.create_index(op.f("ix_job_labels_key_value_job_id"), "job_labels", ["key", "value", "job_id"])
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


def _create_step_traces() -> None:
    op.create_table(
        "step_traces",
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
    op.create_index("ix_step_traces_state", "step_traces", ["state"])
    op.create_table(
        "step_trace_parts",
        sa.Column("job_id", sa.String(32), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("rank", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("recording", sa.JSON()),
        sa.Column("profile", sa.LargeBinary()),
        sa.PrimaryKeyConstraint("job_id", "number", "rank", name=op.f("pk_step_trace_parts")),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_step_trace_parts_job_id"), ondelete="CASCADE"),
    )


def downgrade() -> None:
    """Forget all of it."""
    for table in _TABLES:
        op.drop_table(table)
    if op.get_bind().dialect.name == "sqlite":
        with op.batch_alter_table("events", recreate="always"):
            pass
    with op.batch_alter_table("installation", recreate="never") as installation:
        installation.drop_column("home")
    for name in _INDEXES_OF_JOBS:
        op.drop_index(op.f(name), "jobs")
    with op.batch_alter_table("jobs", recreate="never") as jobs:
        for column in reversed(_columns_of_jobs()):
            jobs.drop_column(column.name)
