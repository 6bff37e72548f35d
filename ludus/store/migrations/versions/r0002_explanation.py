"""The judge's explanation of a trajectory's score."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add the column; it is NULL in older rows."""
    op.add_column("trajectories", sa.Column("explanation", sa.Text, nullable=True))
