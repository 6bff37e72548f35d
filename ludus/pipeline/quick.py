"""Small versions of a recipe, to see that all its parts work here: minutes on a CPU.

config, notes = quick(config)       `ludus train RECIPE --quick-test`
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from ludus.config.schema import RunConfig
from ludus.config.training import last_measured
from ludus.core.errors import ConfigError

LIMITS: dict[str, dict[str, Any]] = {
    "sft": {"steps": 2, "episodes_per_step": 4},
    "rl": {"steps": 2, "groups_per_step": 2, "group_size": 2},
    "demonstrations": {"num_episodes": 64},
    "evaluate": {"num_tasks": 8, "samples_per_task": 2},
    "rollout": {"max_tokens_per_turn": 64, "max_turns": 4},
}
"""Largest values of a run's keys."""

FEWER: dict[str, dict[str, Any]] = {
    "demonstrations": {"num_episodes": 8},
    "evaluate": {"num_tasks": 4, "num_tasks_between": 4},
    "rollout": {"concurrency": 4},
}
"""Lower ones of a single run."""

TINY = {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32}
"""The model in place of a pretrained one."""

ON_A_CPU: dict[str, dict[str, Any]] = {
    "model": {"device": "cpu", "dtype": "float32", "tf32": False},
    "learner": {
        "dtype": "float32",
        "compile": False,
        "gradient_checkpointing": False,
        "master_weights": "float32",
    },
}
"""Values of a run on a CPU."""


def limited(section: Mapping[str, Any], limits: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns a run's keys with values of at most these."""
    result = dict(section)
    for name, most in limits.items():
        if isinstance(own := section.get(name), Mapping):
            small = {
                key: min(own[key], limit)
                for key, limit in most.items()
                if isinstance(own.get(key), int)
            }
            result[name] = {**own, **small}
    sft = result.get("sft") or {}
    if isinstance(until := sft.get("until"), Mapping) and "every" in until and "steps" in sft:
        steps = sft["steps"]
        every = min(until["every"], steps)
        least = min(until.get("min_steps", 0), last_measured(steps, every))
        result["sft"] = {**sft, "until": {**until, "every": every, "min_steps": least}}
    return result


def quick(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """Returns the recipe with small counts, named NAME-quick, and what differs from it: in words,
    then each key with both values.

    A pretrained model is replaced by a tiny one from scratch, with a tokenizer of its own: such a
    run tests the parts, and learns nothing.

    Errors: ConfigError for a recipe whose model cannot be replaced.
    """
    # Not as JSON, which turns infinite values into null before they are refused.
    data = limited(limited(config.model_dump(), LIMITS), FEWER)
    told = "a few steps and episodes"
    for name, values in ON_A_CPU.items():
        data[name] |= values
    if data["evaluate"]["num_tasks"] is None:
        data["evaluate"]["num_tasks"] = FEWER["evaluate"]["num_tasks"]
    if config.model.path is not None:
        told += f" of a tiny model from scratch in place of {config.model.path}"
        _from_scratch(data)
    if data["rl"] is not None:
        episodes = data["rl"]["groups_per_step"] * data["rl"]["group_size"]
        data["rl"]["minibatches"] = min(data["rl"]["minibatches"], episodes)
        data["rl"]["steps_per_unused_sft_step"] = 0.0
        data["rl"] |= {"min_success_to_stop": None, "min_signal": None}  # of more steps than these
    if data["sft"] is not None and data["sft"]["until"] is not None:
        until = data["sft"]["until"]
        until |= {"num_tasks": min(until["num_tasks"], 4), "samples_per_task": 1}
    data |= {"sampler": {"name": "in_process"}, "backend": {"name": "local"}}
    data |= {"mirror": None, "notify": [], "metrics": [], "traces": None}
    small = RunConfig.model_validate(data)
    changed = _changes(config.model_dump(mode="json"), small.model_dump(mode="json"))
    return small.model_copy(update={"name": f"{config.name}-quick"}), [told, *changed]


def _changes(old: Mapping[str, Any], new: Mapping[str, Any], inside: str = "") -> list[str]:
    """Lines `key: old -> new` of the keys that differ."""
    lines = []
    for key in dict.fromkeys((*old, *new)):
        one, other = old.get(key), new.get(key)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            lines += _changes(one, other, f"{inside}{key}.")
        elif one != other:
            lines.append(f"{inside}{key}: {_short(one)} -> {_short(other)}")
    return lines


def _short(value: Any) -> str:
    """A value in a word: of a plug-in its name, of other sections and of lists no content, which
    may have secrets."""
    if isinstance(value, Mapping):
        return str(value.get("name", "{...}"))
    if isinstance(value, list):
        return "[...]" if value else "[]"
    return value if isinstance(value, str) else json.dumps(value)


def _from_scratch(data: dict[str, Any]) -> None:
    """Replace the model, and those of the policies."""
    model = data["model"]
    model |= {"path": None, "chat_template": None}
    model |= {"architecture": {"name": "qwen3", "args": TINY}, "tokenizer": {"name": "bpe"}}
    if model["lora"] and model["lora"]["quantise"]:
        model["lora"]["quantise"] = None
    for policy in data["policies"].values():
        if isinstance(policy.get("model"), Mapping):
            policy["model"] = "same"


def without_stages(
    config: RunConfig, *, sft: bool, rl: bool, note: Callable[[str], object] = lambda _: None
) -> RunConfig:
    """Returns the recipe without its SFT (and demonstrations), or without its RL.

    Args:
        note: told of settings that have no effect without SFT, and are switched off.

    Errors: ConfigError where there is nothing to skip, or nothing is left to train.
    """
    for name, skipped, left in (("sft", sft, config.rl), ("rl", rl, config.sft)):
        if skipped and getattr(config, name) is None:
            raise ConfigError(f"--skip-{name}: the recipe has no `{name}`")
        if skipped and (left is None or (sft and rl)):
            raise ConfigError(f"--skip-{name}: nothing is left to train: `ludus evaluate` plays")
    data = config.model_dump()
    if sft:
        data |= {"sft": None, "demonstrations": None}
        for section, key, off in (
            ("rl", "steps_per_unused_sft_step", 0.0),
            ("evaluate", "before_sft", False),
        ):
            if data[section][key] != off:
                note(f"--skip-sft: {section}.{key} has no effect without SFT: it is off")
                data[section][key] = off
    if rl:
        data["rl"] = None
    return RunConfig.model_validate(data)
