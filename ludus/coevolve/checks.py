"""Checks of all derived configurations, before the first stage: an hour later is too late."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ludus.coevolve.roles import Roles, trains_curriculum
from ludus.config.load import check_specs
from ludus.config.schema import RunConfig
from ludus.core.errors import ConfigError
from ludus.core.types import Spec
from ludus.pipeline.parts.checks import check
from ludus.pipeline.parts.effects import equal_samples
from ludus.pipeline.parts.registries import REGISTRIES

_KEY = re.compile(r"^[a-z_]+(?:\.\w+)+|^[a-z_]+")
_NO_KEY = re.compile(r" is not (?:a key|an argument)\b")
_HINT = re.compile(r"did you mean ([a-z_]+(?:\.\w+)*)\?")
_REMEDY = re.compile(r" ((?:sft|rl)(?:\.\w+)+=)")
_READ_A_FILE = {"agentgym", "benchmark", "json"}
_SECTIONS = ("start", "curriculum", "executor")


def check_all(roles: Roles) -> None:
    """Refuse wrong keys, plug-ins and settings without effect in all runs and players.

    Nothing is written; models, and the problems of later stages, need not exist.

    Errors: ConfigError, a line a fault, each with its key in the recipe; MissingDependency.
    """
    faults: dict[str, None] = {}
    for section, attempt in _attempts(roles):
        try:
            attempt()
        except ConfigError as error:
            lines = str(error).splitlines()
            if section == "start" and "tasks" not in (roles.config.start or {}):
                lines = [line for line in lines if "tasks.train." not in line]  # the curriculum's
            placed = (_placed(line, section, roles) for line in lines)
            faults.update(dict.fromkeys(placed))
    if faults:
        raise ConfigError("\n".join(faults))


def _attempts(roles: Roles) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yields a section, and what refuses its faults."""
    if roles.config.start is not None:
        yield "start", lambda: check(roles.start())
        if not roles.storage.model("start").exists():  # later its data may be gone
            yield "start", lambda: _check_start_files(roles.start())
    yield "curriculum", lambda: _check_player(roles.proposing(1, 1))
    yield "executor", lambda: _check_player(roles.answering(0, 1))
    if trains_curriculum(roles.config):
        yield "curriculum", lambda: check(roles.training("curriculum", 1))
    yield "executor", lambda: check(roles.training("executor", 1))
    yield "executor", lambda: _check_evaluated(roles.solving(1, "evaluate"))
    yield "reward", roles.judge
    yield "reward", lambda: _check_answer_markers(roles)


def _check_player(config: RunConfig) -> None:
    check_specs(config, REGISTRIES)


def _check_evaluated(config: RunConfig) -> None:
    _check_player(config)
    if config.tasks.heldout is None:
        return
    faults = [*equal_samples(config.evaluate), *_missing(config.tasks.heldout, "tasks.heldout")]
    if faults:
        raise ConfigError("\n".join(faults))


def _check_answer_markers(roles: Roles) -> None:
    """Votes that look for an answer between other markers than the executor's read none of them."""
    own, rollout = roles.config.reward.get("answer_markers"), roles.answering(0, 1).rollout
    written = list(rollout.markers.answer)
    if own is not None and rollout.format == "code" and own != written:
        raise ConfigError(
            f"reward.answer_markers: {own}, but the executor writes its answers between those of "
            f"executor.rollout.markers.answer, {written}: remove reward.answer_markers, which then "
            "are the same"
        )


def _check_start_files(config: RunConfig) -> None:
    faults = _missing(config.tasks.train, "tasks.train")
    if (
        config.sft is not None
        and config.sft.data is not None
        and not Path(config.sft.data).exists()
    ):
        faults.append(f"sft.data: {config.sft.data} does not exist")
    if faults:
        raise ConfigError("\n".join(faults))


def _missing(reader: Spec, place: str) -> list[str]:
    """The fault of a reader whose file is absent: it would be read after an hour of training."""
    path = reader.args.get("path")
    if reader.name not in _READ_A_FILE or not isinstance(path, str) or Path(path).exists():
        return []
    return [f"{place}.args.path: {path} does not exist"]


def _placed(line: str, section: str, roles: Roles) -> str:
    """The fault with its key in the recipe: the role's section, or `shared` if the key is there."""
    if line.startswith(tuple(f"{name}." for name in (*_SECTIONS, "shared", "reward"))):
        name, _, line = line.partition(".")
        if name in ("shared", "reward"):
            return f"{name}.{line}"
        section = name
    match = _KEY.match(line)
    own = getattr(roles.config, section, None) or {}
    place = section
    if match and not _has(own, match[0]) and _has(roles.config.shared, match[0]):
        place = "shared"
    if _NO_KEY.search(line):  # the hint is a key too; that of a plug-in is a name
        line = _HINT.sub(rf"did you mean {place}.\1?", line)
    line = _REMEDY.sub(rf" {place}.\1", line)
    return f"{place}.{line}"


def _has(keys: Mapping[str, Any], dotted: str) -> bool:
    """True if the mapping has the key, or a plug-in above it."""
    value: Any = keys
    for part in dotted.split("."):
        if not isinstance(value, Mapping) or "name" in value:
            return True
        if part not in value:
            return False
        value = value[part]
    return True
