"""`ludus init`: measure, choose, and write the recipe."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean, pstdev
from tempfile import TemporaryDirectory

from ludus.config.schema import RunConfig
from ludus.core.errors import ConfigError
from ludus.core.system.signals import run
from ludus.core.types import Message, Task
from ludus.data.conversations import Conversation
from ludus.data.expert import Demonstration
from ludus.diagnostics.calibration import choices, tokens
from ludus.diagnostics.calibration import warnings as foretold
from ludus.diagnostics.calibration.conversations import (
    conversations_of,
    heldout_episodes,
    measured,
    of_heldout_levels,
    openings,
)
from ludus.diagnostics.calibration.distinct import by_tier, total, undeclared
from ludus.diagnostics.calibration.episodes import (
    RandomEpisode,
    play_again,
    play_random,
    random_line,
    success_of,
    success_of_one_answer,
)
from ludus.diagnostics.calibration.expert import Expert, play_expert
from ludus.diagnostics.calibration.first import (
    base,
    tokenizer_for,
    tokenizer_name,
    with_lengths,
    with_splits,
    with_tasks,
)
from ludus.diagnostics.calibration.levels import (
    EXPERT_S,
    fewer_tiers,
    no_demonstration,
    refuse_long,
    without_failing_tiers,
    without_small_tiers,
    without_unmade_tiers,
)
from ludus.diagnostics.calibration.pretrained import with_starting_values
from ludus.diagnostics.calibration.starting import Start
from ludus.diagnostics.calibration.subject import Subject
from ludus.diagnostics.calibration.trials.trial import Trial
from ludus.diagnostics.calibration.trials.try_out import try_out
from ludus.diagnostics.calibration.tuned import (
    num_tasks_of,
    with_choices,
    with_few_episodes,
    with_measurement,
    with_target,
)
from ludus.diagnostics.calibration.warnings import SLOW_S
from ludus.diagnostics.plan import shape_of
from ludus.pipeline.preflight.again import difference
from ludus.tasks.readers import TaskList

RANDOM_S = 5.0
"""Seconds for episodes of random actions."""

TRIAL_S = 70.0
"""Seconds for the trials of SFT and RL."""

NUM_REPEATED, REPEAT_S = 8, 4.0
"""Tasks that the expert plays again, to find episodes that differ; at most so many seconds."""

NUM_EPISODES = 6000
"""Most episodes of the expert during calibration."""

TRIAL_TOKENS = 500_000
"""Tokens of the episodes that the trial of SFT has: with few, it would learn them by heart."""

TOLD = 0.01
"""Success of one answer to all tasks above which it is told."""


@dataclass
class Calibration:
    """Measurements and the configuration that follows from them; `warnings` in words.

    Args:
        conversations: what SFT shows.
        distinct: about how many different tasks there are.
        steps, start: how the minutes are divided; for a pretrained model its starting values.
        broken: levels that are left out since they make no tasks, or since the expert fails there,
            with the reason.
        searches: the expert knows what an agent must find out first.
        seconds: that the calibration took.
    """

    subject: Subject
    config: RunConfig
    conversations: list[Conversation]
    expert: Expert
    lengths: choices.Lengths
    vocabulary: int
    unknown: tuple[float, float]
    distinct: float
    trial: Trial
    steps: choices.Steps | None
    start: Start | None
    broken: dict[str, str]
    searches: bool = False
    warnings: list[str] = field(default_factory=list)
    seconds: float = 0.0


def calibrate(
    subject: Subject,
    minutes: float,
    seed: int,
    say: Callable[[str], object],
    model: str | None = None,
    data_file: str = "sft.jsonl",
) -> Calibration:
    """Measure and choose.

    Args:
        model: a pretrained one in place of one from scratch.
        data_file: of the conversations of a data set, which the caller writes.

    Errors: ConfigError, DataError where no recipe can learn.
    """
    begun, load = time.perf_counter(), os.getloadavg()[0]
    with TemporaryDirectory(prefix="ludus-init-", ignore_cleanup_errors=True) as folder:
        made = _calibrate(subject, minutes, seed, say, model, data_file, Path(folder))
    warnings = [*made.warnings, *foretold.of_load(load, os.cpu_count() or 1)]
    if made.steps is not None:
        warnings += foretold.of_time(made.steps.sft_s + made.steps.rl_s, minutes)
    return replace(made, warnings=warnings, seconds=time.perf_counter() - begun)


def _calibrate(
    subject: Subject,
    minutes: float,
    seed: int,
    say: Callable[[str], object],
    model: str | None,
    data_file: str,
    folder: Path,
) -> Calibration:
    if model is not None:  # a model that cannot be loaded is told before anything is played
        first = base(subject, seed, model, data_file, shows=False)
        tokens.trained(first, (), ())
        shape_of(first)
    broken: dict[str, str] = {}
    if subject.env is not None:
        subject, broken = without_unmade_tiers(subject, NUM_EPISODES, say)
        subject, failing = fewer_tiers(subject, folder, say, scratch=model is None)
        broken |= failing
    tasks = subject.take(NUM_EPISODES, 0)
    searches = subject.searches(tasks[0])
    expert = play(subject, tasks, folder, say, scratch=model is None)
    subject, expert, failing = without_failing_tiers(subject, expert, say)
    broken |= failing
    tasks = [task for task in tasks if task.tier not in failing]
    good = [d for d in expert.demonstrations if d.success]
    if not good and model is None:
        raise ConfigError(no_demonstration(subject, expert))
    config = base(subject, seed, model, data_file, shows=bool(good))
    shown = conversations_of(config, measured(good), tasks) if good else openings(config, tasks)
    tiers, reset_s = by_tier(subject, tasks, expert.demonstrations)
    subject = without_small_tiers(subject, tiers, say)
    half = max(len(shown) // 2, 1)
    unplayed = of_heldout_levels(config, subject, tasks)
    others = heldout_episodes(config, subject) if good and model is None else []
    config, vocabulary, unknown = tokenizer_for(config, shown[:half], shown[half:], others)
    if model is None:
        turns = "answers" if subject.kind == "data" else "expert's turns"
        say(
            f"tokenizer: {tokenizer_name(config)}, {vocabulary} tokens; of unseen episodes "
            f"{unknown[0]:.2%} of the {turns} and {unknown[1]:.2%} of the prompts are <unk>"
        )
    distinct = total(tiers, subject)
    most = choices.MOST_HELDOUT if model is None else choices.NUM_HELDOUT
    config = with_tasks(config, subject, distinct, reset_s, most)
    config, splits = with_splits(config, subject)
    config = with_measurement(config, len(splits.train))
    config, lengths = with_lengths(config, subject, expert.turns, shown, searches)
    say(
        f"tokens: prompts to {lengths.prompt_max}, turns {lengths.turn_mean:.1f} to "
        f"{lengths.turn_max}, episodes {lengths.episode_mean:.0f} to {lengths.episode_max}; "
        f"context {config.model.context_length}"
    )
    if lengths.episode_min > config.model.context_length:
        raise ConfigError(
            f"every episode exceeds the context: the shortest has {lengths.episode_min} tokens, "
            f"and the context can have {config.model.context_length} here; shorten prompts and "
            + ("observations, or choose shorter levels" if subject.env else "answers")
        )
    played: list[RandomEpisode] = []
    if subject.env is not None and good:
        actions = sorted({m.content for d in good for m in d.messages if m.role == "assistant"})
        most_turns = config.rollout.max_turns
        assert isinstance(most_turns, int)
        played = run(play_random(subject.env, tasks[:200], actions, RANDOM_S, seed, most_turns))
        say(random_line(played, most_turns))
    of_training = conversations_of(config, good, splits.train)
    if subject.kind == "data":
        of_training = of_training[: len(of_training) - choices.undemonstrated(len(of_training))]
    if model is not None:
        config, start = with_starting_values(config, minutes, say)
        trial, planned = Trial(), None
    else:
        start = None
        slow = any(p.step_s > SLOW_S for p in played)
        tokenizer = tokens.trained(config, shown, splits.train[: 1 if slow else None])
        if slow:
            config = with_few_episodes(config)
        if (one := success_of_one_answer(good)) > TOLD:
            say(f"one answer to all tasks succeeds in {one:.0%}")
        chance = max(success_of(played), one)
        config = with_target(config, chance)
        trial = run(
            try_out(
                config,
                folder,
                splits._replace(train=without_failed(splits.train, expert)),
                tokenizer,
                of_training[: max(int(TRIAL_TOKENS / lengths.episode_mean), 64)],
                TRIAL_S,
                say,
                heldout=others,
                slow=slow,
            )
        )
        trial.chance = chance
        rate = expert.per_s if subject.env else 1e9
        sampled = choices.own_tokens(lengths, expert.turns)
        config, planned = with_choices(config, trial, minutes, rate, sampled)
    unseen = undeclared(subject, tasks)
    warnings = [
        *unplayed,
        *foretold.of_expert(expert, subject.tiers),
        *foretold.of_random(played, expert, subject.levels),
        *foretold.of_threads(played, subject.own_threads(tasks[0])),
        *foretold.of_tasks(distinct, num_tasks_of(config.tasks.heldout), subject.kind, unseen),
        *foretold.of_worlds(distinct, unseen),
        *foretold.of_lengths(lengths, config.model.context_length),
        *foretold.of_turns(expert.turns, config.rollout.max_turns, subject.levels),
        *foretold.of_heldout(trial, subject.kind),
        *of_trial(config, trial, subject, planned),
        *repeated(subject, expert, tasks),
    ]
    return Calibration(
        subject, config, of_training, expert, lengths, vocabulary, unknown, distinct, trial,
        planned, start, broken, searches, warnings,
    )  # fmt: skip


def of_trial(
    config: RunConfig, trial: Trial, subject: Subject, planned: choices.Steps | None
) -> Iterator[str]:
    """Yields what is foretold of a recipe with SFT until a measured end, and of its RL."""
    if config.sft is not None and config.sft.until is not None:
        yield from foretold.of_trial(
            trial,
            config.sft.steps,
            config.sft.until.success,
            subject.kind,
            subject.levels,
            subject.tiers,
        )
        if (rl := config.rl) is not None:
            steps = planned.likely if planned else rl.steps
            yield from foretold.of_episodes(steps * rl.groups_per_step * rl.group_size)


def play(
    subject: Subject,
    tasks: Sequence[Task],
    folder: Path,
    say: Callable[[str], object],
    *,
    scratch: bool,
) -> Expert:
    """The expert's episodes; of a data set, its answers. `scratch`: for a model from scratch."""
    if subject.env is None:
        shown = [
            Demonstration(
                task_id=task.id,
                tier=task.tier,
                messages=[Message(role="assistant", content=answer_of(task))],
                reward=1.0,
                success=True,
                num_turns=1,
            )
            for task in tasks
        ]
        say(f"{subject.rows} rows with answers")
        return Expert(shown)
    fit = partial(refuse_long, subject) if scratch else None
    expert = play_expert(subject.env, tasks, folder, EXPERT_S, fit=fit)
    if expert.demonstrations:
        reached = f"{expert.success:.0%}"
        if expert.dropped:
            reached = f"{len(expert.dropped)} fail, {reached} of the others"
        say(
            f"expert: {expert.num_played} episodes in {expert.seconds:.0f} s, {reached} succeed, "
            f"{fmean(expert.turns):.1f} turns (to {expert.turns[-1]}), reward "
            f"{fmean(expert.rewards):.2f} (standard deviation {pstdev(expert.rewards):.2f})"
        )
    return expert


def without_failed(train: TaskList, expert: Expert) -> TaskList:
    """The tasks without those of which the expert's episode failed: a trial plays tasks that it
    does not show, and these would be most of them."""
    failed = {one.task_id for one in expert.dropped}
    return TaskList([task for task in train if task.id not in failed] or train)


def answer_of(task: Task) -> str:
    """The answer that SFT shows: of several accepted ones, the first."""
    answer = task.answer[0] if isinstance(task.answer, list) and task.answer else task.answer
    return str(answer)


def repeated(subject: Subject, expert: Expert, tasks: Sequence[Task]) -> Iterator[str]:
    """Yields a warning where a second play of a task differs from the first."""
    if subject.env is None or not expert.demonstrations:
        return
    first = {d.task_id: d for d in expert.demonstrations}
    chosen = [task for task in tasks if task.id in first][:NUM_REPEATED]
    for again in run(play_again(subject.env, chosen, REPEAT_S)):
        if text := difference(first[again.task_id], again):
            yield f"{text} (`ludus check-env {subject.given}` tells more)"
            return
