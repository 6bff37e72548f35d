"""Play published benchmarks with models: runs, Hugging Face folders, endpoints.

Rollout settings and tools are those of the recipe, else of the first run that is named, else the
defaults below. Prompts and judges are the benchmarks' own; they are played without an environment.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from pydantic import ValidationError
from rich.console import Console

from ludus import __version__
from ludus.config.load import load_config
from ludus.config.messages import option_faults
from ludus.config.schema import EvaluateConfig, RunConfig
from ludus.core.errors import ConfigError, DataError, did_you_mean
from ludus.core.files import atomic_write
from ludus.core.types import Spec
from ludus.data.splits import Splits
from ludus.evaluate.benchmark_tables import render_report, short_names
from ludus.evaluate.benchmarks import (
    BenchmarkReport,
    BenchmarkResult,
    Threshold,
    make_report,
    num_truncated,
)
from ludus.evaluate.episodes import EpisodeFile
from ludus.judges import JUDGES
from ludus.pipeline.evaluation.subjects import (
    EndpointSubject,
    FolderSubject,
    Play,
    RunSubject,
    Subject,
    derived,
    play_subject,
)
from ludus.pipeline.monitoring.progress import BenchmarkBar
from ludus.pipeline.parts.effects import equal_samples
from ludus.report.iterations import draw_iterations
from ludus.store.settings import run_config
from ludus.tasks.benchmarks import BENCHMARKS
from ludus.tasks.benchmarks.reader import benchmark_tasks, find_benchmark
from ludus.tasks.readers import OnBadLine, TaskList
from ludus.tools.limits.limiter import is_endpoint

MAX_TOKENS, CONTEXT, PROMPT = 4096, 8192, 4096
"""Without a recipe: tokens of an answer; tokens of an episode; those left for a prompt."""

DEADLINE_S = 3600.0
"""Without a recipe: time limit of an episode. An answer has thousands of tokens."""

OPTIONS = {
    "num_tasks": "--num-tasks",
    "samples_per_task": "--samples",
    "temperature": "--temperature",
}


@dataclass(frozen=True, slots=True)
class Request:
    """The benchmarks to play, and how. `samples` and `temperature`: None is each benchmark's own.

    `data`: files by benchmark; the others are read from the hub.
    """

    on: Sequence[str]
    data: Mapping[str, str] = field(default_factory=dict)
    num_tasks: int | None = None
    samples: int | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    on_bad_line: OnBadLine = "refuse"
    thresholds: Sequence[Threshold] = ()


@dataclass(frozen=True, slots=True)
class Outputs:
    """New files: episodes (JSON lines), results (JSON), the chart (SVG). None: not written."""

    episodes: Path | None = None
    results: Path | None = None
    plot: Path | None = None

    def check(self, num_models: int) -> None:
        """Errors: ConfigError for a file that cannot be made, for two that are one, or for a chart
        of one model.
        """
        if self.plot is not None and num_models < 2:
            raise ConfigError("--plot: a curve needs two models or more: name them in their order")
        files = {"--out": self.episodes, "--json": self.results, "--plot": self.plot}
        named: dict[Path, str] = {}
        for option, path in files.items():
            if path is None:
                continue
            if (other := named.setdefault(path.absolute(), option)) != option:
                raise ConfigError(f"{option} {path}: it is the file of {other}, too")
            if option != "--out":  # which is made at once
                _check_new(option, path)


def _check_new(option: str, path: Path) -> None:
    """Errors: ConfigError where the file exists, or cannot be made: after hours is too late."""
    try:
        if path.exists():
            raise ConfigError(f"{option} {path}: it exists; name a new file")
        if not path.parent.is_dir():
            raise ConfigError(f"{option} {path}: there is no folder {path.parent}")
        TemporaryFile(dir=path.parent).close()
    except OSError as error:
        told = f"cannot be written: {error.strerror}"
        raise ConfigError(f"{option} {path!s:.200}: {told}") from None


def named_pairs(pairs: Sequence[str], on: Sequence[str]) -> dict[str, str]:
    """`NAME=FILE` texts by benchmark. Errors: ConfigError."""
    found: dict[str, str] = {}
    for pair in pairs:
        name, _, path = pair.partition("=")
        if not path:
            raise ConfigError(f"--data {pair}: write NAME=FILE, e.g. gsm8k=gsm8k.jsonl")
        if name not in on:
            raise ConfigError(
                f"--data {pair}: {name!r} is not played{did_you_mean(name, on)}: name it in --on"
            )
        if name in found:
            raise ConfigError(f"--data {pair}: {name} has a file already, {found[name]}")
        found[name] = path
    return found


def named_benchmarks(text: str) -> list[str]:
    """The names in `a,b,c`. Errors: ConfigError for unknown and repeated names, and for none."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError("--on: name benchmarks, e.g. --on math-500,gsm8k")
    for name in names:
        find_benchmark(name)
        if names.count(name) > 1:
            raise ConfigError(f"--on: {name} is named twice")
    return names


def benchmark_subjects(
    subjects: Sequence[Subject],
    request: Request,
    recipe: RunConfig | None = None,
    outputs: Outputs | None = None,
) -> BenchmarkReport:
    """Play all benchmarks with each subject; print tables, write files. Returns all results.

    A benchmark of which nothing can be scored does not end the others. Results are written after
    each model.

    Errors: ConfigError, DataError for a data set that cannot be read, CheckpointError; LudusError
    where an endpoint cannot be reached.
    """
    outputs = outputs or Outputs()
    outputs.check(len(subjects))
    names = [subject.name for subject in subjects]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"{twice[0]} is named twice: its results would be equal")
    settings = {name: _settings(name, request, recipe) for name in request.on}
    console = Console()
    tasks = {name: _read(name, request, console) for name in request.on}
    config = _config(subjects, request, recipe, tasks)
    everything = TaskList(task for some in tasks.values() for task in some)
    splits = Splits(TaskList(), everything)
    urls = [subject.url for subject in subjects if isinstance(subject, EndpointSubject)]
    if config.tools:
        told = ", ".join(spec.name for spec in config.tools)
        console.print(f"tools: {told}", markup=False)
    results: list[BenchmarkResult] = []
    with EpisodeFile(outputs.episodes) if outputs.episodes else nullcontext() as file:
        for subject in subjects:
            recorder = file.recorder(subject.name, everything) if file else None
            with BenchmarkBar(subject.name) as bar:
                playing = _playing(subject.name, request.on, tasks, settings, bar)
                results += play_subject(
                    subject, config, splits, playing, urls=urls, on_episode=bar.counting(recorder)
                )
            report = make_report(__version__, names, request.on, results, request.thresholds)
            if outputs.results is not None:
                atomic_write(outputs.results, report.model_dump_json(indent=1))
    console.print(render_report(report))
    if outputs.plot is not None:
        atomic_write(outputs.plot, draw(report))
    return report


def draw(report: BenchmarkReport) -> str:
    """The chart of a report, SVG."""
    series = {
        name: [found.mean if (found := report.of(model, name)) else None for model in report.models]
        for name in report.benchmarks
    }
    short = short_names(report.models)
    averages = [report.averages.get(model) for model in report.models]
    return draw_iterations([short[model] for model in report.models], series, averages)


def _settings(name: str, request: Request, recipe: RunConfig | None) -> EvaluateConfig:
    """Errors: ConfigError names the option, and the benchmark whose default does not fit it."""
    benchmark = find_benchmark(name)
    own = {"samples_per_task": benchmark.samples, "temperature": benchmark.temperature}
    given = {"samples_per_task": request.samples, "temperature": request.temperature}
    values = {key: own[key] if value is None else value for key, value in given.items()}
    confidence = recipe.evaluate.confidence if recipe else 0.95
    try:
        settings = EvaluateConfig.model_validate(
            {**values, "num_tasks": request.num_tasks, "confidence": confidence}
        )
    except ValidationError as error:
        raise ConfigError(option_faults(error, EvaluateConfig, OPTIONS)) from None
    for fault in equal_samples(settings, OPTIONS["samples_per_task"], OPTIONS["temperature"]):
        raise ConfigError(f"{name}: {fault}")
    return settings


def _read(name: str, request: Request, console: Console) -> TaskList:
    benchmark, path = BENCHMARKS[name], request.data.get(name)
    JUDGES.build(benchmark.judge, f"{name}: judge")
    try:
        tasks = benchmark_tasks(
            name,
            path,
            limit=request.num_tasks,
            on_bad_line=request.on_bad_line,
            skip="--on-bad-line skip",
        )
    except DataError as error:
        if path is not None:
            raise
        raise DataError(f"{name}: {error}. Give a file: --data {name}=FILE") from None
    if not tasks:
        raise DataError(f"{path or benchmark.hub}: all {len(tasks.skipped)} rows are malformed")
    if tasks.skipped:
        first = tasks.skipped[0]
        console.print(f"{name}: {len(tasks.skipped)} rows skipped: {first}", markup=False)
    return tasks


def _playing(
    model: str,
    names: Sequence[str],
    tasks: Mapping[str, TaskList],
    settings: Mapping[str, EvaluateConfig],
    bar: BenchmarkBar,
) -> Callable[[Play], Awaitable[list[BenchmarkResult]]]:
    """Returns the function that plays the benchmarks, one after the other."""

    async def playing(play: Play) -> list[BenchmarkResult]:
        results = []
        for name in names:
            bar.start(name, len(tasks[name]) * settings[name].samples_per_task)
            evaluation, truncated, failure = None, 0, ""
            try:
                groups, evaluation = await play(tasks[name], settings[name], name)
                truncated = num_truncated(groups)
            except DataError as error:  # of the answers: the data are read
                failure = str(error)
            result = BenchmarkResult(
                model=model,
                benchmark=name,
                source=tasks[name][0].source,
                num_rows=tasks[name].num_rows,
                num_skipped=len(tasks[name].skipped),
                num_truncated=truncated,
                evaluation=evaluation and evaluation.model_copy(update={"label": model}),
                failure=failure,
            )
            results.append(result)
            bar.say(f"{model}: {name}: {evaluation.success if evaluation else failure}")
        return results

    return playing


def _config(
    subjects: Sequence[Subject],
    request: Request,
    recipe: RunConfig | None,
    tasks: Mapping[str, TaskList],
) -> RunConfig:
    """The configuration that the models play with."""
    name = request.on[0]
    path = request.data.get(name)
    train = Spec(name="benchmark", args={"name": name, **({"path": path} if path else {})})
    runs = [subject for subject in subjects if isinstance(subject, RunSubject)]
    if recipe is None and runs:
        recipe = run_config(runs[0].folder)
    config = _defaults(subjects, request, train) if recipe is None else recipe
    rollout = config.rollout.model_dump(mode="json")
    rollout["parts"] = {}
    if isinstance(rollout["max_turns"], dict):
        rollout["max_turns"] = None  # by environment
    if request.max_tokens is not None:
        rollout["max_tokens_per_turn"] = request.max_tokens
    limits = config.model_dump(mode="json")["limits"]
    urls = _addresses(subjects)
    try:
        return derived(
            config,
            env=None,
            judge=None,
            tasks={"train": train.model_dump()},
            limits={key: limits[key] for key in limits if not is_endpoint(key) or key in urls},
            rollout=rollout,
            evaluate={},
            sft=None,
            rl=None,
            demonstrations=None,
            metrics=[],
            mirror=None,
            checkpoint={},
            verify=False,
        )
    except ConfigError as error:
        if request.max_tokens is None:
            raise
        raise ConfigError(f"--max-tokens {request.max_tokens}: {error}") from None


def _addresses(subjects: Sequence[Subject]) -> set[str]:
    return {subject.url for subject in subjects if isinstance(subject, EndpointSubject)}


def _defaults(subjects: Sequence[Subject], request: Request, train: Spec) -> RunConfig:
    """Settings without a recipe: one long turn, on a GPU where there is one."""
    folders = [subject.path for subject in subjects if isinstance(subject, FolderSubject)]
    known = [_positions(path) for path in folders]
    most = request.max_tokens or MAX_TOKENS
    context = min([max(CONTEXT, most + PROMPT), *(positions for positions in known if positions)])
    if request.max_tokens is None:
        most = min(most, context // 2)
    elif most >= context:
        raise ConfigError(
            f"--max-tokens {most}: prompt and answer of the model have {context} tokens together: "
            f"give fewer than {context}"
        )
    model: dict[str, Any] = {"path": str(folders[0] if folders else "none")}
    if folders:
        import torch

        if torch.cuda.is_available():
            model |= {"device": "cuda", "dtype": "bfloat16"}
    rollout = {"max_tokens_per_turn": most, "episode_deadline_s": DEADLINE_S}
    return load_config(
        {
            "name": "benchmark",
            "model": {**model, "context_length": context},
            "rollout": rollout,
            "tasks": {"train": train.model_dump()},
        }
    )


def _positions(folder: Path) -> int | None:
    """The positions that a model was trained with; None where its configuration tells none."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # loading the model tells what is wrong
    value = config.get("max_position_embeddings") if isinstance(config, dict) else None
    return value if isinstance(value, int) and value >= 32 else None
