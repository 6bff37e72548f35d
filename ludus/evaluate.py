"""Evaluation: success, mean score and pass@k with confidence intervals, and paired comparison.

The unit of all statistics is the *task*: its episodes are samples of one cluster, so intervals are
over tasks, never over episodes as if they were independent. A task's values are

    success   share of its scored episodes whose reward reaches `success_at`
    score     mean reward of its scored episodes
    pass@k    1 - C(n-c, k) / C(n, k) for c successes among n scored episodes: the unbiased
              estimate that at least one of k succeeds (Chen et al. 2021, arXiv:2107.03374, eq. 1)

and an estimate is their mean over the tasks; hence pass@1 is the success rate.

Episodes that broke (an environment's error, a deadline, nothing to score with) are left out, with
their number and reasons; `success_bounds` says what the success rate would be had all of them
failed, and had all of them succeeded.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Group as Rows
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from ludus.core.errors import DataError
from ludus.core.evaluation import (
    Comparison,
    Difference,
    Estimate,
    Evaluation,
    Exclusion,
    TaskOutcome,
    TierResult,
)
from ludus.core.types import Group, Task, Trajectory
from ludus.tasks.splits import fingerprint

__all__ = [
    "Comparison",
    "Evaluation",
    "compare",
    "mean_score",
    "pass_at_k",
    "render_comparison",
    "render_evaluation",
    "summarise",
]

_NUM_SHOWN = 3


def summarise(
    groups: Sequence[Group],
    *,
    success_at: float = 1.0,
    confidence: float = 0.95,
    label: str = "",
    checkpoint: str | None = None,
    policy_version: int | None = None,
    temperature: float = 0.0,
    seconds: float = 0.0,
) -> Evaluation:
    """The evaluation of played and judged groups, one a task.

    Errors: DataError where there is no group, or where no episode was scored.
    """
    outcomes = [_outcome(group) for group in groups]
    played = [t for group in groups for t in group.trajectories]
    scored = [t for t in played if _scored(t)]
    if not scored:
        raise DataError(
            f"nothing to evaluate: {len(groups)} tasks, {len(played)} episodes, none of them scored"
            f" ({_reasons(played)})"
        )
    samples_per_task = max(len(group.trajectories) for group in groups)
    tiers = sorted({outcome.tier for outcome in outcomes if outcome.tier is not None})
    by_tier = {tier: [o for o in outcomes if o.tier == tier] for tier in tiers}
    successes = sum(reward >= success_at for o in outcomes for reward in o.rewards)
    num_excluded = len(played) - len(scored)
    return Evaluation(
        label=label,
        checkpoint=checkpoint,
        policy_version=policy_version,
        temperature=temperature,
        samples_per_task=samples_per_task,
        success_at=success_at,
        confidence=confidence,
        success=pass_at_k(outcomes, 1, success_at, confidence),
        success_bounds=(successes / len(played), (successes + num_excluded) / len(played)),
        score=mean_score(outcomes, confidence),
        pass_at={
            k: pass_at_k(outcomes, k, success_at, confidence)
            for k in range(1, samples_per_task + 1)
            if any(len(outcome.rewards) >= k for outcome in outcomes)
        },
        tiers={
            tier: TierResult(
                success=pass_at_k(some, 1, success_at, confidence),
                score=mean_score(some, confidence),
                num_episodes=sum(len(o.rewards) + o.num_excluded for o in some),
                num_excluded=sum(o.num_excluded for o in some),
            )
            for tier, some in by_tier.items()
            if any(outcome.rewards for outcome in some)
        },
        num_tasks=len(outcomes),
        num_episodes=len(played),
        num_excluded=num_excluded,
        excluded=_excluded(played),
        mean_turns=sum(t.num_turns for t in scored) / len(scored),
        mean_sampled_tokens=sum(t.num_sampled_tokens for t in scored) / len(scored),
        seconds=seconds,
        outcomes=outcomes,
    )


def pass_at_k(
    outcomes: Iterable[TaskOutcome], k: int, success_at: float, confidence: float
) -> Estimate:
    """pass@k over the tasks with at least k scored episodes, with a Wilson interval.

    With one episode a task this is Wilson's score interval for a proportion. With several, the
    same interval with the *effective* number of observations in place of their number: p(1-p) / v,
    where v is the variance of the mean over tasks (Korn and Graubard 1998; compared with others in
    Dean and Pagano 2015, doi:10.1093/jssam/smv024). It lies between the number of tasks (episodes
    of a task always agree) and the number of disjoint k-subsets of episodes (they are independent).
    """
    from statsmodels.stats.proportion import proportion_confint

    values, most = [], 0
    for outcome in outcomes:
        n, c = len(outcome.rewards), _successes(outcome, success_at)
        if n >= k:
            values.append(1.0 - math.comb(n - c, k) / math.comb(n, k))
            most += n // k
    num_tasks = len(values)
    if not num_tasks:
        raise DataError(f"no task has {k} scored episodes")
    mean = math.fsum(values) / num_tasks
    size = float(num_tasks)
    if 0.0 < mean < 1.0 and num_tasks > 1:
        spread = math.fsum((value - mean) ** 2 for value in values) / (num_tasks - 1)
        ratio = mean * (1.0 - mean) / spread if spread > 0 else math.inf
        size = min(max(ratio * num_tasks, float(num_tasks)), float(most))
    low, high = proportion_confint(mean * size, size, alpha=1.0 - confidence, method="wilson")
    # Rounding may put an end a hair on the wrong side of a mean of 0 or 1.
    return Estimate(
        value=mean,
        low=min(max(float(low), 0.0), mean),
        high=max(min(float(high), 1.0), mean),
        num_tasks=num_tasks,
    )


def mean_score(outcomes: Iterable[TaskOutcome], confidence: float) -> Estimate:
    """The mean reward over tasks, with Student's t interval on the tasks' means."""
    means = [math.fsum(o.rewards) / len(o.rewards) for o in outcomes if o.rewards]
    if not means:
        raise DataError("no task has a scored episode")
    value, low, high = _t_interval(means, confidence)
    return Estimate(value=value, low=low, high=high, num_tasks=len(means))


def compare(a: Evaluation, b: Evaluation) -> Comparison:
    """Compare two evaluations of the same tasks, task by task.

    Success, one episode a task: McNemar's exact test. Otherwise, and for scores: Wilcoxon's
    signed-rank test on the tasks' means (Pratt's handling of ties). Tasks that one of them could
    not score are left out and counted. Interval of a success difference: Bonett and Price 2012
    (doi:10.3102/1076998611411915), which adds one task that won and one that lost; of a score
    difference: Student's t on the tasks' differences.

    Errors: DataError for different tasks, success thresholds or levels of confidence.
    """
    _check_comparable(a, b)
    others = {outcome.task_id: outcome for outcome in b.outcomes}
    pairs = [(outcome, others[outcome.task_id]) for outcome in a.outcomes]
    both = [(x, y) for x, y in pairs if x.rewards and y.rewards]
    if not both:
        raise DataError("no task was scored in both evaluations")
    at, level = a.success_at, a.confidence
    gains = [_success(y, at) - _success(x, at) for x, y in both]
    tiers = sorted({x.tier for x, _ in both if x.tier is not None})
    return Comparison(
        a=a.label or "a",
        b=b.label or "b",
        confidence=level,
        success=_success_difference(both, at, level),
        score=_score_difference(both, level),
        num_better=sum(gain > 0 for gain in gains),
        num_worse=sum(gain < 0 for gain in gains),
        num_left_out=len(pairs) - len(both),
        tiers={
            tier: _success_difference([(x, y) for x, y in both if x.tier == tier], at, level)
            for tier in tiers
        },
    )


_Pairs = Sequence[tuple[TaskOutcome, TaskOutcome]]


def _success_difference(pairs: _Pairs, success_at: float, confidence: float) -> Difference:
    from scipy.stats import norm
    from statsmodels.stats.contingency_tables import mcnemar

    before = [_success(x, success_at) for x, _ in pairs]
    after = [_success(y, success_at) for _, y in pairs]
    gains = [y - x for x, y in zip(before, after, strict=True)]
    binary = all(len(x.rewards) == len(y.rewards) == 1 for x, y in pairs)
    if binary:
        counts = Counter(zip(before, after, strict=True))
        cells = [[counts[1.0, 1.0], counts[1.0, 0.0]], [counts[0.0, 1.0], counts[0.0, 0.0]]]
        p_value = float(mcnemar(cells, exact=True).pvalue)
    else:
        p_value = _wilcoxon(gains)
    padded = [*gains, 1.0, -1.0]
    centre = math.fsum(padded) / len(padded)
    variance = math.fsum((gain - centre) ** 2 for gain in padded) / len(padded)
    half = float(norm.ppf((1.0 + confidence) / 2.0)) * math.sqrt(variance / len(padded))
    value = math.fsum(gains) / len(gains)
    return Difference(
        a=math.fsum(before) / len(before),
        b=math.fsum(after) / len(after),
        value=value,
        low=max(min(centre - half, value), -1.0),
        high=min(max(centre + half, value), 1.0),
        p_value=min(p_value, 1.0),
        test="McNemar exact" if binary else "Wilcoxon signed-rank",
        num_tasks=len(pairs),
    )


def _score_difference(pairs: _Pairs, confidence: float) -> Difference:
    before = [math.fsum(x.rewards) / len(x.rewards) for x, _ in pairs]
    after = [math.fsum(y.rewards) / len(y.rewards) for _, y in pairs]
    gains = [y - x for x, y in zip(before, after, strict=True)]
    value, low, high = _t_interval(gains, confidence)
    return Difference(
        a=math.fsum(before) / len(before),
        b=math.fsum(after) / len(after),
        value=value,
        low=low,
        high=high,
        p_value=_wilcoxon(gains),
        test="Wilcoxon signed-rank",
        num_tasks=len(pairs),
    )


def _wilcoxon(gains: Sequence[float]) -> float:
    """Two-sided p-value that gains are symmetric about 0; 1 where all of them are 0."""
    from scipy.stats import wilcoxon

    if not any(gains):
        return 1.0
    return float(wilcoxon(gains, zero_method="pratt").pvalue)


def _t_interval(
    values: Sequence[float], confidence: float
) -> tuple[float, float | None, float | None]:
    from statsmodels.stats.weightstats import DescrStatsW

    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, None, None
    low, high = DescrStatsW(values).tconfint_mean(alpha=1.0 - confidence)
    return mean, float(low), float(high)


def _check_comparable(a: Evaluation, b: Evaluation) -> None:
    for name in ("success_at", "confidence"):
        if getattr(a, name) != getattr(b, name):
            raise DataError(
                f"the evaluations have another {name}: {getattr(a, name)} and {getattr(b, name)}"
            )
    ours, theirs = ({o.task_id: o.fingerprint for o in e.outcomes} for e in (a, b))
    only_a = [task_id for task_id in ours if task_id not in theirs]
    only_b = [task_id for task_id in theirs if task_id not in ours]
    changed = [id for id in ours if id in theirs and ours[id] != theirs[id]]
    found = [
        f"{len(ids)} {what} ({', '.join(ids[:_NUM_SHOWN])}{', ...' * (len(ids) > _NUM_SHOWN)})"
        for ids, what in (
            (only_a, f"only in {a.label or 'the first'}"),
            (only_b, f"only in {b.label or 'the second'}"),
            (changed, "of the same id but another content"),
        )
        if ids
    ]
    if found:
        raise DataError(
            f"the evaluations are not of the same tasks: {'; '.join(found)}. "
            "Evaluate both on the same held-out tasks."
        )


def _outcome(group: Group) -> TaskOutcome:
    rewards = [float(t.reward) for t in group.trajectories if _scored(t) and t.reward is not None]
    task: Task = group.task
    return TaskOutcome(
        task_id=task.id,
        fingerprint=fingerprint(task),
        tier=task.tier,
        rewards=rewards,
        num_excluded=len(group.trajectories) - len(rewards),
    )


def _scored(trajectory: Trajectory) -> bool:
    reward = trajectory.reward
    return trajectory.status.trainable and reward is not None and math.isfinite(reward)


def _reason(trajectory: Trajectory) -> str:
    if not trajectory.status.trainable:
        return str(trajectory.status)
    return "no reward" if trajectory.reward is None else "reward is not finite"


def _excluded(played: Iterable[Trajectory]) -> dict[str, Exclusion]:
    left_out = [t for t in played if not _scored(t)]
    counts = Counter(_reason(t) for t in left_out)
    examples = {_reason(t): t.error for t in reversed(left_out) if t.error}
    return {
        reason: Exclusion(count=count, example=examples.get(reason, ""))
        for reason, count in counts.most_common()
    }


def _reasons(played: Iterable[Trajectory]) -> str:
    parts = [f"{x.count} {reason}: {x.example}" for reason, x in _excluded(played).items()]
    return "; ".join(parts) or "no episode was played"


def _successes(outcome: TaskOutcome, success_at: float) -> int:
    return sum(reward >= success_at for reward in outcome.rewards)


def _success(outcome: TaskOutcome, success_at: float) -> float:
    return _successes(outcome, success_at) / len(outcome.rewards)


def render_evaluation(evaluation: Evaluation) -> RenderableType:
    """A table for the terminal: overall and by tier, pass@k, and what was left out."""
    e = evaluation
    table = Table(box=box.SIMPLE_HEAD, title=escape(_title(e)), title_justify="left")
    table.add_column("tier")
    level = f"{100 * e.confidence:g} % interval"
    for name in ("tasks", "success", level, "score", level):
        table.add_column(name, justify="right")
    for tier, result in e.tiers.items():
        table.add_row(escape(tier), *_cells(result.success, result.score))
    if e.tiers:
        table.add_section()
    table.add_row("all", *_cells(e.success, e.score), style="bold")
    lines: list[RenderableType] = [table]
    lines += [
        f"  pass@{k}  {_percent(x.value)}  ({_interval(x)})" for k, x in e.pass_at.items() if k > 1
    ]
    lines.append(
        f"  {e.num_episodes} episodes, {e.mean_turns:.1f} turns and "
        f"{e.mean_sampled_tokens:.0f} sampled tokens each, {e.seconds:.1f} s"
    )
    if e.num_excluded:
        reasons = ", ".join(f"{x.count} {reason}" for reason, x in e.excluded.items())
        low, high = e.success_bounds
        lines.append(
            f"  [yellow]{e.num_excluded} episodes left out[/] ({escape(reasons)}): success would be"
            f" {_percent(low)} had all of them failed, {_percent(high)} had all succeeded"
        )
    return Rows(*lines)


def render_comparison(comparison: Comparison) -> RenderableType:
    """A table for the terminal: success and score, before, after, difference, p-value."""
    c = comparison
    title = escape(f"{c.a} against {c.b}, {c.success.num_tasks} tasks")
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    table.add_column("")
    for name in (c.a, c.b, "difference", f"{100 * c.confidence:g} % interval", "p", "test"):
        table.add_column(escape(name), justify="right")
    for tier, difference in c.tiers.items():
        table.add_row(escape(tier), *_difference_cells(difference, percent=True))
    if c.tiers:
        table.add_section()
    table.add_row("success", *_difference_cells(c.success, percent=True), style="bold")
    table.add_row("score", *_difference_cells(c.score, percent=False))
    left_out = f"; {c.num_left_out} not scored in both" if c.num_left_out else ""
    return Rows(table, f"  better on {c.num_better} tasks, worse on {c.num_worse}{left_out}")


def _title(e: Evaluation) -> str:
    version = "" if e.policy_version is None else f"policy version {e.policy_version}"
    how = e.sampling if e.sampling == "greedy" else f"sampled at temperature {e.temperature:g}"
    return ", ".join(part for part in (e.label, e.checkpoint or "", version, how) if part)


def _cells(success: Estimate, score: Estimate) -> list[str]:
    return [
        str(success.num_tasks),
        _percent(success.value),
        _interval(success),
        f"{score.value:.3f}",
        "-" if score.low is None else f"{score.low:.3f} to {score.high:.3f}",
    ]


def _difference_cells(d: Difference, *, percent: bool) -> list[str]:
    scale, digits = (100.0, 1) if percent else (1.0, 3)
    unit = " %" if percent else ""

    def show(value: float | None, sign: str = "+") -> str:
        return "-" if value is None else f"{scale * value:{sign}.{digits}f}"

    return [
        show(d.a, "") + unit,
        show(d.b, "") + unit,
        show(d.value),
        "-" if d.low is None else f"{show(d.low)} to {show(d.high)}",
        "< 0.001" if d.p_value < 0.001 else f"{d.p_value:.3f}",
        d.test,
    ]


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _interval(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return "-"
    return f"{100 * estimate.low:.1f} to {100 * estimate.high:.1f} %"
