"""From measurements to a recipe's values. No function here plays, trains or reads a clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from ludus.config.training import last_measured
from ludus.diagnostics.calibration.trials.trial import Trial
from ludus.pipeline.sft_end import LEAST_UNSEEN, recent

MAX_WORDS = 4096
"""Largest vocabulary of the tokenizer `words`; above it, most of a small model is embeddings."""

UNKNOWN_TURNS = 0.002
"""Share of unknown tokens in the expert's turns above which `words` cannot write the answers."""

UNKNOWN_PROMPTS = 0.02
"""Share of unknown tokens in prompts above which `words` hides too much of the task."""

MOSTLY_OBSERVED = 0.05
"""Share of the expert's tokens in its episodes up to which gradients skip the other tokens. From
one end of SFT, the same steps of RL took the coin collector (4 %) to 54.1 % in place of 46.4,
PickupLoc (7 %) to 37.5 in place of 39.7 and 42.1, OpenDoor to 65.4 in place of 69.4
(docs/log.md)."""

WIDE_HEADS, SHORT_EPISODE = 64, 256
"""Width of a model's heads where the expert's episodes have at most so many tokens on average; else
the default, 32. Induction heads of 32 have 22 coordinates to tell tokens apart, and confuse them;
heads of 64 have 46. 1,000 steps of SFT took chain_sum to 6, 14 and 15 % with 32, and with 64 to 27,
21 and 41 % (docs/log.md). In long episodes attention takes most of a step, and twice as long with
64."""

MAX_CONTEXT = 4096
"""Longest context of a small model on a CPU."""

MAX_TURNS = 100
"""Longest episodes of a small model on a CPU."""

SEARCH = 2
"""Turns of an agent over those of an expert that knows what the agent must find out."""

COMPARE_S = 15.0
"""Most seconds to compare training and held-out tasks at the start of a run."""

RESERVE_S = 25.0
"""Seconds of a run's start, report and checkpoints."""

NUM_HELDOUT = 384
"""Held-out tasks: the 95 % intervals of 50 and 60.5 % do not overlap."""

MOST_HELDOUT, HELDOUT_SHARE = 2048, 0.1
"""Held-out tasks where playing them before and after RL takes this share of the minutes: the
intervals of 50 and 54.4 % do not overlap, nor those of 87.5 and 90.4 %."""

MANY_HELDOUT, HELDOUT_SHARE_MANY = 1024, 0.2
"""The same of episodes that take longer: the intervals of 45 and 51.2 % do not overlap. RL raised
coin by 4.5 to 15.3 points in eight runs of 8 minutes; 512 tasks can tell 8.6."""

FEW_HELDOUT = 128
"""Held-out tasks up to which they are a larger share of few different tasks: 31 of 127 numbers to
guess would leave intervals of 17 points."""

LEAST_HELDOUT, HELDOUT_SHARE_SLOW = 64, 0.25
"""The same of an environment whose episodes take long."""

NUM_MEASURED = 128
"""Episodes of a measurement of `sft.until`: one each of as many training tasks without a
demonstration. Of 32 tasks with four episodes each, half had sums of one digit, and SFT of chain_sum
ended at 48 % with 19 % of held-out tasks (docs/log.md)."""

MOST_SAMPLES = 4
"""Most episodes of each task of a measurement, where few tasks are left."""

MORE_SIGNAL = 0.15
"""Share of the groups that a higher temperature has to add to those with different rewards. One of
32 more (0.12 to 0.16) was chance: RL of chain_sum at 1.2 then went from 51.8 to 48.2 %."""

SIGNAL = 0.5
"""Share of groups with different rewards at which a higher temperature is not needed."""

SFT_TOKENS, SFT_TOKENS_PRETRAINED = 2560, 8192
"""Most tokens of a step of SFT. Small steps teach a model from scratch more from the same tokens
(docs/log.md, *Small steps of SFT*), but not below 2,000: of sums that are written out, 32 of 72
tokens taught more than 16 (*Experts that write their steps*)."""

FEWEST_PER_STEP, FEWEST_PER_STEP_PRETRAINED = 2, 8
"""Fewest demonstrations of a step of SFT, also where these have more tokens."""

MAX_RL_STEPS = 2000
"""Most steps of RL."""

PATIENCE = 0.5
"""Share of SFT's steps in which its success may stand still: a measurement has an error of some
points."""

MINIBATCH = 32
"""Fewest episodes of an optimizer step in RL. Four steps learn faster than one of all episodes
(docs/log.md)."""

RL_SHARE, RL_SHARE_HARD = 0.6, 0.3
"""Least share of the minutes for RL; the second where SFT is not expected to reach its target in
the rest: SFT learns faster than RL from nothing. chain_sum had 11 % after 770 of 990 steps, half of
the minutes of a busy machine, and RL stood still there; after 1,120 it had 46 %, and RL took
held-out success from 59 to 82 % (docs/log.md)."""

MEASURED, MEASURED_HARD = 0.25, 0.1
"""Share of SFT's time for measurements of its success; the second where SFT is not expected to
reach its target, so that no measurement ends it."""

MOST_MEASURED = 40
"""Most measurements there: of very many, some would reach the target by luck."""

MIN_GAIN = 0.1
"""Success that the steps of SFT that are left have to promise: RL adds as much in their time. coin
stood at 37 % from step 100 of 1,080 on, and RL took it to 50 % in 70 steps; with 0.05 SFT still
went on to step 900 once, for a measurement has an error of 4 points (docs/log.md)."""

LEAST_MEASURED = 2
"""Fewest measurements of SFT: the last comes too late to end it."""

RL_FALLS = 0.9
"""Mean seconds of a step of RL over those of the first steps: where success rises, episodes are
shorter, and fewer groups have different rewards (0.6 to 1.2 in docs/benchmarks/init.md's runs)."""

SOLVED = 0.9
"""Success of SFT alone in the trial above which RL has little to add."""

NEARLY_ALL = 0.95
"""Success at which SFT ends there. A warehouse whose SFT ended at 43 % went from 58.0 to 98.7 % in
450 steps of RL; 400 steps of SFT alone, in a quarter of the time, reached 99.9 %."""

MIN_SIGNAL = 0.02
"""Of `rl.min_signal`: a policy that solved 97 % of its tasks still had a signal in 4 to 6 % of the
groups, one that had become certain of one answer to all tasks in less than 1 % (docs/log.md)."""

STOP = 0.98
"""Success of an evaluation at which RL ends there."""

BEYOND = 0.7
"""Success of the trial's policy above which it is not the one that RL begins with."""

TARGET = 0.4
"""Success of sampled episodes at which RL begins, where random actions, or one answer to all tasks,
never succeed."""

LIKELY, LATER = 1.5, 4
"""SFT's likely steps, and its most steps, over those expected: success rises more slowly than the
trial's line."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of the expert's episodes; `turn`: of a single turn of the expert.

    Those far longer than all others set no size: only `episode_max` and `episodes` have them.

    Args:
        episodes: tokens of each, ascending.
    """

    prompt_max: int
    turn_mean: float
    turn_max: int
    per_turn_max: float
    episode_mean: float
    episode_max: int
    episode_min: int = 0
    episodes: Sequence[int] = ()


def percentile(values: Sequence[int], share: float) -> int:
    """The smallest value that at least `share` of the ascending values do not exceed."""
    return values[min(len(values) - 1, max(math.ceil(share * len(values)) - 1, 0))]


def tokens_per_turn(lengths: Lengths) -> int:
    """Room for the expert's longest turn, a quarter more, and the token that ends it."""
    return math.ceil(1.25 * lengths.turn_max) + 1


def turns(expert: Sequence[int], own_limit: int, searches: bool = False) -> int:
    """Maximum turns: those of 90 % of the expert's episodes and a quarter more, at most MAX_TURNS.
    Episodes that fail go on to the limit, and take most of the time.

    The environment's own limit counts where the expert keeps it; it is a default, which many levels
    exceed. `searches`: the agent needs twice the turns, because it must find what the expert knows.
    """
    if expert[-1] == 1 and own_limit == 1:
        return 1
    margin = 1.25 * SEARCH if searches else 1.25
    wanted = max(math.ceil(margin * percentile(expert, 0.9)) + 1, 2)
    return min(wanted, own_limit if expert[-1] <= own_limit else MAX_TURNS)


def detaches(lengths: Lengths, expert_turns: Sequence[int]) -> bool:
    """True where RL trains so few of the tokens that most of a step are gradients of the others."""
    own = own_tokens(lengths, expert_turns)
    return bool(expert_turns) and own <= MOSTLY_OBSERVED * lengths.episode_mean


def own_tokens(lengths: Lengths, expert_turns: Sequence[int]) -> float:
    """Tokens that the expert writes in an episode; those of a turn where no turns are known."""
    return lengths.turn_mean * (fmean(expert_turns) if expert_turns else 1.0)


def context(lengths: Lengths, max_turns: int, room: int) -> int:
    """Tokens of the longest prompt and of `max_turns` turns with their observations, in steps of
    64: `per_turn_max` is that of the expert's episode with the longest turns."""
    grown = lengths.prompt_max + max_turns * (lengths.per_turn_max + room - lengths.turn_mean)
    return min(max(64 * math.ceil(grown / 64), 128), MAX_CONTEXT)


def episodes_per_step(lengths: Lengths, most: int, from_scratch: bool = True) -> int:
    """Demonstrations of a step of SFT: `most`, halved until they keep the limit of tokens."""
    tokens, fewest = SFT_TOKENS_PRETRAINED, FEWEST_PER_STEP_PRETRAINED
    if from_scratch:
        tokens, fewest = SFT_TOKENS, FEWEST_PER_STEP
    number = most
    while number > fewest and number * lengths.episode_mean > tokens:
        number //= 2
    return number


TARGET_KL = 0.003
"""Nats a token: RL at the usual rate moved policies that it destroyed by 0.007 to 0.015 a step, and
those that learned by 0.002 to 0.004 (docs/log.md)."""

EPISODE_KL = 0.06
"""Nats an episode: the tokens of a long turn share one reward, so at TARGET_KL a step moved a
policy by 0.24 nats an episode of 75 tokens, and RL raised nothing. At 0.02 episodes of 20 tokens
rose by 5 points where they rise by 20 (docs/log.md)."""

RL_RATE, RL_RATE_FREE = 1e-3, 3e-4
"""Peak learning rates of RL, with a `target_kl` that lowers it and without one. At 3e-4 a step
moved a policy by a tenth of what it may, and held-out success rose by 7 in place of 20 points
(docs/log.md)."""


def target_kl(episode_tokens: float) -> float:
    """The KL in nats a token to which an RL step is held, by the tokens that an episode samples."""
    return float(f"{min(TARGET_KL, EPISODE_KL / max(episode_tokens, 1.0)):.1g}")


def minibatches(episodes: int) -> int:
    """Optimizer steps of an RL step: 4, or fewer, so that each has MINIBATCH episodes."""
    return max(min(episodes // MINIBATCH, 4), 1)


def target(chance: float) -> float:
    """Success at which SFT ends: TARGET of the way from that of chance to 1."""
    return round(chance + TARGET * (1 - chance), 2)


def target_after(trial: Trial, success: float) -> float:
    """The target, or NEARLY_ALL where SFT alone has solved the tasks in the trial."""
    solved = bool(trial.curve) and trial.curve[-1][1] >= SOLVED
    return max(success, NEARLY_ALL) if solved else success


def measure_every(trial: Trial, success: float, share: float = MEASURED) -> int:
    """Steps of SFT between measurements that take a `share` of its time; fewer where the trial
    reached `success` in fewer steps."""
    wanted = (1 / share - 1) * trial.eval_s / max(trial.sft_step_s, 1e-3)
    every = min(max(10 * math.ceil(wanted / 10), 10), 100)
    reached = next((step for step, value in trial.curve if value >= success), None)
    return every if reached is None else min(every, max(10 * (reached // 20), 10))


def min_steps(trial: Trial, steps: int, every: int) -> int:
    """Steps of SFT before which no plateau ends it: those of the trial, which measured more, and at
    most half, with a measurement after them. letter_counting stood at the 16 % of chance until step
    150, where a line through its measurements promised nothing, and the trial had 48 % after 292
    (docs/log.md)."""
    last = trial.curve[-1][0] if trial.curve else 0
    return min(last, steps // 2, last_measured(steps, every))


def patience(steps: int, every: int, least: int) -> int:
    """Measurements without a new best success after which SFT ends, at least `least`."""
    return max(math.ceil(PATIENCE * steps / every), least)


def training_tasks(distinct: float, reset_s: float, share: float | None = None) -> int:
    """Number of training tasks where there are about `distinct` different ones, and each run
    compares them with the held-out tasks. `share`: of them that may train; None: as many as leave
    enough to hold out."""
    affordable = COMPARE_S / max(reset_s, 1e-6)
    if share is None:
        share = 0.6 if distinct * 0.25 > FEW_HELDOUT else 0.5
    return max(min(6000, int(distinct * share), int(affordable)), 8)


def undemonstrated(num_train: int) -> int:
    """Training tasks that SFT does not show, so that its end is measured on them."""
    return min(NUM_MEASURED, num_train // 5)


def measured_episodes(num_train: int) -> tuple[int, int]:
    """Tasks of a measurement of `sft.until`, and episodes of each: of those that SFT does not show,
    or of all where these are too few."""
    unseen = undemonstrated(num_train)
    num_tasks = unseen if unseen >= LEAST_UNSEEN else max(num_train, 1)
    return num_tasks, min(math.ceil(NUM_MEASURED / num_tasks), MOST_SAMPLES)


def heldout_tasks(distinct: float, most: int = NUM_HELDOUT) -> int:
    """`most`, or fewer where there are few different tasks: a quarter, up to FEW_HELDOUT two
    fifths of them."""
    return max(min(most, max(int(distinct * 0.25), min(int(distinct * 0.4), FEW_HELDOUT))), 2)


def affordable_heldout(given: int, episode_s: float, minutes: float) -> int:
    """Of `given` held-out tasks as many as two evaluations play in HELDOUT_SHARE of the minutes; up
    to MANY_HELDOUT in HELDOUT_SHARE_MANY of them, up to NUM_HELDOUT in HELDOUT_SHARE_SLOW; at least
    LEAST_HELDOUT."""

    def within(share: float) -> int:
        return int(share * 60 * minutes / (2 * max(episode_s, 1e-6))) // 32 * 32

    many = min(within(HELDOUT_SHARE_MANY), MANY_HELDOUT)
    few = min(within(HELDOUT_SHARE_SLOW), NUM_HELDOUT)
    return min(given, max(within(HELDOUT_SHARE), many, few, LEAST_HELDOUT))


def temperature(trial: Trial) -> float:
    """The lowest temperature at which half of the groups have different rewards; else the one with
    the most, unless it costs a third of the success or brings less than MORE_SIGNAL. Where most
    episodes succeed, groups are alike for that reason, and RL begins before: the lowest."""
    plain = min(trial.signal, default=1.0)
    if trial.success.get(plain, 0.0) >= BEYOND:
        return plain
    enough = [t for t, share in sorted(trial.signal.items()) if share >= SIGNAL]
    if enough or not trial.signal:
        return min(enough, default=plain)
    keeps = [
        t
        for t in trial.signal
        if trial.success[t] >= trial.success[plain] * 2 / 3
        and (t == plain or trial.signal[t] >= trial.signal[plain] + MORE_SIGNAL)
    ]
    return max(keeps, key=lambda t: (trial.signal[t], -t), default=plain)


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps of a run within its minutes, and the seconds that they take.

    Args:
        sft: at most.
        rl: where SFT takes all of its steps.
        more: steps of RL for each step of SFT that is left unused.
        likely: steps of RL where SFT ends when it is expected to.
        sft_s, rl_s: of the likely steps.
        every: steps of RL between evaluations, of which there are about four.
    """

    sft: int
    sft_s: float
    rl: int
    more: float
    likely: int
    rl_s: float
    every: int


def expected_sft(trial: Trial, success: float) -> int | None:
    """Steps of SFT until `success`, by a straight line through the last half of the trial's curve,
    which begins at the success of random actions; None where that does not rise."""
    if not trial.curve:
        return None
    step, value = trial.curve[-1]
    if recent([value for _, value in trial.curve]) >= success:
        return step
    before, old = next(
        point for point in reversed([(0, trial.chance), *trial.curve]) if point[0] <= step / 2
    )
    slope = (value - old) / (step - before)
    return math.ceil(step + (success - value) / slope) if slope > 0 else None


def is_expected(trial: Trial, success: float, steps: int) -> bool:
    """True if SFT is expected to reach `success` within `steps`."""
    expected = expected_sft(trial, success)
    return expected is not None and expected <= steps


def steps(
    trial: Trial,
    minutes: float,
    demonstrations_s: float,
    every: int,
    success: float = TARGET,
    evaluations_s: float = 0.0,
) -> Steps:
    """Divide the minutes: demonstrations, SFT up to its measured end at `success`, RL for the
    rest. SFT may take LATER times as long as expected, if that leaves RL its share; the time of
    the steps that it leaves unused goes to RL, in the run.

    Args:
        evaluations_s: of held-out tasks, before, during and after RL.
    """
    total = 60.0 * minutes - RESERVE_S - demonstrations_s
    sft_step = max(trial.sft_step_s + trial.eval_s / every, 1e-3)
    most = max(int((1 - RL_SHARE) * total / sft_step), 20)
    expected = expected_sft(trial, success)
    if not trial.curve:
        used = most
    elif expected is None or expected > most:
        most = max(int((1 - RL_SHARE_HARD) * total / sft_step), 20)
        used = min(expected or most, most)
    else:
        most = min(most, max(expected * LATER, 40))
        used = min(most, math.ceil(expected * LIKELY))
    most = max(math.ceil(most / 10) * 10, 20)
    rl_step = max(RL_FALLS * trial.rl_step_s, 1e-3)
    rl = int((total - most * sft_step - evaluations_s) / rl_step)
    rl = max(min(rl // 10 * 10, MAX_RL_STEPS), 20)
    more = float(f"{sft_step / rl_step:.2g}")
    likely = rl + int((most - used) * more)
    longest = rl + int(most / 2 * more)  # where a plateau ends SFT
    return Steps(
        sft=most,
        sft_s=used * sft_step,
        rl=rl,
        more=more,
        likely=likely,
        rl_s=likely * rl_step,
        every=math.ceil(max(likely, longest) / 40) * 10,
    )
