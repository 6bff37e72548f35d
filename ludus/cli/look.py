"""Verbs that read: runs, the store, config keys, environments, this machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from ludus.cli.options import (
    Run,
    RunsDir,
    StoreUrl,
    located_run,
    open_store,
    recorded,
    show_on_screen,
    spec,
    unfinished,
)
from ludus.core.errors import ConfigError, did_you_mean, printable
from ludus.core.system.signals import run

app = typer.Typer()

LOUD = 1_000_000
"""Bytes that an environment writes in a check from which it is an error."""


@app.command()
def report(run: Run, runs_dir: RunsDir = "runs", store: StoreUrl = None) -> None:
    """Write a run's report again from the store."""
    from ludus.report.collect import report_again

    with recorded(run, runs_dir):
        typer.echo(report_again(run, runs_dir, store))


@app.command()
def runs(
    runs_dir: RunsDir = "runs",
    store: StoreUrl = None,
    all: Annotated[
        bool, typer.Option("--all", help="List all runs; default: the 15 newest.")
    ] = False,
) -> None:
    """List the runs in the store."""
    from ludus.store.show import NEWEST, render_runs

    with open_store(runs_dir, store) as opened:
        show_on_screen(render_runs(opened, None if all else NEWEST))
        for line in unfinished(opened, runs_dir):
            typer.echo(line)


@app.command()
def show(
    run: Run,
    id: Annotated[
        str | None,
        typer.Argument(
            metavar="ID",
            help="A trajectory's id: show its rollout. A stage (evaluate/after: its last step), a "
            "step (rl-10) or a group (rl-10/g3): list its episodes.",
        ),
    ] = None,
    failed: Annotated[
        bool,
        typer.Option(
            "--failed",
            help="List the episodes that have no score or failed: of ID, or of the newest "
            "evaluation.",
        ),
    ] = False,
    metrics: Annotated[
        bool, typer.Option("--metrics", help="Show all metrics of each stage of the run.")
    ] = False,
    runs_dir: RunsDir = "runs",
    store: StoreUrl = None,
) -> None:
    """Show a run, a list of its episodes, or one rollout with its trained tokens marked."""
    from ludus.store.show import find_place, render_run, render_step, render_trajectory

    if metrics and (failed or id):
        raise ConfigError("--metrics has no effect beside an id or --failed: leave one out")
    run, runs_dir = located_run(run, runs_dir)
    with open_store(runs_dir, store) as opened, recorded(run, runs_dir):
        is_list = id is None or find_place(opened, run, id) is not None
        if failed and not is_list:
            stages = ", ".join(opened.run(run).stages) or "none"
            raise ConfigError(
                f"--failed needs a stage, a step or a group, not {id!r:.60}: the run's stages are "
                f"{stages}"
            )
        if failed or (id is not None and is_list):
            show_on_screen(render_step(opened, run, id, failures=failed))
        elif id is None:
            show_on_screen(render_run(opened, run, metrics=metrics))
            _show_findings(run, runs_dir)
            for line in unfinished(opened, runs_dir, run):
                typer.echo(line)
        else:
            decode = _decoder(run, runs_dir)
            show_on_screen(render_trajectory(opened, run, id, decode))


@app.command()
def replay(
    log: Annotated[Path, typer.Argument(help="Log of `ludus serve model A --challenger B`.")],
) -> None:
    """Replay the log of an A/B roll-out: the same decisions, or an error with the line."""
    from ludus.services.model.rollout import replay as logs
    from ludus.services.model.rollout.show import render_replay

    try:
        replayed = logs.replay(log)
    except OSError as error:
        raise ConfigError(f"{log}: {error.strerror}") from None
    typer.echo(printable(render_replay(replayed)))


@app.command()
def export(
    run: Run,
    path: Annotated[Path, typer.Argument(help="The file to write.")],
    format: Annotated[
        str | None, typer.Option(help="jsonl, parquet or eval; default: by the file's suffix.")
    ] = None,
    what: Annotated[
        str, typer.Option(help="trajectories, steps, sft, or inspect: a log for `inspect view`.")
    ] = "trajectories",
    stage: Annotated[
        str | None,
        typer.Option(help="Only this stage; default: all, but for sft no held-out evaluations."),
    ] = None,
    min_score: Annotated[
        float | None, typer.Option(help="Lowest reward of an exported episode.")
    ] = None,
    runs_dir: RunsDir = "runs",
    store: StoreUrl = None,
) -> None:
    """Write a run's trajectories, steps, or an SFT data set to a file."""
    from ludus.store.export import export as write

    run, runs_dir = located_run(run, runs_dir)
    with open_store(runs_dir, store) as opened, recorded(run, runs_dir):
        written = write(
            opened,
            run,
            path,
            format=format,
            what=what,
            min_score=min_score,
            stage=stage,
            decode=_decoder(run, runs_dir),
        )
    typer.echo(f"{written.num_rows} lines in {written.path}")
    for reason, count in written.skipped.items():
        typer.echo(f"skipped: {count} ({reason})", err=True)
    for lack, count in written.incomplete.items():
        typer.echo(f"incomplete: {count} ({lack})", err=True)


@app.command()
def config(
    key: Annotated[
        str | None,
        typer.Argument(
            help="A key, a section, a plug-in's name, or `coevolve`; default: all keys of a run."
        ),
    ] = None,
    markdown: Annotated[
        bool, typer.Option(help="Print the documentation page (Markdown).")
    ] = False,
) -> None:
    """Print the reference of all keys and of the plug-ins' arguments."""
    from ludus.config.reference import config_reference, show_reference
    from ludus.pipeline.parts.registries import REGISTRIES

    if markdown:
        sys.stdout.write(config_reference(REGISTRIES))
    else:
        show_on_screen(show_reference(key, REGISTRIES))


@app.command()
def recipes(
    name: Annotated[
        str | None, typer.Argument(help="Print this recipe; default: list all.")
    ] = None,
    copy: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the recipe to this file, to change it."),
    ] = None,
) -> None:
    """List the recipes of the package; print or copy one."""
    from ludus.config.recipes import shipped_recipes, summary

    shipped = shipped_recipes()
    if name is None:
        if copy is not None:
            raise ConfigError("--copy: name the recipe too: ludus recipes NAME --copy FILE")
        for key, path in shipped.items():
            typer.echo(f"{key:24} {summary(path)}")
        return
    if name not in shipped:
        raise ConfigError(f"{name!r} is not a recipe of the package{did_you_mean(name, shipped)}")
    text = shipped[name].read_text(encoding="utf-8")
    if copy is None:
        typer.echo(text, nl=False)
        return
    try:
        with copy.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"{copy}: cannot be written: {error.strerror}") from error
    verb = "coevolve" if name.startswith("coevolve") else "train"
    typer.echo(f"{copy}: change it, then: ludus {verb} {copy}")


@app.command("check-env")
def check_env_command(
    name: Annotated[
        str, typer.Argument(help="A registered environment, FILE.py:Class, or module:Class.")
    ],
    args: Annotated[
        list[str] | None, typer.Argument(help="Arguments of the environment: key=value ...")
    ] = None,
    tasks: Annotated[int, typer.Option(min=1, help="Number of tasks to play.")] = 6,
    timeout: Annotated[
        float,
        typer.Option(min=0.1, help="Seconds that the constructor, a reset or a step may take."),
    ] = 10.0,
) -> None:
    """Check that an environment follows the protocol: deterministic, robust, no output.

    Tells what trains badly too: slow steps, equal rewards, long episodes, no expert.
    """
    from ludus.core.system.forked import MAX_NOISE, Died, Stuck, in_child
    from ludus.envs.checks.check import STOPPED, check_env

    env = spec(name, args)

    def check(tell: Callable[[str], object]) -> int:
        def report(finding: object) -> None:
            tell(str(finding))

        findings = run(check_env(env, num_tasks=tasks, timeout_s=timeout, report=report, tell=tell))
        return int(any(finding.severity == "error" for finding in findings))

    def noise(data: bytes) -> None:
        typer.echo(data, nl=False, err=True)

    told: list[str] = []

    def show(text: str) -> None:
        told.append(text)
        typer.echo(text)

    try:
        ended = in_child(check, show, noise, silent_s=timeout + 30)
    except (Died, Stuck) as error:
        what = "process" if isinstance(error, Died) else "time"
        typer.echo(f"error: {what}: the environment {error}{STOPPED}")
        raise typer.Exit(1) from None
    code = ended.code
    if ended.noise > MAX_NOISE:
        loud = ended.noise >= LOUD
        code = 1 if loud else code
        much = f"{ended.noise / 1e6:.0f} MB" if loud else f"{ended.noise / 1e3:.0f} kB"
        typer.echo(
            f"{'error' if loud else 'note'}: output: it writes {much} to standard output or "
            f"standard error, of which {MAX_NOISE / 1e3:.0f} kB are shown: use logging"
        )
    if code:
        raise typer.Exit(code)
    partly = any(text.startswith("note: left out") for text in told)
    typer.echo(f"{name} follows the protocol{', as far as it was checked' if partly else ''}")


@app.command()
def doctor(
    runs_dir: RunsDir = "runs",
    attack: Annotated[
        bool, typer.Option("--attack", help="Attack the sandbox, and print what was stopped.")
    ] = False,
    isolation: Annotated[
        Literal["jail", "gvisor"], typer.Option(help="The sandbox's isolation that is attacked.")
    ] = "jail",
    hosts: Annotated[
        str | None,
        typer.Option(
            help="Check these environment hosts instead: addresses separated by commas, "
            "file:PATH, or dns+http://NAME:PORT."
        ),
    ] = None,
) -> None:
    """Check this machine and print what to install."""
    from rich.console import Console

    from ludus.diagnostics.doctor import (
        check_hosts,
        exit_code,
        render_checks,
        run_attacks,
        run_doctor,
    )

    with Console(stderr=True).status("checking") as status:  # on a terminal only
        if hosts is not None:
            checks = check_hosts(hosts)
        elif attack:
            checks = run_attacks(lambda name: status.update(f"attack: {name}"), isolation)
        else:
            checks = run_doctor(runs_dir, lambda name: status.update(f"checking {name}"))
    show_on_screen(render_checks(checks))
    raise typer.Exit(exit_code(checks))


def _show_findings(run: str, runs_dir: str) -> None:
    """Print what the diagnosis found, where the run's folder is here."""
    from ludus.report.diagnosis import read_findings
    from ludus.store.folders import find_run

    try:
        path = find_run(runs_dir, run).findings
    except ConfigError:
        return
    found = read_findings(path, partial(typer.echo, err=True))
    if not found:
        typer.echo("no warnings of the diagnosis")
    for finding in found:
        passed = "" if finding.lasting else " (no longer so at the end)"
        typer.echo(printable(f"warning: {finding}{passed}"))


def _decoder(run: str, runs_dir: str) -> Callable[[list[int]], str] | None:
    """Token ids to text with the run's tokenizer; None without its folder (a remote store)."""
    from ludus.store.folders import find_run

    try:
        folder = find_run(runs_dir, run)
    except ConfigError:
        return None
    if not folder.tokenizer.exists():
        return None
    from ludus.models.chat.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(str(folder.tokenizer))
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))
