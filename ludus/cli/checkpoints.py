"""`ludus checkpoint`: list, check, export, push."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ludus.cli.options import Checkpoint, Merge, Run, RunsDir

app = typer.Typer(help="Checkpoints: list, check, export, push.", no_args_is_help=True)


@app.command("list")
def checkpoint_list(run: Run, runs_dir: RunsDir = "runs") -> None:
    """List a run's checkpoints; mark the newest and the best."""
    from ludus.store.folders import find_run
    from ludus.train.checkpoint.listing import best, list_checkpoints, unreadable

    folder = find_run(runs_dir, run).checkpoints
    infos = list_checkpoints(folder)
    best_one = best(infos)
    for info in infos:
        parts = [f"{info.path.name}: {info.stage} step {info.step}"]
        if info.metric is not None:
            parts.append(f"{info.metric_name or 'metric'} {info.metric:.4g}")
        marks = {"pinned": info.pinned, "best": info == best_one, "latest": info == infos[-1]}
        typer.echo(", ".join(parts + [mark for mark, applies in marks.items() if applies]))
    for problem in unreadable(folder):
        typer.echo(f"{problem.checkpoint.name}: damaged ({problem.file} is {problem.kind})")
    if infos and best_one is None:
        typer.echo("no checkpoint has a metric: none is the best", err=True)


@app.command("check")
def checkpoint_check(
    path: Annotated[str, typer.Argument(help="A run's id, or the path of a checkpoint.")],
    runs_dir: RunsDir = "runs",
) -> None:
    """Find truncated, altered or missing files."""
    from ludus.store.folders import find_run
    from ludus.train.checkpoint.listing import check

    folder = Path(path) if Path(path).is_dir() else find_run(runs_dir, path).checkpoints
    problems = check(folder)
    for problem in problems:
        typer.echo(problem)
    if problems:
        raise typer.Exit(1)
    typer.echo("all files are intact")


@app.command("export")
def checkpoint_export(
    run: Run,
    path: Annotated[Path, typer.Argument(help="The Hugging Face folder to write.")],
    checkpoint: Checkpoint = None,
    merge: Merge = True,
    overwrite: Annotated[bool, typer.Option(help="Replace the folder's content.")] = False,
    runs_dir: RunsDir = "runs",
) -> None:
    """Export a checkpoint as a Hugging Face folder that `from_pretrained` loads."""
    from ludus.pipeline.evaluation.evaluate import export_checkpoint

    export_checkpoint(run, runs_dir, checkpoint, path, merge=merge, overwrite=overwrite)
    typer.echo(str(path))


@app.command("push")
def checkpoint_push(
    run: Run,
    repo: Annotated[str, typer.Argument(help="Repository of the hub: NAMESPACE/NAME.")],
    checkpoint: Checkpoint = None,
    license: Annotated[
        str | None, typer.Option(help="Licence of the weights, e.g. apache-2.0; required.")
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="Create a private repository.")
    ] = False,
    revision: Annotated[
        str | None, typer.Option(help="Branch, created if absent; default: main.")
    ] = None,
    merge: Merge = True,
    update: Annotated[
        bool, typer.Option("--update", help="Add a commit to a repository that exists.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the files and print the card; upload nothing.")
    ] = False,
    runs_dir: RunsDir = "runs",
) -> None:
    """Upload a checkpoint to a Hugging Face hub with a model card. Token: HF_TOKEN or the login."""
    from ludus.pipeline.evaluation.publish import push

    push(
        run,
        runs_dir,
        repo,
        checkpoint=checkpoint,
        licence=license,
        private=private,
        revision=revision,
        merge=merge,
        update=update,
        dry_run=dry_run,
        say=typer.echo,
    )
