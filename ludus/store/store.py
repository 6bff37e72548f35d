"""The run store: runs, steps, and trajectories with their tokens.

    store = RunStore.open(None, "runs")               # runs/ludus.db
    store.create_run("babyai-1", "babyai", config, versions)
    store.record_step("babyai-1", "rl", 0, groups, metrics)
    for row in store.trajectories("babyai-1", stage="rl", min_reward=1.0): ...
    store.trajectory("babyai-1", row.id)              # equal to what was recorded

A step is one transaction. Recording a step again replaces it, so a resumed run may repeat its last
step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import URL, Connection, Row, Select, and_, delete, insert, or_, select, update
from sqlalchemy.exc import IntegrityError

from ludus.core.errors import StoreError, did_you_mean
from ludus.core.types import Group, Status, Task, Trajectory
from ludus.store import queries
from ludus.store import schema as db
from ludus.store.codec import encode_json
from ludus.store.database import Database
from ludus.store.migrate import migrate, revision
from ludus.store.recording import StepWriter
from ludus.store.rows import (
    DroppedRow,
    Record,
    RunRow,
    RunStatus,
    StageSummary,
    StepRow,
    TrajectoryRow,
)
from ludus.store.transfer import decode_step, encode_step, read_step

T = TypeVar("T")

_PAGE_ROWS, _PAGE_TREES = 2000, 100


class RunExists(StoreError):
    """The id of a new run exists already."""


class UnknownName(StoreError):
    """No run or trajectory has this id: wrong use of a command."""

    exit_code = 2


def _url(url: str | None, runs_dir: str | Path) -> str:
    if url is not None:
        return url
    path = str(Path(runs_dir) / "ludus.db")
    return URL.create("sqlite", database=path).render_as_string()


class RunStore:
    """Reads and writes one database. Safe to use from several threads.

    Errors: every method raises StoreError where the database is locked, full, damaged or
    unreachable, or where a name is unknown (the message suggests the nearest name).
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self.url = database.url

    @classmethod
    def open(
        cls,
        url: str | None = None,
        runs_dir: str | Path = "runs",
        *,
        read_only: bool = False,
        timeout_s: float = 30.0,
    ) -> RunStore:
        """Open the store; create it or migrate its schema first.

        `url`: sqlite:///... or postgresql://..., default `<runs_dir>/ludus.db`. `read_only` neither
        creates nor changes anything. `timeout_s`: how long to wait for a lock.
        Errors: ConfigError for a wrong URL, MissingDependency, StoreError.
        """
        database = Database(_url(url, runs_dir), read_only=read_only, timeout_s=timeout_s)
        try:
            migrate(database)
        except BaseException:
            database.close()
            raise
        return cls(database)

    @classmethod
    def upgrade(cls, url: str | None = None, runs_dir: str | Path = "runs") -> None:
        """Migrate a store of an older ludus. Errors: as `open`; StoreError where there is none."""
        with closing(Database(_url(url, runs_dir), read_only=True)) as database:
            if revision(database) is None:
                raise StoreError(f"there is no run store in {database.url}: nothing to upgrade")
        cls.open(url, runs_dir).close()

    def close(self) -> None:
        """Close all connections. Safe to call twice."""
        self._database.close()

    def __enter__(self) -> RunStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Writing

    def create_run(
        self, run_id: str, name: str, config: Mapping[str, Any], versions: Mapping[str, Any]
    ) -> None:
        """Begin a run. Errors: RunExists."""
        values = {
            "id": run_id,
            "name": name,
            "created": datetime.now(UTC),
            "status": RunStatus.RUNNING,
            "config": dict(config),
            "versions": dict(versions),
        }
        encode_json(values["config"], f"the config of run {run_id!r}")
        encode_json(values["versions"], f"the versions of run {run_id!r}")
        try:
            self._write(lambda connection: connection.execute(insert(db.runs), values))
        except StoreError as error:
            if not isinstance(error.__cause__, IntegrityError):
                raise
            raise RunExists(
                f"run {run_id!r} exists already in {self.url}: resume it, or choose another name"
            ) from error

    def finish_run(
        self,
        run_id: str,
        status: str,
        error: str | None = None,
        elapsed_s: float | None = None,
    ) -> None:
        """End a run: completed, interrupted, or failed with an error.

        Args:
            elapsed_s: wall time of all processes of the run; None: that since its creation.
        """
        values = {"status": RunStatus(status), "finished": datetime.now(UTC), "error": error}
        self._update_run(run_id, {**values, "elapsed_s": elapsed_s})

    def reopen_run(self, run_id: str) -> None:
        """Mark a run as running again. Its row keeps the configuration that it began with, by which
        a mirror's run is told from another of the same id."""
        ended = {"finished": None, "error": None, "elapsed_s": None}
        self._update_run(run_id, {"status": RunStatus.RUNNING, **ended})

    def record_step(
        self,
        run_id: str,
        stage: str,
        step: int,
        groups: Sequence[Group],
        metrics: Mapping[str, float],
        *,
        seconds: float | None = None,
        policy_version: int | None = None,
        dropped: Iterable[tuple[str, str]] = (),
    ) -> None:
        """Record a step with its groups; replaces this step of the stage.

        `dropped` adds (trajectory id, reason) pairs to the trajectories' own: a training row that
        did not fit, a trajectory that is in no group.
        Errors: StoreError; the store is unchanged then.
        """
        writer = StepWriter.prepare(
            f"run {run_id!r}, {stage} step {step}",
            {
                "stage": stage,
                "step": step,
                "started": datetime.now(UTC) - timedelta(seconds=seconds or 0.0),
                "seconds": seconds,
                "policy_version": policy_version,
                "metrics": {name: float(value) for name, value in metrics.items()},
            },
            groups,
            dropped,
        )
        self._write(lambda connection: writer.write(connection, run_key(connection, run_id, True)))

    def unpack_step(self, run_id: str, data: bytes) -> None:
        """Record the bytes of `pack_step`, of this store or another; replaces the step."""
        writer = decode_step(data)
        self._write(lambda connection: writer.write(connection, run_key(connection, run_id, True)))

    def rewind(self, run_id: str, keep: Mapping[str, int]) -> None:
        """Delete all steps after `keep[stage]`, and all stages missing from `keep`."""
        kept = [
            and_(db.steps.c.stage == stage, db.steps.c.step <= step) for stage, step in keep.items()
        ]

        def work(connection: Connection) -> None:
            run = run_key(connection, run_id, lock=True)
            beyond = delete(db.steps).where(db.steps.c.run_key == run)
            connection.execute(beyond.where(~or_(*kept)) if kept else beyond)

        self._write(work)

    # Reading

    def read(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in a transaction that reads."""
        return self._database.transact(work)

    def runs(self) -> list[RunRow]:
        """Returns all runs, in order of creation."""
        return self.read(queries.runs)

    def run_ids(self) -> set[str]:
        query = select(db.runs.c.id)
        return self.read(lambda connection: set(connection.scalars(query)))

    def run(self, run_id: str) -> RunRow:
        """Returns one run."""
        return self.read(lambda connection: queries.runs(connection, run_key(connection, run_id)))[
            0
        ]

    def steps(self, run_id: str, stage: str | None = None) -> list[StepRow]:
        """Returns the steps of a run, or of one stage, in order of recording."""
        c = db.steps.c
        query = select(c.stage, c.step, c.started, c.seconds, c.policy_version, c.metrics)
        query = query.where(c.run_key == self._key(run_id)).order_by(c.key)
        query = query if stage is None else query.where(c.stage == stage)
        return [StepRow(*row) for row in self._fetch(query)]

    def pack_step(self, run_id: str, stage: str, step: int) -> bytes:
        """Returns a recorded step as bytes, for `unpack_step`."""
        return self.read(
            lambda connection: encode_step(
                read_step(connection, run_key(connection, run_id), stage, step)
            )
        )

    def trajectories(
        self,
        run_id: str,
        stage: str | None = None,
        step: int | None = None,
        *,
        status: Status | None = None,
        min_reward: float | None = None,
        limit: int | None = None,
        newest_first: bool = False,
    ) -> Iterator[TrajectoryRow]:
        """Yields the trajectories of a run without their tokens, in order of recording.

        Every page is read in its own transaction, so a long listing does not block writers; a step
        replaced meanwhile may appear in either state.
        `min_reward` excludes NaN and trajectories without a reward.
        """
        query = queries.trajectories(self._key(run_id), stage, step, status, min_reward)
        rows = self._pages(query, _PAGE_ROWS, limit, newest_first)
        return map(queries.trajectory_row, rows)

    def records(
        self,
        run_id: str,
        stage: str | None = None,
        step: int | None = None,
        *,
        status: Status | None = None,
        min_reward: float | None = None,
        limit: int | None = None,
        newest_first: bool = False,
    ) -> Iterator[Record]:
        """Yields the rows of `trajectories` with their tokens and tasks."""
        query = queries.trajectories(self._key(run_id), stage, step, status, min_reward)
        rows = self._pages(queries.with_trees(query), _PAGE_TREES, limit, newest_first)
        return map(queries.record, rows)

    def record(
        self, run_id: str, trajectory_id: str, stage: str | None = None, step: int | None = None
    ) -> Record:
        """Returns one trajectory with tokens and task; of several with the id, the latest."""
        t = db.trajectories.c
        query = queries.with_trees(queries.trajectories(self._key(run_id), stage, step))
        rows = self._fetch(query.where(t.id == trajectory_id).order_by(t.key.desc()).limit(1))
        if not rows:
            raise UnknownName(
                f"run {run_id!r} has no trajectory {trajectory_id!r}"
                + did_you_mean(trajectory_id, self._similar_ids(run_id, trajectory_id))
            )
        return queries.record(rows[0])

    def trajectory(
        self, run_id: str, trajectory_id: str, stage: str | None = None, step: int | None = None
    ) -> Trajectory:
        """Returns one trajectory, equal to the recorded one."""
        return self.record(run_id, trajectory_id, stage, step).trajectory

    def groups(self, run_id: str, stage: str, step: int) -> list[Group]:
        """Returns the groups of a step, equal to the recorded groups."""
        key = self._key(run_id)
        at = (db.steps.c.run_key == key, db.steps.c.stage == stage, db.steps.c.step == step)
        query = select(db.groups).join(db.steps).where(*at).order_by(db.groups.c.key)
        played = queries.with_trees(queries.trajectories(key, stage, step))
        played = played.order_by(db.trajectories.c.key)

        def work(connection: Connection) -> list[Group]:
            groups = {
                row.key: Group(row.id, Task.model_validate(row.task), [])
                for row in connection.execute(query)
            }
            for row in connection.execute(played):
                groups[row.group_key].trajectories.append(queries.record(row).trajectory)
            return list(groups.values())

        return self.read(work)

    def dropped(self, run_id: str, stage: str | None = None) -> list[DroppedRow]:
        """Returns the trajectories without training rows and the reasons, in order of recording."""
        s, d = db.steps.c, db.dropped.c
        query = select(s.stage, s.step, d.trajectory_id, d.reason).join(db.steps).order_by(d.key)
        query = query.where(s.run_key == self._key(run_id))
        query = query if stage is None else query.where(s.stage == stage)
        return [DroppedRow(*row) for row in self._fetch(query)]

    def summary(self, run_id: str) -> list[StageSummary]:
        """Returns a summary of each stage, in order of their start."""
        return self.read(
            lambda connection: queries.summary(connection, run_key(connection, run_id))
        )

    # Internal

    def _write(self, work: Callable[[Connection], object]) -> None:
        self._database.transact(work, write=True)

    def _update_run(self, run_id: str, values: Mapping[str, Any]) -> None:
        def work(connection: Connection) -> None:
            key = run_key(connection, run_id, lock=True)
            connection.execute(update(db.runs).where(db.runs.c.key == key).values(values))

        self._write(work)

    def _key(self, run_id: str) -> int:
        return self.read(lambda connection: run_key(connection, run_id))

    def _fetch(self, query: Select[Any]) -> Sequence[Any]:
        return self.read(lambda connection: connection.execute(query).all())

    def _pages(
        self, query: Select[Any], size: int, limit: int | None, newest_first: bool
    ) -> Iterator[Row[Any]]:
        key = db.trajectories.c.key
        query = query.order_by(key.desc() if newest_first else key)
        last: int | None = None
        while limit is None or limit > 0:
            page = query.limit(size if limit is None else min(size, limit))
            if last is not None:
                page = page.where(key < last if newest_first else key > last)
            rows = self._fetch(page)
            yield from rows
            if len(rows) < size:
                return
            last = rows[-1].key
            limit = None if limit is None else limit - len(rows)

    def _similar_ids(self, run_id: str, trajectory_id: str) -> list[str]:
        """Returns ids to suggest: those with the longest common prefix, else the newest."""
        t = db.trajectories.c
        query = queries.trajectories(self._key(run_id)).with_only_columns(t.id)
        query = query.order_by(t.key.desc()).limit(_PAGE_ROWS)
        for length in (len(trajectory_id) - 1, len(trajectory_id) // 2):
            alike = query.where(t.id.startswith(trajectory_id[:length], autoescape=True))
            if length > 0 and (rows := self._fetch(alike)):
                return [row.id for row in rows]
        return [row.id for row in self._fetch(query)]


def run_key(connection: Connection, run_id: str, lock: bool = False) -> int:
    """Returns the key of a run; `lock` blocks other writers until the transaction ends."""
    query = select(db.runs.c.key).where(db.runs.c.id == run_id)
    key: int | None = connection.scalar(query.with_for_update() if lock else query)
    if key is None:
        ids = connection.execute(select(db.runs.c.id)).scalars().all()
        raise UnknownName(f"there is no run {run_id!r}{did_you_mean(run_id, ids)}")
    return key
