"""Settings without effect: each is refused, with what to change.

They are not refused in the schema, because stored configurations of old runs must stay readable.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from ludus.config.schema import EvaluateConfig, ModelConfig, RLConfig, RolloutConfig, RunConfig
from ludus.config.sections import MarkersConfig
from ludus.config.training import SFTConfig, SFTUntilConfig, last_measured
from ludus.core.errors import ConfigError
from ludus.core.types import Spec
from ludus.judges import JUDGES
from ludus.models import TOKENIZERS
from ludus.pipeline.monitoring import rl_end
from ludus.pipeline.parts.processes import obstacle
from ludus.pipeline.parts.registries import judges, with_parts
from ludus.train import ALGORITHMS

MARKED = ("answer", "math", "qa")
"""Judges that take the answer between markers."""

IGNORED_BY_VERIFY = ("path", "cache_gib")
"""Arguments of the in-process sampler."""


def without_effect(config: RunConfig) -> Iterator[str]:
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
    if (number := config.rollout.processes or 1) > 1 and (reason := obstacle(config)):
        yield f"rollout.processes: {number} is not possible: {reason}"
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
    if config.sft is not None and config.sft.until is not None:
        yield from _inert_until(config.sft, config.sft.until)
    if rl is None:
        for key in ("top_p", "top_k"):
            if getattr(config.rollout, key) != RolloutConfig.model_fields[key].default:
                yield (
                    f"rollout.{key}: nothing samples with it: `rl` is null, and evaluations sample "
                    "from the whole distribution: remove it"
                )
        return
    yield from _inert_rl(config, rl)


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


def _other_markers(config: RunConfig) -> Iterator[str]:
    """Yields a message for each judge that looks for the answer between others than the policy's
    markers: it would compare them with the answer."""
    for place, judge, settings in judges(config):
        wanted = settings.markers.answer
        if judge is None or settings.format != "code":
            continue
        for spec in with_parts(judge, JUDGES):
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


def _inert_until(sft: SFTConfig, until: SFTUntilConfig) -> Iterator[str]:
    last = last_measured(sft.steps, min(until.every, sft.steps))
    if until.every > sft.steps:
        yield (
            f"sft: `steps` is {sft.steps}, so SFT would be over before its first measurement "
            f"(`until.every` is {until.every}): sft.until.every={sft.steps}, or sft.until=null"
        )
    if until.min_steps > last:
        yield (
            f"sft: `steps` is {sft.steps} and `until.every` {until.every}, so no measurement comes "
            f"between step {last} and the end, and with `until.min_steps` {until.min_steps} "
            f"`until.patience` and `until.min_gain` would have no effect: "
            f"sft.until.min_steps={last}"
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
        return
    most = rl.most_steps(config.sft)
    if not 0 < config.evaluate.every < most:
        yield (
            f"rl.min_success_to_stop: no evaluation comes between steps: `evaluate.every` is "
            f"{config.evaluate.every}, and RL has at most {most} steps (`rl.steps`): set "
            "evaluate.every below that, or rl.min_success_to_stop to null"
        )


def _compares(algorithm: Spec) -> bool:
    """False for an algorithm that does not compare a group's episodes; one whose arguments are
    wrong, which is told elsewhere, is taken without them."""
    for given in (algorithm, Spec(name=algorithm.name)):
        with suppress(ConfigError):
            return bool(ALGORITHMS.build(given, "rl.algorithm").compares)
    return True
