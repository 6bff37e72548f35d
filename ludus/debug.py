"""The `debug` back end: the same configuration, a few tasks, one thread, no optimizer step.

Everything runs where the debugger is: environments, judges and readers are called in this thread,
one episode at a time and without deadlines, so that a breakpoint in any of them just works.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from ludus.assemble import check, make_renderer, make_tokenizer, read_splits
from ludus.core.schema import RunConfig
from ludus.core.seeds import derive_seed
from ludus.core.types import Sample, Task, Trajectory
from ludus.envs import ENVS
from ludus.envs.base import NoExpert
from ludus.envs.demonstrate import Demonstration, play
from ludus.judges import JUDGES
from ludus.models.build import build_model
from ludus.models.engine import InProcessSampler
from ludus.rollout.collect import Collector
from ludus.rollout.replay import ReplayCollector, replay
from ludus.store.show import render_turns
from ludus.train import ALGORITHMS
from ludus.train.samples import to_samples

NUM_EXPERT_EPISODES = 16  # what a tokenizer is trained on here: enough to read its output


def debug(config: RunConfig, num_tasks: int = 1, console: Console | None = None) -> None:
    """Show demonstrations and rollouts of the first tasks: every turn, and every training row."""
    console = console or Console()
    check(config)
    tasks: Sequence[Task] = read_splits(config)[0]
    shown = _demonstrations(config, tasks)
    tokenizer = make_tokenizer(config, tasks, [m for d in shown for m in d.messages])
    renderer = make_renderer(config, tokenizer)
    model = build_model(config.model, tokenizer, derive_seed(config.seed, "model"))
    sampler = InProcessSampler(
        model, context_length=config.model.context_length, decode=tokenizer.decode
    )
    tasks = tasks[:num_tasks]
    if config.sft and shown:
        trajectories = [Trajectory("", "", d.task_id, reward=d.reward) for d in shown[:num_tasks]]
        for demonstration, trajectory in zip(shown, trajectories, strict=False):
            replay(demonstration.messages, renderer, trajectory)
        groups = asyncio.run(ReplayCollector(trajectories).collect(tasks[: len(shown)], 0))
        played = [trajectory for group in groups for trajectory in group.trajectories]
        _show(console, "SFT", played, to_samples(groups, ALGORITHMS.build("sft")), tokenizer)
    if config.rl:
        collector = Collector(
            sampler=sampler,
            renderer=renderer,
            config=config.rollout.model_copy(update={"concurrency": 1, "max_retries": 0}),
            env=config.env,
            judge=JUDGES.build(config.judge, "judge") if config.judge else None,
            seed=config.seed,
            inline=True,
        )
        algorithm = ALGORITHMS.build(config.rl.algorithm, "rl.algorithm")
        groups = asyncio.run(collector.collect(tasks, 0, min(config.rl.group_size, 2)))
        played = [trajectory for group in groups for trajectory in group.trajectories]
        _show(console, "RL", played, to_samples(groups, algorithm), tokenizer)
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
    console: Console,
    stage: str,
    trajectories: Sequence[Trajectory],
    samples: Sequence[Sample],
    tokenizer: Any,
) -> None:
    """Each trajectory's turns, then its training rows token by token."""
    rows: dict[str, list[Sample]] = {}
    for sample in samples:
        rows.setdefault(sample.trajectory_id, []).append(sample)
    for trajectory in trajectories:
        reward = "none" if trajectory.reward is None else f"{trajectory.reward:g}"
        console.print(Rule(f"{stage} {trajectory.id}  task {trajectory.task_id}"))
        console.print(
            Text(f"status {trajectory.status.value}, reward {reward}, error {trajectory.error}")
        )
        console.print(render_turns(trajectory, tokenizer.decode))
        if trajectory.dropped:
            console.print(Text(f"no training row: {trajectory.dropped}", "yellow"))
        for number, sample in enumerate(rows.get(trajectory.id, [])):
            console.print(Text(f"training row {number}: position id mask logprob advantage token"))
            for line, trains in zip(row_lines(sample, tokenizer), sample.loss_mask, strict=True):
                console.print(Text(line, "bold green" if trains else "dim"))


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
