"""Several policies in one run: each trains in a back end of its own.

    score, train       by the policy of each trajectory and each sample
    publish, save      all policies together: their versions and checkpoints have the same numbers

The first is the run's `model`; its checkpoints name those of the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ludus.backends.base import Backend
from ludus.config.policies import POLICY
from ludus.core.types import Group, Sample, Spec
from ludus.judges.base import Judge
from ludus.models.samplers.base import PolicySampler
from ludus.rollout.host import LocalEnvs
from ludus.train.algorithms.base import Algorithm
from ludus.train.checkpoint.listing import CheckpointInfo
from ludus.train.checkpoint.store import CheckpointStore
from ludus.train.meter import Meter
from ludus.train.minibatches import TrainSettings


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

    async def score(self, groups: Sequence[Group], algorithm: Algorithm) -> Sequence[Group]:
        scored: dict[str, Group] = {}
        for name, backend in self._all.items():
            own = [g for g in groups if self._policy_of(g.trajectories[0].policy) == name]
            scored |= {group.id: group for group in await backend.score(own, algorithm)}
        return [scored[group.id] for group in groups]

    async def train(self, samples: list[Sample], algorithm: Algorithm) -> dict[str, float]:
        """Train each policy on its own samples, and all on demonstrations, which are of none.

        Returns the metrics of the run's policy, and those of the others as `policy/NAME/METRIC`;
        the optimizer steps are those of all.
        """
        metrics: dict[str, float] = {}
        steps = 0.0
        for name, backend in self._all.items():
            taken = [s for s in samples if s.policy == name or s.policy not in self._all]
            own = await backend.train(taken, algorithm)
            steps += own["train/optimizer_steps"]
            if backend is self._main:
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
        kept = {info.path.name for info in self._main.checkpoints.list()}
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
        for backend in self._all.values():
            backend.close()

    def _policy_of(self, name: str) -> str:
        """The policy that scores a trajectory: demonstrations are of none that trains."""
        return name if name in self._all else POLICY

    def _own(self, backend: Backend, path: Path) -> CheckpointInfo:
        """The checkpoint of another policy that belongs to one of the run's policy."""
        return backend.checkpoints.named(path.name)

    def _restore_followers(self) -> None:
        for follower in self._followers:
            follower.restored(self._main.policy_version)
