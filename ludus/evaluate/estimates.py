"""Success, mean score and pass@k of played episodes, with confidence intervals.

The unit of all statistics is the *task*: its episodes form a cluster, so intervals are over tasks,
never over episodes as if these were independent. A task's values are

    success   share of its scored episodes whose reward reaches `success_at`
    score     mean reward of its scored episodes
    pass@k    1 - C(n-c, k) / C(n, k) for c successes among n scored episodes: the unbiased
              estimate that at least one of k succeeds (Chen et al. 2021, arXiv:2107.03374, eq. 1)

and an estimate is their mean over the tasks; hence pass@1 is the success rate.

Failed episodes (environment error, timeout, unscorable) are excluded; their number and reasons are
reported. `success_bounds` is the success rate if all excluded episodes had failed, and if all had
succeeded.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from ludus.core.errors import DataError
from ludus.core.types import Group, Task, Trajectory
from ludus.evaluate.results import Estimate, Evaluation, Exclusion, TaskOutcome, TierResult
from ludus.tasks.mixture import part_of
from ludus.tasks.splits import fingerprint


def summarise(
    groups: Sequence[Group],
    *,
    success_at: float = 1.0,
    success_of: Callable[[Task], float] | None = None,
    score_range: tuple[float, float] | None = None,
    confidence: float = 0.95,
    label: str = "",
    checkpoint: str | None = None,
    policy_version: int | None = None,
    temperature: float = 0.0,
    seconds: float = 0.0,
) -> Evaluation:
    """Returns the evaluation of played and judged groups, one group a task.

    `success_of` gives the success threshold of each task, if thresholds differ. The parts of a
    mixture are listed among the tiers, each before its own tiers. `score_range` bounds the
    intervals of scores; None: unbounded.

    Errors: DataError if there is no group, or no scored episode.
    """
    outcomes = [_outcome(group, success_at, success_of) for group in groups]
    played = [t for group in groups for t in group.trajectories]
    scored = [t for t in played if _scored(t)]
    if not scored:
        raise DataError(
            f"nothing to evaluate: {len(groups)} tasks, {len(played)} episodes, none of them scored"
            f" ({_reasons(played)})"
        )
    samples_per_task = max(len(group.trajectories) for group in groups)
    by_tier = {
        name: [o for o in outcomes if name in (o.tier, o.part)] for name in tier_names(outcomes)
    }
    successes = sum(num_successes(o, success_at) for o in outcomes)
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
        score=mean_score(outcomes, confidence, score_range),
        pass_at={
            k: pass_at_k(outcomes, k, success_at, confidence)
            for k in range(1, samples_per_task + 1)
            if any(len(outcome.rewards) >= k for outcome in outcomes)
        },
        tiers={
            tier: TierResult(
                success=pass_at_k(some, 1, success_at, confidence),
                score=mean_score(some, confidence, score_range),
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
        mean_sampled_tokens=sum(t.num_sampled_tokens for t in scored) / len(scored) or None,
        seconds=seconds,
        outcomes=outcomes,
    )


def pass_at_k(
    outcomes: Iterable[TaskOutcome], k: int, success_at: float, confidence: float
) -> Estimate:
    """pass@k over the tasks with at least k scored episodes, with a Wilson interval.

    With one episode a task this is Wilson's score interval for a proportion. With several episodes
    the number of observations is replaced by the *effective* number p(1-p) / v, where v is the
    variance of the mean over tasks (Korn and Graubard 1998; comparison in Dean and Pagano 2015,
    doi:10.1093/jssam/smv024). The effective number lies between the number of tasks (episodes of a
    task always agree) and the number of disjoint k-subsets of episodes (episodes are independent).
    """
    from statsmodels.stats.proportion import proportion_confint

    values, most = [], 0
    for outcome in outcomes:
        n, c = len(outcome.rewards), num_successes(outcome, success_at)
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
    # Rounding may move an end of the interval past a mean of 0 or 1.
    return Estimate(
        value=mean,
        low=min(max(float(low), 0.0), mean),
        high=max(min(float(high), 1.0), mean),
        num_tasks=num_tasks,
    )


def mean_score(
    outcomes: Iterable[TaskOutcome],
    confidence: float,
    score_range: tuple[float, float] | None = None,
) -> Estimate:
    """The mean reward over tasks, with Student's t interval on the tasks' means.

    The interval is cut at the ends of `score_range`, if all means are within it.
    """
    means = [math.fsum(o.rewards) / len(o.rewards) for o in outcomes if o.rewards]
    if not means:
        raise DataError("no task has a scored episode")
    value, low, high = t_interval(means, confidence)
    least, most = score_range or (-math.inf, math.inf)
    if low is not None and high is not None and least <= min(means) and max(means) <= most:
        low, high = max(low, least), min(high, most)
    return Estimate(value=value, low=low, high=high, num_tasks=len(means))


def t_interval(
    values: Sequence[float], confidence: float
) -> tuple[float, float | None, float | None]:
    """Mean of the values with Student's t interval; (mean, None, None) for a single value."""
    from statsmodels.stats.weightstats import DescrStatsW

    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, None, None
    low, high = DescrStatsW(values).tconfint_mean(alpha=1.0 - confidence)
    return mean, float(low), float(high)


def tier_names(outcomes: Iterable[TaskOutcome]) -> list[str]:
    """Tiers and mixture parts, in alphabetical order."""
    return sorted({name for o in outcomes for name in (o.tier, o.part) if name is not None})


def _outcome(
    group: Group, success_at: float, success_of: Callable[[Task], float] | None
) -> TaskOutcome:
    scored = [t for t in group.trajectories if _scored(t)]
    rewards = [float(t.reward) for t in scored if t.reward is not None]
    task = group.task
    own = success_of(task) if success_of else None
    reached = [reward >= (success_at if own is None else own) for reward in rewards]
    verdicts = [
        bool(t.metrics.get("success", by_reward))
        for t, by_reward in zip(scored, reached, strict=True)
    ]
    return TaskOutcome(
        task_id=task.id,
        fingerprint=fingerprint(task),
        tier=task.tier,
        rewards=rewards,
        num_excluded=len(group.trajectories) - len(rewards),
        part=part_of(task),
        success_at=own,
        successes=None if verdicts == reached else verdicts,
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


def num_successes(outcome: TaskOutcome, success_at: float) -> int:
    """Number of scored episodes of a task that reach its own threshold, or else `success_at`; the
    verdicts of an agent or a judge come first."""
    if outcome.successes is not None:
        return sum(outcome.successes)
    threshold = success_at if outcome.success_at is None else outcome.success_at
    return sum(reward >= threshold for reward in outcome.rewards)
