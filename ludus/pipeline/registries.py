"""Which registry owns the plug-ins of which configuration key."""

from __future__ import annotations

from typing import Any

from ludus.config.registry import Registry
from ludus.envs import ENVS
from ludus.judges import JUDGES
from ludus.models import ARCHITECTURES, SAMPLERS, TOKENIZERS
from ludus.tasks import READERS
from ludus.telemetry.sinks import SINKS
from ludus.train import ALGORITHMS

REGISTRIES: dict[str, Registry[Any]] = {
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
