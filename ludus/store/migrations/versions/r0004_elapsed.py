"""The wall time of a run's processes."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Add the column; it is NULL in older rows."""
    op.add_column("runs", sa.Column("elapsed_s", sa.Double, nullable=True))
