"""Trinity's side of a run, in the process of `ludus train`: settings, command, metrics.

<run>/trinity/
    job.json                 Trinity's settings, and what the runners need
    train.jsonl, heldout.jsonl   tasks in the order of training; of the evaluations between steps
    tasksets/SPLIT/          what Trinity reads of them: the number of each
    model/                   the weights that RL starts from
    checkpoints/global_step_N/   Trinity's own, and what its parts remember
    trinity.log              output of all its processes
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
from ludus.backends.hosted import EPISODES, task_lines
from ludus.backends.hosts import HostJob, HostPlay
from ludus.backends.trinity.keys import CPU_DEFAULTS, DEFAULTS, OWN, ROLLOUT, RUNNERS, TABLE
from ludus.backends.trinity_side.cpu import CHANGES
from ludus.config.schema import RunConfig
from ludus.core.files import atomic_write

SIDE = "ludus.backends.trinity_side"
WORKFLOW = f"{SIDE}.workflow.LudusWorkflow"
FOREVER_S = 10**8
"""In place of Trinity's limits of time: episodes have their own."""

_NAMES = {
    "actor/pg_loss": "train/loss",
    "actor/grad_norm": "train/grad_norm",
    "actor/lr": "train/lr",
    "actor/entropy_loss": "train/entropy",
    "actor/ppo_kl": "train/kl",
    "actor/pg_clipfrac": "train/clip_fraction",
    "actor/kl_loss": "train/reference_kl",
    "time/read_experience": "time/rollout_s",
    "time/train_step": "time/train_s",
}


class TrinityHost(ForeignHost):
    """Trinity-RFT: its explorer samples with vLLM, its trainer is that of verl, on FSDP.

    Args:
        python: interpreter of Trinity's environment; default: $LUDUS_TRINITY_PYTHON, else
            .venv-trinity/bin/python.
        trinity: Trinity's own keys and values.
    """

    name: ClassVar[str] = "trinity"
    table = TABLE
    tied = OWN
    side = f"{SIDE}.run"
    cpu: ClassVar[Mapping[str, str]] = {
        **CPU_SAMPLER,
        "LUDUS_TRINITY_CPU": ",".join(CHANGES),
        "VLLM_PLUGINS": "",  # Trinity's changes a parser of tool calls that vLLM 0.31 lacks
    }
    names = _NAMES

    def __init__(
        self,
        python: Annotated[
            str | None,
            Field(
                min_length=1,
                description="The interpreter with Trinity; null: $LUDUS_TRINITY_PYTHON, else "
                ".venv-trinity/bin/python, of `make trinity`.",
            ),
        ] = None,
        trinity: Annotated[
            dict[str, Any],
            Field(
                description="Trinity's own keys, dotted: {explorer.runner_per_model: 2}. Those "
                "under trainer.trainer_config are verl's."
            ),
        ] = {},  # noqa: B006  # the schema of the arguments reads it; nobody writes to it
    ) -> None:
        super().__init__(python, trinity)

    def prepare(self, config: RunConfig, folder: Path, play: HostPlay) -> HostJob:
        """Write the job; returns Trinity's process."""
        path = folder / "job.json"
        remove_left(last_job(path).get("ray", {}).get("_temp_dir"))
        episodes, steps = folder / EPISODES, folder / "steps.jsonl"
        for split, tasks in (("train", play.train), ("heldout", play.heldout)):
            self._write_taskset(folder, split, tasks)
        temporary = None if "RAY_ADDRESS" in os.environ else new_ray_folder()
        job = self.job(config, folder, play.model)
        job["settings"]["ray_namespace"] = f"ludus-{play.run.name}"
        job |= {
            **played(play, episodes),
            "steps": str(steps),
            "num_workers": min(job["settings"][RUNNERS], job["settings"]["buffer.batch_size"]),
            "ray": self._ray(config, temporary),
            "address": str(folder / "ray_address"),
            "done": self.steps_done(folder),
            "evaluate_first": play.evaluate_first,
        }
        atomic_write(path, json.dumps(job, indent=1))
        command = [self.python, "-m", self.side, str(path)]
        environment = self.environment(config, path)
        return HostJob(command, environment, steps, episodes, folder / "trinity.log", temporary)

    def _write_taskset(self, folder: Path, split: str, tasks: Path) -> None:
        """Write what Trinity reads: one line for each task, with its place in the split."""
        count = len(task_lines(tasks))
        own = folder / "tasksets" / split
        own.mkdir(parents=True, exist_ok=True)
        lines = (json.dumps({"split": split, "place": place}) + "\n" for place in range(count))
        atomic_write(own / "tasks.jsonl", "".join(lines))

    def _ray(self, config: RunConfig, temporary: Path | None) -> dict[str, Any]:
        """The arguments of `ray.init`."""
        if temporary is None:
            return {"address": os.environ["RAY_ADDRESS"]}
        own = {"address": "local", "_temp_dir": str(temporary), "include_dashboard": False}
        if config.model.device == "cpu":  # logical: Trinity places its workers on them (`cpu.py`)
            own |= {"num_gpus": 2, "num_cpus": 16}
        return own

    def job(self, config: RunConfig, folder: Path, model: Path) -> dict[str, Any]:
        """Returns Trinity's settings by dotted key."""
        on_cpu = config.model.device == "cpu"

        def taskset(split: str) -> dict[str, Any]:
            path = str(folder / "tasksets" / split)
            return {"name": split, "path": path, "default_workflow_type": WORKFLOW}

        heldout = config.evaluate.every and config.tasks.heldout is not None
        ours = {
            "mode": "both",
            "checkpoint_root_dir": str(folder),
            "project": ".",
            "name": "checkpoints",
            "ray_namespace": "ludus",
            "continue_from_checkpoint": True,
            "ignore_validator_suggestions": True,
            "model.model_path": str(model),
            "model.enable_prompt_truncation": False,
            "cluster.node_num": 1,
            "cluster.gpu_per_node": 2,
            "algorithm.sample_strategy": f"{SIDE}.buffer.WholeStep",
            "algorithm.kl_penalty_fn": "none",
            "algorithm.bypass_old_logprobs": True,
            "buffer.explorer_input.taskset": taskset("train"),
            "buffer.explorer_input.eval_tasksets": [taskset("heldout")] if heldout else [],
            "buffer.trainer_input.experience_buffer": {
                "name": "steps",
                "storage_type": "queue",
                "max_read_timeout": FOREVER_S,
            },
            "data_processor.experience_pipeline.save_input": False,
            "data_processor.experience_pipeline.operators": [{"name": f"{SIDE}.buffer.CountRows"}],
            "explorer.max_retry_times": 0,  # ludus' retries an episode by itself
            "explorer.max_timeout": FOREVER_S,
            f"{ROLLOUT}.engine_num": 1,
            f"{ROLLOUT}.tensor_parallel_size": 1,
            "trainer.balance_batch": False,
            "trainer.save_hf_checkpoint": "last",
            "synchronizer.sync_method": "memory" if on_cpu else "nccl",
            "synchronizer.sync_style": "fixed",
            "synchronizer.sync_interval": 1,
            "synchronizer.sync_timeout": FOREVER_S,
            "monitor.monitor_type": f"{SIDE}.monitor.StepsMonitor",
        }
        defaults = self.chosen({**DEFAULTS, **(CPU_DEFAULTS if on_cpu else {})})
        settings = {**defaults, **TABLE.settings(config), **self.own, **ours}
        return {"settings": settings, "device": config.model.device}

    def environment(self, config: RunConfig, job: Path) -> dict[str, str]:
        """The environment variables of Trinity's processes."""
        found = super().environment(config, job)
        if config.model.device == "cpu":  # each Python process starts with `sitecustomize`
            start = Path(__file__).parents[1] / "trinity_side" / "start"
            found["PYTHONPATH"] = os.pathsep.join([str(start), found["PYTHONPATH"]])
        return {
            **found,
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_CACHE": str(job.parent / "cache"),
            "TRINITY_PLUGIN_DIRS": str(job.parent),  # else it looks for plug-ins in itself
        }

    def metrics(self, values: Mapping[str, float]) -> dict[str, float]:
        """A step's metrics; those without a name of ours are `trinity/NAME`."""
        found = self.renamed(values)
        parts = ("time/rollout_s", "time/train_s", "trinity/time/sync_weight")
        found["time/step_s"] = sum(found.get(name, 0.0) for name in parts)
        return found
