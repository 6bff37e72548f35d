"""Plug-in registry of each config key; checks of a config before a run starts."""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ludus.backends import BACKENDS
from ludus.config.load import check_specs, specs_at
from ludus.config.registry import Registry
from ludus.config.schema import EvaluateConfig, ModelConfig, RLConfig, RolloutConfig, RunConfig
from ludus.config.sections import MarkersConfig
from ludus.core.errors import ConfigError, ToolError, did_you_mean
from ludus.core.sources import own_sources
from ludus.core.system.signals import run
from ludus.core.types import Spec
from ludus.data.demonstrations import require_pool
from ludus.envs import ENVS
from ludus.judges import JUDGES
from ludus.judges.base import check_all
from ludus.loop.metrics import BY_PART
from ludus.models import ARCHITECTURES, SAMPLERS, TOKENIZERS
from ludus.pipeline.monitoring import rl_end
from ludus.pipeline.monitoring.notify import check_urls
from ludus.rollout.agent_tools import check_agent_tools
from ludus.rollout.workflow import AGENTS, Agent
from ludus.store.mirror.remote import Remote
from ludus.tasks import READERS
from ludus.tasks.mixture import Part, settings_of
from ludus.telemetry.sinks import SINKS
from ludus.telemetry.span_export import require_otel
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

MARKED = ("answer", "math", "qa")
"""Judges that take the answer between markers."""

IGNORED_BY_VERIFY = ("path", "cache_gib")
"""Arguments of the in-process sampler."""

OUTCOMES = {"rollout/reward", "rollout/success", "rollout/groups_with_signal", "rollout/turns"}
"""Metrics of an RL step's rollouts that `checkpoint.metric` may name."""


def check(config: RunConfig) -> None:
    """Refuse unknown plug-ins, wrong arguments, absent packages, and settings without effect.

    Builds environment, agent, judge and algorithm once, because they may refuse values that fit
    their signatures.
    """
    try:
        check_specs(config, REGISTRIES)
    except ConfigError as error:
        raise ConfigError("\n".join([str(error), *_found_without_effect(config)])) from error
    if config.demonstrations is not None:
        require_pool()
    if config.mirror is not None:
        Remote(config.mirror)
    check_urls(config.notify)
    if config.traces is not None:
        require_otel()
    _check_distribution(config)
    faults = list(_without_effect(config))
    if config.rl is not None:  # told together with what has no effect
        try:
            ALGORITHMS.build(config.rl.algorithm, "rl.algorithm")
        except ConfigError as error:
            faults.append(str(error))
    if config.env is not None:
        try:
            parts = ENVS.build(config.env, "env").members()
        except AttributeError as error:
            raise ConfigError(
                f"env: {config.env.name!r} is not an environment: derive the class from "
                "ludus.envs.base.Env"
            ) from error
    else:
        parts = {}
    names = {*parts, *parts_of(config)}
    _check_parts(config, names)
    if config.agent is not None:
        check_agent_tools(Agent.build(config.agent).play, bool(config.tools))
    if config.judge is not None:
        JUDGES.build(config.judge, "judge")
    faults += _unknown_metric(config, names)
    if faults:
        raise ConfigError("\n".join(faults))


def check_judges(config: RunConfig) -> None:
    """Check the servers that the judges of a configuration need.

    Errors: ToolError, ConfigError with the place of a judge whose server does not answer.
    """
    specs = {place: spec for place, spec, _ in _judges(config) if spec is not None}
    for place, spec in specs.items():
        try:
            run(check_all([JUDGES.build(spec, place)]))
        except ToolError as error:
            raise ToolError(f"{place}: {error}") from error


def plugin_files(config: RunConfig) -> dict[str, str]:
    """Returns the SHA-256 of the source files of each plug-in from outside of ludus.

    Keys are like `env my_env.py:Env`, and `env my_env.py:Env (rewards.py)` for a module of the user
    that the plug-in imports.
    """
    digests: dict[str, str] = {}
    for path, registry in REGISTRIES.items():
        for _, top in specs_at(config, path):
            for spec in _with_parts(top, registry):
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


def _with_parts(spec: Spec, registry: Registry[Any]) -> Iterator[Spec]:
    """Yields a plug-in's spec, and those of the same kind in its arguments: a mixture's parts."""
    yield spec
    for value in registry.check(spec).values():
        if isinstance(value, Mapping):
            yield from (part for part in value.values() if isinstance(part, Spec))


def equal_samples(
    settings: EvaluateConfig,
    samples: str = "evaluate.samples_per_task",
    temperature: str = "evaluate.temperature",
) -> Iterator[str]:
    """Yields a message for several samples of a greedy policy, with the names of the settings."""
    if settings.samples_per_task > 1 and settings.temperature == 0:
        yield (
            f"{samples}: {settings.samples_per_task} episodes of each task are equal at "
            f"{temperature} 0 (greedy): set a temperature above 0, or 1 sample"
        )


def _found_without_effect(config: RunConfig) -> list[str]:
    """The messages of `_without_effect` up to a plug-in that cannot be read."""
    found = list[str]()
    with suppress(ConfigError):
        found.extend(_without_effect(config))
    return found


def _without_effect(config: RunConfig) -> Iterator[str]:
    """Yields a message for each setting that would have no effect in this configuration.

    Not in the schema, because stored configurations of old runs must stay readable. What an
    override of one key leaves over is allowed: `rl=null`, `evaluate.every=0`.
    """
    rl = config.rl
    if rl is None and config.sft is None:
        yield (
            "sft, rl: both are null, so nothing is trained: set one of them. `ludus evaluate` "
            "evaluates a model, `ludus generate-data` writes an expert's episodes"
        )
    yield from equal_samples(config.evaluate)
    if config.verify and (keys := [key for key in IGNORED_BY_VERIFY if key in config.sampler.args]):
        yield (
            f"{', '.join(f'sampler.args.{key}' for key in keys)}: `verify` samples with `exact`, "
            "which ignores them: remove them, or set verify to false"
        )
    yield from _unmeasured(config)
    if config.evaluate.before_sft and config.sft is None:
        yield (
            "evaluate.before_sft: sft is null, and the evaluation before RL is that of the start: "
            "set it to false"
        )
    settings, defaults = config.rollout, RolloutConfig()
    if not config.tools and settings.tool_calls != defaults.tool_calls:
        yield "rollout.tool_calls: there are no tools to call: set `tools`, or remove it"
    if settings.format != "code" and settings.markers != defaults.markers:
        yield (
            f"rollout.markers: the format {settings.format} has no markers: set rollout.format to "
            "code, or remove it"
        )
    for name, part in settings.parts.items():
        if part.markers is not None and (part.format or settings.format) != "code":
            yield (
                f"rollout.parts.{name}.markers: the format {part.format or settings.format} has no "
                f"markers: set rollout.parts.{name}.format to code, or remove them"
            )
    yield from dict.fromkeys(_other_markers(config))
    if config.sft and config.sft.data and config.demonstrations:
        yield (
            "demonstrations: sft.data replaces them, so they would be generated for nothing: set "
            "demonstrations to null, or remove sft.data"
        )
    elif config.demonstrations and not config.sft and not _trains_tokenizer(config.model):
        yield (
            "demonstrations: nothing reads them, because sft is null and the tokenizer is not "
            "trained: set demonstrations to null"
        )
    if rl is None:
        for key in ("top_p", "top_k"):
            if getattr(config.rollout, key) != RolloutConfig.model_fields[key].default:
                yield (
                    f"rollout.{key}: nothing samples with it: `rl` is null, and evaluations sample "
                    "from the whole distribution: remove it"
                )
        return
    yield from _inert_rl(config, rl)


def _other_markers(config: RunConfig) -> Iterator[str]:
    """Yields a message for each judge that looks for the answer between others than the policy's
    markers: it would compare them with the answer."""
    for place, judge, settings in _judges(config):
        wanted = settings.markers.answer
        if judge is None or settings.format != "code":
            continue
        for spec in _with_parts(judge, JUDGES):
            read = tuple(spec.args.get("markers", MarkersConfig().answer))
            if spec.name == "math" and spec.args.get("extract") == "boxed":
                continue
            if spec.name in MARKED and read != wanted:
                yield (
                    f"{place}: {spec.name} takes the answer between {read[0]} and {read[1]}, and "
                    f"the policy writes it between {wanted[0]} and {wanted[1]} "
                    f"(`markers.answer`): set the judge's args.markers to [{wanted[0]!r}, "
                    f"{wanted[1]!r}]"
                )


def _judges(config: RunConfig) -> Iterator[tuple[str, Spec | None, RolloutConfig]]:
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


def _trains_tokenizer(model: ModelConfig) -> bool:
    return isinstance(model.tokenizer, Spec) or model.tokenizer in TOKENIZERS.names()


def _unmeasured(config: RunConfig) -> Iterator[str]:
    """Yields a message for settings of evaluations without tasks to evaluate on."""
    settings, defaults = config.evaluate, EvaluateConfig()
    if config.tasks.heldout is not None or "heldout" in config.tasks.model_fields_set:
        return  # an explicit null switches evaluations off
    periodic = {"every", "num_tasks_between"}
    ignored = set() if config.rl and settings.every else periodic
    keys = [
        f"evaluate.{key}"
        for key in EvaluateConfig.model_fields
        if key not in ignored and getattr(settings, key) != getattr(defaults, key)
    ]
    if keys:
        yield (
            f"{', '.join(keys)}: there are no held-out tasks to evaluate on: set tasks.heldout, to "
            "null to evaluate nothing"
        )


def _inert_rl(config: RunConfig, rl: RLConfig) -> Iterator[str]:
    if rl.algorithm.name == "sft":
        near = ", ".join(name for name in ALGORITHMS.names() if name != "sft")
        yield (
            "rl.algorithm: sft imitates given conversations, it does not learn from rewards: "
            f"configure the stage `sft`, and for `rl` an algorithm of: {near}"
        )
    if config.rollout.temperature == 0:
        yield (
            "rollout.temperature: 0 is greedy: the episodes of a task are equal, so `rl` learns "
            "nothing from them: set a temperature above 0, e.g. 1.0"
        )
    if rl.minibatches > rl.groups_per_step * rl.group_size:
        yield (
            f"rl.minibatches: {rl.minibatches} exceed the {rl.groups_per_step * rl.group_size} "
            "episodes of a step (rl.groups_per_step * rl.group_size): at most that number"
        )
    ends = rl.min_signal is not None
    if ends and not _compares(rl.algorithm):
        yield (
            f"rl.min_signal has no effect with {rl.algorithm.name}, which does not compare the "
            "episodes of a group: set it to null"
        )
    elif ends and not rl_end.can_end(rl, config.sft):
        yield (
            f"rl.min_signal has no effect: it compares {rl_end.WINDOW} steps with later ones, and "
            f"RL has {rl.steps} (`rl.steps`): rl.min_signal=null, or more steps"
        )
    if ends and config.tasks.curriculum is not None:
        yield (
            "rl.min_signal: a new tier of tasks.curriculum may begin without a signal: set it to "
            "null"
        )
    if rl.min_success_to_stop is None:
        return
    if config.tasks.heldout is None:
        yield "rl.min_success_to_stop: there are no tasks to evaluate on: set tasks.heldout"
    elif not config.evaluate.every or (
        config.evaluate.every >= rl.steps and not rl.steps_per_unused_sft_step
    ):
        yield (
            f"rl.min_success_to_stop: no evaluation comes between steps (evaluate.every is "
            f"{config.evaluate.every}, rl.steps {rl.steps}): set evaluate.every to a number from "
            "1 to rl.steps - 1, or rl.min_success_to_stop to null"
        )


def _compares(algorithm: Spec) -> bool:
    """False for an algorithm that does not compare a group's episodes; one whose arguments are
    wrong, which is told elsewhere, is taken without them."""
    for given in (algorithm, Spec(name=algorithm.name)):
        with suppress(ConfigError):
            return bool(ALGORITHMS.build(given, "rl.algorithm").compares)
    return True


def _unknown_metric(config: RunConfig, parts: Collection[str]) -> Iterator[str]:
    """Yields a message if no step or evaluation of this configuration writes the metric."""
    name = config.checkpoint.metric
    if name is None:
        return
    known: set[str] = set()
    if config.tasks.heldout is not None:
        known |= {"evaluate/success", "evaluate/score", *(f"evaluate/success_{p}" for p in parts)}
    if config.rl is not None:
        known |= OUTCOMES | {f"{outcome}_{p}" for outcome in OUTCOMES & BY_PART for p in parts}
    if name in known:
        return
    if name.startswith("evaluate/") and config.tasks.heldout is None:
        yield (
            f"checkpoint.metric: {name} is never measured, because there are no held-out tasks: "
            "set tasks.heldout, or checkpoint.metric to null"
        )
    else:
        yield (
            f"checkpoint.metric: {name!r} is not a measure of the policy that this configuration "
            f"writes{did_you_mean(name, known)}"
        )


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


def _check_parts(config: RunConfig, parts: Collection[str]) -> None:
    """Refuse settings for parts that no mixture has, and two turn limits of one part."""
    limit, horizon = config.rollout.max_turns, config.rl.horizon if config.rl else None
    own = config.rollout.parts
    by_part = {"rollout.max_turns": limit, "rl.horizon": horizon, "rollout.parts": own}
    for key, setting in by_part.items():
        for name in setting if isinstance(setting, dict) else ():
            if name not in parts:
                raise ConfigError(
                    f"{key}.{name}: {name!r} is no part of a mixture{did_you_mean(name, parts)}"
                )
    for key, setting in {"rollout.max_turns": limit, "rl.horizon": horizon}.items():
        for name, part in own.items():
            whole = key == "rl.horizon" and isinstance(setting, list)
            if part.max_turns and (whole or (isinstance(setting, dict) and name in setting)):
                raise ConfigError(
                    f"rollout.parts.{name}.max_turns: {key} limits the same episodes: remove one"
                )
    if isinstance(horizon, dict) and isinstance(limit, int):
        raise ConfigError(
            "rollout.max_turns must be by environment, or null, where rl.horizon is by environment"
        )


def _check_distribution(config: RunConfig) -> None:
    """Refuse top_p and top_k in RL: sampler and learner must use the same distribution.

    This check is not in the schema because stored configs of old runs must stay readable.
    """
    if config.rl is None:
        return
    off = {"top_p": 1.0, "top_k": 0}
    values = {key: getattr(config.rollout, key) for key in off}
    faults = [
        f"rollout.{key} must be {off[key]:g} where `rl` trains, got {values[key]}: the sampler's "
        "log-probabilities would belong to the cut distribution, the learner's to the full one"
        for key in off
        if values[key] != off[key]
    ]
    if faults:
        remedy = "remove it, or lower rollout.temperature for fewer unlikely tokens"
        raise ConfigError("\n".join(f"{fault} ({remedy})" for fault in faults))
