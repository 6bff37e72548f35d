"""Notes on the rewards and the speed of the episodes before a run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import fmean, median
from typing import Any

from ludus.config.schema import RunConfig
from ludus.pipeline.preflight.episodes import NUM_EPISODES, Played, Sample, at_once
from ludus.pipeline.preflight.limits import Findings
from ludus.train import ALGORITHMS

SLOW_STEP_S = 0.5
"""Seconds of an environment's step that are told."""

SLOW_ROLLOUTS_S = 60.0
"""Seconds of an RL step's environments that are told."""


def judge_expert(config: RunConfig, sample: Sample, found: Findings) -> None:
    """Add what the expert's episodes lack: an expert, a success, an end."""
    env = config.env.name if config.env else "of the tasks"
    expert, demonstrations = sample.expert, config.demonstrations
    without = [played for played in expert if played.no_expert]
    failed = [played for played in expert if played.error and not played.no_expert]
    finished = sample.finished
    if demonstrations is not None and expert and len(without) == len(expert):
        found.faults.append(
            f"demonstrations: the environment {env!r} has no expert for {_tasks(expert)}: "
            f"{without[0].error}. Give the class a method `expert_action`, or set sft.data to a "
            "file of conversations, or set demonstrations and sft to null"
        )
    elif demonstrations is not None and without:
        found.notes.append(
            f"demonstrations: the environment {env!r} has no expert for {len(without)} of "
            f"{_tasks(expert)}, e.g. {without[0].task.id}: they give no demonstration"
        )
    if failed:
        every = len(failed) == len(expert)
        share = f"{_episodes(expert)}" if every else f"{len(failed)} of {_episodes(expert)}"
        told = f"env: {env!r}: the expert's play failed in {share}, {failed[0].fault}"
        if any(played.overdue for played in failed):
            found.notes.append(f"{told}, so it was not checked further")
        elif every and demonstrations is not None and len(failed) >= min(4, sample.num_tasks):
            found.faults.append(f"{told}. `ludus check-env` tells more")
        else:
            found.notes.append(f"{told}; failed episodes are left out of the training")
    lost = [played for played in finished if not _won(played)]
    if not lost:
        return
    rewards = sorted({f"{played.reward:g}" for played in lost})
    if len(lost) < len(finished):
        if 2 * len(lost) > len(finished):
            found.notes.append(f"env: the expert loses {len(lost)} of {len(finished)} episodes")
        return
    text = (
        f"env: {env!r}: the expert loses {_episodes(finished)}, with a reward of "
        f"{', '.join(rewards[:3])}"
    )
    every = len(finished) == len(expert)
    enough = sample.complete and len(finished) >= min(4 * NUM_EPISODES, sample.num_tasks)
    if demonstrations and demonstrations.only_successful and every and enough:
        found.faults.append(
            f"{text}, so no demonstration is kept: check the environment's rewards and "
            "`success_at` (`ludus check-env`), or set demonstrations.only_successful to false"
        )
    else:
        found.notes.append(f"{text}: check the environment's rewards and `success_at`")


def _won(played: Played) -> bool:
    return played.demonstration is not None and played.demonstration.success


def _tasks(episodes: Sequence[Played]) -> str:
    return f"the {len(episodes)} tasks that were tried" if len(episodes) > 1 else "the task tried"


def _episodes(episodes: Sequence[Played]) -> str:
    count = len(episodes)
    return f"the {count} episodes that were tried" if count > 1 else "the one episode tried"


def judge_rewards(config: RunConfig, sample: Sample, found: Findings) -> None:
    """Add notes on rewards that give no signal, or have an unusual size."""
    if config.judge is not None or config.rl is None:
        return
    finished = [played for played in sample.finished if played.task.judge is None]
    both = [played for played in sample.random if not (played.error or played.task.judge)]
    outside = [p for p in (*finished, *both) if not _within(p)]
    if outside:
        low, high = outside[0].score_range
        most = max((played.reward for played in outside), key=abs)
        found.notes.append(
            f"env: an episode's reward of {most:g} is outside of the environment's score_range, "
            f"{low:g} to {high:g}: {_of_size(config, most)}. Declare `score_range` and "
            "`success_at` in the class, or scale the rewards"
        )
    random = {played.reward for played in both}
    same = random == {played.reward for played in finished}
    if len(finished) > 1 and len(random) == 1 and same:
        found.notes.append(
            f"env: the expert and random words both earn a reward of {random.pop():g}: where all "
            "episodes do, groups have no signal and RL trains nothing"
        )
    raised = [p for p in sample.random if p.error and not p.overdue and p.opened]
    worked = any(not played.error for played in sample.expert)
    if raised and worked:
        found.notes.append(
            f"env: an action of random words failed with: {raised[0].error}. A failed episode is "
            "left out of the training: answer the model with a message (`ludus check-env`)"
        )


def _within(played: Played) -> bool:
    low, high = played.score_range
    margin = 1e-6 + 0.01 * (high - low)
    return low - margin <= played.reward <= high + margin


def _of_size(config: RunConfig, reward: float) -> str:
    """The effect of rewards of this size on the algorithm."""
    assert config.rl is not None
    name = config.rl.algorithm.name
    algorithm: Any = ALGORITHMS.build(config.rl.algorithm, "rl.algorithm")
    compare = getattr(getattr(algorithm, "advantages", None), "compare", None)
    try:
        size = max(map(abs, compare([0.0, reward]))) if compare else math.inf
    except Exception:
        size = math.inf
    if size <= 2:
        return f"{name} divides by the spread of a group's rewards, so their size has no effect"
    if math.isinf(size):
        return f"{name} may train with advantages of that size"
    return f"{name} trains with advantages of that size, up to {size:g}, which clip all gradients"


def slow_steps(config: RunConfig, sample: Sample) -> Iterator[str]:
    """Yields a note with the estimated time of an RL step, where the environment is slow."""
    steps = [second for played in (*sample.expert, *sample.random) for second in played.seconds]
    rl = config.rl
    if not steps or rl is None:
        return
    step_s = median(steps)
    cpu_s = sum(played.cpu_s for played in (*sample.expert, *sample.random)) / len(steps)
    lengths = [len(played.rewards) for played in sample.finished]
    limits = [played.max_turns for played in sample.opened]
    most = config.rollout.max_turns if isinstance(config.rollout.max_turns, int) else max(limits)
    turns = min(fmean(lengths), most) if lengths else most
    episodes = rl.groups_per_step * rl.group_size
    together = min(at_once(config), episodes)
    seconds = max(math.ceil(episodes / together) * turns * step_s, episodes * turns * cpu_s)
    deadline = config.rollout.episode_deadline_s
    if turns * step_s > deadline:
        yield (
            f"rollout.episode_deadline_s: an episode of {turns:.0f} turns takes about "
            f"{_duration(turns * step_s)} in the environment alone, and is given up after "
            f"{deadline:g} s: raise it"
        )
    if step_s < SLOW_STEP_S and seconds < SLOW_ROLLOUTS_S:
        return
    total = seconds * rl.steps
    yield (
        f"env: a step takes {step_s:.2g} s (median of {len(steps)}): the {episodes} episodes of an "
        f"RL step, of about {turns:.0f} turns and {together} at a time, take about "
        f"{_duration(seconds)}, all {rl.steps} steps {_duration(total)}, in the environment alone. "
        f"Raise rollout.concurrency or lower rl.groups_per_step, or make the environment faster"
    )


def _duration(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
