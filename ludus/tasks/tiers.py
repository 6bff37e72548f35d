"""The curriculum of tiers: the tasks of a tier are played until its criteria are met.

    tasks:
      curriculum:
        tiers:
          easy: {includes: [depth-1], until: {success: 0.6, episodes: 200}}
          hard: {includes: [depth-2]}

Most tasks are of the current tier; a fixed share is of earlier tiers, and one of the next tier if
that is asked for. Criteria are checked after the groups of a step are judged, so the tasks of a
step are chosen before its results are known. A tier that was left never becomes the current one
again.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import islice
from math import lcm
from typing import Any

from ludus.config.schema import CurriculumConfig, TierConfig
from ludus.core.errors import CheckpointError, ConfigError, did_you_mean
from ludus.core.names import metric_part
from ludus.core.types import Group, Task, Trajectory
from ludus.tasks.curriculum import TaskSampler
from ludus.tasks.mixture import part_of, task_sampler
from ludus.tasks.ratios import Schedule
from ludus.tasks.readers import TaskList
from ludus.telemetry.logs import get_logger

log = get_logger(__name__)

PLACE = "tasks.curriculum"
_NUM_SHOWN = 5


def tasks_by_tier(tasks: Sequence[Task], config: CurriculumConfig) -> dict[str, list[Task]]:
    """The tasks of each tier of the curriculum.

    A task belongs to the tier that includes the task's own tier, else to the one that includes its
    part of a mixture.

    Errors: ConfigError for a tier without tasks, and for tasks of no tier.
    """
    found: dict[str, list[Task]] = {name: [] for name in config.tiers}
    others: Counter[str | None] = Counter()
    owner = _owners(config)
    for task in tasks:
        if (of := _tier_of(task, owner)) is None:
            others[task.tier] += 1
        else:
            found[of].append(task)
    known = sorted({name for t in tasks for name in (t.tier, part_of(t)) if name is not None})
    for name, tier in config.tiers.items():
        for included in tier.includes or [name]:
            if included not in known:
                raise ConfigError(_absent(name, tier, included, known))
        if not found[name]:
            raise ConfigError(
                f"{PLACE}.tiers.{name}: other tiers include the tiers of all of its tasks"
            )
    if others:
        listed = ", ".join(
            f"{count} {'without a tier' if tier is None else f'of tier {tier!r}'}"
            for tier, count in islice(others.items(), _NUM_SHOWN)
        )
        more = f" and {len(others) - _NUM_SHOWN} more" if len(others) > _NUM_SHOWN else ""
        raise ConfigError(
            f"{PLACE}: {others.total()} of {len(tasks)} training tasks belong to no tier ({listed}"
            f"{more}): include them in a tier, or leave them out of tasks.train"
        )
    return found


def check_curriculum(train: TaskList, config: CurriculumConfig | None) -> None:
    """Errors: ConfigError for a curriculum that does not fit the training tasks."""
    if config is None:
        return
    tasks_by_tier(train, config)
    if train.distinct:
        part = min(train.distinct)
        raise ConfigError(
            f"tasks.train.args.parts.{part}.distinct: {PLACE} cannot keep a step's tasks "
            "distinct, as it chooses them tier by tier: set it to false, or remove the curriculum"
        )


def _owners(config: CurriculumConfig) -> dict[str, str]:
    """The tier of the curriculum of each tier, or part, of tasks."""
    tiers = config.tiers.items()
    return {included: name for name, tier in tiers for included in tier.includes or [name]}


def _tier_of(task: Task, owner: Mapping[str, str]) -> str | None:
    return owner.get(task.tier or "") or owner.get(part_of(task) or "")


def _absent(name: str, tier: TierConfig, included: str, known: Sequence[str]) -> str:
    key = "includes" if tier.includes else ""
    place = ".".join(filter(None, [PLACE, "tiers", name, key]))
    if not known:
        return f"{place}: the training tasks have no tiers; give the reader's `tier`"
    listed = ", ".join(known[:_NUM_SHOWN]) + (", ..." if len(known) > _NUM_SHOWN else "")
    near = did_you_mean(included, known)
    hint = near if "did you mean" in near else f"; they have {listed}"
    remedy = "" if key else f" (set `includes` to the tiers of tasks that {name} stands for)"
    return f"{place}: no training task is of tier {included!r}{hint}{remedy}"


@dataclass(slots=True)
class _Tier:
    """A tier, its tasks, and the results of its latest episodes.

    `episodes` counts the scored episodes since the tier became the current one; `recent` has the
    latest results, each with the values that metrics and criteria need.
    """

    name: str
    config: TierConfig
    sampler: TaskSampler
    episodes: int = 0
    recent: deque[dict[str, float]] = field(default_factory=deque)
    warned: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.recent = deque(maxlen=self.config.window or self.config.episodes)

    @property
    def met(self) -> bool:
        """True if there are enough episodes, and every mean is at least what `until` asks."""
        if self.config.until is None or self.episodes < self.config.episodes:
            return False
        means = {name: self.mean(name) for name in self.config.criteria}
        return all(
            mean is not None and mean >= self.config.criteria[name] for name, mean in means.items()
        )

    def mean(self, name: str) -> float | None:
        """Mean over the latest episodes that have the value; None if none has it."""
        values = [result[name] for result in self.recent if name in result]
        return math.fsum(values) / len(values) if values else None

    def add(self, trajectory: Trajectory) -> None:
        self.episodes += 1
        self.recent.append(_result(trajectory, ["success", *self.config.criteria]))

    def begin(self) -> None:
        """Becomes the current tier: episodes from before do not count."""
        self.episodes = 0
        self.recent.clear()

    def warn_of_absent(self, names: Sequence[str]) -> None:
        """Warn of criteria that no episode has a value for, when there are enough episodes."""
        if self.episodes < self.config.episodes:
            return
        for name in self.config.criteria:
            if name not in self.warned and self.mean(name) is None:
                self.warned.add(name)
                log.warning(
                    "a criterion of the curriculum has no value, so the tier does not end",
                    criterion=f"{PLACE}.tiers.{self.name}.until: {name}",
                    episodes=len(self.recent),
                    have=", ".join(names) or "no named scores",
                )


def _result(trajectory: Trajectory, names: Sequence[str]) -> dict[str, float]:
    """The finite values of a scored episode, of those that are asked for."""
    values = _values(trajectory)
    return {name: values[name] for name in names if math.isfinite(values.get(name, math.nan))}


def _values(trajectory: Trajectory) -> dict[str, float]:
    values = {f"rollout/{name}": value for name, value in trajectory.metrics.items()}
    values |= {f"score/{name}": value for name, value in trajectory.scores.items()}
    reward = math.nan if trajectory.reward is None else trajectory.reward
    return values | {"success": trajectory.metrics.get("success", 0.0), "reward": reward}


class TierSampler(TaskSampler):
    """Visits the tiers in order; the tasks of each tier in passes of their own.

    The state is that of the schedule of the shares, and of each tier's sampler and results.

    Args:
        ratios: those of a mixture; each tier keeps them among the parts that it has.
        batch_size: tasks of a step, in which the shares are exact up to one task; None: the sum of
            the shares as whole numbers.

    Errors: ConfigError if tiers and tasks do not fit.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        seed: int,
        shuffle: bool,
        config: CurriculumConfig,
        ratios: Mapping[str, int] | None = None,
        batch_size: int | None = None,
    ) -> None:
        super().__init__(tasks, seed, shuffle)
        self._owner = _owners(config)
        self._tiers = [
            _Tier(name, config.tiers[name], task_sampler(own, seed, shuffle=shuffle, ratios=ratios))
            for name, own in tasks_by_tier(tasks, config).items()
        ]
        self._schedule = Schedule(_whole_shares(config), batch_size)
        self._number = self._num_earlier = 0

    @property
    def current(self) -> str:
        """Name of the current tier."""
        return self._tiers[self._number].name

    @property
    def finished(self) -> bool:
        """True if the criteria of the last tier are met."""
        return self._number == len(self._tiers) - 1 and self._tiers[-1].met

    def __next__(self) -> Task:
        return next(self._tiers[self._choose()].sampler)

    def _choose(self) -> int:
        """The number of the next task's tier. Shares of tiers that there are not are of the
        current one."""
        source = next(self._schedule)
        if source == "earlier" and self._number:
            self._num_earlier += 1
            return (self._num_earlier - 1) % self._number
        if source == "next" and self._number + 1 < len(self._tiers):
            return self._number + 1
        return self._number

    def observe(self, groups: Sequence[Group]) -> None:
        """Count scored episodes for their tiers, then begin the next tier if the criteria of the
        current one are met."""
        super().observe(groups)
        by_name = {tier.name: tier for tier in self._tiers}
        current, seen = self._tiers[self._number], list[Trajectory]()
        for group in groups:
            tier = by_name[_tier_of(group.task, self._owner) or self.current]
            scored = [t for t in group.trajectories if t.status.trainable and t.reward is not None]
            for trajectory in scored:
                tier.add(trajectory)
            seen += scored if tier is current else []
        if current.met and self._number + 1 < len(self._tiers):
            self._number += 1
            self._tiers[self._number].begin()
            log.info("next tier", tier=self.current, episodes=current.episodes)
        current.warn_of_absent(sorted({f"score/{name}" for t in seen for name in t.scores}))

    def metrics(self) -> dict[str, float]:
        """`tasks/tier`: number of the current tier, from 1; `tasks/tier_episodes`: its scored
        episodes; `tasks/until/NAME`: mean of a criterion; `tasks/success_TIER`: success in the
        tier's latest episodes; `tasks/epoch_TIER`: passes over its tasks; `tasks/reward_TIER`: as
        TaskSampler."""
        metrics = super().metrics()
        del metrics["tasks/epoch"]
        current = self._tiers[self._number]
        metrics["tasks/tier"] = self._number + 1.0
        metrics["tasks/tier_episodes"] = float(current.episodes)
        for name in current.config.criteria:
            if (mean := current.mean(name)) is not None:
                metrics[f"tasks/until/{metric_part(name)}"] = mean
        for tier in self._tiers:
            sampler, part = tier.sampler, metric_part(tier.name)
            if epoch := sampler.epoch + sampler.index / len(sampler.tasks):
                metrics[f"tasks/epoch_{part}"] = epoch
            if (success := tier.mean("success")) is not None:
                metrics[f"tasks/success_{part}"] = success
        return metrics

    def state_dict(self) -> dict[str, Any]:
        tiers = {
            tier.name: {
                "includes": tier.config.includes,
                "sampler": tier.sampler.state_dict(),
                "episodes": tier.episodes,
                "recent": list(tier.recent),
            }
            for tier in self._tiers
        }
        curriculum = {
            "order": [tier.name for tier in self._tiers],
            "tiers": tiers,
            "number": self._number,
            "num_earlier": self._num_earlier,
            "schedule": self._schedule.state_dict(),
        }
        return super().state_dict() | {"curriculum": curriculum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state`. Criteria may have changed since; tiers may not.

        Errors: CheckpointError.
        """
        super().load_state_dict(state)
        saved = state["curriculum"]
        own = {tier.name: tier.config.includes for tier in self._tiers}
        theirs = {name: saved["tiers"][name]["includes"] for name in saved["order"]}
        if list(own.items()) != list(theirs.items()):
            raise CheckpointError(
                f"the saved task order has the tiers {_told(theirs)}, this run has {_told(own)}: "
                "resume with the configuration of the saved run"
            )
        self._schedule.load_state_dict(saved["schedule"])
        self._number, self._num_earlier = int(saved["number"]), int(saved["num_earlier"])
        for tier in self._tiers:
            kept = saved["tiers"][tier.name]
            tier.sampler.load_state_dict(kept["sampler"])
            tier.episodes = int(kept["episodes"])
            tier.recent.clear()
            tier.recent.extend(kept["recent"])


def _told(tiers: Mapping[str, list[str] | None]) -> str:
    return ", ".join(
        name if includes is None else f"{name} ({', '.join(includes)})"
        for name, includes in tiers.items()
    )


def _whole_shares(config: CurriculumConfig) -> dict[str, int]:
    """The shares as whole numbers; 0.2 is 1/5, and not the nearest binary fraction."""
    earlier, later = Fraction(str(config.share_earlier)), Fraction(str(config.share_next))
    shares = {"current": 1 - earlier - later, "earlier": earlier, "next": later}
    common = lcm(*(share.denominator for share in shares.values()))
    return {name: int(share * common) for name, share in shares.items() if share}
