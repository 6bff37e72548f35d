"""Paired comparison of two evaluations on the same tasks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ludus.core.errors import DataError
from ludus.evaluate.estimates import num_successes, t_interval, tier_names
from ludus.evaluate.results import Comparison, Difference, Evaluation, TaskOutcome

_NUM_SHOWN = 3


def compare(a: Evaluation, b: Evaluation) -> Comparison:
    """Compare two evaluations task by task. Where the tasks of one are some of the other's, those
    of both count.

    Interval and p-value of a difference come from one method, so they agree: the interval leaves
    out 0 if and only if p < 1 - confidence. Success: Bonett and Price 2012
    (doi:10.3102/1076998611411915), a normal interval and test of the tasks' differences with one
    better and one worse task added. Score: the paired t interval and test. Tasks without a score
    in either evaluation are left out and counted.

    Errors: DataError where each has tasks that the other lacks; for different success thresholds or
    confidence levels.
    """
    _check_comparable(a, b)
    others = {outcome.task_id: outcome for outcome in b.outcomes}
    pairs = [(x, others[x.task_id]) for x in a.outcomes if x.task_id in others]
    both = [(x, y) for x, y in pairs if x.rewards and y.rewards]
    if not both:
        raise DataError("no task was scored in both evaluations")
    at, level = a.success_at, a.confidence
    gains = [_success(y, at) - _success(x, at) for x, y in both]
    by_tier = {
        tier: [(x, y) for x, y in both if tier in (x.tier, x.part)]
        for tier in tier_names(x for x, _ in both)
    }
    return Comparison(
        a=a.label or "a",
        b=b.label or "b",
        confidence=level,
        success=_success_difference(both, at, level),
        score=_score_difference(both, level),
        num_better=sum(gain > 0 for gain in gains),
        num_worse=sum(gain < 0 for gain in gains),
        num_left_out=len(pairs) - len(both),
        num_unpaired=max(len(a.outcomes), len(b.outcomes)) - len(pairs),
        tiers={tier: _success_difference(some, at, level) for tier, some in by_tier.items()},
    )


_Pairs = Sequence[tuple[TaskOutcome, TaskOutcome]]


def _success_difference(pairs: _Pairs, success_at: float, confidence: float) -> Difference:
    from scipy.stats import norm

    before = [_success(x, success_at) for x, _ in pairs]
    after = [_success(y, success_at) for _, y in pairs]
    gains = [y - x for x, y in zip(before, after, strict=True)]
    padded = [*gains, 1.0, -1.0]
    centre = math.fsum(padded) / len(padded)
    variance = math.fsum((gain - centre) ** 2 for gain in padded) / len(padded)
    error = math.sqrt(variance / len(padded))
    half = float(norm.ppf((1.0 + confidence) / 2.0)) * error
    value = math.fsum(gains) / len(gains)
    return Difference(
        a=math.fsum(before) / len(before),
        b=math.fsum(after) / len(after),
        value=value,
        low=max(min(centre - half, value), -1.0),
        high=min(max(centre + half, value), 1.0),
        p_value=float(2.0 * norm.sf(abs(centre) / error)),
        test="Bonett-Price",
        num_tasks=len(pairs),
    )


def _score_difference(pairs: _Pairs, confidence: float) -> Difference:
    before = [math.fsum(x.rewards) / len(x.rewards) for x, _ in pairs]
    after = [math.fsum(y.rewards) / len(y.rewards) for _, y in pairs]
    gains = [y - x for x, y in zip(before, after, strict=True)]
    value, low, high = t_interval(gains, confidence)
    return Difference(
        a=math.fsum(before) / len(before),
        b=math.fsum(after) / len(after),
        value=value,
        low=low,
        high=high,
        p_value=_t_test(gains),
        test="paired t",
        num_tasks=len(pairs),
    )


def _t_test(gains: Sequence[float]) -> float:
    """Two-sided p-value of Student's t test; 1 if all gains are 0, or there is only one."""
    from scipy.stats import ttest_1samp

    if not any(gains) or len(gains) < 2:
        return 1.0
    if len(set(gains)) == 1:
        return 0.0
    return float(ttest_1samp(gains, 0.0).pvalue)


def _check_comparable(a: Evaluation, b: Evaluation) -> None:
    for name in ("success_at", "confidence"):
        if getattr(a, name) != getattr(b, name):
            raise DataError(
                f"the evaluations differ in {name}: {getattr(a, name)} and {getattr(b, name)}"
            )
    ours, theirs = ({o.task_id: o.fingerprint for o in e.outcomes} for e in (a, b))
    only_a = [task_id for task_id in ours if task_id not in theirs]
    only_b = [task_id for task_id in theirs if task_id not in ours]
    if not (only_a and only_b):  # one evaluation had more tasks
        only_a = only_b = []
    changed = [id for id in ours if id in theirs and ours[id] != theirs[id]]
    differences = [
        f"{len(ids)} {what} ({', '.join(ids[:_NUM_SHOWN])}{', ...' * (len(ids) > _NUM_SHOWN)})"
        for ids, what in (
            (only_a, f"only in {a.label or 'the first'}"),
            (only_b, f"only in {b.label or 'the second'}"),
            (changed, "with the same id but different content"),
        )
        if ids
    ]
    if differences:
        raise DataError(
            f"the evaluations are not of the same tasks: {'; '.join(differences)}. "
            "Evaluate both on the same held-out tasks."
        )


def _success(outcome: TaskOutcome, success_at: float) -> float:
    return num_successes(outcome, success_at) / len(outcome.rewards)
