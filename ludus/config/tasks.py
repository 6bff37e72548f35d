"""The section of the tasks: readers, their order, the curriculum of tiers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ludus.config.sections import Section
from ludus.core.errors import did_you_mean
from ludus.core.names import metric_part
from ludus.core.types import Spec

MIN_EPISODES = 100
"""Least scored episodes of a tier whose `until` does not set `episodes`."""

_NAMED = ("score/", "rollout/")
_FORMS = "success, reward, episodes, score/NAME or rollout/NAME"

Name = Annotated[str, Field(min_length=1, max_length=150)]
Least = Annotated[float, Field(strict=True)]


class TierConfig(Section):
    """A tier of the curriculum: its tasks, and when the next one begins."""

    includes: list[Name] | None = Field(
        None,
        min_length=1,
        description="Tiers of the tasks, or parts of a mixture, that belong to it; null: the tier "
        "of its name.",
    )
    until: dict[str, Least] | None = Field(
        None,
        min_length=1,
        description="Least values at which the next tier begins, and after the last tier the stage "
        "ends: {success: 0.6, episodes: 200}. Means over the tier's latest scored episodes of "
        "`success`, `reward`, a named score (`score/compiled`) or a count of the episode "
        "(`rollout/tool_calls`); `episodes` is the number of scored episodes of the tier, 100 "
        "unless set. Null, for the last tier only: to the end of the stage.",
    )
    window: int | None = Field(
        None,
        ge=1,
        description="Number of latest episodes for the means; null: as many as `episodes`.",
    )

    @property
    def episodes(self) -> int:
        """Least scored episodes of the tier."""
        return int((self.until or {}).get("episodes", MIN_EPISODES))

    @property
    def criteria(self) -> dict[str, float]:
        """Least mean of each criterion, without `episodes`."""
        return {name: least for name, least in (self.until or {}).items() if name != "episodes"}

    @model_validator(mode="after")
    def _criteria(self) -> TierConfig:
        for name, least in (self.until or {}).items():
            _check(name, least)
        if self.window is not None and not self.criteria:
            raise ValueError("`window` has no effect without a mean in `until`")
        return self


def _check(name: str, least: float) -> None:
    """Errors: ValueError for a criterion that does not exist, or that says nothing."""
    if name == "episodes":
        if least < 1 or least != int(least):
            raise ValueError(f"`until` needs a whole number >= 1 of episodes, got {least:g}")
    elif name == "success":
        if not 0 < least <= 1:
            raise ValueError(
                f"`until` needs a success rate above 0 and at most 1, got {least:g}: every episode "
                f"is {'at or above' if least <= 0 else 'below'} that"
            )
    elif name.endswith("seconds"):
        raise ValueError(
            f"`until` cannot use {name}: the order of the tasks must not depend on time"
        )
    elif name != "reward" and (not name.startswith(_NAMED) or name.endswith("/")):
        near = did_you_mean(name, ["success", "reward", "episodes"])
        if "did you mean" not in near:
            near = f" (a named score is score/{name})" if "/" not in name else ""
        raise ValueError(f"`until` has {name!r}, which is none of {_FORMS}{near}")
    elif name == "rollout/success":
        raise ValueError("`until` has 'rollout/success', which is called success here")


class CurriculumConfig(Section):
    """The order of the training tasks in RL: tier by tier, each until its criteria are met."""

    tiers: dict[Name, TierConfig] = Field(
        min_length=2, description="The tiers, in order: {easy: {until: {success: 0.6}}, hard: {}}."
    )
    share_earlier: float = Field(
        0.2, ge=0, lt=1, description="Share of the tasks that are of earlier tiers, in turn."
    )
    share_next: float = Field(
        0.0, ge=0, lt=1, description="Share of the tasks that are of the next tier already."
    )

    @model_validator(mode="after")
    def _reachable(self) -> CurriculumConfig:
        if self.share_earlier + self.share_next >= 1:
            raise ValueError(
                "`share_earlier` and `share_next` must leave a share to the current tier: their "
                "sum must be below 1"
            )
        owner: dict[str, str] = {}
        shown: dict[str, str] = {}
        *earlier, _ = self.tiers
        for name, tier in self.tiers.items():
            if tier.until is None and name in earlier:
                raise ValueError(
                    f"`tiers.{name}.until` is not set, so no later tier would begin: set it, e.g. "
                    "{success: 0.6}"
                )
            for included in tier.includes or [name]:
                if (other := owner.setdefault(included, name)) != name:
                    raise ValueError(f"{included!r} belongs to two tiers, {other!r} and {name!r}")
            if (other := shown.setdefault(metric_part(name), name)) != name:
                raise ValueError(
                    f"{other!r} and {name!r} are the same name in metrics, "
                    f"{metric_part(name)!r}: rename one of the tiers"
                )
        return self


class TasksConfig(Section):
    """The readers of tasks. The two splits must not share a task."""

    train: Spec = Field(description="Reader of the training tasks.")
    heldout: Spec | None = Field(None, description="Reader of the tasks for evaluation.")
    on_bad_line: Literal["refuse", "skip"] = Field(
        "refuse", description="On a malformed line: refuse the run, or skip and report the line."
    )
    allow_overlap: bool = Field(
        False,
        description="Allow held-out tasks that equal training tasks. By default they are replaced "
        "where the environment makes the tasks, and refused where they come from files.",
    )
    shuffle: bool = Field(
        True, description="Visit training tasks in a new random order in each epoch."
    )
    curriculum: CurriculumConfig | None = Field(
        None, description="Train on the tasks tier by tier in RL, or null: on all alike."
    )
