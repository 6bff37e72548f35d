"""Refusals and warnings that follow from an agent's episodes: each with its number and a remedy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import fmean

from ludus.config.schema import RunConfig
from ludus.core.errors import ConfigError, counted
from ludus.core.types import Status
from ludus.diagnostics.calibration.agents.episodes import AgentPlay
from ludus.diagnostics.calibration.agents.subject import AgentSubject
from ludus.diagnostics.calibration.warnings import LARGE
from ludus.judges import JUDGES

SLOW_S = 2.0
"""Seconds of an episode without its model above which RL mostly waits for the agent."""

CUT = 0.1
"""Share of turns at the limit of tokens above which it is told."""

LOW_SIGNAL = 0.2
"""Share of groups with different rewards below which RL learns slowly."""

FEW_STEPS = 10
"""Steps below which nothing can be seen of learning."""


def refuse_fruitless(play: AgentPlay, subject: AgentSubject, seconds: float) -> None:
    """Refuse an agent whose episodes cannot train: none makes a call, or none gets a reward.

    Errors: ConfigError with the most frequent reason.
    """
    episodes = play.episodes
    if len(play.unfinished) == len(episodes):
        called = play.silent < len(episodes)
        raise ConfigError(
            f"{subject.given}: no episode ended within {seconds:.0f} s, "
            + (
                f"in which {counted(len(play.turns), 'turn')} ended: the model or the agent is too "
                "slow on this machine: take a smaller model, fewer calls, or a GPU"
                if called
                else "and no turn was sampled: the agent hangs before its first call, or the model "
                "is too slow on this machine"
            )
        )
    raised = [t for t in play.failed if t.status is not Status.UNSCORABLE]
    if raised and len(raised) + len(play.unfinished) == len(episodes):
        reason, number = play.reasons[0]
        raise ConfigError(
            f"{subject.given}: none of {len(episodes)} episodes ended well, {number} failed with "
            f"{reason}. A failed episode does not train: catch what is the model's fault, such as "
            "text that does not parse, and return a reward"
        )
    if play.silent == len(episodes) and play.overflown:
        raise ConfigError(
            f"{subject.given}: its first prompts leave no room in the context of {play.context} "
            "tokens, the longest of a recipe here or the model's own: shorten them (its "
            "instructions, the schemas of its tools, the task), or take another model"
        )
    if play.silent == len(episodes):
        raise ConfigError(
            f"{subject.given}: none of its {len(episodes)} episodes called the model, so there is "
            "nothing to train: call `await model.chat(messages)`, or hand `model.base_url` and "
            "`model.api_key`, or `model.http_client()`, to the agent's own client"
        )
    # Without a judge, an episode that a limit cuts has a reward of 0, whatever the agent returns.
    whole = [t for t in play.scored if t.status is Status.COMPLETED]
    if not play.scored or (not whole and any(t.status is Status.UNSCORABLE for t in episodes)):
        raise ConfigError(_unscored(play, subject))


def _unscored(play: AgentPlay, subject: AgentSubject) -> str:
    unscored = [t for t in play.failed if t.status is Status.UNSCORABLE]
    reason = (unscored or play.episodes)[0].error or ""
    if subject.tasks.env is None and "no `judge` is configured" in reason:
        return (
            f"{subject.given}: it returned no reward in {len(unscored)} of {len(play.episodes)} "
            f"episodes, and its tasks have neither answers nor a judge: return a number or an"
            f" Outcome(reward=...), or name a judge with --judge ({', '.join(JUDGES.names())})"
        )
    return f"{subject.given}: no whole episode got a reward: {reason}"


def of_play(play: AgentPlay, subject: AgentSubject, config: RunConfig) -> Iterator[str]:
    """Yields what the episodes foretell."""
    episodes = play.episodes
    if play.failed:
        told = "; ".join(f"{number} x {reason}" for reason, number in play.reasons[:3])
        yield (
            f"{len(play.failed)} of {len(episodes)} episodes failed: {told}. Such episodes are "
            "played again, then left out, and their groups compare fewer: catch what is the "
            "model's fault, and return a reward"
        )
    if play.unfinished:
        yield (
            f"{len(play.unfinished)} of {len(episodes)} episodes had not ended when the "
            "measurement did: the numbers of calls and tokens are low estimates"
        )
    if quiet := sum(not t.num_turns for t in episodes if not t.status.retryable):
        yield f"{quiet} of {len(episodes)} episodes made no call of the model: they do not train"
    if subject.chosen and not play.judged:
        yield (
            "--judge: it was never asked, since the agent returns its rewards itself: the recipe "
            "has no judge. Return None to have episodes judged"
        )
    yield from _of_rewards(play)
    yield from _of_lengths(play, config)
    if play.own_s > SLOW_S and config.rl is not None:
        number = config.rl.groups_per_step * config.rl.group_size
        waits = play.own_s * math.ceil(number / config.rollout.concurrency)
        yield (
            f"an episode takes {play.own_s:.1f} s besides its model's turns: a step of RL with "
            f"{number} episodes, {config.rollout.concurrency} at the same time, waits at least "
            f"{waits / 60:.1f} minutes for the agent; make its tools faster"
        )


def _of_rewards(play: AgentPlay) -> Iterator[str]:
    rewards = play.rewards
    if len(set(rewards)) == 1:
        all_of_them = f"all {len(rewards)} episodes have" if len(rewards) > 1 else "the episode has"
        yield (
            f"{all_of_them} the reward {rewards[0]:g}: RL compares the episodes of a group, so "
            "there is nothing to learn from: take easier tasks or a stronger model, give part of "
            "the reward for part of the way, or show examples first (`sft.data`)"
        )
    elif play.signal < LOW_SIGNAL:
        low = fmean(rewards) < (min(rewards) + max(rewards)) / 2
        yield (
            f"{play.signal:.0%} of {counted(len(play.groups), 'group')} "
            f"{'has' if len(play.groups) == 1 else 'have'} different rewards: RL learns "
            f"from those alone, so slowly (mean reward {fmean(rewards):.2f}): take "
            f"{'easier' if low else 'harder'} tasks, or give a reward for part of the way"
        )
    if max(map(abs, rewards)) > LARGE:
        yield (
            f"rewards reach {max(rewards, key=abs):g}: GRPO divides by their spread within a "
            "group, so one outlier hides all other differences; scale them to 0 to 1"
        )


def _of_lengths(play: AgentPlay, config: RunConfig) -> Iterator[str]:
    if play.overflown:
        yield (
            f"{play.overflown} of {len(play.episodes)} episodes outgrew the context of "
            f"{play.context} tokens, the longest of a recipe here or the model's own: make fewer "
            "calls, shorten what tools return, or summarise the history"
        )
    if play.cut_turns > CUT:
        yield (
            f"{play.cut_turns:.0%} of the turns reached the limit of {play.max_tokens} tokens: "
            "they are cut, and what follows is not seen: ask for shorter turns, or raise "
            "rollout.max_tokens_per_turn and model.context_length "
            f"({config.model.context_length} now)"
        )


def of_steps(config: RunConfig, step_s: float, minutes: float) -> Iterator[str]:
    """Yields what the number of steps foretells."""
    assert config.rl is not None
    if (steps := config.rl.steps) < FEW_STEPS:
        wanted = math.ceil(100 * step_s / 60)
        yield (
            f"{counted(steps, 'step')} of RL of {step_s:.0f} s fit into the {minutes:g} of "
            f"--minutes, too few to learn: 100 take about {counted(wanted, 'minute')}, a smaller "
            "model or a GPU less"
        )
