"""Verbs that act on a running run."""

from __future__ import annotations

from typing import Annotated

import typer

from ludus.cli.options import Run, RunsDir

app = typer.Typer()


@app.command()
def kill(
    run: Run,
    grace: Annotated[
        float,
        typer.Option(min=0, help="Seconds to finish the step and save, before it is killed."),
    ] = 60.0,
    runs_dir: RunsDir = "runs",
) -> None:
    """End a run and the processes that it started: those that it recorded, and no others.

    Also ends what a run left that was killed.
    """
    from ludus.store.folders import find_run, resume_command
    from ludus.store.processes import kill_run

    folder = find_run(runs_dir, run)
    for ended in kill_run(folder, grace):
        typer.echo(f"ended {ended}")
    typer.echo(f"resume with: {resume_command(folder)}")
