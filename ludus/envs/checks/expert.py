"""Checks of an environment's expert: its episodes end, win, and are the same each time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ludus.core.errors import EpisodeTimeout, counted, printable
from ludus.core.modules import told
from ludus.core.types import Message, Task
from ludus.envs.base import NoExpert, limits_of
from ludus.envs.checks.differences import expert_change
from ludus.envs.checks.outcomes import Outcome, check_outcomes
from ludus.envs.checks.play import Player
from ludus.envs.checks.subject import Subject


@dataclass(frozen=True, slots=True)
class _Episode:
    """An expert's episode.

    Args:
        steps: lines of `expert_steps` in the first turn that has some.
        scored: a step gave a reward.
        bounds: the environment's `score_range`.
        error: that a step raised, and that ended the episode; `at`: as `Player.at`.
    """

    outcome: Outcome
    actions: list[str]
    steps: str
    scored: bool
    bounds: tuple[float, float]
    success_at: float
    error: Exception | None
    at: tuple[str, str] | None

    @property
    def wins(self) -> bool:
        return self.outcome.done and self.scored and self.outcome.reward >= self.success_at

    @property
    def ending(self) -> str:
        """The end of an episode that does not win, in words."""
        if self.error is not None:
            return f"a step raises {' '.join(printable(told(self.error, 100)).split())}"
        return "the expert loses" if self.outcome.done else "the episode does not end"


@dataclass(slots=True)
class _Found:
    """Faults by kind, a line for each task."""

    without: list[str] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)
    endless: list[str] = field(default_factory=list)
    last_actions: list[str] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


async def check_expert(subject: Subject, player: Player) -> None:
    """Play the expert in each task as demonstrations do, and tell what is wrong with it."""
    found, outcomes, scored, num_won = _Found(), list[Outcome](), False, 0
    failed: list[tuple[Exception, tuple[str, str] | None]] = []
    for number, task in enumerate(subject.tasks):
        if player.late:
            break
        try:
            episode = await _episode(player, task, found)
        except NoExpert:
            found.without.append(task.id)
            continue
        except EpisodeTimeout:
            raise
        except Exception as error:
            failed.append((error, player.at))
            continue
        if episode.error is not None:
            failed.append((episode.error, episode.at))
            continue
        outcomes.append(episode.outcome)
        num_won += episode.wins
        scored |= episode.scored
        await _compare(player, episode, subject.played.get(number), found)
        _judge(subject, episode, found)
    num_ended = sum(outcome.done for outcome in outcomes)
    if outcomes:
        turns = sorted({outcome.num_turns for outcome in outcomes})
        span = counted(turns[0], "turn") if len(turns) == 1 else f"{turns[0]} to {turns[-1]} turns"
        tasks = counted(len(outcomes), "task")
        reached = f"wins {num_won} of" if scored else "plays"  # a judge scores it
        cut = len(outcomes) - num_ended
        left = f"; {counted(cut, 'episode')} did not end here" if cut else ""
        left += f"; {counted(len(failed), 'more task')} cannot be played" if failed else ""
        subject.tell(f"the expert {reached} {tasks}, in episodes of {span}{left}")
    _tell(subject, player, found, num_ended)
    if failed:
        first, player.at = failed[0]
        raise first
    await check_outcomes(subject, player, outcomes)


async def _episode(player: Player, task: Task, found: _Found) -> _Episode:
    """Play a task; where it is won only without the lines of `expert_steps`, tell so and return the
    episode without them."""
    episode = await _play(player, task, with_steps=True)
    if episode.steps and not episode.wins:
        without = await _play(player, task, with_steps=False)
        if without.wins:
            found.steps.append(
                f"{task.id}: with the lines of expert_steps ({episode.steps!r:.60}) before its "
                f"action {episode.ending}, and without them it wins"
            )
            return without
    return episode


async def _compare(
    player: Player, episode: _Episode, before: list[str] | None, found: _Found
) -> None:
    """Tell what changed since the task was played before, without the lines of `expert_steps`."""
    if before is None or before == episode.actions:
        return
    task = episode.outcome.task
    if episode.steps and (await _play(player, task, with_steps=False)).actions == before:
        found.steps.append(
            f"{task.id}: with the lines of expert_steps ({episode.steps!r:.60}) before its action "
            "the episode takes another way than without them"
        )
    else:
        change = expert_change(before, episode.actions)
        found.changes.append(f"{task.id}, played twice: {change}")


async def _play(player: Player, task: Task, *, with_steps: bool) -> _Episode:
    env = await player.new()
    actions, shown = list[str](), ""
    total, done, scored = 0.0, False, False
    error: Exception | None = None
    at: tuple[str, str] | None = None
    try:
        opening = await player.reset(env, task)
        size = sum(len(message.content) for message in opening.messages)
        while not done and len(actions) < player.max_turns:
            steps, action = await player.steps(env), await player.expert(env)
            actions.append(action)
            shown = shown or steps
            text = steps + action if with_steps else action
            try:
                result = await player.step(env, Message(role="assistant", content=text))
            except EpisodeTimeout:
                raise
            except Exception as failure:
                error, at = failure, player.at
                break
            total, done = total + (result.reward or 0.0), result.done
            scored |= result.reward is not None
            size += len(text) + sum(len(message.content) for message in result.messages)
        outcome = Outcome(task, total, len(actions), size, env.max_turns, done)
        bounds, _ = limits_of(env)
        return _Episode(outcome, actions, shown, scored, bounds, env.success_at, error, at)
    finally:
        await player.close_env(env)


def _judge(subject: Subject, episode: _Episode, found: _Found) -> None:
    task, total = episode.outcome.task, episode.outcome.reward
    low, high = episode.bounds
    if not episode.outcome.done:
        found.last_actions = found.last_actions or episode.actions[-2:]
        found.endless.append(task.id)
        return
    if math.isfinite(total) and not low - 1e-9 <= total <= high + 1e-9:
        found.outside.append(
            f"{task.id}: the reward {total:g} is outside of score_range {low:g} to {high:g}"
        )
    if not episode.scored:
        text = "no step gives a reward (it is None): a judge has to score the episodes"
        subject.note("rewards", text)
    elif total < episode.success_at:
        needed = f"success_at is {episode.success_at:g}"
        found.lost.append(f"{task.id}: the expert lost, with a reward of {total:g} ({needed})")


def _tell(subject: Subject, player: Player, found: _Found, num_ended: int) -> None:
    if found.steps:
        text = f"{found.steps[0]}{_others(found.steps)}: `step` has to take them off"
        subject.error("expert", text)
    if found.outside:
        text = f"{found.outside[0]}{_others(found.outside)}: scale it, or set `score_range` in the "
        subject.error("rewards", f"{text}class")
    if found.endless:
        steps = counted(player.max_turns, "step")
        if player.slow:
            text = f"the {steps} played here{_others(found.endless)} do not end the episode"
            subject.note("expert", f"{found.endless[0]}: {text}; its end was not checked")
        else:
            text = f"none of {steps} returned terminated or truncated{_others(found.endless)}"
            last = ", then ".join(f"{action!r:.40}" for action in found.last_actions)
            last = f" (the expert's last actions: {last})"
            if num_ended:  # so a step can end it: the expert does not get there
                text = f"the expert does not end the episode in {steps}{_others(found.endless)}"
                subject.note("expert", f"{found.endless[0]}: {text}{last}")
            else:
                ends = "the step that ends the episode has to"
                subject.error("expert", f"{found.endless[0]}: {text}: {ends}{last}")
    if found.changes:
        subject.note("expert", f"{found.changes[0]}{_others(found.changes)}")
    if found.lost:
        text = f"{found.lost[0]}{_others(found.lost)}"
        if 1 < len(found.lost) == num_ended:
            subject.error("expert", f"{text}, and it won none: demonstrations need one that wins")
        else:
            subject.note("expert", text)
    if found.without:
        subject.note("expert", f"there is none for {', '.join(found.without)}")


def _others(found: Sequence[str]) -> str:
    """The number of tasks that have the same fault as the first one, in words."""
    return f" (so it is in {counted(len(found) - 1, 'other task')})" if found[1:] else ""
