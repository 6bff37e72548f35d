"""The process of Trinity: `python -m ludus.backends.trinity_side.run [--check] JOB.json`.

It starts Ray, Trinity's explorer and its trainer, and waits for both.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ludus.backends.host_side.process import device_faults, run_process, set_keys

OPEN = "trainer.trainer_config."
"""verl's keys, which Trinity takes as they are."""


def compose(settings: dict[str, Any]) -> tuple[Any, list[str]]:
    """Returns Trinity's configuration with our settings, and a line for each key it refuses."""
    from omegaconf import OmegaConf
    from trinity.common.config import Config

    config = OmegaConf.structured(Config)
    faults = set_keys(config, settings, "Trinity", lambda key: key.startswith(OPEN))
    return (None if faults else OmegaConf.to_object(config)), faults


def check(job: dict[str, Any]) -> list[str]:
    """Returns the faults of a job: unknown keys, values that Trinity refuses, no GPU."""
    config, faults = compose(job["settings"])
    if faults:
        return [f"backend.args.trinity.{fault}" for fault in faults]
    if config.explorer.runner_per_model < 1:
        return ["backend.args.trinity.explorer.runner_per_model: at least 1 runner must play"]
    if faults := device_faults(job, "Trinity"):
        return faults
    try:
        config.check_and_update()
    except (ValueError, AssertionError) as error:
        return [f"backend.args.trinity: Trinity's configuration refuses it: {error}"]
    return []


def train(job: dict[str, Any]) -> None:
    """Train with Trinity. Errors: SystemExit where it ends before the last step."""
    config, faults = compose(job["settings"])
    if faults:
        raise SystemExit("\n".join(faults))
    config.check_and_update()
    _resume(Path(config.checkpoint_job_dir), config, int(job["done"]))
    import ray

    _start_ray(job, config)
    from ludus.backends.trinity_side.actors import LudusExplorer, LudusTrainer

    explorer, trainer = LudusExplorer.get_actor(config), LudusTrainer.get_actor(config)
    ray.get([explorer.prepare.remote(), trainer.prepare.remote()])
    _synchronise(config, explorer, trainer)
    exploring, training = explorer.explore.remote(), trainer.train.remote()
    ended, _ = ray.wait([exploring, training], num_returns=1)
    if exploring in ended:
        ray.get(explorer.end.remote())
    ray.get(training)
    steps, wanted = ray.get(trainer.steps.remote()), config.trainer.total_steps
    if steps == wanted:
        ray.get(exploring)  # it evaluates the last weights
    ray.get(trainer.shutdown.remote())
    ray.shutdown()
    if steps < wanted:
        raise SystemExit(f"Trinity's trainer ended after step {steps}")


def _start_ray(job: dict[str, Any], config: Any) -> None:
    """Start a Ray, or join one."""
    import ray

    environment = {"env_vars": config.get_envs()}
    ray.init(**job["ray"], namespace=config.ray_namespace, runtime_env=environment)
    address = ray.get_runtime_context().gcs_address
    Path(job["address"]).write_text(address, encoding="utf-8")  # for vLLM's worker, `cpu_worker`


def _synchronise(config: Any, explorer: Any, trainer: Any) -> None:
    """Give the trainer's weights to the explorer, before the first step."""
    import ray
    from trinity.manager.synchronizer import Synchronizer

    if config.synchronizer.sync_method.value == "nccl":
        synchronizer = Synchronizer.get_actor(namespace=config.ray_namespace)
        ray.get(synchronizer.coordinate_weight_sync_setup.remote())
        ray.get([explorer.sync_weight.remote(), trainer.sync_weight.remote()])
        return
    # One after the other: else, after a checkpoint, the explorer may take the first weights.
    ray.get(trainer.sync_weight.remote())
    ray.get(explorer.sync_weight.remote())


def _resume(folder: Path, config: Any, done: int) -> None:
    """Set the explorer back to the trainer's newest checkpoint: it may have played further."""
    state = {
        "latest_iteration": done,
        "taskset_states": [{"current_index": done * config.buffer.batch_size}],
    }
    path = folder / f"{config.explorer.name}_meta.json"
    path.write_text(json.dumps(state), encoding="utf-8")


if __name__ == "__main__":
    run_process(check, train)
