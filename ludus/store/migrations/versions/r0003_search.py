"""Search: indexes to sort by, the tools that trajectories called, advantages and entropies."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

Key = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Add them; older trajectories have no rows in `tool_calls`, and NULL in the columns."""
    for name in ("advantages", "entropies"):
        op.add_column("trees", sa.Column(name, sa.LargeBinary, nullable=True))
    op.create_table(
        "tool_calls",
        *_under("run_key", "runs"),
        sa.Column("tool", sa.Text, nullable=False),
        *_under("trajectory_key", "trajectories"),
        sa.Column("num_calls", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("run_key", "tool", "trajectory_key"),
    )
    op.create_index("ix_tool_calls_trajectory_key", "tool_calls", ["trajectory_key"])
    for column in ("reward", "num_tokens", "num_turns", "status"):
        columns = ["run_key", column, "key"]
        op.create_index(f"ix_trajectories_{'_'.join(columns)}", "trajectories", columns)


def _under(column: str, parent: str) -> list[sa.schema.SchemaItem]:
    return [
        sa.Column(column, Key, nullable=False),
        sa.ForeignKeyConstraint(
            [column], [f"{parent}.key"], f"fk_tool_calls_{column}", ondelete="CASCADE"
        ),
    ]
