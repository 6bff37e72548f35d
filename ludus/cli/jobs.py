"""Runs on a cluster: submit, logs, attach, stop."""

from __future__ import annotations

import re
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ludus.cli.options import NewRecipe, Overrides, check, load
from ludus.core.errors import ConfigError, MissingDependency

if TYPE_CHECKING:
    from ludus.cluster.jobs import Jobs

app = typer.Typer()

Job = Annotated[str, typer.Argument(metavar="JOB", help="A job's id, as `ludus submit` says.")]
Address = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="The cluster's dashboard, http://HEAD:8265; default: RAY_API_SERVER_ADDRESS, or this "
        "machine's.",
    ),
]
START_S = 120
"""Seconds that `submit` waits for the start of a run."""

RESUME = re.compile(r"--resume (\S+)(?: --runs-dir (\S+))?")
"""The run and its folder in the message of a run that was stopped."""

SHOWN = 20
"""Lines of the log that `attach` begins with."""


@app.command()
def submit(
    recipe: NewRecipe = None,
    overrides: Overrides = None,
    address: Address = None,
    resume: Annotated[
        str | None,
        typer.Option("--resume", metavar="RUN", help="Resume this run of the cluster's folder."),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Follow the job; exit with its exit code.")
    ] = False,
    working_dir: Annotated[
        Path | None,
        typer.Option(help="Ship this whole folder; default: the files that the recipe refers to."),
    ] = None,
    python: Annotated[str, typer.Option(help="Python on the head.")] = "python",
    grace: Annotated[
        int,
        typer.Option(min=1, max=86400, help="Seconds to finish the step and save, when stopped."),
    ] = 600,
) -> None:
    """Run `ludus train` on a Ray cluster, with the files that the recipe refers to."""
    if (recipe is None) == (resume is None) and not (resume and recipe and "=" in recipe):
        raise ConfigError("give either a recipe or --resume RUN")
    if working_dir is not None and not working_dir.is_dir():
        raise ConfigError(f"--working-dir {working_dir}: no such folder")
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="ludus-submit-")))
        if resume is not None:
            name, words = resume, ["--resume", resume, *([recipe] if recipe else [])]
        else:
            from ludus.cluster.shipping import stage

            config = load(str(recipe), overrides)
            try:
                check(config, str(recipe), overrides)
            except MissingDependency as absent:  # the head checks again
                typer.echo(f"not checked here: {absent}", err=True)
            name, words = config.name, [str(recipe)]
            if working_dir is None:
                shipped = stage(str(recipe), config, folder)
                words = [shipped.recipe]
                typer.echo(f"ships {', '.join(shipped.files) or 'no files'}", err=True)
        (folder / ".ludus").touch()  # Ray refuses an empty folder
        from ludus.cluster.jobs import SubmitOptions

        jobs = _jobs(address)
        options = SubmitOptions(python, grace)
        job = jobs.submit(name, [*words, *(overrides or [])], working_dir or folder, options)
    typer.echo(f"job {job}")
    typer.echo(f"follow it: ludus attach {job} --address {jobs.address}", err=True)
    try:
        jobs.await_start(job, START_S)
    except KeyboardInterrupt:
        _detached(job, jobs)
    if wait:
        _follow(job, jobs, 0)


@app.command()
def logs(
    job: Job,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new lines too, until the job ends.")
    ] = False,
    address: Address = None,
) -> None:
    """Print what a job of a cluster has printed."""
    jobs = _jobs(address)
    text = jobs.logs(job)
    typer.echo(text, nl=False)
    if follow:
        try:
            jobs.follow(job, _echo, skip=len(text))
        except KeyboardInterrupt:
            _detached(job, jobs)


@app.command()
def attach(job: Job, address: Address = None) -> None:
    """Follow a job of a cluster; exit with its exit code. Ctrl-C detaches: the job goes on."""
    jobs = _jobs(address)
    text = jobs.logs(job)
    lines = text.splitlines(keepends=True)
    typer.echo("".join(lines[-SHOWN:]), nl=False)
    _follow(job, jobs, len(text))


@app.command()
def stop(
    job: Job,
    timeout: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for the end of the job.")
    ] = 660.0,
    address: Address = None,
) -> None:
    """Stop a job of a cluster: its run finishes the step and saves."""
    jobs = _jobs(address)
    info = jobs.stop(job, timeout)
    typer.echo(f"job {job}: {info.status.value.lower()}")
    if found := RESUME.findall(jobs.logs(job)):
        run, folder = found[-1]
        place = f"{folder.rstrip('/')}/{run}" if folder else run
        typer.echo(f"resume with: ludus submit --resume {place} --address {jobs.address}")


def _jobs(address: str | None) -> Jobs:
    from ludus.cluster.jobs import Jobs, default_address

    return Jobs.at(address or default_address())


def _follow(job: str, jobs: Jobs, skip: int) -> None:
    try:
        code = jobs.follow(job, _echo, skip)
    except KeyboardInterrupt:
        _detached(job, jobs)
    else:
        raise typer.Exit(code)


def _detached(job: str, jobs: Jobs) -> None:
    typer.echo(f"\nthe job goes on: ludus attach {job} --address {jobs.address}", err=True)
    raise typer.Exit(130)


def _echo(text: str) -> None:
    typer.echo(text, nl=False)
