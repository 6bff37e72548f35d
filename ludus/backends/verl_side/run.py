"""The process of verl: `python -m ludus.backends.verl_side.run [--check] JOB.json`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ludus.backends.host_side.process import device_faults, run_process, set_keys


def compose(settings: dict[str, Any]) -> tuple[Any, list[str]]:
    """Returns verl's configuration with our settings, and a line for each key it does not have.

    A key with a `+` is added, as on verl's command line.
    """
    import hydra

    spec = find_spec("verl")
    assert spec is not None
    assert spec.submodule_search_locations
    folder = Path(next(iter(spec.submodule_search_locations))) / "trainer" / "config"
    strategy = settings.get("actor_rollout_ref.actor.strategy", "fsdp")
    engine = "dp" if str(strategy).startswith("fsdp") else strategy
    with hydra.initialize_config_dir(str(folder), version_base=None):
        config = hydra.compose("ppo_trainer", overrides=[f"model_engine={engine}"])
    return config, set_keys(config, settings, "verl", lambda key: False)


def check(job: dict[str, Any]) -> list[str]:
    """Returns the faults of a job: unknown keys, values that verl's classes refuse, no GPU."""
    config, faults = compose(job["settings"])
    if faults:
        return [f"backend.args.verl.{fault}" for fault in faults]
    if faults := device_faults(job, "verl"):
        return faults
    import torch

    asked = config.trainer.n_gpus_per_node
    if job["device"] != "cpu" and config.trainer.nnodes == 1 and asked > torch.cuda.device_count():
        have = torch.cuda.device_count()
        return [f"backend.args.verl.trainer.n_gpus_per_node: {asked}, but there are {have} GPUs"]
    return []


def train(job: dict[str, Any]) -> None:
    """Train with verl, on Ray of its own or on that of RAY_ADDRESS."""
    config, faults = compose(job["settings"])
    if faults:
        raise SystemExit("\n".join(faults))
    from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    validate_config(
        config=config,
        use_reference_policy=need_reference_policy(config),
        use_critic=need_critic(config),
    )
    run_ppo(config, task_runner_class=TaskRunnerV1)


if __name__ == "__main__":
    run_process(check, train)
