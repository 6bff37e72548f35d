"""Evaluate models on the same held-out tasks: runs, Hugging Face folders, endpoints.

    babyai-tiny-1, babyai-tiny-1/best        a run, a run's checkpoint
    hf/my-model                              a Hugging Face folder with a tokenizer
    my-model@http://127.0.0.1:8000/v1        a model of an OpenAI-compatible endpoint

Tasks, environment, judge and rollout settings are those of the recipe, else of the first run.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from rich.console import Console

from ludus.config.load import load_config
from ludus.config.messages import option_faults
from ludus.config.schema import EvaluateConfig, ModelConfig, RunConfig
from ludus.core.errors import ConfigError, LudusError, SamplerError
from ludus.core.system.signals import run as run_async
from ludus.core.types import Group, Message, Task, Trajectory
from ludus.data.splits import Splits, read_splits
from ludus.evaluate import compare, render_comparison, render_evaluation
from ludus.evaluate.episodes import EpisodeFile
from ludus.evaluate.results import Evaluation
from ludus.models.chat.tokenizers import load_tokenizer
from ludus.models.samplers.base import SamplingParams
from ludus.pipeline.build import build, make_collector, make_limits
from ludus.pipeline.evaluation.evaluate import play_heldout
from ludus.pipeline.parts.effects import equal_samples
from ludus.pipeline.parts.registries import check_judges
from ludus.pipeline.parts.tokenizer import check_functions
from ludus.rollout.collect import Collector
from ludus.store.folders import RunFolder
from ludus.store.settings import run_config
from ludus.tools.limits.limiter import Limits
from ludus.train.checkpoint.listing import CheckpointInfo
from ludus.train.checkpoint.policy import find_checkpoint, find_run_checkpoint, run_tokenizer

API_KEY = "LUDUS_API_KEY"
"""Environment variable with the key of the endpoints."""

OPTIONS = {
    "num_tasks": "--num-tasks",
    "samples_per_task": "--samples",
    "temperature": "--temperature",
}
"""The options of `ludus evaluate`, by the key of `evaluate` that each of them sets."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


@dataclass(frozen=True, slots=True)
class RunSubject:
    """A checkpoint of a run."""

    folder: RunFolder
    info: CheckpointInfo

    @property
    def name(self) -> str:
        return f"{self.folder.id}/{self.info.path.name}"


@dataclass(frozen=True, slots=True)
class FolderSubject:
    """A Hugging Face folder."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path)


@dataclass(frozen=True, slots=True)
class EndpointSubject:
    """A model of an OpenAI-compatible endpoint; `url` goes up to and including `/v1`."""

    model: str
    url: str

    @property
    def name(self) -> str:
        return f"{self.model}@{self.url}"


Subject = RunSubject | FolderSubject | EndpointSubject
Recorder = Callable[[Trajectory], None] | None
Play = Callable[[Sequence[Task], EvaluateConfig, str], Awaitable[tuple[list[Group], Evaluation]]]
"""Plays tasks with a subject's model; the text is the label of the result."""
T = TypeVar("T")


def find_subject(text: str, runs_dir: str, beside: Subject | None = None) -> Subject:
    """Returns the subject that `text` names; see the top of this file.

    With a run `beside` it, `text` may be the name of one of that run's checkpoints.

    Errors: ConfigError, CheckpointError.
    """
    model, at, url = text.partition("@")
    if at and url.startswith(("http://", "https://")):
        if not model:
            raise ConfigError(f"{text}: name the endpoint's model: MODEL@{url}")
        return EndpointSubject(model, url)
    if text.startswith(("http://", "https://")):
        raise ConfigError(f"{text}: name the endpoint's model: MODEL@{text}")
    path = Path(text).expanduser()
    if (path / "config.json").is_file():
        if not any((path / name).is_file() for name in TOKENIZER_FILES):
            raise ConfigError(f"{text} holds no tokenizer ({', '.join(TOKENIZER_FILES)})")
        return FolderSubject(path)
    if (path / "adapter_config.json").is_file():
        raise ConfigError(f"{text} holds adapters without their base model: merge them first")
    try:
        folder, name = find_run_checkpoint(runs_dir, text)
    except ConfigError as error:
        if isinstance(beside, RunSubject):
            return RunSubject(beside.folder, find_checkpoint(beside.folder, text))
        raise ConfigError(
            f"{error}. Name a run (RUN or RUN/CHECKPOINT), a Hugging Face folder with a "
            "config.json, or an endpoint's model (MODEL@URL)"
        ) from None
    return RunSubject(folder, find_checkpoint(folder, name))


def evaluate_subjects(
    subjects: Sequence[Subject],
    recipe: RunConfig | None = None,
    *,
    num_tasks: int | None,
    samples: int,
    temperature: float,
    out: Path | None = None,
) -> list[Evaluation]:
    """Evaluate each subject on the held-out tasks; print the results; compare two of them.

    `recipe` names the tasks, else the first run among the subjects does. `out`: a new file for the
    episodes; without it, nothing is written.

    Errors: ConfigError; DataError where no episode could be scored; LudusError where an endpoint
    cannot be reached.
    """
    runs = [subject for subject in subjects if isinstance(subject, RunSubject)]
    origin = None
    if recipe is None:
        if not runs:
            raise ConfigError(
                f"{subjects[0].name} is no run, so nothing names the held-out tasks and their "
                "environment: give a recipe that does, e.g. --recipe babyai-tiny"
            )
        origin = runs[0].folder
        recipe = run_config(origin)
    options = {"num_tasks": num_tasks, "samples_per_task": samples, "temperature": temperature}
    settings = _with_options(recipe.evaluate, options).model_dump()
    config = derived(recipe, evaluate=settings, sft=None, rl=None, demonstrations=None)
    splits = read_splits(config, origin)
    if not splits.heldout:
        where = f"run {origin.id}" if origin else "the recipe"
        raise ConfigError(f"{where} has no held-out tasks: tasks.heldout is null")
    same_run = len(runs) == len(subjects) and len({run.folder.id for run in runs}) == 1
    console = Console()
    results: list[Evaluation] = []
    urls = [subject.url for subject in subjects if isinstance(subject, EndpointSubject)]
    same = len(subjects) == 2 and subjects[0] == subjects[1]

    async def heldout(play: Play) -> Evaluation:
        return (await play(splits.heldout, config.evaluate, "evaluate"))[1]

    with EpisodeFile(out) if out else nullcontext() as file:
        for subject in subjects[:1] if same else subjects:
            recorder = file.recorder(subject.name, splits.heldout) if file else None
            result = play_subject(subject, config, splits, heldout, urls=urls, on_episode=recorder)
            label = runs[len(results)].info.path.name if same_run else subject.name
            results.append(result.model_copy(update={"label": label}))
            console.print(render_evaluation(results[-1]))
    if len(results) == 2:
        console.print(render_comparison(compare(*results)))
    if same:
        console.print(f"{subjects[0].name} is both models: nothing to compare", markup=False)
    return results


def _with_options(settings: EvaluateConfig, options: Mapping[str, Any]) -> EvaluateConfig:
    """Returns the settings with the command's options. Errors: ConfigError names the option."""
    try:
        changed = EvaluateConfig(**{**settings.model_dump(), **options})
    except ValidationError as error:
        raise ConfigError(option_faults(error, EvaluateConfig, OPTIONS)) from None
    if faults := list(equal_samples(changed, OPTIONS["samples_per_task"], OPTIONS["temperature"])):
        raise ConfigError(faults[0])
    return changed


def play_subject(
    subject: Subject,
    config: RunConfig,
    splits: Splits,
    playing: Callable[[Play], Awaitable[T]],
    *,
    urls: Sequence[str] = (),
    on_episode: Recorder = None,
) -> T:
    """Build the model of a subject, and return the result of `playing`, which plays tasks with it.

    Args:
        splits: all tasks that `playing` may play.
        urls: the endpoints of all subjects, which `limits` may name.
        on_episode: receives each finished trajectory.

    Errors: ConfigError, CheckpointError; LudusError where an endpoint cannot be reached.
    """
    check_judges(config)
    if isinstance(subject, EndpointSubject):
        check_functions(config, splits.heldout)
        limits = make_limits(config, splits, urls)
        return run_async(_play_endpoint(subject, config, limits, on_episode, playing))
    if isinstance(subject, RunSubject):
        own = run_config(subject.folder)
        config = derived(config, model=own.model.model_dump(), seed=own.seed)
        tokenizer = run_tokenizer(subject.folder)
        run = build(
            config, subject.folder, splits, tokenizer, on_episode=on_episode, endpoints=urls
        )
        with closing(run.backend):
            run.backend.load_weights(subject.info.path)
            version = run.backend.sampler.policy_version
            return run_async(_play(run.collector, config, playing, lambda _: version))
    shared = config.model.model_dump(include={"context_length", "dtype", "device", "thinking"})
    config = derived(config, model=ModelConfig(path=str(subject.path), **shared).model_dump())
    with tempfile.TemporaryDirectory(prefix="ludus-evaluate-") as path:
        tokenizer = load_tokenizer(str(subject.path))
        folder = RunFolder(Path(path))
        run = build(config, folder, splits, tokenizer, on_episode=on_episode, endpoints=urls)
        with closing(run.backend):
            return run_async(_play(run.collector, config, playing, lambda _: None))


async def _play(
    collector: Collector,
    config: RunConfig,
    playing: Callable[[Play], Awaitable[T]],
    version: Callable[[Sequence[Group]], int | None],
) -> T:
    """Run `playing`, whose results carry the policy version, and close the collector."""

    async def play(
        tasks: Sequence[Task], settings: EvaluateConfig, label: str
    ) -> tuple[list[Group], Evaluation]:
        groups, result = await play_heldout(collector, tasks, config.env, settings, label)
        return groups, result.model_copy(update={"policy_version": version(groups)})

    try:
        return await playing(play)
    finally:
        await collector.close()


async def _play_endpoint(
    subject: EndpointSubject,
    config: RunConfig,
    limits: Limits,
    on_episode: Recorder,
    playing: Callable[[Play], Awaitable[T]],
) -> T:
    from ludus.models.endpoint.client import Endpoint

    key = os.environ.get(API_KEY) or None
    async with Endpoint(subject.url, subject.model, key, limits=limits) as endpoint:
        await endpoint.check()
        try:  # an endpoint that is down would fail every episode, slowly
            await endpoint.chat([Message(role="user", content="Hello")], SamplingParams(1))
        except SamplerError as error:
            raise LudusError(f"{subject.name} cannot be evaluated: {error}") from None
        collector = make_collector(
            config, None, None, limits, endpoint=endpoint, on_episode=on_episode
        )
        return await _play(collector, config, playing, _version)


def _version(groups: Sequence[Group]) -> int | None:
    """The one policy version that an endpoint named for all turns; None: none, or several."""
    segments = (s for g in groups for t in g.trajectories for s in t.segments if s.sampled)
    versions = {v for s in segments for v in (s.policy_version, *(v for v, _ in s.runs))}
    return versions.pop() if len(versions) == 1 else None


def derived(config: RunConfig, **changes: Any) -> RunConfig:
    """Returns the configuration with sections replaced, validated. Errors: ConfigError."""
    return load_config({**config.model_dump(mode="json"), **changes})
