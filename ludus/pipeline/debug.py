"""Debug a configuration: a few tasks, one thread, no optimizer step, nothing on disk.

Environments, judges and readers are called in the debugger's thread, one episode at a time and
without deadlines, so breakpoints work in all of them.
"""

from __future__ import annotations

import os
from bdb import BdbQuit
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.rule import Rule
from rich.text import Text
from rich.traceback import Traceback

from ludus.config.schema import RunConfig
from ludus.core.errors import EpisodeError
from ludus.core.system.signals import run as run_async
from ludus.core.types import Group, Sample, Spec, Task, by_role
from ludus.data.conversations import functions_brought, read_conversations, replay_all
from ludus.data.expert import CodeBlocks, Demonstration, run_expert
from ludus.data.splits import read_splits
from ludus.envs.base import NoExpert
from ludus.pipeline.build import build
from ludus.pipeline.parts.checks import check
from ludus.pipeline.parts.registries import check_judges
from ludus.pipeline.parts.tokenizer import check_functions, make_renderers, make_tokenizer
from ludus.pipeline.stages import sft_algorithm
from ludus.rollout.collect import Collector
from ludus.rollout.hosts.host import LocalEnvs
from ludus.rollout.replay import ReplaySource
from ludus.store.folders import RunFolder
from ludus.store.show import render_turns, render_verdict
from ludus.tasks.curriculum import TaskSampler
from ludus.tasks.mixture import part_of, settings_of
from ludus.tools.toolbox import Toolbox
from ludus.train import ALGORITHMS
from ludus.train.algorithms.base import Algorithm
from ludus.train.batches.samples import to_samples
from ludus.train.scoring import assume_start

NUM_EXPERT_EPISODES = 16
"""Demonstrations that the tokenizer is trained on; enough to read its output."""

GROUP_SIZE = 2
"""Most episodes of a group; the least that can be compared."""

NO_FOLDER = RunFolder(Path(os.devnull))
"""Folder of a run that writes nothing: any write below it fails."""


def debug(config: RunConfig, num_tasks: int = 1, console: Console | None = None) -> None:
    """Print demonstrations and rollouts of the first tasks: every turn, and every training row.

    Errors: KeyboardInterrupt where the user quits the debugger.
    """
    try:
        _debug(config, num_tasks, console or Console())
    except BdbQuit:
        raise KeyboardInterrupt from None


def _debug(config: RunConfig, num_tasks: int, console: Console) -> None:
    check(config)
    splits = read_splits(config)
    if splits.note:
        console.print(Text(splits.note))
    demonstrations = _demonstrations(config, splits.train)
    conversations, _ = read_conversations(config, demonstrations, splits.train)
    known = (conversation.task for conversation in conversations)
    check_functions(config, splits.train, splits.heldout, others=known)
    check_judges(config)
    messages = [message for item in conversations for message in item.messages]
    tokenizer = make_tokenizer(config, splits.train, messages, functions_brought(conversations))
    if config.sft:
        tasks, trajectories, excluded = replay_all(
            conversations[:num_tasks],
            make_renderers(config, tokenizer),
            config.model.context_length,
        )
        if tasks:
            source = ReplaySource(TaskSampler(tasks, shuffle=False), trajectories)
            groups = run_async(source.take(len(tasks), 0, 0))
            _show(console, "SFT", groups, sft_algorithm(config.sft), tokenizer)
        for task_id, reason in excluded:
            console.print(Text(f"SFT: {task_id} skipped: {reason}", "yellow"))
    if config.rl:
        run = build(
            _inline(config),
            NO_FOLDER,
            splits,
            tokenizer,
            on_error=lambda error: _show_cause(console, error),
            inline=True,
        )
        algorithm = ALGORITHMS.build(config.rl.algorithm, "rl.algorithm")
        group_size = min(config.rl.group_size, GROUP_SIZE)
        with closing(run.backend):
            groups = run_async(_played(run.collector, splits.train[:num_tasks], group_size))
        groups = by_role(groups)
        if algorithm.asks_models:
            groups = assume_start(groups)
        _show(console, "RL", groups, algorithm, tokenizer)
    console.print("debug: nothing was trained, nothing was saved")


async def _played(collector: Collector, tasks: Sequence[Task], group_size: int) -> list[Group]:
    try:
        return await collector.collect(tasks, 0, group_size)
    finally:
        await collector.close()


def _inline(config: RunConfig) -> RunConfig:
    """Returns the configuration with one episode at a time, no retries, and no other threads."""
    assert config.rl is not None
    changes = {
        "rollout": config.rollout.model_copy(update={"concurrency": 1, "max_retries": 0}),
        "rl": config.rl.model_copy(update={"max_staleness": 0}),
        "backend": Spec(name="local"),
        "sampler": Spec(name="in_process"),
        "verify": False,
    }
    return config.model_copy(update=changes)


def _demonstrations(config: RunConfig, tasks: Sequence[Task]) -> list[Demonstration]:
    """Play a few of the expert's episodes in this thread."""
    spec = config.env
    if spec is None or config.demonstrations is None:
        return []

    async def play_all() -> list[Demonstration]:
        if not config.tools:
            return await play(None)
        async with await Toolbox.open(config.tools) as toolbox:
            return await play(toolbox)

    async def play(toolbox: Toolbox | None) -> list[Demonstration]:
        demonstrations: list[Demonstration] = []
        envs = LocalEnvs(spec)
        for task in [task for task in tasks if envs.spec_of(task)][:NUM_EXPERT_EPISODES]:
            try:
                env = envs.make(task)
                settings = settings_of(config.rollout, part_of(task))
                format, blocks = settings.format, None
                if toolbox is not None and format == "code":
                    blocks = CodeBlocks(settings.markers, toolbox)
                demonstrations.append(await run_expert(env, task, format, 0.0, blocks))
            except NoExpert:
                continue
        return demonstrations

    return run_async(play_all())


def _show(
    console: Console, stage: str, groups: Sequence[Group], algorithm: Algorithm, tokenizer: Any
) -> None:
    """Print each trajectory's turns, then its training rows token by token."""
    assignment = algorithm.assign(groups)
    rows: dict[str, list[Sample]] = {}
    for sample in to_samples(assignment, algorithm.observation_weight):
        rows.setdefault(sample.trajectory_id, []).append(sample)
    everyone = [t for group in groups for t in group.trajectories]
    several = len({trajectory.role for trajectory in everyone}) > 1
    for trajectory in everyone:
        reward = "none" if trajectory.reward is None else f"{trajectory.reward:g}"
        outcome = f"status {trajectory.status.value}, reward {reward}"
        role = f"  role {trajectory.role}, {trajectory.policy}" if several else ""
        console.print(Rule(Text(f"{stage} {trajectory.id}  task {trajectory.task_id}{role}")))
        console.print(Text(outcome + (f": {trajectory.error}" if trajectory.error else "")))
        if trajectory.scores or trajectory.explanation:
            console.print(render_verdict(trajectory))
        console.print(render_turns(trajectory, tokenizer.decode))
        if reason := assignment.excluded.get(trajectory.id):
            console.print(Text(f"no training row: {reason}", "yellow"))
        for number, sample in enumerate(rows.get(trajectory.id, []), start=1):
            length = f"{len(sample.token_ids)} tokens, {sample.num_loss_tokens} with a loss"
            console.print(Text(f"training row {number}: {length}", "bold"))
            console.print(Text(ROW_HEADER, "bold"))
            for line, trains in zip(row_lines(sample, tokenizer), sample.loss_mask, strict=True):
                console.print(Text(line, "green" if trains else "dim"), no_wrap=True)


def _show_cause(console: Console, error: EpisodeError) -> None:
    """Print the traceback of the user's code that ended an episode."""
    if (cause := error.__cause__) is not None:
        console.print(Traceback.from_exception(type(cause), cause, cause.__traceback__))


ROW_HEADER = f"{'pos':>5} {'id':>7} {'mask':>4} {'logprob':>9} {'advantage':>9}  token"


def row_lines(sample: Sample, tokenizer: Any) -> list[str]:
    """Returns a training row as text, one token a line; tokens with mask 1 have a loss."""
    columns = zip(
        sample.token_ids, sample.loss_mask, sample.logprobs, sample.advantages, strict=True
    )
    return [
        f"{position:5d} {token:7d} {int(mask):4d} {logprob:9.4f} {advantage:9.4f}  "
        f"{tokenizer.decode([token])!r}"
        for position, (token, mask, logprob, advantage) in enumerate(columns)
    ]
