"""Episodes of a run in a host's worker.

    Player      plays the groups of the tasks; there is one in a process
    rows_of     a trajectory as rows of ids, each sampled token in one of them

The episodes of a group are played in one process, and are returned when all have ended: then the
algorithm's screening knows whether an episode can be compared.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ludus.backends.hosted import EpisodesWriter, HostedGroup, task_lines
from ludus.config.schema import RunConfig
from ludus.core.modules import load_module
from ludus.core.types import Group, Segment, Task, Trajectory
from ludus.rollout.collect import Collector
from ludus.rollout.episode import run_episode
from ludus.rollout.hosts.threads import EnvThread
from ludus.train import ALGORITHMS
from ludus.train.batches.samples import paths
from ludus.train.schedule import turn_limit

JOB = "LUDUS_HOST_JOB"
"""Environment variable with the path of the job."""


def this_job() -> dict[str, Any]:
    """Returns the job of this process."""
    job: dict[str, Any] = json.loads(Path(os.environ[JOB]).read_text(encoding="utf-8"))
    return job


@dataclass(slots=True)
class _Playing:
    """A group whose episodes are being played."""

    group: Group
    missing: int
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    kept: dict[str, Trajectory] = field(default_factory=dict)


class Player:
    """Plays the episodes of this process; there is one, made with the first episode.

    The job names the function that opens the run's collector: `open_collector(folder, sampler)`.
    """

    _own: Player | None = None

    def __init__(self, job: dict[str, Any], sampler_of: Callable[[RunConfig, int], Any]) -> None:
        module, _, name = job["opener"].partition(":")
        self.collector: Collector
        self.config: RunConfig
        opened = getattr(load_module(module), name)(job, sampler_of)
        self.config, self.collector = opened
        rl = self.config.rl
        assert rl is not None
        # Groups without signal are the host's to leave out.
        self._algorithm = replace(ALGORITHMS.build(rl.algorithm, "rl.algorithm"), keep=None)
        self._sizes = {"train": rl.group_size, "heldout": self.config.evaluate.samples_per_task}
        self._tasks = {split: task_lines(Path(job["tasks"][split])) for split in self._sizes}
        self._groups_per_step = rl.groups_per_step
        share = -(-self.config.rollout.concurrency // int(job["num_workers"]))
        self._places = asyncio.Semaphore(share)
        self._threads: list[EnvThread] = []
        self._playing: dict[str, _Playing] = {}
        self._writer = EpisodesWriter(Path(job["episodes"]))

    @classmethod
    def of_this_process(cls, sampler_of: Callable[[RunConfig, int], Any]) -> Player:
        """Returns the process's player.

        Args:
            sampler_of: returns the host's sampler, given the number of the model's ids.
        """
        if cls._own is None:
            cls._own = cls(this_job(), sampler_of)
        return cls._own

    async def play_group(self, split: str, place: int, step: int) -> list[Trajectory]:
        """Play all episodes of a task; returns those that can train. See `play`."""
        uid = f"{split}/{step}/{place}"
        episodes = (self.play(uid, split, place, step) for _ in range(self._sizes[split]))
        played = await asyncio.gather(*episodes)
        return [trajectory for trajectory in played if trajectory is not None]

    async def play(self, uid: str, split: str, place: int, step: int) -> Trajectory | None:
        """Play the next episode of a group; returns it when all of the group have ended, or None
        where it cannot train.

        Args:
            uid: the host's name of the group.
            place: of its task in the split.
            step: the host's number of the step, from 1 on; for held-out tasks, of complete steps.
        """
        playing = self._playing.get(uid)
        if playing is None:
            playing = self._playing[uid] = self._begin(split, place, step)
        number = len(playing.group.trajectories) - playing.missing
        playing.missing -= 1
        trajectory = playing.group.trajectories[number]
        collector = self._collector(split, step)
        try:
            await self._play(collector, playing.group.task, trajectory)
        finally:
            playing.kept[trajectory.id] = trajectory
            if len(playing.kept) == len(playing.group.trajectories):
                del self._playing[uid]
                self._finish(playing, split, step)
        await playing.ended.wait()
        return playing.kept.get(trajectory.id)

    def _begin(self, split: str, place: int, step: int) -> _Playing:
        task = Task.model_validate_json(self._tasks[split][place])
        train, size = split == "train", self._sizes[split]
        first = (step - 1) * self._groups_per_step if train else 0
        number = (place - first) % len(self._tasks[split])
        stage_step = step - 1 if train else step
        group = self._collector(split, step).lay_out(task, stage_step, number, size)
        return _Playing(group, size)

    def _collector(self, split: str, step: int) -> Collector:
        if split == "heldout":
            temperature = self.config.evaluate.temperature
            return self.collector.with_config(
                "evaluate/rl", temperature=temperature, top_p=1.0, top_k=0
            )
        if self.config.rl is None or not self.config.rl.horizon:
            return self.collector
        return self.collector.with_config("rl", max_turns=turn_limit(self.config, step - 1))

    async def _play(self, collector: Collector, task: Task, trajectory: Trajectory) -> None:
        async with self._places:
            thread = self._threads.pop() if self._threads else EnvThread()
            try:
                await run_episode(thread, collector.episode(task, trajectory))
            finally:
                self._threads.append(thread)

    def _finish(self, playing: _Playing, split: str, step: int) -> None:
        """Record a group that has ended, and keep of it what can train."""
        train = split == "train"
        self._writer.write(
            HostedGroup(
                "rl" if train else "evaluate/rl", step - 1 if train else step, playing.group
            )
        )
        if train:
            screened = self._algorithm.screen([playing.group]).groups
            kept = {t.id for group in screened for t in group.trajectories}
        else:
            kept = {t.id for t in playing.group.trajectories if t.reward is not None and t.segments}
        playing.kept = {id: t for id, t in playing.kept.items() if id in kept}
        playing.ended.set()


@dataclass(frozen=True, slots=True)
class Row:
    """One path of a trajectory's tree: P0 A0 E0 A1 is the prompt P0 and the response A0 E0 A1.

    Args:
        mask: of the response: 1 on the sampled ids that no other row has.
        logprobs: of the response: 0 where nothing was sampled.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    mask: list[int]
    logprobs: list[float]


def rows_of(trajectory: Trajectory) -> list[Row]:
    """Returns the rows of a trajectory: one for each path of its tree with a loss of its own."""
    segments, found = trajectory.segments, []
    for path, fresh in paths(trajectory):
        split = path.index(fresh[0])
        response = path[split:]
        found.append(
            Row(
                prompt_ids=_joined(segments, path[:split]),
                response_ids=_joined(segments, response),
                mask=[int(i in fresh) for i in response for _ in segments[i].token_ids],
                logprobs=[
                    x
                    for i in response
                    for x in (segments[i].logprobs or [0.0] * len(segments[i].token_ids))
                ],
            )
        )
    return found


def _joined(segments: Sequence[Segment], path: Sequence[int]) -> list[int]:
    return [id for i in path for id in segments[i].token_ids]
