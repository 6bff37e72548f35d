"""Checks of an environment's speed, and of the rewards and lengths of its episodes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ludus.core.errors import EpisodeTimeout, counted
from ludus.core.modules import told
from ludus.core.types import Message, Task
from ludus.envs.base import Env, is_blocking, limits_of
from ludus.envs.checks.play import Player
from ludus.envs.checks.subject import Subject

SPEED_S = 3.0
"""Seconds of the first episode, which measures the steps."""

SLOW_STEP_S = 0.5
"""Seconds of a step from which an environment is slow."""

SLOW_OPENING_S = 0.2
"""Seconds of the first constructor and reset from which they are measured a second time."""

LONG_S = 60.0
"""Seconds of all checks from which they are reduced, although no call is slow."""

SLOW_EPISODES = 10
"""Episodes of the checks of one task, about."""

NUM_MALFORMED = 7
"""Malformed actions that are tried, each in an episode of its own; the expert's spoilt ones, which
fast environments get too, are not counted."""

FAST_STEP_S = 2e-4
"""Seconds of a step below which a thread for it costs more than the step."""

FAST_OPENING_S = 0.01
"""Seconds of a constructor and a reset from which other episodes should not wait for them."""

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


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds of an environment's calls; `turns` of the episode that measured them."""

    construct_s: float
    reset_s: float
    step_s: float
    turns: int

    @property
    def opening_s(self) -> float:
        return self.construct_s + self.reset_s

    def episode_s(self, turns: int) -> float:
        return self.opening_s + turns * self.step_s

    def checks_s(self, num_tasks: int) -> float:
        """Seconds of all checks of so many tasks."""
        episodes = 3 * num_tasks + 2 * min(num_tasks, 4) + 5
        return episodes * self.episode_s(self.turns) + NUM_MALFORMED * self.episode_s(1)


async def check_speed(subject: Subject, player: Player) -> None:
    """Measure one episode; play fewer tasks and turns of a slow environment."""
    env, task = await player.new(), subject.tasks[0]
    construct_s = player.call_s
    turns, steps = player.turns(env, task), list[float]()
    async for turn in turns:
        if not subject.first:
            reset_s = player.call_s
        else:
            steps.append(player.call_s)
        subject.first.append(turn)
        if sum(steps) >= SPEED_S or len(steps) >= env.max_turns:
            break
    await turns.aclose()
    await player.close_env(env)
    if construct_s + reset_s >= SLOW_OPENING_S:  # the first may load files
        again = await player.new()
        construct_s = player.call_s
        await player.reset(again, task)
        reset_s = player.call_s
        await player.close_env(again)
    if not steps:
        return
    ended = len(steps) < env.max_turns and sum(steps) < SPEED_S
    speed = Speed(construct_s, reset_s, median(steps), len(steps) if ended else env.max_turns)
    step_s = speed.step_s
    if _in_threads(subject) and (text := needless_thread(step_s, speed.opening_s)):
        subject.note("speed", text)
    if max(step_s, speed.opening_s) < SLOW_STEP_S and speed.checks_s(len(subject.tasks)) < LONG_S:
        return
    player.slow = True
    fitting = [n for n in range(1, len(subject.tasks) + 1) if speed.checks_s(n) <= player.left_s]
    del subject.tasks[max(fitting, default=1) :]
    if not fitting:
        turns_s = player.left_s / SLOW_EPISODES - speed.opening_s
        player.max_turns = max(int(turns_s / step_s), 1) if step_s else player.max_turns
    number = min(player.max_turns, speed.turns)
    player.unit_s = speed.episode_s(number)
    many = len(subject.tasks) > 1
    subject.note(
        "speed",
        f"a step takes {step_s:.2g} s (median of {len(steps)}), a reset {reset_s:.2g} s and the "
        f"constructor {construct_s:.2g} s: an episode of {env.max_turns} turns takes about "
        f"{speed.episode_s(env.max_turns):.0f} s, and a step of RL plays hundreds. Here, "
        f"{len(subject.tasks) if many else 'one'} task{'s are' if many else ' is'} checked, "
        f"{counted(number, 'turn')} of each episode",
    )


def _in_threads(subject: Subject) -> bool:
    """True for the user's own class whose steps run in worker threads."""
    spec = subject.spec
    own = spec is not None and ":" in spec.name
    return own and is_blocking(subject.env_class, subject.tasks[0], spec.args if spec else {})


def needless_thread(step_s: float, opening_s: float) -> str | None:
    """Returns what is wrong with a worker thread for steps of so many seconds, after an opening
    (constructor and reset) of so many; None: nothing."""
    if step_s >= FAST_STEP_S or opening_s >= FAST_OPENING_S:
        return None
    return (
        f"a step of the environment takes {1000 * step_s:.2g} ms, and handing it to a worker "
        "thread about 0.3 ms, up to a third of a step of RL: if `reset` and `step` cannot hang, "
        "set `blocking = False` in the class"
    )


async def check_outcomes(subject: Subject, player: Player, outcomes: Sequence[Outcome]) -> None:
    """Compare the expert's episodes with one another, and with one of random words."""
    _check_lengths(subject, outcomes)
    if not player.fits(1):
        player.left_out.append("an episode of random words")
        return
    try:
        random, done = await _random(subject, player)
    except EpisodeTimeout:
        raise
    except Exception as error:
        subject.error("rubbish", f"words that are no action raised {told(error, 200)}")
        return
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
    over = sum(outcome.num_turns > outcome.limit for outcome in ended)
    if 2 * over >= len(ended):
        which = "all" if over == len(ended) else f"{over} of {len(ended)}"
        subject.note(
            "length",
            f"the expert needs more than max_turns, {limit}, in {which} episodes, up to {turns}: "
            "they are cut before they are solved, unless `rollout.max_turns` allows more",
        )
    if turns >= LONG:
        subject.note(
            "length",
            f"{longest.task.id}: the expert's episode has {turns} turns and {longest.size:,} "
            "characters: all of it has to fit `model.context_length`, in tokens",
        )


async def _random(subject: Subject, player: Player) -> tuple[float, bool]:
    """Returns the reward of an episode of random words, and True if it ended."""
    env: Env = await player.new()
    (low, high), _ = limits_of(env)
    total, done = 0.0, False
    try:
        await player.reset(env, subject.tasks[0])
        for turn in range(min(RANDOM_TURNS, player.max_turns, env.max_turns)):
            result = await player.step(env, Message(role="assistant", content=f"look {turn}"))
            total, done = total + (result.reward or 0.0), result.done
            if done:
                break
    finally:
        await player.close_env(env)
    if math.isfinite(total) and not low - 1e-9 <= total <= high + 1e-9:
        text = f"the reward {total:g} of random words is outside of score_range {low:g} to {high:g}"
        subject.error("rewards", text)
    return total, done
