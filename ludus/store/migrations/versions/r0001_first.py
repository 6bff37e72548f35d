"""The first schema: runs, steps, groups, trajectories, trees, dropped."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

Key = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _key() -> list[sa.schema.SchemaItem]:
    return [sa.Column("key", Key), sa.PrimaryKeyConstraint("key")]


def _under(table: str, column: str, parent: str) -> list[sa.schema.SchemaItem]:
    return [
        sa.Column(column, Key, nullable=False),
        sa.ForeignKeyConstraint(
            [column], [f"{parent}.key"], f"fk_{table}_{column}", ondelete="CASCADE"
        ),
    ]


def _columns(kind: type[sa.types.TypeEngine[Any]], *names: str) -> list[sa.schema.SchemaItem]:
    """One column a name; a question mark at its end allows NULL."""
    return [sa.Column(name.rstrip("?"), kind(), nullable=name.endswith("?")) for name in names]


def upgrade() -> None:
    """Create every table and index."""
    op.create_table(
        "runs",
        *_key(),
        *_columns(sa.Text, "id", "name", "status", "config", "versions", "error?"),
        *_columns(sa.Double, "created", "finished?"),
        sa.UniqueConstraint("id", name="uq_runs_id"),
    )
    op.create_table(
        "steps",
        *_key(),
        *_under("steps", "run_key", "runs"),
        *_columns(sa.Text, "stage", "metrics"),
        *_columns(sa.BigInteger, "step", "policy_version?"),
        *_columns(sa.Double, "started", "seconds?"),
        sa.UniqueConstraint("run_key", "stage", "step", name="uq_steps_run_key_stage_step"),
    )
    op.create_table(
        "groups",
        *_key(),
        *_under("groups", "step_key", "steps"),
        *_columns(sa.Text, "id", "task"),
    )
    op.create_table(
        "trajectories",
        *_key(),
        *_under("trajectories", "run_key", "runs"),
        *_under("trajectories", "step_key", "steps"),
        *_under("trajectories", "group_key", "groups"),
        *_columns(sa.Text, "id", "group_id", "task_id", "tier?", "role", "policy", "status"),
        *_columns(sa.Double, "reward?"),
        *_columns(sa.Integer, "num_turns"),
        *_columns(sa.BigInteger, "num_tokens", "num_sampled_tokens"),
        *_columns(sa.Text, "scores", "metrics", "error?", "dropped?"),
    )
    op.create_table(
        "trees",
        *_under("trees", "trajectory_key", "trajectories"),
        *_columns(sa.LargeBinary, "segments", "token_ids", "logprobs"),
        sa.PrimaryKeyConstraint("trajectory_key"),
    )
    op.create_table(
        "dropped",
        *_key(),
        *_under("dropped", "step_key", "steps"),
        *_columns(sa.Text, "trajectory_id", "reason"),
    )
    for table, *columns in (
        ("groups", "step_key"),
        ("trajectories", "run_key", "key"),
        ("trajectories", "run_key", "id"),
        ("trajectories", "step_key", "key"),
        ("trajectories", "group_key"),
        ("dropped", "step_key"),
    ):
        op.create_index(f"ix_{table}_{'_'.join(columns)}", table, columns)
