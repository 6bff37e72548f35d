"""Episodes that calibrate a recipe, played in this process: the expert's, and random actions."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any, cast

from ludus.core.types import Message, Spec, Task
from ludus.data.expert import Demonstration, run_expert
from ludus.envs.base import Env
from ludus.envs.checks.play import MAX_TURNS
from ludus.pipeline.preflight.episodes import Played, Recorded, play_one
from ludus.rollout.hosts.host import LocalEnvs
from ludus.rollout.hosts.threads import EnvThread

MOST_TURNS = MAX_TURNS
"""Turns after which an episode of the expert fails."""

LONGEST_TURNS = 400
"""Turns after which an episode of random actions ends."""


@dataclass(frozen=True, slots=True)
class RandomEpisode:
    """An episode of random actions. `step_s`: mean wall time of a step; `opening_s`: of constructor
    and reset; `error`: it failed."""

    reward: float
    success: bool
    step_s: float = 0.0
    error: str = ""
    opening_s: float = 0.0


async def play_again(env: Spec, tasks: Sequence[Task], seconds: float) -> list[Demonstration]:
    """The expert's episodes of tasks, played in this process, as many as fit into `seconds`."""
    found = [played async for played in _each(env, tasks, seconds, seconds, expert_of)]
    return [played.demonstration for played in found if played.demonstration is not None]


async def play_openings(
    env: Spec, tasks: Sequence[Task], seconds: float
) -> list[tuple[Task, list[Message]]]:
    """The opening observations of tasks, as many as fit into `seconds`."""

    async def opens(env: Recorded) -> None:
        await env.reset(env.task.model_copy(deep=True))

    found = [played async for played in _each(env, tasks, seconds, seconds, opens)]
    return [(played.task, played.opening) for played in found if played.opened]


async def _each(
    env: Spec,
    tasks: Sequence[Task],
    seconds: float,
    limit_s: float,
    act: Callable[[Recorded], Awaitable[Any]],
) -> AsyncIterator[Played]:
    """Play tasks in this process, one after the other: none begins after `seconds`, and one under
    way is given up at `limit_s`, both from the start."""
    envs, thread, begun = LocalEnvs(env), EnvThread(), time.perf_counter()
    try:
        for task in tasks:
            spent = time.perf_counter() - begun
            if spent >= seconds:
                break
            played = await play_one(envs, thread, task, limit_s - spent, act)
            yield played
            if played.overdue:
                break
    finally:
        thread.close()


async def expert_of(env: Recorded) -> Demonstration:
    """Play the expert of an environment."""
    return await run_expert(cast(Env, env), env.task, max_turns=MOST_TURNS)


async def play_random(
    env: Spec,
    tasks: Sequence[Task],
    actions: Sequence[str],
    seconds: float,
    seed: int = 0,
    max_turns: int = LONGEST_TURNS,
) -> list[RandomEpisode]:
    """Play tasks with actions drawn from `actions`: what a policy gets that knows the words and
    not when to use them, in as many turns as the policy has. No episode begins after `seconds`; one
    under way has as long again."""
    rng, won, episodes = random.Random(seed), set[str](), list[RandomEpisode]()

    async def wander(env: Recorded) -> None:
        await env.reset(env.task)
        for _ in range(min(max_turns, LONGEST_TURNS)):
            message = Message(role="assistant", content=rng.choice(actions))
            result = await env.step(message)
            if result.done:
                if result.info.get("success", env.won):
                    won.add(env.task.id)
                break

    async for played in _each(env, tasks, seconds, 2 * seconds, wander):
        mean = fmean(played.seconds) if played.seconds else 0.0
        error = "" if played.overdue and played.seconds else played.error
        episodes.append(
            RandomEpisode(played.reward, played.task.id in won, mean, error, played.opening_s)
        )
    return episodes


def success_of(played: Sequence[RandomEpisode]) -> float:
    """The success of random actions; 0 where none was played to its end."""
    fine = [p.success for p in played if not p.error]
    return fmean(fine) if fine else 0.0


def success_of_one_answer(good: Sequence[Demonstration]) -> float:
    """The success of a policy that always gives the expert's most frequent answer, where episodes
    have one turn; else 0."""
    answers = Counter(
        next(m.content for m in reversed(d.messages) if m.role == "assistant")
        for d in good
        if d.num_turns == 1
    )
    [(_, most)] = answers.most_common(1) or [("", 0)]
    return most / len(good) if good and answers.total() == len(good) else 0.0


def random_line(played: Sequence[RandomEpisode], max_turns: object) -> str:
    """The success, rewards and speed of random actions in at most `max_turns` turns."""
    failed = [p for p in played if p.error]
    fine = [p for p in played if not p.error]
    if not fine:
        return f"random actions: every episode failed, {failed[0].error}" if failed else ""
    rewards = [p.reward for p in fine]
    lost = f"{len(failed)} more fail, " if failed else ""
    most = "" if max_turns == 1 else f", at most {max_turns} turns"
    return (
        f"random actions (the expert's, in random order{most}): "
        f"{fmean(p.success for p in fine):.0%} of {len(fine)} episodes succeed, {lost}"
        f"reward {fmean(rewards):.3g} (standard deviation {pstdev(rewards):.2g}), a step of the "
        f"environment takes {1000 * fmean(p.step_s for p in fine):.2g} ms"
    )
