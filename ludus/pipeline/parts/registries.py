"""Plug-in registry of each config key, and what a configuration names in them."""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ludus.backends import BACKENDS
from ludus.config.load import specs_at
from ludus.config.registry import Registry
from ludus.config.schema import RolloutConfig, RunConfig
from ludus.core.errors import ToolError
from ludus.core.sources import own_sources
from ludus.core.system.signals import run
from ludus.core.types import Spec
from ludus.envs import ENVS
from ludus.judges import JUDGES
from ludus.judges.base import check_all
from ludus.models import ARCHITECTURES, SAMPLERS, TOKENIZERS
from ludus.rollout.workflow import AGENTS
from ludus.tasks import READERS
from ludus.tasks.mixture import Part, settings_of
from ludus.telemetry.sinks import SINKS
from ludus.tools import TOOLS
from ludus.train import ALGORITHMS

REGISTRIES: dict[str, Registry[Any]] = {
    "backend": BACKENDS,
    "env": ENVS,
    "agent": AGENTS,
    "judge": JUDGES,
    "tasks.train": READERS,
    "tasks.heldout": READERS,
    "model.architecture": ARCHITECTURES,
    "model.tokenizer": TOKENIZERS,
    "rl.algorithm": ALGORITHMS,
    "sampler": SAMPLERS,
    "metrics": SINKS,
    "tools": TOOLS,
}


def parts_of(config: RunConfig) -> dict[str, Part]:
    """Returns the parts of the readers' mixtures, by name."""
    readers = {"tasks.heldout": config.tasks.heldout, "tasks.train": config.tasks.train}
    parts = (READERS.check(spec, where).get("parts") for where, spec in readers.items() if spec)
    return {
        name: part
        for found in parts
        if isinstance(found, Mapping)
        for name, part in found.items()
        if isinstance(part, Part)
    }


def check_judges(config: RunConfig) -> None:
    """Check the servers that the judges of a configuration need.

    Errors: ToolError, ConfigError with the place of a judge whose server does not answer.
    """
    specs = {place: spec for place, spec, _ in judges(config) if spec is not None}
    for place, spec in specs.items():
        try:
            run(check_all([JUDGES.build(spec, place)]))
        except ToolError as error:
            raise ToolError(f"{place}: {error}") from error


def judges(config: RunConfig) -> Iterator[tuple[str, Spec | None, RolloutConfig]]:
    """Yields the judge of each reader and part: its place, its spec, the rollout settings."""
    for where, reader in (
        ("tasks.train", config.tasks.train),
        ("tasks.heldout", config.tasks.heldout),
    ):
        args = READERS.check(reader, where) if reader else {}
        parts = args.get("parts") or {}
        for name, part in parts.items():
            place = f"{where}.args.parts.{name}.judge" if part.judge else "judge"
            yield place, part.judge or config.judge, settings_of(config.rollout, name)
        if reader and not parts:
            own = args.get("judge")
            yield f"{where}.args.judge" if own else "judge", own or config.judge, config.rollout


def plugin_files(config: RunConfig) -> dict[str, str]:
    """Returns the SHA-256 of the source files of each plug-in from outside of ludus.

    Keys are like `env my_env.py:Env`, and `env my_env.py:Env (rewards.py)` for a module of the user
    that the plug-in imports.
    """
    digests: dict[str, str] = {}
    for path, registry in REGISTRIES.items():
        for _, top in specs_at(config, path):
            for spec in with_parts(top, registry):
                target = registry.load(spec.name)
                if target.__module__.partition(".")[0] == "ludus":
                    continue
                with suppress(TypeError, OSError):  # no Python source
                    own = Path(str(inspect.getsourcefile(target))).resolve()
                    for source in own_sources(own):
                        place = f" ({os.path.relpath(source, own.parent)})" if source != own else ""
                        digest = hashlib.sha256(source.read_bytes()).hexdigest()
                        digests[f"{path} {spec.name}{place}"] = digest
    return digests


def with_parts(spec: Spec, registry: Registry[Any]) -> Iterator[Spec]:
    """Yields a plug-in's spec, and those of the same kind in its arguments: a mixture's parts."""
    yield spec
    for value in registry.check(spec).values():
        if isinstance(value, Mapping):
            yield from (part for part in value.values() if isinstance(part, Spec))
