"""Warnings that follow from measurements: each with its number and what to change."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import fmean, median

from ludus.core.errors import counted
from ludus.data.demonstrations import Dropped
from ludus.diagnostics.calibration.choices import MAX_CONTEXT, SOLVED, Lengths, is_expected
from ludus.diagnostics.calibration.episodes import RandomEpisode
from ludus.diagnostics.calibration.expert import Expert, in_a_line
from ludus.diagnostics.calibration.trials.trial import Trial
from ludus.envs.checks.outcomes import needless_thread

SLOW_S = 0.2
"""Seconds of an environment's step above which RL mostly waits for it."""

EASY = 0.8
"""Success of random actions above which there is little to learn."""

LARGE = 100.0
"""Size of a reward above which its scale is likely a mistake."""

TOO_LONG = 0.15
"""Share of the expert's episodes over the limit of turns above which it is told."""

ENOUGH = 10
"""Episodes of random actions from which something follows, where others failed."""

COMPARED = 1e5
"""Different worlds up to which training and held-out tasks share more than a few."""

FEW_EPISODES = 5000
"""Episodes of RL below which little was learned (docs/benchmarks/init.md: PickupLoc, coin)."""

FEW_HELDOUT = 100
"""Held-out tasks below which the intervals hide most of what a run gains."""

UNDECLARED = (
    "The class declares neither `cheap_reset` nor `world`: held-out tasks will be training tasks, "
    "and their success may be memory; set `cheap_reset = True` where resets take milliseconds, or "
    "define `world()` (docs/tasks.md, Splits)"
)
"""Of an environment where different seeds open the same worlds."""

LARGE_GAP = 0.5
"""Nats a token of the expert's turns in held-out levels, beyond those in unseen training tasks,
above which they differ: coin has 0.01, peckingorder, whose held-out success stays 0 %, 4.1."""

HALF, POINTS = 0.5, 0.2
"""Held-out tasks differ where their success is at most this part of that of training tasks, or
lower by this much."""

FEW = 50
"""Different tasks below which a run can only memorise them."""


def of_expert(expert: Expert, levels: Sequence[str] = ()) -> Iterator[str]:
    """Yields what the expert's episodes foretell. `levels`: those of the recipe."""
    by_level = expert.dropped_of(levels)
    for tier, dropped in by_level.items():
        played = expert.played_of(tier)
        yield (
            f"level {tier!r}: {len(dropped) / played:.0%} of {counted(played, 'episode')} of the "
            f"expert gave no demonstration: {_by_kind(dropped)}: {in_a_line(dropped[0].reason)}"
        )
    if expert.dropped and not by_level:
        yield (
            f"of {counted(expert.num_played, 'episode')} of the expert, some gave no "
            f"demonstration: {_by_kind(expert.dropped)}: {expert.reason}"
        )
    if expert.success < 0.9 and expert.demonstrations:
        yield (
            f"the expert succeeds in {expert.success:.0%} of its episodes; only these are shown, "
            "so tasks that it loses have to be learned by RL"
        )
    rewards = expert.rewards
    if broken := [r for r in rewards if not math.isfinite(r)]:
        yield (
            f"{len(broken)} of {counted(len(rewards), 'episode')} "
            f"{'has' if len(broken) == 1 else 'have'} the reward {broken[0]}: RL leaves such "
            "episodes out; return a finite number"
        )
    elif rewards and max(map(abs, rewards)) > LARGE:
        yield (
            f"rewards reach {max(rewards, key=abs):g}: GRPO divides by their spread within a "
            "group, so one outlier hides all other differences; scale them to 0 to 1"
        )


def _by_kind(dropped: Sequence[Dropped]) -> str:
    """`12 x error, 1 x timeout`."""
    counts = Counter(one.kind for one in dropped)
    return ", ".join(f"{count:,} x {kind}" for kind, count in sorted(counts.items()))


def of_random(
    played: Sequence[RandomEpisode], expert: Expert, levels: Sequence[str] = ()
) -> Iterator[str]:
    """Yields what episodes of random actions foretell. `levels`: all of the environment."""
    fine = [p for p in played if not p.error]
    if failed := [p for p in played if p.error]:
        yield (
            f"{len(failed)} of {counted(len(played), 'episode')} of random actions failed: "
            f"{failed[0].error}"
        )
    if failed and len(fine) < max(ENOUGH, len(failed)):  # those that end are no sample
        return
    if not fine:
        return
    success, rewards = fmean(p.success for p in fine), {p.reward for p in fine}
    if success > EASY:
        yield (
            f"random actions succeed in {success:.0%} of the episodes: there is little to learn; "
            + other_tasks("harder", "env", levels)
        )
    if len(rewards | set(expert.rewards)) == 1:
        yield (
            f"every episode has the reward {next(iter(rewards)):g}, the expert's and those of "
            "random actions: no group will have different rewards, so RL has nothing to learn from"
        )
    if (step_s := fmean(p.step_s for p in fine)) > SLOW_S:
        turns = fmean(expert.turns) if expert.turns else 1.0
        yield (
            f"a step of the environment takes {step_s:.1f} s: a step of RL with 256 episodes of "
            f"{counted(turns, 'turn')} waits {counted(256 * turns * step_s / 60, 'minute')} for "
            "it if steps run one after the other; make it faster, or serve it with many workers "
            "(docs/services.md)"
        )


def of_threads(played: Sequence[RandomEpisode], blocking: bool) -> Iterator[str]:
    """Yields that fast steps wait for the threads in which they run."""
    fine = [p for p in played if not p.error]
    if not blocking or not fine:
        return
    step_s, opening_s = median(p.step_s for p in fine), median(p.opening_s for p in fine)
    if text := needless_thread(step_s, opening_s):
        yield text


def of_load(load: float, cores: int) -> Iterator[str]:
    """Yields that other programs slowed the measurements. `load`: of the minute before them."""
    if load > cores:
        yield (
            f"the machine was busy (load {load:.1f} on {cores} cores before this began): the "
            "seconds of a step, and the numbers of steps that follow, are those of a busy machine; "
            "`ludus init` again when it is quiet"
        )


def of_time(planned_s: float, minutes: float) -> Iterator[str]:
    """Yields that the least that a recipe needs takes longer than it may."""
    if planned_s > 1.1 * 60 * minutes:
        yield (
            f"the recipe takes about {counted(planned_s / 60, 'minute')}, more than the "
            f"{minutes:g} of --minutes: fewer steps would teach nothing; give it these minutes, or "
            "make the environment's steps or episodes shorter"
        )


def of_tasks(distinct: float, heldout: int, kind: str, undeclared: bool = False) -> Iterator[str]:
    """Yields what the number of different tasks foretells. `undeclared`: a run cannot tell whether
    two seeds open one world."""
    # They were counted over thousands of seeds, so further seeds open the same.
    more = "add levels, or let the environment make more different worlds; more seeds open the same"
    if distinct < FEW:
        whose = "the recipe's levels and seeds have" if kind == "env" else "the rows have"
        yield (
            f"{whose} about {counted(distinct, 'different task')}: a run memorises them, and "
            f"{counted(heldout, 'held-out task')} give{'s' if heldout == 1 else ''} intervals of "
            f"{100 / math.sqrt(max(heldout, 1)):.0f} points; "
            + (more if kind == "env" else "collect more rows")
            + (f". {UNDECLARED}" if undeclared else "")
        )
    elif heldout < FEW_HELDOUT:
        if kind != "env":
            remedy = "collect more rows"
        elif distinct < 4 * FEW_HELDOUT:
            remedy = more
        else:  # fewer than there are: the minutes allow no more
            remedy = "give more --minutes"
        yield (
            f"{heldout} held-out tasks have intervals of +-{98 / math.sqrt(heldout):.0f} points: "
            f"a rise of less than about {196 / math.sqrt(heldout):.0f} points cannot be told from "
            f"chance; {remedy}"
        )


def of_worlds(distinct: float, undeclared: bool) -> Iterator[str]:
    """Yields what equal worlds foretell where a run cannot tell them apart; of fewer than FEW,
    `of_tasks` tells."""
    if undeclared and FEW <= distinct < COMPARED:
        yield (
            f"different seeds open the same worlds (about {distinct:,.0f} different ones). "
            + UNDECLARED
        )


def of_lengths(lengths: Lengths, context: int) -> Iterator[str]:
    """Yields what the tokens of the expert's episodes foretell."""
    if lengths.episode_max > context:
        long = sum(tokens > context for tokens in lengths.episodes)
        most = f" (at most {MAX_CONTEXT} here)" if context >= MAX_CONTEXT else ""
        remedy = "or train a pretrained model on a GPU" if most else "or raise model.context_length"
        yield (
            f"{long:,} of {counted(len(lengths.episodes), 'episode')} of the expert "
            f"{'exceeds' if long == 1 else 'exceed'} the context of {context} tokens{most}, the "
            f"longest with {lengths.episode_max:,}: such episodes are not shown; shorten prompts "
            f"or observations, {remedy}"
        )


def of_turns(turns: Sequence[int], most: object, levels: Sequence[str] = ()) -> Iterator[str]:
    """Yields what the turns of the expert's episodes foretell. `levels`: as in `of_random`."""
    if not turns or not isinstance(most, int):
        return
    over = sum(n > most for n in turns) / len(turns)
    if over > TOO_LONG:
        yield (
            f"{over:.0%} of the expert's episodes need more than the {most} turns that a small "
            f"model can play here ({fmean(turns):.0f} on average, at most {turns[-1]}): their "
            f"tasks are out of reach; {other_tasks('shorter', 'env', levels)}"
        )


def of_episodes(number: int) -> Iterator[str]:
    """Yields that RL of a model from scratch will have too few episodes."""
    if number < FEW_EPISODES:
        yield (
            f"RL has {number:,} episodes in these minutes. Of six runs with fewer than "
            f"{FEW_EPISODES:,}, success rose with intervals apart in three, barely in two of them, "
            "and fell in one: give more with --minutes, or train with SFT alone"
        )


def other_tasks(
    kind: str, source: str, levels: Sequence[str] = (), tiers: Sequence[str] = ()
) -> str:
    """Advice to take other tasks, and how.

    Args:
        kind: `easier`, `harder` or `shorter`.
        source: of the tasks: `env` or `data`.
        levels: all of the environment.
        tiers: those of the recipe.
    """
    if source != "env":
        return f"take {kind} questions"
    if len(levels) < 2:
        return f"make {kind} tasks: other arguments of the environment, or levels of it (`tiers`)"
    if kind == "easier" and len(tiers) > 1:
        return f"choose easier levels (--tiers {shlex.quote(tiers[0])}, the first named)"
    return f"choose {kind} levels with --tiers"


def of_heldout(trial: Trial, source: str = "env") -> Iterator[str]:
    """Yields a warning where what SFT learns does not carry over to held-out tasks: the expert's
    turns are hard to foresee there, or success is at most half of that of training tasks, or lower
    by 20 points, and the intervals do not overlap.

    Args:
        source: as in `other_tasks`.
    """
    if trial.unplayed:
        yield (
            f"held-out tasks cannot be played: {trial.unplayed}; until they can, `ludus train` "
            "refuses the recipe, or ends at its first evaluation"
        )
    own, others = trial.gap or (0.0, 0.0)
    if own < math.inf and others == math.inf:
        yield (
            "every episode of the expert in held-out levels exceeds the context: the policy cannot "
            "succeed there; hold out tasks of the training levels (`tasks.heldout`)"
        )
    elif others > own + LARGE_GAP:
        yield (
            f"after {trial.curve[-1][0]} steps of SFT the expert's turns have a loss of {own:.2f} "
            f"nats a token in training tasks that SFT did not show, and of {others:.2f} in "
            "held-out levels: these have words or rules that training lacks, and what is learned "
            "will hardly carry over; give the training levels many more different words, or hold "
            "out other tasks of the training levels (`tasks.heldout`: their names, another "
            "first_seed)"
        )
    elif (
        (trained := trial.trained) is not None
        and (heldout := trial.heldout) is not None
        and heldout.high is not None
        and trained.low is not None
        and heldout.high < trained.low
        and heldout.value <= max(HALF * trained.value, trained.value - POINTS)
    ):
        more = "more rows" if source == "data" else "more seeds or levels"
        yield (
            f"after {trial.curve[-1][0]} steps of SFT sampled episodes succeed in {trained} of "
            f"{trained.num_tasks} training tasks, and in {heldout} of {heldout.num_tasks} held-out "
            "tasks: they differ, and what is learned may not carry over; train on more different "
            f"tasks ({more}), or hold out some that are alike"
        )


def of_trial(
    trial: Trial,
    steps: int,
    target: float,
    source: str = "env",
    levels: Sequence[str] = (),
    tiers: Sequence[str] = (),
) -> Iterator[str]:
    """Yields what the trials foretell.

    Args:
        steps, target: of the recipe's SFT at most, and the success at which it ends.
        source, levels, tiers: as in `other_tasks`.
    """
    easier = other_tasks("easier", source, levels, tiers)
    if not trial.curve:
        return
    step, success = trial.curve[-1]
    if success == 0 and not any(trial.signal.values()):
        yield (
            f"after {step} steps of SFT no sampled episode succeeds, and no group has different "
            f"rewards. The recipe has up to {steps} steps; if the last measurement before RL is "
            f"still 0 %, RL cannot help: {easier}, give more minutes, or a larger model"
        )
    elif success >= SOLVED:
        if trial.chance > EASY:  # `of_random` tells
            return
        yield (
            f"{success:.0%} of the sampled episodes succeed after {step} steps of SFT, which "
            f"leaves RL little to add, so SFT goes on until {target:.0%} succeed: "
            f"{other_tasks('harder', source, levels)} for RL to learn from"
        )
    elif not is_expected(trial, target, steps):
        yield (
            f"success was {success:.0%} after {step} steps of SFT in the trial, and is not "
            f"expected to reach {target:.0%} in the recipe's {steps}: RL begins with few "
            "successes, and may not raise them in these minutes; "
            f"{easier}, give more with --minutes, or take a larger model"
        )
    elif trial.signal and max(trial.signal.values()) < 0.1:
        yield (
            f"{max(trial.signal.values()):.0%} of the groups have different rewards after {step} "
            "steps of SFT: RL learns from those alone, so slowly"
        )
