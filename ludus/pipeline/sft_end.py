"""The measured end of SFT, `sft.until`: the success of sampled episodes while the policy learns.

RL compares the episodes of a group. A policy that never succeeds, or that always does the same,
gives it nothing to compare; one that succeeds in some episodes and is undecided gives it the most.
The number of SFT steps to that point differs between environments, and between seeds of one (28.7
to 74.0 % success after equal steps of babyai-tiny), so it is measured and not fixed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import fmean

from ludus.config.schema import RunConfig
from ludus.config.training import RECENT, SFTConfig, SFTUntilConfig
from ludus.core.seeds import derive_seed
from ludus.core.types import Group, Message, Task
from ludus.data.conversations import Conversation
from ludus.data.demonstrations import load_dropped
from ludus.evaluate import Evaluation
from ludus.evaluate.results import read_evaluation
from ludus.pipeline.build import Run
from ludus.pipeline.evaluation.evaluate import play_heldout
from ludus.store.folders import RunFolder
from ludus.train.checkpoint.listing import list_checkpoints

LEAST = 0.1
"""Success below which SFT goes on although success does not rise: RL would find too little."""

LEAST_UNSEEN = 8
"""Training tasks without a demonstration that suffice for a measurement."""

LEAST_FORECAST = 4
"""Measurements that a forecast needs."""

LEAST_SPAN = 0.5
"""Doublings of the steps from its first measurement to its last. Those of a later half have about
one; they are closer where a resumed run measures more often."""

FALL = 0.25
"""Share of the steps in which the rate of `wsd` falls once a measurement has ended SFT and no RL
follows. letter_counting had 61 % at the decision, 80 % where the rate fell in a fifth of the steps,
85 % in two fifths; RL then gains less (docs/log.md)."""

LABEL = "sft"
"""Label of the measurements: `evaluate/sft` in the store."""


def not_shown(train: Sequence[Task], conversations: Sequence[Conversation]) -> list[Task]:
    """The tasks that no conversation shows: neither by its task's id nor, since the ids of a file
    `sft.data` are its own, by its opening."""
    ids = {conversation.task.id for conversation in conversations}
    openings = {_opening(conversation.messages) for conversation in conversations}
    return [
        task
        for task in train
        if task.id not in ids and not (task.prompt and _opening(task.prompt) in openings)
    ]


def _opening(messages: Sequence[Message]) -> tuple[str, ...]:
    """The user's messages before the first turn of the assistant."""
    first = takewhile(lambda message: message.role != "assistant", messages)
    return tuple(message.content for message in first if message.role == "user")


def unseen(run: Run, number: int) -> list[Task]:
    """Training tasks that SFT does not show, the same in each call; where fewer than LEAST_UNSEEN
    are left, all training tasks.

    Tasks that the expert lost or could not play are not among them: they would be most of these,
    and harder than all others, or broken.
    """
    failed = {one.task_id for one in load_dropped(run.folder.demonstrations)}
    tasks = [t for t in not_shown(run.splits.train, run.conversations) if t.id not in failed]
    if len(tasks) < min(number, LEAST_UNSEEN):
        tasks = list(run.splits.train)
    seed = derive_seed(run.config.seed, "sft", "until")
    return random.Random(seed).sample(tasks, min(number, len(tasks)))


async def measure(
    run: Run, until: SFTUntilConfig, step: int, tasks: Sequence[Task] | None = None
) -> tuple[list[Group], Evaluation]:
    """Play training tasks, or the first of `tasks`, as RL will: sampled, several episodes each."""
    settings = run.config.evaluate.model_copy(
        update={
            "num_tasks": None,
            "samples_per_task": until.samples_per_task,
            "temperature": run.config.rollout.temperature,
        }
    )
    tasks = unseen(run, until.num_tasks) if tasks is None else tasks[: until.num_tasks]
    groups, result = await play_heldout(run.collector, tasks, run.config.env, settings, LABEL, step)
    version = run.backend.sampler.policy_version
    return groups, result.model_copy(update={"policy_version": version})


Measured = tuple[int, float]
"""A step of SFT, and the success of its measurement."""


def measured(folder: RunFolder, step: int) -> list[tuple[int, Evaluation]]:
    """The measurements up to a step, in their order."""
    files = sorted((at, path) for label, at, path in folder.evaluation_files() if label == LABEL)
    return [(at, read_evaluation(path)) for at, path in files if at <= step]


@dataclass(frozen=True, slots=True)
class Decision:
    """The end of SFT by `sft.until`: after `last`, for the `reason` found by the measurement at
    `step`."""

    step: int
    reason: str
    last: int


def decided(config: RunConfig, found: Sequence[tuple[int, Evaluation]]) -> Decision | None:
    """The decision of these measurements to end SFT; None: it goes on.

    RL begins at once, from a policy that is still undecided, which gains most by it. Where none
    follows, the rate falls first.
    """
    sft = config.sft
    if sft is None or sft.until is None:
        return None
    curve = [(at, evaluation.success.value) for at, evaluation in found]
    for number, (at, evaluation) in enumerate(found, 1):
        if at >= sft.steps and at % sft.until.every:  # it ends in any case
            break
        reason = reason_to_end(sft.until, curve[:number], sft.steps, evaluation.num_episodes)
        if reason is not None:
            return Decision(at, reason, at if config.rl is not None else last_step(sft, at))
    return None


def last_step(sft: SFTConfig, step: int) -> int:
    """The last step where a measurement at `step` ends SFT: with `wsd`, the rate falls first."""
    if sft.optimizer.schedule != "wsd":
        return step
    return min(math.ceil(step / (1 - FALL)), sft.steps)


def ended(folder: RunFolder, config: RunConfig, step: int) -> str | None:
    """The reason why SFT ended at a step by `sft.until`; None: it did not."""
    decision = decided(config, measured(folder, step))
    return decision.reason if decision is not None and step >= decision.last else None


def rl_steps(config: RunConfig, folder: RunFolder) -> int:
    """Steps of RL, with those that SFT has left to it (`rl.steps_per_unused_sft_step`)."""
    if config.rl is None:
        return 0
    if not config.rl.steps_per_unused_sft_step or config.sft is None:
        return config.rl.steps
    # Its end is measured, whatever the reason for it, but for a resumed run that has its last step.
    ends = [at for label, at, _ in folder.evaluation_files() if label == LABEL]
    ends += [info.step for info in list_checkpoints(folder.checkpoints) if info.stage == "sft"]
    unused = max(config.sft.steps - max(ends), 0) if ends else 0
    return config.rl.steps_after(unused)


def expected_gain(found: Sequence[Measured], steps: int, num_episodes: int) -> float:
    """Success that the steps up to `steps` are expected to add, with one standard error.

    A line through the log-odds of the later half of the measurements, at least LEAST_FORECAST, over
    the logarithm of the steps: each doubling multiplies the odds by the same. What begins to be
    learned late is seen to rise: of chain_sum's 4 % after 380 steps and 10 % after 630, a line
    through success itself promised 9 points to 1,450, its log-odds 23. Infinite where there are too
    few, or too close ones.

    Args:
        num_episodes: of a measurement.
    """
    points = found[-max(LEAST_FORECAST, len(found) // 2) :]
    if len(points) < LEAST_FORECAST:
        return math.inf
    half = 0.5 / num_episodes  # an episode more of each kind keeps the odds finite
    doublings = [math.log2(at) for at, _ in points]
    if doublings[-1] - doublings[0] < LEAST_SPAN:
        return math.inf
    odds = [math.log((value + half) / (1 - value + half)) for _, value in points]
    success, middle = fmean(value for _, value in points), fmean(doublings)
    spread = sum((x - middle) ** 2 for x in doublings)
    slope = sum((x - middle) * y for x, y in zip(doublings, odds, strict=True)) / spread
    error = math.sqrt(1 / max(success * (1 - success), 0.01) / num_episodes / spread)
    now = fmean(odds) + slope * (doublings[-1] - middle)
    end = now + (slope + error) * (math.log2(steps) - doublings[-1])
    return _share(end) - _share(now)


def _share(log_odds: float) -> float:
    return 1 / (1 + math.exp(min(-log_odds, 700.0)))


def recent(successes: Sequence[float]) -> float:
    """The mean of the last RECENT measurements, or of those that there are; at least one."""
    return fmean(successes[-RECENT:])


def _last_ones(successes: Sequence[float]) -> str:
    """The measurements of which `recent` is the mean, in words."""
    return "the last two measurements" if len(successes) >= RECENT else "the measurement"


def told(
    until: SFTUntilConfig, decision: Decision | None, step: int, successes: Sequence[float]
) -> str:
    """The line of a run about the end of SFT: where a measurement decides on it, and at its last
    step.

    Args:
        successes: of all measurements up to `step`.
    """
    if decision is None:
        level = recent(successes) if successes else 0.0
        return (
            f"sft: ends after step {step}, all of its steps; {level:.0%} of the sampled episodes "
            f"of {_last_ones(successes)} succeed, of {until.success:.0%} (until.success)"
        )
    if decision.last == decision.step:
        return f"sft: ends after step {step}: {decision.reason}"
    if step < decision.last:
        return f"sft: {decision.reason}; the rate falls until it ends, after step {decision.last}"
    return f"sft: ends after step {step}: {successes[-1]:.0%} of the sampled episodes succeed"


def reason_to_end(
    until: SFTUntilConfig, found: Sequence[Measured], steps: int = 0, num_episodes: int = 1
) -> str | None:
    """The reason why SFT ends after these measurements; None: it goes on.

    Args:
        steps, num_episodes: of SFT at most, and of a measurement, for `until.min_gain`; with 0
            steps it is not asked.
    """
    successes = [value for _, value in found]
    if not successes:
        return None
    if (level := recent(successes)) >= until.success:
        of = _last_ones(successes)
        return f"{level:.0%} of the sampled episodes of {of} succeed (until.success)"
    if found[-1][0] < until.min_steps:
        return None
    best = max(successes[: -until.patience], default=0.0)
    if best >= LEAST and max(successes[-until.patience :]) <= best:
        return (
            f"success has not risen above {best:.0%} in {until.patience} measurements "
            "(until.patience)"
        )
    if until.min_gain is None or found[-1][0] >= steps or level < LEAST:
        return None
    gain = expected_gain(found, steps, num_episodes)
    if gain < until.min_gain * 4 * level * (1 - level):  # RL learns from episodes that differ
        return (
            f"{level:.0%} of the sampled episodes of {_last_ones(successes)} succeed, and the "
            f"{steps - found[-1][0]:,} steps that are left are expected to add "
            f"{max(gain, 0):.1%} (until.min_gain)"
        )
    return None
