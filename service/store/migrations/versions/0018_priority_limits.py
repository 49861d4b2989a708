"""How high the priorities may be that jobs are given with a key."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"

_KEYS, _COLUMN = "api_keys", "highest_priority"


def upgrade() -> None:
    """Keys that are there go on giving any. Releases before can go on using the database, and hold no key to this."""
    with op.batch_alter_table(_KEYS, recreate="never") as keys:
        keys.add_column(sa.Column(_COLUMN, sa.Integer()))


def downgrade() -> None:
    """Every key gives any priority again."""
    with op.batch_alter_table(_KEYS, recreate="never") as keys:
        keys.drop_column(_COLUMN)
