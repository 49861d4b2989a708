"""Who may do what, and who did: projects, API keys, tokens of browsers, audit; and the project of each job."""

from __future__ import annotations

import time

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"

_DEFAULT_PROJECT = "default"
_JOB_INDEXES = {"ix_jobs_project_id": ["project", "id"], "ix_jobs_project_state_id": ["project", "state", "id"]}


def upgrade() -> None:
    """All jobs that are there belong to the default project. Releases before, which know of no project, leave the
    column out and put theirs there too, so they can go on using the database."""
    with op.batch_alter_table("jobs", recreate="never") as jobs:
        jobs.add_column(sa.Column("project", sa.String(64), nullable=False, server_default=_DEFAULT_PROJECT))
    for name, columns in _JOB_INDEXES.items():
        op.create_index(op.f(name), "jobs", columns)
    projects = op.create_table(
        "projects",
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_projects")),
    )
    op.bulk_insert(projects, [{"name": _DEFAULT_PROJECT, "created_at": time.time()}])
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


def downgrade() -> None:
    """Forget who is who; all jobs are everybody's again."""
    for table in ("audit", "browser_tokens", "api_keys", "projects"):
        op.drop_table(table)
    for name in _JOB_INDEXES:
        op.drop_index(op.f(name), "jobs")
    with op.batch_alter_table("jobs", recreate="never") as jobs:
        jobs.drop_column("project")
