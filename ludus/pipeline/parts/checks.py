"""Checks of a configuration before a run starts."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress

from ludus.config.load import check_specs
from ludus.config.schema import RunConfig
from ludus.core.errors import ConfigError, did_you_mean
from ludus.data.demonstrations import require_pool
from ludus.envs import ENVS
from ludus.judges import JUDGES
from ludus.loop.metrics import BY_PART
from ludus.pipeline.monitoring.notify import check_urls
from ludus.pipeline.parts.effects import without_effect
from ludus.pipeline.parts.registries import REGISTRIES, parts_of
from ludus.rollout.agent_tools import check_agent_tools
from ludus.rollout.workflow import Agent
from ludus.store.mirror.remote import Remote
from ludus.telemetry.span_export import require_otel
from ludus.train import ALGORITHMS

OUTCOMES = {"rollout/reward", "rollout/success", "rollout/groups_with_signal", "rollout/turns"}
"""Metrics of an RL step's rollouts that `checkpoint.metric` may name."""


def check(config: RunConfig) -> None:
    """Refuse unknown plug-ins, wrong arguments, absent packages, and settings without effect.

    Builds environment, agent, judge and algorithm once, because they may refuse values that fit
    their signatures.
    """
    try:
        check_specs(config, REGISTRIES)
    except ConfigError as error:
        raise ConfigError("\n".join([str(error), *_found_without_effect(config)])) from error
    if config.demonstrations is not None:
        require_pool()
    if config.mirror is not None:
        Remote(config.mirror)
    check_urls(config.notify)
    if config.traces is not None:
        require_otel()
    _check_distribution(config)
    faults = list(without_effect(config))
    if config.rl is not None:  # told together with what has no effect
        try:
            ALGORITHMS.build(config.rl.algorithm, "rl.algorithm")
        except ConfigError as error:
            faults.append(str(error))
    if config.env is not None:
        try:
            parts = ENVS.build(config.env, "env").members()
        except AttributeError as error:
            raise ConfigError(
                f"env: {config.env.name!r} is not an environment: derive the class from "
                "ludus.envs.base.Env"
            ) from error
    else:
        parts = {}
    names = {*parts, *parts_of(config)}
    _check_parts(config, names)
    if config.agent is not None:
        check_agent_tools(Agent.build(config.agent).play, bool(config.tools))
    if config.judge is not None:
        JUDGES.build(config.judge, "judge")
    faults += _unknown_metric(config, names)
    if faults:
        raise ConfigError("\n".join(faults))


def _found_without_effect(config: RunConfig) -> list[str]:
    """The messages of `without_effect` up to a plug-in that cannot be read."""
    found = list[str]()
    with suppress(ConfigError):
        found.extend(without_effect(config))
    return found


def _unknown_metric(config: RunConfig, parts: Collection[str]) -> Iterator[str]:
    """Yields a message if no step or evaluation of this configuration writes the metric."""
    name = config.checkpoint.metric
    if name is None:
        return
    known: set[str] = set()
    if config.tasks.heldout is not None:
        known |= {"evaluate/success", "evaluate/score", *(f"evaluate/success_{p}" for p in parts)}
    if config.rl is not None:
        known |= OUTCOMES | {f"{outcome}_{p}" for outcome in OUTCOMES & BY_PART for p in parts}
    if name in known:
        return
    if name.startswith("evaluate/") and config.tasks.heldout is None:
        yield (
            f"checkpoint.metric: {name} is never measured, because there are no held-out tasks: "
            "set tasks.heldout, or checkpoint.metric to null"
        )
    else:
        yield (
            f"checkpoint.metric: {name!r} is not a measure of the policy that this configuration "
            f"writes{did_you_mean(name, known)}"
        )


def _check_parts(config: RunConfig, parts: Collection[str]) -> None:
    """Refuse settings for parts that no mixture has, and two turn limits of one part."""
    limit, horizon = config.rollout.max_turns, config.rl.horizon if config.rl else None
    own = config.rollout.parts
    by_part = {"rollout.max_turns": limit, "rl.horizon": horizon, "rollout.parts": own}
    for key, setting in by_part.items():
        for name in setting if isinstance(setting, dict) else ():
            if name not in parts:
                raise ConfigError(
                    f"{key}.{name}: {name!r} is no part of a mixture{did_you_mean(name, parts)}"
                )
    for key, setting in {"rollout.max_turns": limit, "rl.horizon": horizon}.items():
        for name, part in own.items():
            whole = key == "rl.horizon" and isinstance(setting, list)
            if part.max_turns and (whole or (isinstance(setting, dict) and name in setting)):
                raise ConfigError(
                    f"rollout.parts.{name}.max_turns: {key} limits the same episodes: remove one"
                )
    if isinstance(horizon, dict) and isinstance(limit, int):
        raise ConfigError(
            "rollout.max_turns must be by environment, or null, where rl.horizon is by environment"
        )


def _check_distribution(config: RunConfig) -> None:
    """Refuse top_p and top_k in RL: sampler and learner must use the same distribution.

    This check is not in the schema because stored configs of old runs must stay readable.
    """
    if config.rl is None:
        return
    off = {"top_p": 1.0, "top_k": 0}
    values = {key: getattr(config.rollout, key) for key in off}
    faults = [
        f"rollout.{key} must be {off[key]:g} where `rl` trains, got {values[key]}: the sampler's "
        "log-probabilities would belong to the cut distribution, the learner's to the full one"
        for key in off
        if values[key] != off[key]
    ]
    if faults:
        remedy = "remove it, or lower rollout.temperature for fewer unlikely tokens"
        raise ConfigError("\n".join(f"{fault} ({remedy})" for fault in faults))
