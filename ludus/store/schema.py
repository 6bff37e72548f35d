"""The tables; one schema for SQLite and PostgreSQL.

    runs ─< steps ─< groups ─< trajectories ── trees
                  └─< dropped             └─< tool_calls

Deleting a run or a step deletes everything under it. Columns hold the values that queries filter
by; `trees` holds the tokens, one row per trajectory, so listing trajectories reads no tokens. Keys
are integers in the order of recording. `migrations/` upgrades older databases; a test compares the
migrated schema with this file.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Dialect,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
)

from ludus.store.codec import decode_json, encode_json, escape_text, unescape_text


class ExactText(TypeDecorator[str]):
    """Text of any content, including NUL and lone surrogates."""

    impl = Text
    cache_ok = True

    def bind_processor(self, dialect: Dialect) -> Callable[[str | None], str | None]:
        # not process_bind_param, which SQLAlchemy wraps: a step has thousands of values
        return lambda value: None if value is None else escape_text(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else unescape_text(value)


class ExactJSON(TypeDecorator[Any]):
    """A JSON value; key order, floats and NaN are preserved (unlike in `jsonb`)."""

    impl = Text
    cache_ok = True

    def bind_processor(self, dialect: Dialect) -> Callable[[Any], str | None]:
        return lambda value: None if value is None else encode_json(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        return None if value is None else decode_json(value)


class ExactFloat(TypeDecorator[float]):
    """A float64. SQLite stores NaN as the text 'nan', because it reads NaN as NULL.

    On both databases NaN compares greater than every number, and equal to itself.
    """

    impl = Double
    cache_ok = True

    def bind_processor(self, dialect: Dialect) -> Callable[[Any], Any]:
        # not process_bind_param, after which SQLAlchemy converts the text to a float
        sqlite = dialect.name == "sqlite"
        return lambda value: "nan" if sqlite and value is not None and math.isnan(value) else value

    def process_result_value(self, value: Any, dialect: Dialect) -> float | None:
        return None if value is None else float(value)


class Instant(TypeDecorator[datetime]):
    """A time in seconds since 1970 (UTC); read back as an aware datetime."""

    impl = Double
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> float | None:
        return None if value is None else value.timestamp()

    def process_result_value(self, value: float | None, dialect: Dialect) -> datetime | None:
        return None if value is None else datetime.fromtimestamp(value, UTC)


Key = BigInteger().with_variant(Integer, "sqlite")  # SQLite autoincrements INTEGER keys only

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
    }
)


def _under(parent: str) -> ForeignKey:
    return ForeignKey(f"{parent}.key", ondelete="CASCADE")


runs = Table(
    "runs",
    metadata,
    Column("key", Key, primary_key=True),
    Column("id", ExactText, nullable=False, unique=True),
    Column("name", ExactText, nullable=False),
    Column("created", Instant, nullable=False),
    Column("finished", Instant),
    Column("status", ExactText, nullable=False),
    Column("config", ExactJSON, nullable=False),
    Column("versions", ExactJSON, nullable=False),
    Column("error", ExactText),
    Column("elapsed_s", ExactFloat),
)

steps = Table(
    "steps",
    metadata,
    Column("key", Key, primary_key=True),
    Column("run_key", Key, _under("runs"), nullable=False),
    Column("stage", ExactText, nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("started", Instant, nullable=False),
    Column("seconds", ExactFloat),
    Column("policy_version", BigInteger),
    Column("metrics", ExactJSON, nullable=False),
    UniqueConstraint("run_key", "stage", "step"),
)

groups = Table(
    "groups",
    metadata,
    Column("key", Key, primary_key=True),
    Column("step_key", Key, _under("steps"), nullable=False, index=True),
    Column("id", ExactText, nullable=False),
    Column("task", ExactJSON, nullable=False),
)

trajectories = Table(
    "trajectories",
    metadata,
    Column("key", Key, primary_key=True),
    Column("run_key", Key, _under("runs"), nullable=False),
    Column("step_key", Key, _under("steps"), nullable=False),
    Column("group_key", Key, _under("groups"), nullable=False, index=True),
    Column("id", ExactText, nullable=False),
    Column("group_id", ExactText, nullable=False),
    Column("task_id", ExactText, nullable=False),
    Column("tier", ExactText),
    Column("role", ExactText, nullable=False),
    Column("policy", ExactText, nullable=False),
    Column("status", ExactText, nullable=False),
    Column("reward", ExactFloat),
    Column("num_turns", Integer, nullable=False),
    Column("num_tokens", BigInteger, nullable=False),
    Column("num_sampled_tokens", BigInteger, nullable=False),
    Column("scores", ExactJSON, nullable=False),
    Column("metrics", ExactJSON, nullable=False),
    Column("explanation", ExactText),
    Column("error", ExactText),
    Column("dropped", ExactText),
    Index(None, "run_key", "key"),
    Index(None, "run_key", "id"),
    Index(None, "step_key", "key"),
    Index(None, "run_key", "reward", "key"),
    Index(None, "run_key", "num_tokens", "key"),
    Index(None, "run_key", "num_turns", "key"),
    Index(None, "run_key", "status", "key"),
)

trees = Table(
    "trees",
    metadata,
    Column("trajectory_key", Key, _under("trajectories"), primary_key=True, autoincrement=False),
    Column("segments", LargeBinary, nullable=False),
    Column("token_ids", LargeBinary, nullable=False),
    Column("logprobs", LargeBinary, nullable=False),
    Column("advantages", LargeBinary),
    Column("entropies", LargeBinary),
)

tool_calls = Table(
    "tool_calls",
    metadata,
    Column("run_key", Key, _under("runs"), primary_key=True, autoincrement=False),
    Column("tool", ExactText, primary_key=True),
    Column(
        "trajectory_key",
        Key,
        _under("trajectories"),
        primary_key=True,
        autoincrement=False,
        index=True,
    ),
    Column("num_calls", Integer, nullable=False),
)

dropped = Table(
    "dropped",
    metadata,
    Column("key", Key, primary_key=True),
    Column("step_key", Key, _under("steps"), nullable=False, index=True),
    Column("trajectory_id", ExactText, nullable=False),
    Column("reason", ExactText, nullable=False),
)
