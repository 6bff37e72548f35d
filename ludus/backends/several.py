"""Several policies in one run: each trains in a back end of its own.

    score, train       by the policy of each trajectory and each sample
    publish, save      all policies together: their versions and checkpoints have the same numbers

The first is the run's `model`; its checkpoints name those of the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ludus.backends.base import Backend
from ludus.config.policies import POLICY
from ludus.core.errors import LudusError
from ludus.core.types import Group, Sample, Spec
from ludus.judges.base import Judge
from ludus.models.samplers.base import PolicySampler
from ludus.rollout.hosts.host import LocalEnvs
from ludus.train.algorithms.base import Algorithm
from ludus.train.batches.minibatches import TrainSettings
from ludus.train.checkpoint.listing import CheckpointInfo
from ludus.train.checkpoint.store import CheckpointStore
from ludus.train.meter import Meter

T = TypeVar("T")


class Follower(Protocol):
    """A fixed policy, whose weights may depend on those of the run's policy."""

    def started(self, version: int) -> None:
        """RL begins, or goes on: then `restored` follows."""

    def published(self, version: int) -> None:
        """The policy has new weights, under this version."""

    def restored(self, version: int) -> None:
        """The run's policy has been loaded, with this version."""

    def close(self) -> None:
        """Stop the samplers. Idempotent."""


class SeveralPolicies:
    """A `Backend` of several: `main` trains the run's `model`, `others` policies by name.

    Args:
        followers: fixed policies.
    """

    def __init__(
        self, main: Backend, others: Mapping[str, Backend], followers: Sequence[Follower] = ()
    ) -> None:
        self._main, self._others, self._followers = main, dict(others), followers
        self._all = {POLICY: main, **others}
        main.checkpoints.others = tuple(b.checkpoints.folder for b in others.values())

    @property
    def sampler(self) -> PolicySampler:
        return self._main.sampler

    @property
    def meter(self) -> Meter:
        return self._main.meter

    @property
    def checkpoints(self) -> CheckpointStore:
        return self._main.checkpoints

    @property
    def policy_version(self) -> int:
        return self._main.policy_version

    def make_envs(self, spec: Spec | None) -> LocalEnvs:
        return self._main.make_envs(spec)

    def host_judge(self, spec: Spec, judge: Judge) -> Judge:
        return self._main.host_judge(spec, judge)

    def begin_stage(self, settings: TrainSettings, algorithm: Algorithm) -> None:
        for backend in self._all.values():
            backend.begin_stage(settings, algorithm)
        if settings.stage == "rl":
            for follower in self._followers:
                follower.started(self.policy_version)

    def shorten_stage(self, steps: int) -> None:
        for backend in self._all.values():
            backend.shorten_stage(steps)

    async def score(self, groups: Sequence[Group], algorithm: Algorithm) -> Sequence[Group]:
        def own(name: str) -> list[Group]:
            return [g for g in groups if self._policy_of(g.trajectories[0].policy) == name]

        done = await self._of_all(lambda name, b: b.score(own(name), algorithm))
        scored = {group.id: group for part in done.values() for group in part}
        return [scored[group.id] for group in groups]

    async def train(self, samples: list[Sample], algorithm: Algorithm) -> dict[str, float]:
        """Train each policy on its own samples, and all on demonstrations, which are of none.

        Returns the metrics of the run's policy, and those of the others as `policy/NAME/METRIC`;
        the optimizer steps are those of all.
        """

        def taken(name: str) -> list[Sample]:
            return [s for s in samples if s.policy == name or s.policy not in self._all]

        done = await self._of_all(lambda name, b: b.train(taken(name), algorithm))
        metrics: dict[str, float] = {}
        steps = 0.0
        for name, own in done.items():
            steps += own["train/optimizer_steps"]
            if name == POLICY:
                metrics |= own
            else:
                metrics |= {
                    f"policy/{name}/{key.removeprefix('train/')}": value
                    for key, value in own.items()
                    if key.startswith("train/")
                }
        return {**metrics, "train/optimizer_steps": steps}

    async def verify(self, groups: Sequence[Group]) -> None:
        for name, backend in self._all.items():
            await backend.verify([g for g in groups if g.trajectories[0].policy == name])

    async def publish_weights(self) -> int:
        for backend in self._others.values():
            await backend.publish_weights()
        version = await self._main.publish_weights()
        for follower in self._followers:
            follower.published(version)
        return version

    def save(
        self, stage: str, step: int, state: dict[str, Any], metric: float | None, *, pin: bool
    ) -> Path:
        """Save the others first, so that each checkpoint of the run's policy has theirs."""
        for backend in self._others.values():
            backend.save(stage, step, {}, None, pin=True)
        path = self._main.save(stage, step, state, metric, pin=pin)
        # The run's policy may still write its own, in the background.
        kept = {path.name, *(info.path.name for info in self._main.checkpoints.list())}
        for backend in self._others.values():
            backend.checkpoints.keep_only(kept)
        return path

    def load(self, path: Path) -> dict[str, Any]:
        for backend in self._others.values():
            own = self._own(backend, path)
            backend.checkpoints.discard_after(own)
            backend.load(own.path)
        state = self._main.load(path)
        self._restore_followers()
        return state

    def load_weights(self, path: Path) -> None:
        for backend in self._others.values():
            backend.load_weights(self._own(backend, path).path)
        self._main.load_weights(path)
        self._restore_followers()

    def close(self) -> None:
        for follower in self._followers:
            follower.close()
        for backend in (*self._others.values(), self._main):  # the first may own what all use
            backend.close()

    async def _of_all(self, work: Callable[[str, Backend], Coroutine[Any, Any, T]]) -> dict[str, T]:
        """Await work of each policy: at the same time where all train elsewhere, else in turn."""
        if not all(getattr(b, "trains_elsewhere", False) for b in self._all.values()):
            return {name: await _named(name, work(name, b)) for name, b in self._all.items()}
        running = [_named(name, work(name, backend)) for name, backend in self._all.items()]
        done = await asyncio.gather(*running, return_exceptions=True)  # all end before the error
        results: dict[str, T] = {}
        for name, result in zip(self._all, done, strict=True):
            if isinstance(result, BaseException):
                raise result
            results[name] = result
        return results

    def _policy_of(self, name: str) -> str:
        """The policy that scores a trajectory: demonstrations are of none that trains."""
        return name if name in self._all else POLICY

    def _own(self, backend: Backend, path: Path) -> CheckpointInfo:
        """The checkpoint of another policy that belongs to one of the run's policy."""
        return backend.checkpoints.named(path.name)

    def _restore_followers(self) -> None:
        for follower in self._followers:
            follower.restored(self._main.policy_version)


async def _named(name: str, work: Coroutine[Any, Any, T]) -> T:
    """Await work of a policy, whose errors then name it."""
    try:
        return await work
    except LudusError as error:
        if name != POLICY and f"policies.{name}" not in str(error):
            error.args = (f"policies.{name}: {error}",)
        raise
