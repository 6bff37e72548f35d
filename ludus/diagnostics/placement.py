"""The placement of a recipe: where learner, samplers, reference, environments and rewards run."""

from __future__ import annotations

from typing import Any

from ludus.backends import BACKENDS
from ludus.backends.ray.backend import RayBackend
from ludus.config.schema import RunConfig
from ludus.core.errors import counted
from ludus.core.types import Spec
from ludus.envs import ENVS
from ludus.envs.base import Env

WIDTH = 14


def placement(config: RunConfig) -> list[str]:
    """Returns the lines of a plan: a part, and its devices. Of a host (verl, trinity), none: it
    places its parts itself."""
    if config.backend.name == "local":
        rows = _local(config)
    elif config.backend.name == "ray":
        rows = _ray(config, BACKENDS.check(config.backend, "backend"))
    else:
        return []
    return ["placement", *(f"  {part:{WIDTH}} {where}" for part, where in rows)]


def _local(config: RunConfig) -> list[tuple[str, str]]:
    device = config.model.device
    rows = [("learner", f"{device}: {_trained(config)}")]
    if config.rl is not None:
        rows.append(("sampler", _sampler(config, device)))
        rows.append(("reference", _reference(config, device)))
    rows.append(("environment", f"this process{_work(config)}"))
    if config.judge is not None:
        rows.append(("judge", f"this process: {config.judge.name}"))
    for name, policy in config.policies.items():
        if policy.model is not None and policy.model != "same":
            rows.append((f"policy {name}", str(policy.model.device)))
        elif policy.endpoint is not None:
            rows.append((f"policy {name}", policy.endpoint.base_url))
    return rows


def _ray(config: RunConfig, args: dict[str, Any]) -> list[tuple[str, str]]:
    ranks, samplers = args.get("learner_ranks", 1), args.get("samplers", 1)
    workers, gpu = args.get("env_workers", 0), config.model.device.startswith("cuda")
    shared = bool(args.get("colocated"))
    each = ", a GPU each" if gpu else ""
    several = any(policy.model is not None for policy in config.policies.values())
    of_each = " of each policy" if several else ""
    rows = [("learner", f"{counted(ranks, 'rank')}{of_each}{each}: {_trained(config)}")]
    if config.rl is not None:
        how = ", on the ranks' GPUs" if gpu and shared else each
        rows.append(("samplers", f"{counted(samplers, 'process', 'processes')}{of_each}{how}"))
        rows.append(("reference", _reference(config, "the ranks")))
        fixed = counted(args.get("fixed_samplers", 1), "process", "processes")
        for name, policy in config.policies.items():
            if policy.past is not None:
                versions = f" for each of {policy.past.most} older versions"
                rows.append((f"policy {name}", f"{fixed}{versions}{each}"))
            elif policy.weights is not None:
                rows.append((f"policy {name}", f"{fixed}{each}: {policy.weights}"))
            elif policy.endpoint is not None:
                rows.append((f"policy {name}", policy.endpoint.base_url))
    host = counted(workers, "worker") if workers else "the process that starts the run"
    rows.append(("environment", f"{host}{_work(config)}"))
    if config.judge is not None:
        rows.append(("judge", f"{host}: {config.judge.name}"))
    if gpus := round(RayBackend.demand(config, args).total()["GPU"]):
        rows.append(("GPUs", str(gpus)))
    return rows


def _trained(config: RunConfig) -> str:
    names = [name for name, policy in config.policies.items() if policy.model is not None]
    lora = config.model.lora
    kind = "all weights" if lora is None else f"adapters of rank {lora.rank}"
    if config.model.quantised:
        kind += " on a base in 4 bits"
    return f"{', '.join(['policy', *names])} ({kind})" if names else kind


def _sampler(config: RunConfig, device: str) -> str:
    if config.sampler.name != "in_process":
        return f"{config.sampler.name}, a server of its own"
    copies = ", on an unpacked copy of the weights" if config.model.quantised else ""
    return f"{device}, in turn with the learner{copies}"


def _reference(config: RunConfig, where: str) -> str:
    assert config.rl is not None
    args = config.rl.algorithm.args
    if not args.get("kl_coefficient"):
        return "none: rl.algorithm has no kl_coefficient"
    if named := args.get("kl_reference"):
        return f"{where}: {named}"
    if config.model.lora is not None:
        return f"{where}: the model without its adapters, no copy"
    return f"{where}: a copy of the policy as RL begins"


def _work(config: RunConfig) -> str:
    """The work of the environment elsewhere, behind a colon."""
    if config.env is None:
        return ": none"
    text = of_class(config.env, "works")
    return f": {config.env.name}{f', {text}' if text else ''}"


def of_class(env: Spec, name: str) -> Any:
    """The result of a class method of an environment, or else of `Env`, for its arguments."""
    method = getattr(ENVS.load(env.name), name, getattr(Env, name))
    return method(**ENVS.check(env, "env"))
