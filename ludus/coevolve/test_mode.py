"""`--test-mode`: one tiny iteration of every stage, to see that all parts work here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ludus.config.coevolve import CoevolveConfig
from ludus.pipeline.quick import LIMITS, limited

STAND_INS = 4
"""Problems where the model proposes none, as an untrained one."""


def tiny(config: CoevolveConfig) -> CoevolveConfig:
    """Returns the recipe with small counts, in a folder of its own.

    The band of the filter is open. Where no proposal is kept, STAND_INS sums let the later stages
    run; the stage's line says so.
    """
    data = config.model_dump(mode="json")
    shared = data["shared"]
    for section in ("shared", "start", "curriculum", "executor"):
        if data[section] is not None:
            data[section] = limited(data[section], LIMITS)
    _limit_heldout(data["executor"], shared)
    data |= {"name": f"{config.name}-test", "iterations": 1, "shared": shared and data["shared"]}
    data["answers"] |= {"number": min(config.answers.number, 2)}
    data["questions"] |= {
        "proposals": min(config.questions.proposals, 8),
        "min_consistency": 0.0,
        "max_consistency": 1.0,
    }
    data["frontier"] |= {"num_tasks": min(config.frontier.num_tasks, 4)}
    return CoevolveConfig.model_validate(data)


def _limit_heldout(executor: dict[str, Any], shared: Mapping[str, Any]) -> None:
    """A benchmark's hundreds of questions would take hours with a large model."""
    if any((keys.get("tasks") or {}).get("heldout") for keys in (executor, shared)):
        most = LIMITS["evaluate"]["num_tasks"]
        given = {**(shared.get("evaluate") or {}), **(executor.get("evaluate") or {})}
        own = executor.get("evaluate") or {}
        executor["evaluate"] = {**own, "num_tasks": min(given.get("num_tasks") or most, most)}
