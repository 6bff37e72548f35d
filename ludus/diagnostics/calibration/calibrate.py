"""`ludus init`: measure, choose, and write the recipe."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from ludus.config.schema import RunConfig
from ludus.core.errors import ConfigError, DataError
from ludus.core.types import Message, Spec, Task
from ludus.data.conversations import Conversation, read_conversations
from ludus.data.expert import Demonstration
from ludus.data.splits import Splits, read_splits
from ludus.data.worlds import Worlds
from ludus.diagnostics.calibration import choices, tokens
from ludus.diagnostics.calibration import warnings as foretold
from ludus.diagnostics.calibration.episodes import Expert, Played, play_expert, play_random
from ludus.diagnostics.calibration.subject import MAX_TIERS, Subject, config_tasks
from ludus.diagnostics.calibration.trials import Trial, try_out

EXPERT_S = 20.0
"""Seconds for the expert's episodes."""

RANDOM_S = 5.0
"""Seconds for episodes of random actions."""

TRIAL_S = 70.0
"""Seconds for the trials of SFT and RL."""

NUM_EPISODES = 1600
"""Most episodes of the expert during calibration."""

NUM_WORLDS = 600
"""Tasks whose worlds are compared, to find out how many different ones there are."""

WORLDS_S = 5.0
"""Seconds for that comparison."""

MAX_DEMONSTRATIONS = 6000
"""Most demonstrations of a recipe."""


@dataclass
class Calibration:
    """Measurements and the configuration that follows from them; `warnings` in words."""

    subject: Subject
    config: RunConfig
    conversations: list[Conversation]
    expert: Expert
    random: Sequence[Played]
    lengths: choices.Lengths
    vocabulary: int
    unknown: tuple[float, float]
    distinct: float
    trial: Trial
    steps: choices.Steps
    seconds: float
    warnings: list[str] = field(default_factory=list)


def calibrate(
    subject: Subject, minutes: float, seed: int, say: Callable[[str], None]
) -> Calibration:
    """Measure and choose. Errors: ConfigError, DataError where no recipe can learn."""
    begun = time.perf_counter()
    folder = Path(tempfile.mkdtemp(prefix="ludus-init-"))
    try:
        return _calibrate(subject, minutes, seed, say, folder, begun)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _calibrate(
    subject: Subject,
    minutes: float,
    seed: int,
    say: Callable[[str], None],
    folder: Path,
    begun: float,
) -> Calibration:
    if subject.env is not None:
        subject = fewer_tiers(subject, folder, say)
    tasks = subject.take(NUM_EPISODES, 0)
    expert = play(subject, tasks, folder, say)
    good = [d for d in expert.demonstrations if d.success]
    if not good:
        raise ConfigError(no_demonstration(subject, expert))
    config = base(subject, expert, seed)
    conversations, _ = read_conversations(config.model_copy(update={"sft": None}), good, tasks)
    half = max(len(conversations) // 2, 1)
    config, vocabulary, unknown = tokenizer_for(config, conversations[:half], conversations[half:])
    say(
        f"tokenizer: {tokenizer_name(config)}, {vocabulary} tokens; of unseen episodes "
        f"{unknown[0]:.2%} of the expert's turns and {unknown[1]:.2%} of the prompts are <unk>"
    )
    distinct, reset_s = num_distinct(subject, tasks)
    if subject.kind == "env":
        num_train = choices.training_tasks(distinct, reset_s)
        num_heldout = choices.heldout_tasks(distinct)
    else:
        num_heldout = max(min(subject.rows // 5, 256), 1)
        num_train = subject.rows - num_heldout
    config = config.model_copy(update={"tasks": config_tasks(subject, num_train, num_heldout)})
    config, splits = with_splits(config)
    config, lengths = with_lengths(config, subject, expert, conversations)
    say(
        f"tokens: prompts to {lengths.prompt_max}, turns {lengths.turn_mean:.1f} to "
        f"{lengths.turn_max}, episodes {lengths.episode_mean:.0f} to {lengths.episode_max}; "
        f"context {config.model.context_length}"
    )
    played: list[Played] = []
    if subject.env is not None:
        actions = sorted({m.content for d in good for m in d.messages if m.role == "assistant"})
        played = play_random(subject.env, tasks[:200], actions, RANDOM_S, seed)
        say(random_line(played))
    tokenizer = tokens.trained(config, conversations, splits.train)
    shown = conversations_of(config, good, splits)
    trial = try_out(config, folder, splits, tokenizer, shown, TRIAL_S, say)
    rate = expert.num_played / max(expert.seconds, 1e-3) if subject.env else 1e9
    config, planned = with_choices(config, trial, minutes, rate)
    heldout = len(splits.heldout)
    warnings = [
        *foretold.of_expert(expert),
        *foretold.of_random(played, expert),
        *foretold.of_tasks(distinct, heldout, subject.kind),
        *foretold.of_lengths(lengths, config.model.context_length),
        *foretold.of_trial(trial, planned.sft),
    ]
    return Calibration(
        subject, config, shown, expert, played, lengths, vocabulary, unknown, distinct, trial,
        planned, time.perf_counter() - begun, warnings,
    )  # fmt: skip


def conversations_of(
    config: RunConfig, good: Sequence[Demonstration], splits: Splits
) -> list[Conversation]:
    """The demonstrations of training tasks, as SFT shows them."""
    ids = {task.id for task in splits.train}
    kept = [d for d in good if d.task_id in ids]
    return read_conversations(config.model_copy(update={"sft": None}), kept, splits.train)[0]


def fewer_tiers(subject: Subject, folder: Path, say: Callable[[str], None]) -> Subject:
    """Of an environment with many levels, those with the shortest episodes of the expert."""
    if len(subject.tiers) <= MAX_TIERS:
        return subject
    assert subject.env is not None
    alone = [replace(subject, tiers=[tier]) for tier in subject.tiers[:60]]
    tasks = [task for one in alone for task in one.take(2, 0)]
    expert = play_expert(subject.env, tasks, folder, EXPERT_S / 2)
    shortest: dict[str, float] = {}
    for tier in subject.tiers:
        own = [d for d in expert.demonstrations if d.tier == tier and d.success]
        if own:
            shortest[tier] = fmean(sum(len(m.content) for m in d.messages) for d in own)
    if not shortest:
        raise ConfigError(no_demonstration(subject, expert))
    chosen = sorted(shortest, key=shortest.__getitem__)[:MAX_TIERS]
    kept = [tier for tier in subject.tiers if tier in chosen]
    say(
        f"{len(subject.tiers)} levels: the shortest of {len(shortest)} played are "
        f"{', '.join(kept)} (choose with --tiers)"
    )
    return replace(subject, tiers=kept)


def play(
    subject: Subject, tasks: Sequence[Task], folder: Path, say: Callable[[str], None]
) -> Expert:
    """The expert's episodes; of a data set, its answers."""
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
    expert = play_expert(subject.env, tasks, folder, EXPERT_S)
    if expert.demonstrations:
        say(
            f"expert: {expert.num_played} episodes in {expert.seconds:.0f} s, {expert.success:.0%} "
            f"succeed, {fmean(expert.turns):.1f} turns (to {expert.turns[-1]}), reward "
            f"{fmean(expert.rewards):.2f} (standard deviation {pstdev(expert.rewards):.2f})"
        )
    return expert


def answer_of(task: Task) -> str:
    """The answer that SFT shows: of several accepted ones, the first."""
    answer = task.answer[0] if isinstance(task.answer, list) and task.answer else task.answer
    return str(answer)


def no_demonstration(subject: Subject, expert: Expert) -> str:
    """Why nothing can be learned from this environment's expert, and what to do."""
    if expert.demonstrations:
        return (
            f"{subject.given}: the expert played {expert.num_played} episodes and succeeded in "
            f"none (rewards {min(expert.rewards):g} to {max(expert.rewards):g}): compare them with "
            "the environment's success_at"
        )
    return (
        f"{subject.given}: no episode of an expert: {expert.why_none}. A small model from scratch "
        "learns an environment's language from demonstrations: give the class a method "
        "`expert_action`, or collect episodes of a large model with `ludus generate-data` and name "
        "the file in `sft.data`"
    )


def base(subject: Subject, expert: Expert, seed: int) -> RunConfig:
    """The recipe before any measurement of tokens."""
    data: dict[str, Any] = {
        "name": subject.name,
        "seed": seed,
        "model": {
            "architecture": {"name": "qwen3"},
            "tokenizer": {"name": "words"},
            "chat_template": "plain",
            "context_length": 4096,
        },
        "env": subject.env,
        "judge": subject.judge,
        "tasks": {"train": subject.reader_of(64, 0)},
        "demonstrations": {"num_episodes": 1000} if subject.env else None,
        "sft": {
            "steps": 1000,
            "until": {"success": 0.4, "every": 10},
            "optimizer": {"lr": 2e-3, "warmup_steps": 10},
        },
        "rl": {
            "algorithm": {"name": "grpo", "args": {"entropy_bonus": 0.03}},
            "steps": 100,
            "groups_per_step": 32,
            "group_size": 8,
            "optimizer": {"lr": 3e-4, "eps": 1e-5, "warmup_steps": 10, "schedule": "linear"},
        },
        "rollout": {"concurrency": 256},
    }
    if subject.env is None:
        data["sft"]["data"] = f"{subject.name}.sft.jsonl"
    return RunConfig.model_validate(data)


def tokenizer_for(
    config: RunConfig, shown: Sequence[Conversation], new: Sequence[Conversation]
) -> tuple[RunConfig, int, tuple[float, float]]:
    """`words` where unseen episodes have its words, else `bpe`."""
    size, in_turns, in_prompts = tokens.unknown_shares(config, shown, new or shown)
    if tokens.fits_words(size, in_turns, in_prompts):
        return config, size, (in_turns, in_prompts)
    model = config.model.model_copy(
        update={"tokenizer": Spec(name="bpe", args={"vocab_size": 512})}
    )
    config = config.model_copy(update={"model": model})
    size, in_turns, in_prompts = tokens.unknown_shares(config, shown, new or shown)
    return config, size, (in_turns, in_prompts)


def tokenizer_name(config: RunConfig) -> str:
    """The name of the tokenizer to train."""
    spec = config.model.tokenizer
    return spec.name if isinstance(spec, Spec) else str(spec)


def num_distinct(subject: Subject, tasks: Sequence[Task]) -> tuple[float, float]:
    """About how many different tasks there are, by the repetitions among a few hundred; and the
    seconds to compare one."""
    if subject.kind == "data":
        return float(len({t.model_dump_json(include={"prompt"}) for t in subject.tasks})), 0.0
    worlds, keys, begun = Worlds(subject.env), [], time.perf_counter()
    for task in tasks[:NUM_WORLDS]:
        keys.append(worlds.key(task))
        if time.perf_counter() - begun > WORLDS_S:
            break
    seconds = (time.perf_counter() - begun) / len(keys)
    few, num = keys, len(set(keys))
    if num == len(few):
        return 1e6, seconds
    low, high = float(num), 1e7
    for _ in range(100):  # expected number of different ones among n draws of N
        middle = math.sqrt(low * high)
        expected = middle * (1 - math.exp(-len(few) / middle))
        low, high = (middle, high) if expected < num else (low, middle)
    return low, seconds


def with_splits(config: RunConfig) -> tuple[RunConfig, Splits]:
    """The configuration with so few training tasks that held-out tasks are left."""
    while True:
        try:
            return config, read_splits(config)
        except DataError:
            train = config.tasks.train
            number = int(train.args.get("num_tasks", 0)) // 2
            if number < 8:
                raise
            smaller = train.model_copy(update={"args": {**train.args, "num_tasks": number}})
            tasks = config.tasks.model_copy(update={"train": smaller})
            config = config.model_copy(update={"tasks": tasks})


def with_lengths(
    config: RunConfig,
    subject: Subject,
    expert: Expert,
    conversations: Sequence[Conversation],
) -> tuple[RunConfig, choices.Lengths]:
    """Turns, tokens of a turn and the context, by the expert's episodes."""
    tokenizer = tokens.trained(config, conversations, ())
    lengths = tokens.lengths(config, tokenizer, conversations)
    maker = subject.maker()
    own_limit = maker.max_turns if maker else 1
    room = choices.tokens_per_turn(lengths)
    most = choices.turns(expert.turns, own_limit)
    context = choices.context(lengths, most, room)
    rollout = config.rollout.model_copy(
        update={
            "max_tokens_per_turn": min(room, context - 1),
            "max_turns": most if subject.env else None,
        }
    )
    model = config.model.model_copy(update={"context_length": context})
    batch = max(8192, context)
    sft = config.sft.model_copy(update={"tokens_per_batch": batch}) if config.sft else None
    rl = config.rl.model_copy(update={"tokens_per_batch": batch}) if config.rl else None
    return config.model_copy(
        update={"model": model, "rollout": rollout, "sft": sft, "rl": rl}
    ), lengths


def random_line(played: Sequence[Played]) -> str:
    """What random actions reach."""
    failed = [p for p in played if p.error]
    fine = [p for p in played if not p.error]
    if not fine:
        return f"random actions: every episode failed, {failed[0].error}" if failed else ""
    rewards = [p.reward for p in fine]
    return (
        f"random actions: {fmean(p.success for p in fine):.0%} of {len(fine)} episodes succeed, "
        f"reward {fmean(rewards):.2f} (standard deviation {pstdev(rewards):.2f}), a step of the "
        f"environment takes {1000 * fmean(p.step_s for p in fine):.2g} ms"
    )


def with_choices(
    config: RunConfig, trial: Trial, minutes: float, episodes_per_s: float
) -> tuple[RunConfig, choices.Steps]:
    """Learning rate, temperature and steps, by the trials."""
    assert config.sft is not None
    assert config.rl is not None
    until = config.sft.until
    assert until is not None
    num_train = num_training_tasks(config)
    for_seconds = 0.1 * 60 * minutes * episodes_per_s
    step, success = trial.curve[-1] if trial.curve else (0, 0.0)
    reached = success >= until.success
    wanted = max(2 * step * config.sft.episodes_per_step, 1000) if reached else MAX_DEMONSTRATIONS
    number = int(min(MAX_DEMONSTRATIONS, num_train, max(for_seconds, 64), wanted))
    groups = choices.groups(trial.rl_step_s, config.rl.groups_per_step)
    trial.rl_step_s *= groups / config.rl.groups_per_step
    until = until.model_copy(update={"every": choices.measure_every(trial, until.success)})
    planned = choices.steps(trial, minutes, number / episodes_per_s, until.every)
    updates: dict[str, Any] = {
        "sft": config.sft.model_copy(
            update={
                "steps": planned.sft,
                "until": until,
                "optimizer": config.sft.optimizer.model_copy(update={"lr": trial.rate}),
            }
        ),
        "rl": config.rl.model_copy(
            update={
                "steps": planned.rl,
                "groups_per_step": groups,
                "optimizer": config.rl.optimizer.model_copy(
                    update={"warmup_steps": min(10, planned.rl // 5)}
                ),
            }
        ),
        "rollout": config.rollout.model_copy(update={"temperature": choices.temperature(trial)}),
        "evaluate": config.evaluate.model_copy(
            update={"every": planned.every, "num_tasks_between": 128}
        ),
    }
    if config.demonstrations is not None:
        updates["demonstrations"] = config.demonstrations.model_copy(
            update={"num_episodes": max(number, 1), "num_workers": os.cpu_count() or 2}
        )
    return config.model_copy(update=updates), planned


def num_training_tasks(config: RunConfig) -> int:
    """Number of tasks of `tasks.train`."""
    args = config.tasks.train.args
    return int(args.get("num_tasks", args.get("limit", 0)))
