"""What other releases need to know: which of them can use this database, and what of a spec is not a default."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0007"


def upgrade() -> None:
    """Of jobs that are there it is not known any more what their users wrote."""
    with op.batch_alter_table("jobs", recreate="never") as jobs:
        jobs.add_column(sa.Column("submitted", sa.JSON()))
        jobs.add_column(sa.Column("not_default", sa.JSON()))
    table = op.create_table(
        "compatibility",
        sa.Column("oldest_reader", sa.String(32), nullable=False),
        sa.PrimaryKeyConstraint("oldest_reader", name=op.f("pk_compatibility")),
    )
    # A later migration that only adds what may be ignored leaves this row as it is; any other one says its own number.
    op.bulk_insert(table, [{"oldest_reader": revision}])


def downgrade() -> None:
    """Forget it."""
    op.drop_table("compatibility")
    with op.batch_alter_table("jobs", recreate="never") as jobs:
        jobs.drop_column("not_default")
        jobs.drop_column("submitted")
