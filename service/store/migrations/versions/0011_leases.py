"""Which control planes there are, and which of them looks after which job; where the jobs' files are."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    """Nobody looks after anything yet. Releases before know none of this, and can go on using the database alone."""
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
    with op.batch_alter_table("installation", recreate="never") as installation:
        installation.add_column(sa.Column("home", sa.Text()))


def downgrade() -> None:
    """Forget it."""
    with op.batch_alter_table("installation", recreate="never") as installation:
        installation.drop_column("home")
    op.drop_table("leases")
    op.drop_table("control_planes")
