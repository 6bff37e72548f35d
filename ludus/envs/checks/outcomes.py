"""Checks of an environment's speed, and of the rewards and lengths of its episodes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ludus.core.errors import counted
from ludus.core.types import Message, Task
from ludus.envs.base import Env, is_blocking, limits_of
from ludus.envs.checks.play import Player
from ludus.envs.checks.subject import Subject

SPEED_S = 8.0
"""Seconds of the first episode, which measures the steps."""

SLOW_STEP_S = 0.5
"""Seconds of a step from which an environment is slow."""

SLOW_TURNS_S = 4.0
"""Seconds of the turns that are played of each episode of a slow environment."""

FAST_STEP_S = 2e-4
"""Seconds of a step below which a thread for it costs more than the step."""

RANDOM_TURNS = 20
"""Turns of an episode of random words."""

LONG = 200
"""Turns of an expert's episode that are told."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """An expert's episode. `size`: characters of its messages; `limit`: the env's max_turns."""

    task: Task
    reward: float
    num_turns: int
    size: int
    limit: int
    done: bool


async def check_speed(subject: Subject, player: Player) -> None:
    """Measure the steps of one episode; play fewer tasks and turns of a slow environment."""
    env = subject.make()
    started = time.perf_counter()
    await player.reset(env, subject.tasks[0])
    reset_s, steps = time.perf_counter() - started, list[float]()
    while sum(steps) < SPEED_S:
        action = await player.next_action(env, len(steps))
        if action is None or len(steps) >= env.max_turns:
            break
        result = await player.step(env, Message(role="assistant", content=action))
        steps.append(player.call_s)
        if result.done:
            break
    await player.close_env(env)
    if not steps:
        return
    step_s = median(steps)
    if _in_threads(subject) and (text := needless_thread(step_s)):
        subject.note("speed", text)
    if step_s < SLOW_STEP_S:
        return
    player.slow, player.max_turns = True, max(int(SLOW_TURNS_S / step_s), 1)
    del subject.tasks[1:]
    subject.note(
        "speed",
        f"a step takes {step_s:.2g} s (median of {len(steps)}) and a reset {reset_s:.2g} s: an "
        f"episode of {env.max_turns} turns takes about {env.max_turns * step_s:.0f} s, and a step "
        f"of RL plays hundreds. Here, one task is checked, {counted(player.max_turns, 'turn')} of "
        "each episode",
    )


def _in_threads(subject: Subject) -> bool:
    """True for the user's own class whose steps run in worker threads."""
    spec = subject.spec
    own = spec is not None and ":" in spec.name
    return own and is_blocking(subject.env_class, subject.tasks[0], spec.args if spec else {})


def needless_thread(step_s: float) -> str | None:
    """Returns what is wrong with a worker thread for steps of so many seconds; None: nothing."""
    if step_s >= FAST_STEP_S:
        return None
    return (
        f"a step of the environment takes {1000 * step_s:.2g} ms, and handing it to a worker "
        "thread about 0.3 ms, up to a third of a step of RL: if `reset` and `step` cannot hang, "
        "set `blocking = False` in the class"
    )


async def check_outcomes(subject: Subject, player: Player, outcomes: Sequence[Outcome]) -> None:
    """Compare the expert's episodes with one another, and with one of random words."""
    _check_lengths(subject, outcomes)
    random, done = await _random(subject, player)
    rewards = {outcome.reward for outcome in outcomes if outcome.done}
    if done and len([o for o in outcomes if o.done]) > 1 and rewards == {random}:
        subject.note(
            "rewards",
            f"the expert's {len(outcomes)} episodes and one of random words all earn {random:g}: "
            "where all episodes do, RL has nothing to learn from",
        )


def _check_lengths(subject: Subject, outcomes: Sequence[Outcome]) -> None:
    ended = [outcome for outcome in outcomes if outcome.done]
    if not outcomes or not ended:
        return
    longest = max(outcomes, key=lambda outcome: outcome.num_turns)
    turns, limit = longest.num_turns, longest.limit
    if len(ended) > 1 and turns == 1 < limit:
        subject.note("length", "each episode of the expert ends in its first turn")
    if all(outcome.num_turns > outcome.limit for outcome in ended):
        subject.note(
            "length",
            f"the expert needs more than max_turns, {limit}, in all episodes, up to {turns}: they "
            "are cut before they are solved, unless `rollout.max_turns` allows more",
        )
    if turns >= LONG:
        subject.note(
            "length",
            f"{longest.task.id}: the expert's episode has {turns} turns and {longest.size:,} "
            "characters: all of it has to fit `model.context_length`, in tokens",
        )


async def _random(subject: Subject, player: Player) -> tuple[float, bool]:
    """Returns the reward of an episode of random words, and True if it ended."""
    env: Env = subject.make()
    (low, high), _ = limits_of(env)
    total, done = 0.0, False
    try:
        await player.reset(env, subject.tasks[0])
        for turn in range(min(RANDOM_TURNS, player.max_turns)):
            result = await player.step(env, Message(role="assistant", content=f"look {turn}"))
            total, done = total + (result.reward or 0.0), result.done
            if done:
                break
    finally:
        await player.close_env(env)
    if not low - 1e-9 <= total <= high + 1e-9:
        text = f"the reward {total:g} of random words is outside of score_range {low:g} to {high:g}"
        subject.error("rewards", text)
    return total, done
