"""A few episodes of an agent with its model: calls, tokens, ends, rewards and seconds."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from ludus.config.schema import RunConfig
from ludus.core.types import Group, Score, Status, Task, Trajectory
from ludus.data.splits import Splits
from ludus.diagnostics.calibration.choices import Lengths
from ludus.judges.base import Judge
from ludus.models.samplers.base import Completion, Constraining, Sampler, SamplingParams
from ludus.pipeline.build import Run, build
from ludus.store.folders import RunFolder
from ludus.tasks.readers import TaskList

GROUP_SIZE = 4
"""Episodes of a group: the least that show a spread of rewards."""

NUM_GROUPS = 4
"""Groups that are played at the same time, after a first one alone."""

MOST_GROUPS = 25
"""Groups after which nothing further is played."""


@dataclass
class AgentPlay:
    """The groups that were played, and what they took.

    Args:
        sampled_s: seconds in which each trajectory waited for the model.
        judged: episodes that the judge scored.
        waves: seconds and episodes of groups that were played at the same time.
        max_tokens, context: the limits that they were played with.
    """

    max_tokens: int
    context: int
    groups: list[Group] = field(default_factory=list)
    sampled_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    judged: int = 0
    waves: list[tuple[float, int]] = field(default_factory=list)

    @property
    def episodes(self) -> list[Trajectory]:
        """All episodes."""
        return [t for group in self.groups for t in group.trajectories]

    @property
    def scored(self) -> list[Trajectory]:
        """Those with a reward, which would train."""
        return [t for t in self.episodes if t.reward is not None and t.num_turns]

    @property
    def unfinished(self) -> list[Trajectory]:
        """Those that the end of the measurement ended."""
        return [t for t in self.episodes if t.status is Status.ERROR_TIMEOUT]

    @property
    def failed(self) -> list[Trajectory]:
        """Those that an error ended."""
        failed = [t for t in self.episodes if t.status.retryable or t.status is Status.UNSCORABLE]
        return [t for t in failed if t.status is not Status.ERROR_TIMEOUT]

    @property
    def reasons(self) -> list[tuple[str, int]]:
        """The errors of failed episodes with their numbers, the most frequent first."""
        told = Counter(f"{t.status.value}: {t.error}" for t in self.failed)
        return told.most_common()

    @property
    def silent(self) -> int:
        """Number of episodes without a call that trains."""
        return sum(not t.num_turns for t in self.episodes)

    @property
    def calls(self) -> list[int]:
        """Calls of each episode with any, ascending."""
        return sorted(t.num_turns for t in self.episodes if t.num_turns)

    @property
    def turns(self) -> list[int]:
        """Tokens of the turns, ascending."""
        segments = [s for t in self.episodes for s in t.segments if s.sampled]
        return sorted(len(s.token_ids) for s in segments)

    @property
    def cut_turns(self) -> float:
        """Share of the turns that the limit of tokens ended."""
        return sum(size >= self.max_tokens for size in self.turns) / max(len(self.turns), 1)

    @property
    def overflown(self) -> int:
        """Number of episodes that the context ended."""
        long = [t for t in self.episodes if t.status is Status.TRUNCATED_LENGTH]
        return sum("context" in (t.error or "") for t in long)

    @property
    def rewards(self) -> list[float]:
        return [t.reward for t in self.scored if t.reward is not None]

    @property
    def signal(self) -> float:
        """Share of the groups with different rewards."""
        groups = [{t.reward for t in g.trajectories if t.reward is not None} for g in self.groups]
        return sum(len(rewards) > 1 for rewards in groups) / max(len(groups), 1)

    @property
    def episode_s(self) -> float:
        """Seconds of an episode among others at the same time, without the first wave."""
        waves = self.waves[1:] or self.waves
        return sum(seconds for seconds, _ in waves) / max(sum(n for _, n in waves), 1)

    @property
    def own_s(self) -> float:
        """Mean seconds of an episode in which it does not wait for the model."""
        own = [
            max(t.metrics.get("seconds", 0.0) - self.sampled_s[t.id], 0.0)
            for t in self.episodes
            if t.num_turns
        ]
        return fmean(own) if own else 0.0

    @property
    def longest_s(self) -> float:
        """Seconds of the longest episode."""
        return max((t.metrics.get("seconds", 0.0) for t in self.episodes), default=0.0)

    @property
    def lengths(self) -> Lengths:
        """Tokens of the first prompts, of turns, and of the longest conversations: an agent that
        edits its history has several in an episode."""
        rows = [_longest(t) for t in self.episodes if t.num_turns]
        turns = self.turns
        return Lengths(
            prompt_max=max(prompt for prompt, _, _ in rows),
            turn_mean=fmean(turns),
            turn_max=turns[-1],
            per_turn_max=max((total - prompt) / num for prompt, total, num in rows),
            episode_mean=fmean(total for _, total, _ in rows),
            episode_max=max(total for _, total, _ in rows),
        )

    @property
    def turns_in_row(self) -> int:
        """Most turns of a conversation."""
        return max(_longest(t)[2] for t in self.episodes if t.num_turns)


def _longest(trajectory: Trajectory) -> tuple[int, int, int]:
    """Tokens before the first turn and up to the end of the last, and turns, of the longest
    conversation."""
    best = (0, 0, 0)
    for leaf in trajectory.leaves():
        path = [trajectory.segments[index] for index in trajectory.path(leaf)]
        sampled = [n for n, segment in enumerate(path) if segment.sampled]
        if not sampled:
            continue
        prompt = sum(len(segment.token_ids) for segment in path[: sampled[0]])
        total = sum(len(segment.token_ids) for segment in path[: sampled[-1] + 1])
        if total > best[1]:
            best = (prompt, total, len(sampled))
    return best


@dataclass
class _Timed:
    """A sampler that notes the seconds of its turns."""

    sampler: Sampler
    play: AgentPlay

    @property
    def context_length(self) -> int:
        return self.sampler.context_length

    def open(self, session: str) -> None:
        self.sampler.open(session)

    def close(self, session: str) -> None:
        self.sampler.close(session)

    async def sample(
        self, prompt_ids: list[int], params: SamplingParams, *, session: str
    ) -> Completion:
        started = time.perf_counter()
        try:
            return await self.sampler.sample(prompt_ids, params, session=session)
        finally:
            trajectory = session.partition("#")[0]  # a branch has a session of its own
            self.play.sampled_s[trajectory] += time.perf_counter() - started

    def check_grammar(self, grammar: str) -> None:
        assert isinstance(self.sampler, Constraining)  # the sampler of this process is
        self.sampler.check_grammar(grammar)


@dataclass
class _Counted:
    """A judge that counts the episodes that it is asked about."""

    judge: Judge
    play: AgentPlay

    async def __call__(self, task: Task, trajectory: Trajectory) -> Score:
        self.play.judged += 1
        return await self.judge(task, trajectory)


async def play_agent(
    config: RunConfig,
    tokenizer: Any,
    tasks: Sequence[Task],
    folder: Path,
    seconds: float,
) -> AgentPlay:
    """Play groups of the tasks for about `seconds`: one first, which shows what fails, then several
    at the same time. Episodes under way then end with a timeout."""
    play = AgentPlay(config.rollout.max_tokens_per_turn, config.model.context_length)
    none = Splits(TaskList(), TaskList())
    run = build(config, RunFolder(folder), none, tokenizer)
    try:
        begun = time.perf_counter()
        while tasks[len(play.groups) :] and len(play.groups) < MOST_GROUPS:
            left = seconds - (time.perf_counter() - begun)
            if left <= (play.waves[-1][0] if play.waves else 0.0):
                break  # another wave would likely be cut
            number = min(NUM_GROUPS, MOST_GROUPS - len(play.groups)) if play.groups else 1
            await _wave(run, play, tasks[len(play.groups) :][:number], left)
            if not play.scored:  # what fails four times, fails
                break
    finally:
        await run.collector.close()
        run.backend.close()
    return play


async def _wave(run: Run, play: AgentPlay, tasks: Sequence[Task], left: float) -> None:
    """Play groups at the same time, each episode once."""
    collector = run.collector.with_config(
        "trial", episode_deadline_s=left, max_retries=0, concurrency=len(tasks) * GROUP_SIZE
    )
    assert collector.sampler is not None
    collector = replace(
        collector,
        sampler=_Timed(collector.sampler, play),
        judge=None if collector.judge is None else _Counted(collector.judge, play),
    )
    started = time.perf_counter()
    with run.backend.meter.rollout():
        groups = await collector.collect(tasks, 0, GROUP_SIZE, first_group=len(play.groups))
    play.waves.append((time.perf_counter() - started, len(tasks) * GROUP_SIZE))
    play.groups += groups
