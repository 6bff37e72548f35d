"""The `debug` back end: the same configuration, a few tasks, one thread, no optimizer step.

Everything runs where the debugger is: environments, judges and readers are called in this thread,
one episode at a time and without deadlines, so that a breakpoint in any of them just works. Nothing
is written to disk.
"""

from __future__ import annotations

import asyncio
from bdb import BdbQuit
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.rule import Rule
from rich.text import Text
from rich.traceback import Traceback

from ludus.config.schema import RunConfig
from ludus.core.errors import EpisodeError
from ludus.core.seeds import derive_seed
from ludus.core.types import Group, Sample, Task
from ludus.data.demonstrations import Demonstration, play
from ludus.envs import ENVS
from ludus.envs.base import NoExpert
from ludus.judges import JUDGES
from ludus.models.build import build_model
from ludus.models.samplers.engine import InProcessSampler
from ludus.pipeline.assemble import (
    check,
    make_renderer,
    make_renderers,
    make_tokenizer,
    read_conversations,
    read_splits,
    replay_all,
)
from ludus.rollout.collect import Collector
from ludus.rollout.replay import ReplayCollector
from ludus.store.show import render_turns
from ludus.train import ALGORITHMS
from ludus.train.samples import to_samples
from ludus.train.scoring import assume_start

NUM_EXPERT_EPISODES = 16  # what a tokenizer is trained on here: enough to read its output
NUM_MEMBERS = 2  # episodes of a group: the least that can be compared


def debug(config: RunConfig, num_tasks: int = 1, console: Console | None = None) -> None:
    """Show demonstrations and rollouts of the first tasks: every turn, and every training row.

    Errors: KeyboardInterrupt where the user quits the debugger.
    """
    try:
        _debug(config, num_tasks, console or Console())
    except BdbQuit:
        raise KeyboardInterrupt from None


def _debug(config: RunConfig, num_tasks: int, console: Console) -> None:
    check(config)
    train: Sequence[Task] = read_splits(config)[0]
    conversations, _ = read_conversations(config, _demonstrations(config, train), train)
    tokenizer = make_tokenizer(
        config, train, [m for known in conversations for m in known.messages]
    )
    renderer, renderers = make_renderer(config, tokenizer), make_renderers(config, tokenizer)
    if config.sft:
        limit = config.model.context_length
        shown, replayed, left_out = replay_all(
            conversations[:num_tasks], renderer, limit, renderers
        )
        groups = asyncio.run(ReplayCollector(replayed).collect(shown, 0))
        _show(console, "SFT", groups, to_samples(groups, ALGORITHMS.build("sft")), tokenizer)
        for task_id, reason in left_out:
            console.print(Text(f"SFT: {task_id} left out: {reason}", "yellow"))
    if config.rl:
        model = build_model(config.model, tokenizer, derive_seed(config.seed, "model"))
        collector = Collector(
            sampler=InProcessSampler(
                model, context_length=config.model.context_length, decode=tokenizer.decode
            ),
            renderer=renderer,
            renderers=renderers,
            config=config.rollout.model_copy(update={"concurrency": 1, "max_retries": 0}),
            env=config.env,
            judge=JUDGES.build(config.judge, "judge") if config.judge else None,
            seed=config.seed,
            on_error=lambda error: _show_cause(console, error),
            inline=True,
        )
        algorithm = ALGORITHMS.build(config.rl.algorithm, "rl.algorithm")
        members = min(config.rl.group_size, NUM_MEMBERS)
        groups = asyncio.run(collector.collect(train[:num_tasks], 0, members))
        if algorithm.asks_models:
            assume_start(t for group in groups for t in group.trajectories)
        _show(console, "RL", groups, to_samples(groups, algorithm), tokenizer)
    console.print("debug: nothing was trained, nothing was saved")


def _demonstrations(config: RunConfig, tasks: Sequence[Task]) -> list[Demonstration]:
    """A few of the expert's episodes, played in this thread."""
    spec = config.env
    if spec is None or config.demonstrations is None:
        return []

    async def play_all() -> list[Demonstration]:
        found: list[Demonstration] = []
        for task in tasks[:NUM_EXPERT_EPISODES]:
            try:
                env = ENVS.build(spec, "env")
                found.append(await play(env, task, config.rollout.format))
            except NoExpert:
                continue
        return found

    return asyncio.run(play_all())


def _show(
    console: Console, stage: str, groups: Sequence[Group], samples: Sequence[Sample], tokenizer: Any
) -> None:
    """Each trajectory's turns, then its training rows token by token."""
    rows: dict[str, list[Sample]] = {}
    for sample in samples:
        rows.setdefault(sample.trajectory_id, []).append(sample)
    for trajectory in (t for group in groups for t in group.trajectories):
        reward = "none" if trajectory.reward is None else f"{trajectory.reward:g}"
        outcome = f"status {trajectory.status.value}, reward {reward}"
        console.print(Rule(Text(f"{stage} {trajectory.id}  task {trajectory.task_id}")))
        console.print(Text(outcome + (f": {trajectory.error}" if trajectory.error else "")))
        console.print(render_turns(trajectory, tokenizer.decode))
        if trajectory.dropped:
            console.print(Text(f"no training row: {trajectory.dropped}", "yellow"))
        for number, sample in enumerate(rows.get(trajectory.id, []), start=1):
            length = f"{len(sample.token_ids)} tokens, {sample.num_loss_tokens} with a loss"
            console.print(Text(f"training row {number}: {length}", "bold"))
            console.print(Text(ROW_HEADER, "bold"))
            for line, trains in zip(row_lines(sample, tokenizer), sample.loss_mask, strict=True):
                console.print(Text(line, "green" if trains else "dim"), no_wrap=True)


def _show_cause(console: Console, error: EpisodeError) -> None:
    """Where in the user's code an episode failed."""
    if (cause := error.__cause__) is not None:
        console.print(Traceback.from_exception(type(cause), cause, cause.__traceback__))


ROW_HEADER = f"{'pos':>5} {'id':>7} {'mask':>4} {'logprob':>9} {'advantage':>9}  token"


def row_lines(sample: Sample, tokenizer: Any) -> list[str]:
    """A training row as text, one token a line; mask 1 is what the loss falls on."""
    columns = zip(
        sample.token_ids, sample.loss_mask, sample.logprobs, sample.advantages, strict=True
    )
    return [
        f"{position:5d} {token:7d} {int(mask):4d} {logprob:9.4f} {advantage:9.4f}  "
        f"{tokenizer.decode([token])!r}"
        for position, (token, mask, logprob, advantage) in enumerate(columns)
    ]
