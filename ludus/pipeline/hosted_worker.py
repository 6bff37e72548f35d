"""A run's collector in a worker of a host: the same tasks, environments, tools and judges."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ludus.backends.hosted import task_lines
from ludus.config.schema import RunConfig
from ludus.core.types import Spec, Task
from ludus.data.splits import Splits
from ludus.models.chat.tokenizers import load_tokenizer
from ludus.models.samplers.base import Sampler
from ludus.pipeline.build import make_collector, make_limits
from ludus.pipeline.parts.tokenizer import make_renderers
from ludus.rollout.collect import Collector
from ludus.store.folders import RunFolder
from ludus.store.settings import run_config
from ludus.tasks.readers import TaskList


def open_collector(
    job: Mapping[str, Any], sampler_of: Callable[[RunConfig, int], Sampler]
) -> tuple[RunConfig, Collector]:
    """Open the collector of a host's job (`backends.hosts.HostPlay`).

    Args:
        sampler_of: returns the host's sampler, given the number of the model's ids.
    """
    folder = RunFolder(Path(job["run"]))
    config = run_config(folder)
    env = None if job["env"] is None else Spec.model_validate(job["env"])
    config = config.model_copy(update={"env": env})
    splits = Splits(_tasks(job["tasks"]["train"]), _tasks(job["tasks"]["heldout"]))
    renderers = make_renderers(config, load_tokenizer(str(folder.tokenizer)))
    model = json.loads((Path(job["model"]) / "config.json").read_text(encoding="utf-8"))
    sampler = sampler_of(config, int(model["vocab_size"]))
    return config, make_collector(config, sampler, renderers, make_limits(config, splits))


def _tasks(path: str) -> TaskList:
    return TaskList(Task.model_validate_json(line) for line in task_lines(Path(path)))
