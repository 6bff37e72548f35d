"""`ludus benchmark`: published benchmarks, thresholds, comparison of checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from ludus.cli.options import RunsDir, load
from ludus.core.errors import ConfigError

app = typer.Typer()


@app.command()
def benchmark(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            help="Runs (RUN or RUN/CHECKPOINT), Hugging Face folders, or MODEL@URL; several are "
            "compared, in this order.",
            metavar="MODEL",
        ),
    ] = None,
    on: Annotated[
        str | None, typer.Option("--on", help="Benchmarks, separated by commas: math-500,gsm8k.")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FILE",
            help="A benchmark's file, with the fields of the hub's rows: JSON lines, JSON, Parquet "
            "or CSV; default: the hub. Repeat for others.",
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            help="Answers to each question: k of mean@k and pass@k; default: by benchmark."
        ),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy; default: by benchmark.")
    ] = None,
    num_tasks: Annotated[
        int | None, typer.Option(help="The first questions of each benchmark; default: all.")
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of an answer; default: the recipe's, else 4096."),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(help="Recipe with the rollout settings and tools; default: the first run's."),
    ] = None,
    threshold: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PERCENT",
            help="Exit with 1 if mean@k of the last model is below. Repeat for others.",
        ),
    ] = None,
    thresholds: Annotated[
        str | None,
        typer.Option(help="A named set (agent0-8b), or a YAML file with lines `NAME: PERCENT`."),
    ] = None,
    on_bad_line: Annotated[
        Literal["refuse", "skip"],
        typer.Option(help="Broken rows of a file: refuse the file, or skip and count them."),
    ] = "refuse",
    out: Annotated[
        Path | None,
        typer.Option(help="New file (JSON lines) for the answers: messages, scores, errors."),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="New file (JSON) for the results.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="New file (SVG) for a curve over several models.")
    ] = None,
    list_all: Annotated[
        bool, typer.Option("--list", help="List all benchmarks, and play none.")
    ] = False,
    runs_dir: RunsDir = "runs",
) -> None:
    """Play published benchmarks with models: mean@k and pass@k with intervals, thresholds."""
    if list_all:
        if models or on:
            raise ConfigError("--list plays nothing: give neither a model nor --on")
        for line in _listing():
            typer.echo(line)
        return
    if not models or on is None:
        raise ConfigError(
            "name a model and benchmarks: ludus benchmark MODEL --on math-500,gsm8k "
            "(`ludus benchmark --list` lists all)"
        )
    from ludus.evaluate.benchmarks import read_thresholds
    from ludus.pipeline.evaluation.benchmark import (
        Outputs,
        Request,
        benchmark_subjects,
        named_benchmarks,
        named_pairs,
    )
    from ludus.pipeline.evaluation.subjects import find_subject

    names = named_benchmarks(on)
    request = Request(
        on=names,
        data=named_pairs(data or [], names),
        num_tasks=num_tasks,
        samples=samples,
        temperature=temperature,
        max_tokens=max_tokens,
        on_bad_line=on_bad_line,
        thresholds=read_thresholds(threshold or [], thresholds, names),
    )
    first = find_subject(models[0], runs_dir)
    subjects = [first, *(find_subject(text, runs_dir, first) for text in models[1:])]
    config = load(recipe, None) if recipe else None
    report = benchmark_subjects(subjects, request, config, Outputs(out, json, plot))
    if not report.passed:
        raise typer.Exit(1)


def _listing() -> list[str]:
    """A paragraph for each benchmark."""
    from ludus.tasks.benchmarks import BENCHMARKS

    lines = []
    for name, row in BENCHMARKS.items():
        sampling = f"mean@{row.samples} at temperature {row.temperature:g}"
        prompt = row.prompt.replace("\n", "\\n")
        lines += [
            name,
            f"  source    {row.hub}: {row.size:,} rows",
            f"  licence   {row.licence}",
            f"  judge     {row.judge.name}",
            f"  sampling  {sampling if row.temperature else 'greedy'}",
            f"  prompt    {prompt}",
        ]
    return lines
