"""Checks of the training: does the policy learn, and does it stay sound?"""

from __future__ import annotations

import math
import warnings
from statistics import median

from ludus.config.schema import RunConfig
from ludus.report.diagnosis.findings import (
    CEILING,
    START_STEPS,
    WINDOW,
    Found,
    History,
    level_of,
    longer_sft,
    mean,
    percent,
    rate_of,
    sentence,
)

SHARP = 0.03
"""Entropy in nats a token at the start of RL. Tiny recipes start between 0.1 and 0.4; at 0.03, a
turn of 6 tokens has 1.2 likely forms, and the episodes of a group are alike."""

COLLAPSED = (0.9, 0.98)
"""Share of the entropy at the start of RL that is lost. A policy that learns loses 0.6 to 0.9 of
it, so the groups' signal must be gone too (ALIKE), without success as the reason (SOLVED)."""

ALIKE = 0.5
SOLVED = 0.8

RISEN = (3.0, 8.0)
RISEN_NATS = 0.3
"""Entropy over that at the start of RL, in times, and its least rise in nats a token. Policies that
learn lose entropy, or at most double it; those that an entropy bonus made noise had 4 to 12 times
that of their start."""

TREND_STEPS = 50
"""Steps between tests for a rise of the reward: at fewer, the noise of a step hides slow gains."""

TREND_SHARE = 1 / 4
"""Share of RL in which the reward has to rise. A run of 621 steps rose from step 105 on, from 52 to
79 % of the episodes."""

TREND_P = 0.05
FALL_P = 1e-4
"""Of a fall, tested every WINDOW steps: in 1,000 steady steps, a false alarm at 1 %."""

FALL_STEPS = 3
FALL_ERRORS = 5.0
"""Standard errors by which success falls suddenly. A group counts as one observation, of the
largest variance; the best of many spans of steps is above the mean by chance, hence 5."""

STILL = 2e-5
"""Nats a token of an optimizer step below which a policy hardly moves; those that learned moved by
1e-4 to 4e-3 (docs/log.md)."""

NARROWER = 0.15
"""Rise of the share of groups without a success, from the first steps to the last, above which the
policy has narrowed, where success did not rise."""

NARROWER_ERRORS = 4.0
"""The same in standard errors of the difference."""

NARROWER_GAIN = 0.05
"""Rise of success above which a policy that narrows gains by it."""

KL = (0.1, 1.0)
"""Nats a token between the policy and the one that sampled. PPO's usual limits are 0.01 to 0.05."""

RATIO = (0.1, 0.5)
"""Distance of the mean importance ratio from 1, its expectation for the sampling policy."""

CLIPPED = (0.3, 0.6)
"""Share of tokens without gradient due to the clip; 0.1 to 0.2 is usual for PPO with several
epochs."""

JUMP = (10.0, 100.0)
"""Median gradient norm of 5 steps over the median of the 50 before. Norms of healthy runs vary
three times from step to step."""

SAMPLER_GAP = (0.05, 0.5)
"""Mean |log p_learner - log p_sampler| in nats: about 1e-6 in float32 and 0.01 in bfloat16."""

DROPPED = (0.1, 0.5)
"""Share of the expert's episodes that SFT does not see."""


def demonstrations(history: History, config: RunConfig) -> Found | None:
    """The expert failed, or its episodes do not fit the context."""
    kept, failed, long = (
        history.total(f"sft/{name}") for name in ("conversations", "failed", "too_long")
    )
    lost = failed + long
    if not lost or not (level := level_of(lost / (kept + lost), DROPPED)):
        return None
    text = f"SFT leaves out {percent(lost / (kept + lost))} of the demonstrations"
    parts, advice = [], []
    if failed:
        parts.append(f"{failed:,.0f} that the expert lost or could not play")
        advice.append("read their reasons in `demonstrations.dropped.jsonl` of the run's folder")
    if long:
        parts.append(f"{long:,.0f} longer than the context")
        advice.append(f"raise `model.context_length` (now {config.model.context_length})")
    told = "; ".join(advice)
    return Found(level, f"{text}: {' and '.join(parts)}", told[0].upper() + told[1:])


def too_sharp(history: History, config: RunConfig) -> Found | None:
    """The policy after SFT is so certain that the episodes of a group are alike."""
    entropy = history.first("train/entropy", START_STEPS)
    if history.num_steps != START_STEPS or len(entropy) < START_STEPS:
        return None
    if mean(entropy) > SHARP or _learns(history):
        return None
    return Found(
        1,
        f"the policy starts RL with an entropy of {mean(entropy):.3f} nats a token, and the "
        "episodes of most groups are alike",
        "Explore more: fewer `sft.steps` or more different demonstrations, or a higher "
        f"`rollout.temperature` (now {config.rollout.temperature:g})",
    )


def entropy_collapse(history: History, config: RunConfig) -> Found | None:
    """The policy lost its entropy without solving the tasks."""
    start, now = history.first("train/entropy", WINDOW), history.mean("train/entropy")
    if now is None or history.num_steps < 2 * WINDOW or mean(start) <= 0 or _learns(history):
        return None
    if not (level := level_of(1.0 - now / mean(start), COLLAPSED)):
        return None
    return Found(
        level,
        f"the entropy fell from {mean(start):.2g} nats a token at the start of RL to {now:.2g}, "
        f"{percent(now / mean(start))} of it: the policy no longer explores",
        f"Lower `rl.optimizer.lr` (now {rate_of(config)}), or add an `entropy_bonus` or a "
        "`kl_coefficient` to `rl.algorithm`",
    )


def entropy_rise(history: History, config: RunConfig) -> Found | None:
    """The policy becomes random: its entropy rises, and rewards do not."""
    start, now = history.first("train/entropy", WINDOW), history.mean("train/entropy")
    if now is None or history.num_steps < 2 * WINDOW or mean(start) <= 0:
        return None
    if history.last("tasks/tier") or now - mean(start) < RISEN_NATS:
        return None
    level = level_of(now / mean(start), RISEN)
    if not level or _rises(history):
        return None
    text = f"the entropy rose from {mean(start):.2g} nats a token at the start of RL to {now:.2g}"
    success = [values("rollout/success", WINDOW) for values in (history.first, history.last)]
    if all(success):
        before, after = (percent(mean(values)) for values in success)
        went = f"stayed at {after}"
        if before != after:
            went = f"went from {before} in the first {WINDOW} steps to {after} in the last {WINDOW}"
        text += f", and success {went}"
    else:
        text += ", and the reward did not rise"
    return Found(level, f"{text}: the policy turns into noise", _calmer(config))


def _rises(history: History) -> bool:
    """True if the reward of the last steps is above that of the first, beyond chance."""
    first, last = history.first("rollout/reward", WINDOW), history.last("rollout/reward")
    if min(len(first), len(last)) < WINDOW:
        return True  # unknown
    return welch(first, last) <= TREND_P


def _calmer(config: RunConfig) -> str:
    """Ways to a policy that is less random, by what the recipe has."""
    ways = []
    if bonus := config.rl.algorithm.args.get("entropy_bonus") if config.rl else None:
        ways.append(f"lower `entropy_bonus` of `rl.algorithm` (now {bonus:g}) or leave it out")
    ways.append(f"lower `rl.optimizer.lr` (now {rate_of(config)})")
    if (temperature := config.rollout.temperature) > 1:
        ways.append(f"lower `rollout.temperature` (now {temperature:g})")
    if config.sft is None:
        start = "an `sft` stage"
    elif config.sft.until is not None:
        start = f"a higher `sft.until.success` (now {config.sft.until.success:g})"
    else:
        start = f"more `sft.steps` (now {config.sft.steps:,})"
    return sentence(f"{', or '.join(ways)}; or let RL begin with more successes: {start}")


def _learns(history: History) -> bool:
    """True if groups still differ, or because most episodes succeed."""
    signal, success = (
        history.last(f"rollout/{name}") for name in ("groups_with_signal", "success")
    )
    if signal and mean(signal) > ALIKE:
        return True
    return bool(success) and mean(success) >= SOLVED


def flat(history: History, config: RunConfig) -> Found | None:
    """The reward of the last steps is not higher than that of the first."""
    steps = max(TREND_STEPS, int(TREND_SHARE * config.rl.steps) if config.rl else 0)
    count = steps // 2
    if history.num_steps % TREND_STEPS or history.num_steps < steps or history.last("tasks/tier"):
        return None  # the tasks of a curriculum get harder
    first = history.first("rollout/reward", count)
    last = history.last("rollout/reward", count)
    success = history.last("rollout/success", count)
    if min(len(first), len(last)) < count or (success and mean(success) >= CEILING):
        return None
    p_value = welch(first, last)
    if p_value <= TREND_P:
        return None
    return Found(
        1 + (history.num_steps >= 4 * TREND_STEPS),
        f"the reward did not rise in {history.num_steps} steps: {mean(first):.3g} in the first "
        f"{count}, {mean(last):.3g} in the last {count} (Welch's t test, one-sided p = "
        f"{p_value:.2g})",
        _to_a_rise(mean(kl) if (kl := history.last("train/kl", count)) else None, config)
        + longer_sft(history, config),
    )


def _to_a_rise(kl: float | None, config: RunConfig) -> str:
    """Advice where the reward stays, by how far an optimizer step moves the policy."""
    more = "more episodes a step (`rl.groups_per_step`, `rl.group_size`), or easier tasks"
    if kl is None:
        return f"Try {more}"
    if config.rl is not None and (target := config.rl.optimizer.target_kl) is not None:
        return (
            f"Try {more}; or another `rl.optimizer.target_kl` (now {target:g}), which decides how "
            f"far a step moves the policy (now {kl:.1g} nats a token)"
        )
    if kl < STILL:
        rate, why = "higher", f"moves the policy by no more than {kl:.1g} nats a token"
    else:
        rate, why = "lower", f"moves the policy by {kl:.1g} nats a token, and may undo the last"
    return f"Try a {rate} `rl.optimizer.lr` (now {rate_of(config)}: a step {why}), {more}"


def narrows(history: History, config: RunConfig) -> Found | None:
    """Fewer groups have a success, and success does not rise: the policy keeps to one way."""
    rl = config.rl
    if rl is None or history.num_steps < 2 * WINDOW or history.last("tasks/tier"):
        return None
    failed = history.first("rollout/groups_failed", WINDOW), history.last("rollout/groups_failed")
    success = history.first("rollout/success", WINDOW), history.last("rollout/success")
    if min(map(len, (*failed, *success))) < WINDOW:
        return None
    (before, now), (start, end) = map(mean, failed), map(mean, success)
    error = math.sqrt(0.5 / (WINDOW * rl.groups_per_step))  # at most
    if now - before < max(NARROWER, NARROWER_ERRORS * error) or end > start + NARROWER_GAIN:
        return None
    return Found(
        1 + (now - before > 2 * NARROWER),
        f"the policy narrows: {percent(1 - before)} of the groups had a success in the first "
        f"{WINDOW} steps, {percent(1 - now)} in the last {WINDOW}, and of the episodes "
        f"{percent(start)} and {percent(end)}",
        _wider(config),
    )


def _wider(config: RunConfig) -> str:
    """Ways to a policy that goes on to try others."""
    ways = [f"lower `rl.optimizer.lr` (now {rate_of(config)})"]
    ways.append(f"raise `rollout.temperature` (now {config.rollout.temperature:g})")
    if config.rl is not None and not config.rl.algorithm.args.get("entropy_bonus"):
        ways.append("give `rl.algorithm` an `entropy_bonus`")
    return sentence(f"{', or '.join(ways)}; or use more demonstrations and easier tiers first")


def sudden_fall(history: History, config: RunConfig) -> Found | None:
    """The success of the last steps is far below the best before: the policy broke."""
    name = "rollout/success"
    now, recent = history.last(name, FALL_STEPS), history.last(name, 100, before=FALL_STEPS)
    if len(now) < FALL_STEPS or not recent or history.last("tasks/tier") or config.rl is None:
        return None
    start = history.first(name, min(WINDOW, history.num_steps - FALL_STEPS))
    spans = [start[:size] for size in range(1, len(start) + 1)]
    spans += [recent[end - WINDOW : end] for end in range(WINDOW, len(recent) + 1)]

    def errors(span: list[float]) -> float:
        groups = config.rl.groups_per_step if config.rl else 1
        unit = 0.5 * math.sqrt(1 / (groups * len(span)) + 1 / (groups * FALL_STEPS))
        return (mean(span) - mean(now)) / unit

    highest = max(spans, key=errors)
    if errors(highest) < FALL_ERRORS:
        return None
    best = mean(highest)
    return Found(
        1,
        f"success fell from {percent(best)} to {percent(mean(now))} in the last {FALL_STEPS} steps",
        f"Lower `rl.optimizer.lr` (now {rate_of(config)}) and start again, or go on from an "
        "earlier checkpoint (`ludus checkpoint list RUN`)",
    )


def decline(history: History, config: RunConfig) -> Found | None:
    """The reward is lower than at the start."""
    steps = history.num_steps
    if steps < 2 * WINDOW or steps % WINDOW or history.last("tasks/tier"):
        return None
    first, last = history.first("rollout/reward", WINDOW), history.last("rollout/reward")
    if min(len(first), len(last)) < WINDOW or (p_value := welch(last, first)) > FALL_P:
        return None
    return Found(
        1,
        f"the reward fell from {mean(first):.3g} in the first {WINDOW} steps to {mean(last):.3g} "
        f"in the last {WINDOW} (Welch's t test, one-sided p = {p_value:.1g})",
        f"Lower `rl.optimizer.lr` (now {rate_of(config)}), or go on from an earlier checkpoint "
        "(`ludus checkpoint list RUN`)",
    )


def drift(history: History, config: RunConfig) -> Found | None:
    """The policy moves far from the one that sampled the episodes of its step."""
    steps = len(history.last("train/ratio"))
    if steps < START_STEPS:
        return None
    kl, ratio, clipped = (
        mean(history.last(f"train/{name}") or [usual])
        for name, usual in (("kl", 0.0), ("ratio", 1.0), ("clip_fraction", 0.0))
    )
    levels = {
        f"a KL divergence of {kl:.2g} nats a token": level_of(kl, KL),
        f"a mean ratio of {ratio:.2g}": level_of(abs(ratio - 1.0), RATIO),
        f"{percent(clipped)} of the tokens clipped": level_of(clipped, CLIPPED),
    }
    level = max(levels.values())
    if level < (1 if steps == WINDOW else 2):  # a few steps suffice for the worst
        return None
    told = " and ".join(text for text, own in levels.items() if own)
    rl = config.rl
    ways = [f"lower `rl.optimizer.lr` (now {rate_of(config)})"]
    if rl is not None and rl.epochs * rl.minibatches > 1:
        ways.append(f"fewer `rl.epochs` or `rl.minibatches` (now {rl.epochs} x {rl.minibatches})")
    if rl is not None and rl.max_staleness:
        ways.append(f"a smaller `rl.max_staleness` (now {rl.max_staleness})")
    return Found(
        level,
        f"the policy drifts from the one that sampled: {told} in the last {steps} steps",
        sentence(" or ".join(ways)),
    )


def gradient_jump(history: History, config: RunConfig) -> Found | None:
    """Gradient norms are many times those of the steps before."""
    now = history.last("train/grad_norm", 5)
    before = history.last("train/grad_norm", 50, before=5)
    if len(now) < 5 or len(before) < WINDOW or median(before) <= 0:
        return None
    times = median(now) / median(before)
    if not (level := level_of(times, JUMP)):
        return None
    return Found(
        level,
        f"the gradient norm grew {times:.0f} times, from {median(before):.2g} to {median(now):.2g}",
        f"Lower `rl.optimizer.lr` (now {rate_of(config)}) or `rl.optimizer.max_grad_norm`",
    )


def sampler_gap(history: History, config: RunConfig) -> Found | None:
    """Sampler and learner give the same tokens different probabilities.

    Without `importance_cap` nothing measures the gap itself: the KL of the first optimizer step,
    (p_learner / p_sampler - 1 - log of it), is half its square, where no episode is stale.
    """
    gap = history.mean("train/sampler_gap")
    if gap is None and history.mean("train/staleness") == 0:
        first_kl = history.mean("train/first_kl")
        gap = None if first_kl is None else math.sqrt(2 * max(first_kl, 0.0))
    if gap is None or not (level := level_of(gap, SAMPLER_GAP)):
        return None
    return Found(
        level,
        f"log-probabilities of sampler and learner differ by {gap:.2g} nats a token",
        "Let both compute in the same precision (`model.dtype`, `sampler.args.dtype`), or correct "
        "it: `importance_cap` of `rl.algorithm`; `ludus verify` names the operation that differs",
    )


def welch(low: list[float], high: list[float]) -> float:
    """One-sided p-value that the mean of `high` is not above that of `low`; steps are taken as
    independent, with variances of their own (Welch's t test)."""
    from scipy.stats import ttest_ind

    if len(set(low)) == len(set(high)) == 1:  # no variance: the difference is exact
        return 0.0 if high[0] > low[0] else 1.0
    with warnings.catch_warnings():  # about a variance of 0 in one of the two
        warnings.simplefilter("ignore", RuntimeWarning)
        result = ttest_ind(high, low, equal_var=False, alternative="greater")
    return float(result.pvalue)
