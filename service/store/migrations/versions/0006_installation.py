"""Which installation this is, so that several can share a Ray cluster."""

from __future__ import annotations

import secrets

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"

_OLD_NAMESPACE = "manta"
"""Of all installations of the releases before, whose agents may still run."""


def upgrade() -> None:
    """Make the id. A database with jobs in it keeps the namespace in which their agents are found."""
    table = op.create_table(
        "installation",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("ray_namespace", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_installation")),
    )
    made = secrets.token_hex(8)
    has_jobs = op.get_bind().execute(sa.text("SELECT 1 FROM jobs LIMIT 1")).first() is not None
    op.bulk_insert(table, [{"id": made, "ray_namespace": _OLD_NAMESPACE if has_jobs else f"manta-{made}"}])


def downgrade() -> None:
    """Forget it."""
    op.drop_table("installation")
