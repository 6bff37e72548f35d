"""Evaluation between iterations: held-out tasks, and the frontier.

The frontier is what the first iteration's executor makes of each iteration's problems: its pass
rate (agreement with the labels) and its tool calls an answer. A curriculum that gets harder lowers
the first and raises the second (Agent0, arXiv 2511.16043, table 4 there).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from statistics import fmean

from ludus.coevolve.roles import Roles, run_name
from ludus.coevolve.storage import Row, read_rows
from ludus.config.schema import RunConfig
from ludus.core.files import atomic_write
from ludus.core.types import NO_ENV, Group, Message, Task
from ludus.evaluate.results import Evaluation
from ludus.judges.proposals.votes import mean_tool_calls
from ludus.pipeline.build import Player
from ludus.pipeline.evaluation.evaluate import play_heldout
from ludus.pipeline.monitoring.progress import Observer
from ludus.tasks.readers import TaskList


def evaluate(roles: Roles, iteration: int, observer: Observer) -> Row:
    """Evaluate the executor after an iteration. Returns what the state records."""
    config = roles.solving(iteration, "evaluate")
    record: Row = {"iteration": iteration}
    result: Row = {}
    if config.tasks.heldout is not None:
        heldout = roles.heldout(config)
        observer.stage("evaluate", len(heldout[: config.evaluate.num_tasks]))
        found = _heldout(config, heldout, observer)
        record["heldout"] = found
        result |= {"heldout": found["success"]["value"], "tool_calls": found["tool_calls"]}
    if iteration and roles.config.frontier.num_tasks:
        record["frontier"] = frontier = _frontier(roles, iteration)
        result |= {f"frontier_{key}": frontier[key] for key in ("pass_rate", "tool_calls")}
    path = roles.storage.evaluation(iteration)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, json.dumps(record))
    return result


def _heldout(config: RunConfig, heldout: TaskList, observer: Observer) -> Row:
    """Returns the evaluation, and the mean tool calls of an answer."""

    async def play(player: Player) -> tuple[list[Group], Evaluation]:
        collector = player.run.collector
        return await play_heldout(collector, heldout, config.env, config.evaluate, "heldout")

    groups, found = Player.run_with(config, play, lambda _: observer.tick())
    return {**found.model_dump(mode="json"), "tool_calls": _tool_calls(groups)}


def _frontier(roles: Roles, iteration: int) -> Row:
    """Play a sample of the iteration's problems with the executor of the first iteration."""
    problems = read_rows(roles.storage.questions(iteration, "problems"))
    tasks = [problem_task(row) for row in problems[: roles.config.frontier.num_tasks]]

    async def play(player: Player) -> list[Group]:
        return await player(tasks, "frontier", iteration, 1)

    groups = Player.run_with(roles.frontier(), play)
    scored = [t for group in groups for t in group.trajectories if t.reward is not None]
    return {
        "executor": run_name("executor", 1),
        "num_problems": len(tasks),
        "num_scored": len(scored),
        "pass_rate": fmean(t.metrics.get("success", 0.0) for t in scored) if scored else None,
        "tool_calls": _tool_calls(groups),
    }


def _tool_calls(groups: Sequence[Group]) -> float:
    return mean_tool_calls([t for group in groups for t in group.trajectories])


def problem_task(row: Row) -> Task:
    """The task of a kept problem."""
    return Task(
        id=str(row["id"]),
        prompt=[Message(role="user", content=str(row["question"]))],
        env=NO_ENV,
        answer=row["answer"],
        consistency=row.get("consistency"),
        source="coevolve",
    )
