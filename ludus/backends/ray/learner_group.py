"""The learner ranks of a run: calls to all at once, and recovery where one dies.

    begin_stage, load, train, train, ...      the journal, since the last complete checkpoint
    rank 1 dies
    all ranks end; new ones start, load that checkpoint, and repeat the journal

Training is a function of weights, optimizer, samples and seeds, so the repeated steps give the
state of before, and no rollout is played again or lost. Published weights are in the object store
as long as the rank that put them there lives, so the new ranks put them there again.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ludus.backends.ray.channel import reason_of
from ludus.backends.ray.cluster import facts, require_equal
from ludus.backends.ray.deaths import Deaths
from ludus.backends.ray.errors import explained, no_room
from ludus.backends.ray.publication.weights import Weights
from ludus.core.errors import LudusError, TrainingError
from ludus.core.system.signals import abandon
from ludus.telemetry.logs import get_logger
from ludus.train.distributed.settings import OtherRankLost

log = get_logger(__name__)

T = TypeVar("T")

SETTLE_S = 5.0
"""Seconds that the other ranks have to answer after one failed, before all are ended."""


class RankLost(LudusError):
    """A learner rank has died, or does not answer the others."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A call that changed the ranks' state; its arguments may be references to objects."""

    method: str
    args: tuple[Any, ...]


class LearnerThread:
    """The thread that calls the ranks, one job after the other."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "ludus-learner")
        self._job: Future[Any] | None = None

    @property
    def is_idle(self) -> bool:
        """False while a job waits or runs."""
        return self._job is None or self._job.done()

    async def __call__(self, work: Callable[[], T]) -> T:
        """Returns the result of `work`."""
        self._job = job = self._thread.submit(work)
        return await asyncio.wrap_future(job)

    def close(self) -> None:
        """Begin no further job. The present one may go on until `abandon`."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def abandon(self) -> None:
        """Let this process end without the present job."""
        if self._job is not None:
            abandon(self._job)


class LearnerGroup:
    """Calls methods on all ranks, in order. Synchronous; threads wait for each other.

    Args:
        spawn: starts the actors of all ranks and returns them, before `prepare`.
        prepare: the arguments of `LearnerActor.prepare` of each rank, given rank 0's address.
        max_deaths: times that ranks may die before the run stops.
        on_again: gets the published weights, put into the object store again after a death.
        on_lost: gets the reason of a death, before the ranks start anew.
        policy: for messages, in a run of several: ` (NAME)`.
    """

    def __init__(
        self,
        spawn: Callable[[], list[Any]],
        prepare: Callable[[str], list[tuple[Any, ...]]],
        max_deaths: int,
        start_deadline_s: float,
        on_again: Callable[[Weights], None] = lambda weights: None,
        on_lost: Callable[[str], None] = lambda reason: None,
        policy: str = "",
    ) -> None:
        self._policy = policy
        self._spawn, self._prepare = spawn, prepare
        self._on_again, self._on_lost = on_again, on_lost
        self._one_at_a_time = threading.RLock()
        self._published: tuple[Any, ...] | None = None  # with which `weights` was called last
        self._deaths, self._start_deadline_s = Deaths("learner ranks", max_deaths), start_deadline_s
        self._journal: list[Entry] = []
        self._saved: tuple[Path, int] | None = None  # a checkpoint, and the journal's end then
        self._stage: Entry | None = None
        self.model_facts: dict[str, Any] = {}
        self.actors: list[Any] = []

    def start(self) -> None:
        """Start the ranks. Errors: ConfigError; LudusError where one dies while it starts."""
        import ray

        self.actors = self._spawn()
        with explained():
            found = ray.get(
                [actor.facts.remote() for actor in self.actors], timeout=self._start_deadline_s
            )
            require_equal(facts(), found)
            address = ray.get(self.actors[0].address.remote())
            given = self._prepare(address)
            prepared = [
                actor.prepare.remote(*args) for actor, args in zip(self.actors, given, strict=True)
            ]
            self.model_facts = ray.get(prepared)[0]

    def call(self, method: str, *args: Any, keep: bool = False) -> list[Any]:
        """Returns the results of a method of all ranks.

        Args:
            keep: the call changes the state of the ranks, so a recovery repeats it.

        Errors: whatever the method raises; LudusError where too many ranks died.
        """
        with self._one_at_a_time:
            while True:
                try:
                    results = self._attempt(method, args)
                except RankLost as lost:
                    self._recover(lost)
                    if method == "weights":
                        args = _to_store(args)
                    continue
                if keep:
                    self._keep(Entry(method, args))
                if method == "weights":
                    self._published = _to_store(args)
                return results

    @property
    def has_published(self) -> bool:
        """True if the ranks' weights are those that `weights` returned last."""
        return self._published is not None

    def checkpointed(self, path: Path) -> None:
        """A checkpoint of the present state is written to `path`, or is complete already."""
        self._settle()
        self._saved = path, len(self._journal)
        self._settle()

    @property
    def is_saving(self) -> bool:
        """True while a checkpoint is being written."""
        return bool(self.actors and self._saved and not self._saved[0].exists())

    def close(self) -> None:
        """End the ranks at once. Idempotent."""
        import ray

        actors, self.actors = self.actors, []
        for actor in actors:
            with suppress(Exception):
                ray.kill(actor)

    # The journal

    def _keep(self, entry: Entry) -> None:
        if entry.method == "begin_stage":
            self._stage = entry
        else:
            self._published = None
        if entry.method in ("load", "load_weights"):  # they replace what came before
            stage = [self._stage] if entry.method == "load" and self._stage else []
            self._journal, self._saved = stage, None
        self._journal.append(entry)

    def _settle(self) -> None:
        """Begin the journal with the last checkpoint, if that is complete."""
        if self._saved is None or not self._saved[0].exists():
            return
        (path, end), self._saved = self._saved, None
        begun: list[Entry] = []
        for entry in self._journal[:end]:
            if entry.method == "begin_stage":
                begun = [entry]
            elif entry.method == "shorten_stage":
                begun.append(entry)
        self._journal = [*begun, Entry("load", (path,)), *self._journal[end:]]

    # Deaths

    @property
    def num_deaths(self) -> int:
        return self._deaths.num

    def _recover(self, lost: RankLost) -> None:
        """Start new ranks, and bring them to the state of before."""
        began = time.monotonic()
        self._on_lost(str(lost))
        while True:
            self._deaths.count(lost)
            self._settle()
            log.warning("a learner rank died; the ranks start anew", reason=str(lost))
            self.close()
            try:
                self.start()
                for entry in self._journal:
                    self._attempt(entry.method, entry.args)
                if self._published is not None:
                    self._on_again(self._attempt("weights", self._published)[0])
            except RankLost as again:
                lost = again
                continue
            steps = sum(entry.method == "train" for entry in self._journal)
            seconds = round(time.monotonic() - began, 1)
            log.info("the ranks go on", repeated_steps=steps, seconds=seconds)
            return

    def _attempt(self, method: str, args: Sequence[Any]) -> list[Any]:
        """Call a method on all ranks. Errors: RankLost; whatever the method raises."""
        import ray

        references = [getattr(actor, method).remote(*args) for actor in self.actors]
        waiting = list(references)
        failures: dict[int, BaseException] = {}
        deadline: float | None = None
        while waiting:
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            done, waiting = ray.wait(waiting, num_returns=1, timeout=left)
            if not done:
                break
            try:
                ray.get(done)
            except ray.exceptions.RayError as error:
                failures[references.index(done[0])] = error
                deadline = deadline or time.monotonic() + SETTLE_S
        if failures:
            raise _telling(failures, method, f"{len(references)}{self._policy}", bool(waiting))
        results: list[Any] = ray.get(references)
        return results


def _to_store(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns arguments of `weights` without those of a broadcast, whose group a death ends."""
    return args[:2]


def _telling(
    failures: dict[int, BaseException], method: str, count: str, some_hang: bool
) -> BaseException:
    """Returns the error that explains the failures of several ranks, `count` with their policy."""
    from ray.exceptions import RayActorError

    for rank, error in failures.items():
        if isinstance(error, RayActorError):
            return RankLost(f"learner rank {rank} of {count} died in {method}: {reason_of(error)}")
    causes = {rank: getattr(error, "cause", error) for rank, error in failures.items()}
    own = [error for error in causes.values() if not isinstance(error, OtherRankLost)]
    if own and isinstance(own[0], LudusError):
        return own[0]
    if own and (full := no_room(own[0])) is not None:
        return full
    rank, error = next(iter(causes.items()))
    if own:
        return TrainingError(f"learner rank {rank} of {count} failed in {method}: {own[0]!r}")
    hang = "; the others do not answer" if some_hang else ""
    return RankLost(f"learner rank {rank} of {count}: {error}{hang}")
