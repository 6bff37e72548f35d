"""Preflight: tries all parts of a run before demonstrations and before its folder exists.

    check_parts     device, model, sampler, tokenizer, template
    loss            on made-up tokens, and advantages on made-up episodes
    sft.data        read, and rendered
    episodes        a few of the expert, two of them twice, and of random words, against the limits
                    of the recipe; some held-out tasks, opened and stepped
    judges          on made-up episodes

Writes nothing. A resumed run is not tried again; one that has no checkpoint checks its parts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ludus.config.schema import RunConfig
from ludus.config.training import OptimizerConfig
from ludus.core.errors import ConfigError, EnvError
from ludus.core.system.signals import run
from ludus.core.types import Message, Spec, Task
from ludus.data.conversations import (
    Conversation,
    functions_brought,
    read_conversations,
    replay_all,
)
from ludus.data.splits import Splits
from ludus.models.chat.by_task import TaskRenderers
from ludus.pipeline.build import make_limits
from ludus.pipeline.parts.companions import LaunchOptions
from ludus.pipeline.parts.registries import check_judges
from ludus.pipeline.parts.tokenizer import check_functions, make_renderers, make_tokenizer
from ludus.pipeline.preflight.again import judge_again
from ludus.pipeline.preflight.algorithm import try_advantages, try_loss
from ludus.pipeline.preflight.episodes import Played, Sample, play_sample, spread
from ludus.pipeline.preflight.heldout import judge_heldout
from ludus.pipeline.preflight.judges import try_judges
from ludus.pipeline.preflight.limits import (
    Findings,
    judge_needs,
    judge_openings,
    opening_sizes,
    token_needs,
    turn_needs,
)
from ludus.pipeline.preflight.parts import check_parts
from ludus.pipeline.preflight.rewards import judge_expert, judge_rewards, slow_steps

NUM_CONVERSATIONS = 64
"""Conversations of `sft.data` that are rendered."""

NUM_PROMPTS = 16
"""Tasks without an environment whose prompts are measured."""

NOTHING = Sample([], [], 0, complete=True)


def preflight(
    config: RunConfig, splits: Splits, options: LaunchOptions, note: Callable[[str], None]
) -> None:
    """Try the parts of a run; `note` receives warnings.

    The environment is not played with `--break`, whose breakpoints wait for a debugger, nor where
    its service starts with the run.

    Errors: ConfigError with all faults of the episodes and judges; MissingDependency, DataError,
    EnvError, ToolError.
    """
    started = time.perf_counter()
    tokenizer = own = check_parts(config)
    check_judges(config)
    found = Findings()
    found.faults += try_loss(config)
    try_advantages(config, found)
    check_functions(config, splits.train, splits.heldout)
    make_limits(config, splits).close()
    conversations, _ = read_conversations(config, [], splits.train)
    plays = config.env is not None or any(task.env is not None for task in splits.train)
    sample = NOTHING
    if plays and not options.patient and options.env_service is None:
        evaluated = splits.heldout[: config.evaluate.num_tasks]
        sample = run(play_sample(config, splits.train, evaluated))
    exact = tokenizer is not None or _by_words(config)
    if tokenizer is None:
        tokenizer = _estimated_tokenizer(config, splits, conversations, sample)
    if tokenizer is not None:
        if (size := _vocabulary(config, tokenizer, known=own is not None)) is not None:
            found.faults += _entropy_out_of_reach(config, size)
        renderers = make_renderers(config, tokenizer)
        _compare_prompts(config, splits, sample, renderers, exact, found)
        if conversations:
            _compare_conversations(config, conversations, renderers, exact, found)
        if not found.faults and not options.quick:
            _compare_episodes(config, sample, renderers, exact, found)
        if not options.patient:
            scored = [*(splits.train if config.rl is not None else ()), *splits.heldout]
            run(try_judges(config, scored, sample.opened, renderers, found))
    judge_expert(config, sample, found)
    judge_again(sample, found)
    judge_heldout(sample, found)
    judge_rewards(config, sample, found)
    found.notes += slow_steps(config, sample)
    found.notes += _few_heldout(config, splits)
    if not options.quick:
        found.notes += _long_warm_ups(config)
    if found.faults:
        raise ConfigError("\n".join(found.faults))
    for text in found.notes:
        note(f"warning: preflight: {text}")
    note(_summary(sample, time.perf_counter() - started))


def _vocabulary(config: RunConfig, tokenizer: Any, *, known: bool) -> int | None:
    """The most tokens that the run's vocabulary has; None where they follow from its texts."""
    own = config.model.tokenizer
    if known or (own.name if isinstance(own, Spec) else own) == "bytes":
        return len(tokenizer)
    size = own.args.get("vocab_size") if isinstance(own, Spec) else None
    return size if isinstance(size, int) else None


def _entropy_out_of_reach(config: RunConfig, vocabulary: int) -> list[str]:
    """Faults of an entropy that no distribution over the vocabulary has."""
    target = config.rl.algorithm.args.get("entropy_target") if config.rl is not None else None
    most = math.log(max(vocabulary, 1))
    if not isinstance(target, float | int) or target <= most:
        return []
    return [
        f"rl.algorithm.args.entropy_target: no policy reaches {target:g} nats a token: with "
        f"{vocabulary:,} tokens the most is {most:.2f}; 0.1 to 1 are usual"
    ]


def _few_heldout(config: RunConfig, splits: Splits) -> list[str]:
    """Notes that a limit of the tasks of an evaluation has no effect."""
    between, number = config.evaluate.num_tasks_between, len(splits.heldout)
    if between is None or not 0 < number < between:
        return []
    return [
        f"evaluate.num_tasks_between: there are {number} held-out tasks, fewer than {between}: "
        "each evaluation plays all of them; lower it, or leave it out"
    ]


def _long_warm_ups(config: RunConfig) -> Iterator[str]:
    """Notes that the learning rate of a stage is not reached before its last optimizer step."""
    stages: list[tuple[str, OptimizerConfig, int]] = []
    if (sft := config.sft) is not None:
        stages.append(("sft", sft.optimizer, sft.steps))
    if (rl := config.rl) is not None:
        stages.append(("rl", rl.optimizer, rl.most_steps(sft) * rl.epochs * rl.minibatches))
    for name, optimizer, steps in stages:
        if (warm_up := optimizer.warmup_steps) > steps:
            yield (
                f"{name}.optimizer.warmup_steps: a warm-up of {warm_up:,} in {steps:,} optimizer "
                f"steps: the learning rate comes to {steps / warm_up:.0%} of "
                f"`{name}.optimizer.lr` at most; lower it"
            )


def _by_words(config: RunConfig) -> bool:
    """True for a tokenizer that has one token for a word, whatever it was trained on."""
    own = config.model.tokenizer
    return (own.name if isinstance(own, Spec) else own) == "words"


def _estimated_tokenizer(
    config: RunConfig, splits: Splits, conversations: Sequence[Conversation], sample: Sample
) -> Any:
    """A tokenizer of the texts at hand; None where there are none. Errors: EnvError where no
    episode could be opened, because the run could not train its tokenizer either."""
    some = conversations[:NUM_CONVERSATIONS]
    messages = [message for item in some for message in item.messages]
    messages += [message for played in sample.opened for message in played.opening]
    for played in sample.finished:
        assert played.demonstration is not None
        messages += played.demonstration.messages
    messages += [m for task in spread(splits.train, NUM_PROMPTS) for m in task.prompt]
    if messages:
        return make_tokenizer(config, (), messages, functions_brought(conversations))
    tried = [*sample.expert, *sample.random]
    errors = [played for played in tried if played.error and not played.no_expert]
    if errors and not any(played.overdue for played in tried):
        name = config.env.name if config.env else tried[0].task.id
        raise EnvError(f"environment {name!r} opens no episode: {errors[0].fault}")
    return None


def _compare_prompts(
    config: RunConfig,
    splits: Splits,
    sample: Sample,
    renderers: TaskRenderers,
    exact: bool,
    found: Findings,
) -> None:
    if config.agent is None:  # an agent writes its own prompts
        sizes = opening_sizes(config, _openings(splits, sample), renderers)
        judge_openings(sizes, config, exact, found)


def _compare_episodes(
    config: RunConfig, sample: Sample, renderers: TaskRenderers, exact: bool, found: Findings
) -> None:
    """Compare the expert's episodes with the limits of the recipe."""
    finished = sample.finished
    if not finished or config.agent is not None:  # an agent decides when to call the model
        return
    judged = config.judge is not None or any(played.task.judge for played in finished)
    options: dict[str, Any] = {"judged": judged, "all_played": len(finished) == sample.num_tasks}
    of_turn, whole = token_needs(config, finished, renderers)
    if config.rl is not None or config.tasks.heldout is not None:
        turns = turn_needs(config, finished)
        result = "Longer episodes are cut"
        judge_needs(turns, found, what="turns", result=result, exact=True, **options)
        result = "Longer turns end their episodes"
        what = "tokens in the longest turn"
        judge_needs(of_turn, found, what=what, result=result, exact=exact, **options)
    what, result = "tokens in the whole episode", "Longer episodes are cut or left out"
    judge_needs(whole, found, what=what, result=result, exact=exact, **options)


def _openings(splits: Splits, sample: Sample) -> list[tuple[Task, list[Message]]]:
    openings: dict[str, tuple[Task, list[Message]]] = {}
    for played in sample.opened:
        openings.setdefault(played.task.id, (played.task, played.opening))
    if not openings:
        return [(task, []) for task in spread(splits.train, NUM_PROMPTS)]
    return [*openings.values()]


def _compare_conversations(
    config: RunConfig,
    conversations: Sequence[Conversation],
    renderers: TaskRenderers,
    exact: bool,
    found: Findings,
) -> None:
    """Errors: DataError for a conversation that cannot be rendered."""
    every = max(len(conversations) // NUM_CONVERSATIONS, 1)
    some = conversations[::every][:NUM_CONVERSATIONS]
    limit = config.model.context_length
    _, fitting, excluded = replay_all(some, renderers, limit)
    if not excluded:
        return
    task_id, reason = excluded[0]
    about = "" if exact else ", estimated"
    text = f"sft.data: {len(excluded)} of {len(some)} conversations that were tried"
    text = f"{text} are left out ({task_id}{about}: {reason})"
    (found.notes if fitting else found.faults).append(text)


def _summary(sample: Sample, seconds: float) -> str:
    parts = []
    if finished := sample.finished:
        turns = sorted(len(played.rewards) for played in finished)
        won = sum(p.demonstration is not None and p.demonstration.success for p in finished)
        span = f"{turns[0]}" if turns[0] == turns[-1] else f"{turns[0]} to {turns[-1]}"
        parts.append(f"the expert won {won} of {len(finished)} episodes of {span} turns")
    elif _without_expert(sample.expert):
        parts.append("there is no expert")
    return f"preflight: {seconds:.1f} s" + (f"; {parts[0]}" if parts else "")


def _without_expert(expert: Sequence[Played]) -> bool:
    return bool(expert) and all(played.no_expert for played in expert)
