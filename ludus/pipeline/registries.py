"""Plug-in registry of each config key; checks of a config before a run starts."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ludus.backends import BACKENDS
from ludus.config.load import check_specs
from ludus.config.registry import Registry
from ludus.config.schema import RunConfig
from ludus.core.errors import ConfigError, LudusError, did_you_mean
from ludus.data.demonstrations import require_pool
from ludus.envs import ENVS
from ludus.judges import JUDGES
from ludus.models import ARCHITECTURES, SAMPLERS, TOKENIZERS
from ludus.store.mirror.remote import Remote
from ludus.tasks import READERS
from ludus.telemetry.sinks import SINKS
from ludus.train import ALGORITHMS

REGISTRIES: dict[str, Registry[Any]] = {
    "backend": BACKENDS,
    "env": ENVS,
    "judge": JUDGES,
    "tasks.train": READERS,
    "tasks.heldout": READERS,
    "model.architecture": ARCHITECTURES,
    "model.tokenizer": TOKENIZERS,
    "rl.algorithm": ALGORITHMS,
    "sampler": SAMPLERS,
    "metrics": SINKS,
}


def check(config: RunConfig) -> None:
    """Refuse unknown plug-ins and wrong arguments, all in one error, and absent packages.

    Builds the environment once, because it may refuse values that fit its signature.
    """
    check_specs(config, REGISTRIES)
    if config.demonstrations is not None:
        require_pool()
    if config.mirror is not None:
        Remote(config.mirror)
    _check_distribution(config)
    if config.env is not None:
        try:
            _check_parts(config, ENVS.build(config.env, "env").members())
        except LudusError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(f"env: {config.env.name!r} cannot be built: {reason}") from error


def _check_parts(config: RunConfig, parts: Collection[str]) -> None:
    """Refuse settings for environments that the mixture does not have."""
    limit, horizon = config.rollout.max_turns, config.rl.horizon if config.rl else None
    for key, setting in {"rollout.max_turns": limit, "rl.horizon": horizon}.items():
        for name in setting if isinstance(setting, dict) else ():
            if name not in parts:
                raise ConfigError(
                    f"{key}.{name}: {name!r} is no environment of a mixture"
                    f"{did_you_mean(name, parts)}"
                )
    if isinstance(horizon, dict) and isinstance(limit, int):
        raise ConfigError(
            "rollout.max_turns must be by environment, or null, where rl.horizon is by environment"
        )


def _check_distribution(config: RunConfig) -> None:
    """Refuse top_p and top_k in RL: sampler and learner must use the same distribution.

    This check is not in the schema because stored configs of old runs must stay readable.
    """
    if config.rl is None or config.rl.algorithm.name == "sft":
        return
    off = {"top_p": 1.0, "top_k": 0}
    values = {key: getattr(config.rollout, key) for key in off}
    faults = [
        f"rollout.{key} must be {off[key]:g} where `rl` trains, got {values[key]:g}: the sampler's "
        "log-probabilities would belong to the cut distribution, the learner's to the full one"
        for key in off
        if values[key] != off[key]
    ]
    if faults:
        remedy = "remove it, or lower rollout.temperature for fewer unlikely tokens"
        raise ConfigError("\n".join(f"{fault} ({remedy})" for fault in faults))
