"""Tries each judge of a recipe on made-up episodes before its run."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ludus.config.schema import RunConfig
from ludus.core.errors import LudusError, Unscorable
from ludus.core.modules import not_async, told
from ludus.core.types import Message, Score, Spec, Task, Trajectory
from ludus.judges import JUDGES
from ludus.judges.base import Judge, close_all
from ludus.models.chat.by_task import TaskRenderers
from ludus.pipeline.build import urls_in
from ludus.pipeline.preflight.episodes import Played, spread
from ludus.pipeline.preflight.limits import Findings
from ludus.rollout.replay import replay
from ludus.rollout.sessions.session import with_system_prompt
from ludus.tasks.mixture import part_of, settings_of

NUM_TASKS = 4
"""Tasks that a judge is tried on; a judge that asks a server, once."""

DEADLINE_S = 20.0
"""Seconds for all trials of a judge."""

MADE_UP = "I do not know."


@dataclass(slots=True)
class _Trials:
    """Results of a judge. `scores`: of the made-up and of the right answer of each task."""

    errors: list[tuple[Task, str]] = field(default_factory=list)
    scores: list[tuple[float, float | None]] = field(default_factory=list)
    overdue: bool = False


async def try_judges(
    config: RunConfig,
    tasks: Sequence[Task],
    played: Sequence[Played],
    renderers: TaskRenderers,
    found: Findings,
) -> None:
    """Add a fault for a judge that scores none of its made-up episodes, else notes."""
    by_task = {p.task.id: p for p in played if p.opened}
    for place, spec, own in _judges(config, tasks):
        trials = _Trials()
        judge = JUDGES.build(spec, place)
        try:
            async with asyncio.timeout(DEADLINE_S):
                await _try(config, judge, spec, own, by_task, renderers, trials)
        except TimeoutError:
            trials.overdue = True
        finally:
            await close_all([judge])
        _tell(config, place, spec, trials, found)


def _judges(config: RunConfig, tasks: Sequence[Task]) -> Iterator[tuple[str, Spec, list[Task]]]:
    """Yields each judge: its place, its spec, some of its tasks."""
    by_judge: dict[str, tuple[Spec, list[Task]]] = {}
    keys: dict[int, str] = {}  # the tasks of a part share one object
    for task in tasks:
        if (spec := task.judge or config.judge) is not None:
            key = keys.setdefault(id(spec), "") or spec.model_dump_json()
            keys[id(spec)] = key
            by_judge.setdefault(key, (spec, []))[1].append(task)
    for spec, own in by_judge.values():
        place = "judge" if spec == config.judge else f"the judge of task {own[0].id}"
        yield place, spec, spread(own, NUM_TASKS)


async def _try(
    config: RunConfig,
    judge: Judge,
    spec: Spec,
    tasks: Sequence[Task],
    by_task: dict[str, Played],
    renderers: TaskRenderers,
    trials: _Trials,
) -> None:
    asks_server = any(True for _ in urls_in(spec)) or spec.name == "remote"
    for task in tasks[: 1 if asks_server else None]:
        opening = _opening(config, task, by_task)
        if not opening:
            continue
        right = _right_answers(config, task)
        answers = right[:1] or [MADE_UP] if asks_server else [MADE_UP, *right]
        scores: list[float] = []
        for answer in answers:
            turn = Message(role="assistant", content=answer)
            trajectory = Trajectory("preflight/e000", "preflight", task.id)
            replay([*opening, turn], renderers.of(task), trajectory)
            try:
                asked = judge(task.model_copy(deep=True), trajectory)
                scores.append(_value(await _awaitable(asked)))
            except LudusError as error:
                trials.errors.append((task, str(error)))
                break
            except (Exception, SystemExit) as error:
                trials.errors.append((task, f"it raised {told(error)}"))
                break
            if len(scores) > 1 and scores[-1] != scores[0]:
                break
        else:
            best = max(scores[1:], default=None)
            trials.scores.append((scores[0], best))
            continue
        if len(scores) > 1:
            trials.scores.append((scores[0], scores[-1]))


def _awaitable(asked: Any) -> Awaitable[Any]:
    """Errors: Unscorable for the result of a judge that is not async."""
    if not inspect.isawaitable(asked):
        raise Unscorable(not_async("its `__call__`", "__call__", asked))
    awaited: Awaitable[Any] = asked
    return awaited


def _value(score: Any) -> float:
    """Errors: Unscorable where it is no finite Score."""
    if not isinstance(score, Score) or not math.isfinite(score.value):
        raise Unscorable(f"it returned {score!r:.80}; it has to return a Score with a finite value")
    return score.value


def _opening(config: RunConfig, task: Task, by_task: dict[str, Played]) -> list[Message]:
    played = by_task.get(task.id)
    messages = [*task.prompt, *(played.opening if played else [])]
    system = settings_of(config.rollout, part_of(task)).system_prompt
    return with_system_prompt(messages, system)


def _right_answers(config: RunConfig, task: Task) -> list[str]:
    """The task's answer in the forms that judges read."""
    answer = task.answer[0] if isinstance(task.answer, list) and task.answer else task.answer
    if not isinstance(answer, str | int | float):
        return []
    opening, closing = settings_of(config.rollout, part_of(task)).markers.answer
    return [
        f"{answer}",
        f"The answer is \\boxed{{{answer}}}.",
        f"{opening}{answer}{closing}",
        f"Answer: {answer}",
    ]


def _tell(config: RunConfig, place: str, spec: Spec, trials: _Trials, found: Findings) -> None:
    if trials.overdue:
        found.notes.append(
            f"{place}: {spec.name} gave no score of a made-up episode in {DEADLINE_S:.0f} s, so it "
            "was not checked further; RL waits for its scores in every step"
        )
        return
    failed = len({task.id for task, _ in trials.errors})
    if failed and not trials.scores:
        task, error = trials.errors[0]
        text = (
            f"{place}: {spec.name} gives no score for a made-up episode of "
            f"{'each of ' + str(failed) + ' tasks' if failed > 1 else 'task ' + task.id}: {error}"
            f"{_remedy(spec, task, error)}"
        )
        (found.notes if config.agent is not None else found.faults).append(text)
        return
    if failed:
        task, error = trials.errors[0]
        found.notes.append(
            f"{place}: {spec.name} gives no score for a made-up episode of {failed} of "
            f"{failed + len(trials.scores)} tasks, e.g. {task.id}: {error}"
        )
    compared = [(made_up, right) for made_up, right in trials.scores if right is not None]
    if compared and all(made_up == right for made_up, right in compared):
        found.notes.append(
            f"{place}: {spec.name} gives {compared[0][0]:g} to {MADE_UP!r} and to the task's own "
            f"answer, in {len(compared)} of {len(compared)} tasks: where all episodes get the same "
            "score, RL trains nothing. Compare the tasks' answers with what the judge reads"
        )


def _remedy(spec: Spec, task: Task, error: str) -> str:
    urls = [*urls_in(spec)]
    if urls:
        return f". Start the server at {urls[0]}, or correct the judge's args"
    if task.answer is None and "answer" in error:
        return (
            ". Set the reader's `answer` to the field that holds the answer, or take another judge"
        )
    return ""
