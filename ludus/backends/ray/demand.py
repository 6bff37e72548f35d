"""The actors that a recipe asks for, and the keys that the back end `ray` refuses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from ludus.backends.ray import cluster
from ludus.backends.ray.cluster import Bundle, Demand
from ludus.config.messages import explain
from ludus.config.schema import ModelConfig, RunConfig
from ludus.core.errors import ConfigError
from ludus.train.distributed.settings import ShardSettings, check_supported

WHERE = "which the back end `ray` does not offer; use backend: local"


def demand_of(config: RunConfig, args: Mapping[str, Any]) -> Demand:
    """Returns the actors of a run, those of its other policies beside them.

    Args:
        args: all of `learner_ranks`, `samplers`, `env_workers`, `fixed_samplers`, `cpus`,
            `colocated`.
    """

    def trained(model: ModelConfig) -> dict[str, tuple[int, Bundle]]:
        needs = _needs(model, args["cpus"])
        return {
            "learner_ranks": (args["learner_ranks"], needs),
            "samplers": (args["samplers"], needs),
        }

    colocated = args["colocated"]
    others = [
        Demand(trained(model), colocated, f"policies.{name}") for name, model in _trained(config)
    ]
    for name, policy in config.policies.items():
        if policy.weights is not None:
            others.append(fixed_demand(config, args, f"policies.{name}"))
        elif policy.past is not None:
            one = fixed_demand(config, args, f"policies.{name}.past")
            others.extend([one] * policy.past.most)
    workers = {"env_workers": (args["env_workers"], {"CPU": args["cpus"]})}
    return Demand({**trained(config.model), **workers}, colocated, beside=tuple(others))


def fixed_demand(config: RunConfig, args: Mapping[str, Any], name: str = "") -> Demand:
    """Returns the actors of one policy that does not train."""
    needs = _needs(config.model, args["cpus"])
    return Demand({"fixed_samplers": (args["fixed_samplers"], needs)}, name=name)


def _needs(model: ModelConfig, cpus: float) -> Bundle:
    return {"CPU": cpus, "GPU": 1.0 if model.device == "cuda" else 0.0}


def _trained(config: RunConfig) -> Iterator[tuple[str, ModelConfig]]:
    """The other policies that train, with their models."""
    for name, policy in config.policies.items():
        if policy.model == "same":
            yield name, config.model
        elif policy.model is not None:
            yield name, policy.model


def on_own_gpus(config: RunConfig, colocated: bool) -> bool:
    """True if learner ranks and samplers have different GPUs."""
    return config.model.device == "cuda" and not colocated


def require_honoured(config: RunConfig, args: Mapping[str, Any]) -> None:
    """Errors: ConfigError for keys that this back end does not honour, and where no cluster
    answers."""
    if args.get("address") is not None:
        cluster.require_answer(args["address"])
    if config.verify:
        raise ConfigError(f"verify: true compares bits of one process, {WHERE}")
    if (
        args.get("weights") == "broadcast"
        and config.model.device == "cuda"
        and not on_own_gpus(config, args.get("colocated", False))
    ):
        raise ConfigError(
            "backend.args.weights: broadcast needs a GPU for each learner rank and sampler: "
            "NCCL refuses two members on one. With colocated: true, use object_store, or auto"
        )
    shards, ranks = shards_of(args), args.get("learner_ranks", 1)
    if ranks == 1 and not shards.cpu_offload and shards.tensor_parallel == 1:
        return
    for name, model in [("", config.model), *_trained(config)]:
        if model.quantised:
            where = f"policies.{name}.model" if name else "model"
            raise ConfigError(
                f"{where}.lora.quantise: weights in 4 bits are not sharded: with "
                "backend.args.learner_ranks: 1 and without cpu_offload they train on `ray`, too"
            )
        check_supported(config.model_copy(update={"model": model}), shards, ranks)


def shards_of(args: Mapping[str, Any]) -> ShardSettings:
    """Returns the settings of the shards among the arguments. Errors: ConfigError."""
    names = ("tensor_parallel", "cpu_offload", "reshard_after_forward")
    values = {name: args[name] for name in names if name in args}
    if "collective_timeout_s" in args:
        values["timeout_s"] = args["collective_timeout_s"]
    try:
        return ShardSettings(**values)
    except ValidationError as error:
        lines = [text for _, text in explain(error, ShardSettings, "backend.args")]
        raise ConfigError("\n".join(lines)) from None
