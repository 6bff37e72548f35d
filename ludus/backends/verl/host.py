"""verl's side of a run, in the process of `ludus train`: settings, command, checkpoints, metrics.

<run>/verl/
    job.json                 verl's settings, and what the workers need
    train.jsonl, heldout.jsonl   tasks in the order of training; of verl's validation
    model/                   the weights that RL starts from
    checkpoints/global_step_N/   verl's own
    verl.log                 output of all its processes
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from ludus.backends.foreign import (
    CPU_SAMPLER,
    ForeignHost,
    last_job,
    new_ray_folder,
    played,
    remove_left,
)
from ludus.backends.hosted import EPISODES
from ludus.backends.hosts import HostJob, HostPlay
from ludus.backends.verl.keys import (
    ACTOR,
    CPU_DEFAULTS,
    DEFAULTS,
    MEGATRON,
    MODEL,
    OWN,
    ROLLOUT,
    TABLE,
)
from ludus.config.schema import RunConfig
from ludus.core.files import atomic_write

RAY_KEY = "+ray_kwargs.ray_init._temp_dir"

_CPU = {
    **CPU_SAMPLER,
    "VERL_USE_EXTERNAL_MODULES": "ludus.backends.verl_side.cpu",
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",
    "VERL_ENGINE_VENDOR": "nvidia",
}

_NAMES = {
    "actor/pg_loss": "train/loss",
    "actor/loss": "train/loss",
    "actor/grad_norm": "train/grad_norm",
    "actor/lr": "train/lr",
    "actor/entropy": "train/entropy",
    "actor/ppo_kl": "train/kl",
    "actor/pg_clipfrac": "train/clip_fraction",
    "actor/kl_loss": "train/reference_kl",
    "timing_s/gen": "time/rollout_s",
    "timing_s/step": "time/step_s",
}


class VerlHost(ForeignHost):
    """verl: GRPO and its kin on FSDP or Megatron, sampling with vLLM or SGLang.

    Args:
        python: interpreter of verl's environment; default: $LUDUS_VERL_PYTHON, else
            .venv-verl/bin/python.
        verl: verl's own keys and values.
    """

    name: ClassVar[str] = "verl"
    table = TABLE
    tied = OWN
    side = "ludus.backends.verl_side.run"
    cpu = _CPU
    names = _NAMES

    def __init__(
        self,
        python: Annotated[
            str | None,
            Field(
                min_length=1,
                description="The interpreter with verl; null: $LUDUS_VERL_PYTHON, else "
                ".venv-verl/bin/python, of `make verl`.",
            ),
        ] = None,
        verl: Annotated[
            dict[str, Any],
            Field(
                description="verl's own keys, dotted: {actor_rollout_ref.actor.strategy: fsdp2}. A "
                "key with a + is added, as on verl's command line."
            ),
        ] = {},  # noqa: B006  # the schema of the arguments reads it; nobody writes to it
    ) -> None:
        super().__init__(python, verl)

    def prepare(self, config: RunConfig, folder: Path, play: HostPlay) -> HostJob:
        """Write the job; returns verl's process."""
        remove_left(last_job(folder / "job.json").get("settings", {}).get(RAY_KEY))
        job = self.job(config, folder, play.model)
        settings = job["settings"]
        episodes, temporary = folder / EPISODES, None
        if "RAY_ADDRESS" not in os.environ:
            temporary = new_ray_folder()
            settings[RAY_KEY] = str(temporary)
            settings["+ray_kwargs.ray_init.address"] = "local"  # never another's cluster
            settings["+ray_kwargs.ray_init.include_dashboard"] = False
        settings["trainer.val_before_train"] = play.evaluate_first
        num_workers = settings[f"{ROLLOUT}.agent.num_workers"]
        job |= {
            **played(play, episodes),
            "num_workers": num_workers,
        }
        path, steps = folder / "job.json", folder / "steps.jsonl"
        atomic_write(path, json.dumps(job, indent=1))
        agents = [{"name": "ludus", "_target_": "ludus.backends.verl_side.loop.LudusLoop"}]
        atomic_write(folder / "agents.yaml", json.dumps(agents))
        environment = {
            **self.environment(config, path),
            "VERL_FILE_LOGGER_PATH": str(steps),
        }
        command = [self.python, "-m", "ludus.backends.verl_side.run", str(path)]
        return HostJob(command, environment, steps, episodes, folder / "verl.log", temporary)

    def settings(self, config: RunConfig) -> dict[str, Any]:
        """The recipe's values by the keys of verl's engine, FSDP or Megatron."""
        return {
            name: value
            for key, value in super().settings(config).items()
            if (name := self.own_name(key)) is not None
        }

    def own_name(self, key: str) -> str | None:
        """A key of FSDP's by its name in the engine; None where the engine has none."""
        if self.own.get(f"{ACTOR}.strategy") != "megatron":
            return key
        return MEGATRON.get(key, key)

    def job(self, config: RunConfig, folder: Path, model: Path) -> dict[str, Any]:
        """Returns verl's settings by dotted key."""
        on_cpu = config.model.device == "cpu"
        module = "pkg://ludus.backends.verl_side.loop"
        ours = {
            "data.custom_cls.path": module,
            "data.custom_cls.name": "TaskRows",
            "data.train_files": str(folder / "train.jsonl"),
            "data.val_files": str(folder / "heldout.jsonl"),
            "data.shuffle": False,
            "data.validation_shuffle": False,
            "data.dataloader_num_workers": 0,
            "trainer.default_local_dir": str(folder / "checkpoints"),
            "trainer.logger": ["file"],
            "trainer.project_name": "ludus",
            "trainer.resume_mode": "auto",
            "trainer.total_epochs": 1_000_000,
            f"{MODEL}.path": str(model),
            f"{ROLLOUT}.agent.agent_loop_config_path": str(folder / "agents.yaml"),
            f"{ROLLOUT}.agent.default_agent_loop": "ludus",
            f"{ROLLOUT}.calculate_log_probs": True,
            f"{ROLLOUT}.logprobs_mode": "processed_logprobs",
            f"{ACTOR}.checkpoint.save_contents": ["model", "optimizer", "extra", "hf_model"],
        }
        table = self.settings(config)
        if not table.get("algorithm.filter_groups.enable"):
            ours["trainer.v1.sampler.custom_sampler.path"] = module
            ours["trainer.v1.sampler.custom_sampler.name"] = "QuickBuffer"
        defaults = {**DEFAULTS, **(CPU_DEFAULTS if on_cpu else {})}
        if "RAY_ADDRESS" in os.environ:
            defaults = {k: v for k, v in defaults.items() if "ray_kwargs.ray_init." not in k}
        defaults = self.chosen(defaults)
        if on_cpu:  # a logical GPU for each worker
            num = int(self.own.get("trainer.n_gpus_per_node", 1))
            if "+ray_kwargs.ray_init.num_gpus" in defaults:
                defaults["+ray_kwargs.ray_init.num_gpus"] = num
        settings = {**defaults, **table, **self.own, **ours}
        return {"settings": settings, "device": config.model.device}

    def metrics(self, values: Mapping[str, float]) -> dict[str, float]:
        """A step's metrics; those without a name of ours are `verl/NAME`."""
        found = self.renamed(values)
        step, rollout = found.get("time/step_s", 0.0), found.get("time/rollout_s", 0.0)
        found["time/train_s"] = max(step - rollout, 0.0)
        return found
