"""`ludus coevolve`: train a curriculum agent and an executor agent in turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from ludus.cli.options import named_origins, show_on_screen
from ludus.core.errors import ConfigError

app = typer.Typer()


@app.command()
def coevolve(
    recipe: Annotated[
        str, typer.Argument(help="A YAML file, or a recipe's name (coevolve-tiny, ...).")
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[STAGE] [KEY=VALUE]...",
            help="One stage (start, curriculum, generate, score, filter, executor, evaluate), none "
            "for all; or report (write the report again) or show (list problems); then settings "
            "to change.",
        ),
    ] = None,
    iteration: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=1000,
            help="Iteration of STAGE; default: the first that lacks it. Of show: its problems.",
        ),
    ] = None,
    problem: Annotated[
        str | None,
        typer.Option(help="Of show: one problem of the iteration in full, by number or id."),
    ] = None,
    test_mode: Annotated[
        bool,
        typer.Option(
            "--test-mode", help="One tiny iteration of all stages, in a folder NAME-test."
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print all stages with memory, time and cost, and stop. Writes nothing.",
        ),
    ] = False,
    hardware: Annotated[
        str | None,
        typer.Option(help="Of --dry-run: a GPU by name (h200, ...), or `here`, the default."),
    ] = None,
    fill: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            max=1,
            help="Of --dry-run: fraction of turns and context that episodes use; default: as the "
            "expert plays, or all.",
        ),
    ] = None,
    storage: Annotated[
        str | None, typer.Option("--storage", help="Folder with a folder for each co-evolution.")
    ] = None,
) -> None:
    """Train a curriculum agent and an executor agent in turns; resumes what is there."""
    stages, overrides = _sorted_words(words or [])
    of_dry_run = {"--hardware": hardware, "--fill": fill}
    _refuse_combinations(stages, iteration, problem, test_mode, dry_run, of_dry_run)
    if storage is not None:
        overrides.append(f"storage={storage}")
    from ludus.config.coevolve import CoevolveConfig
    from ludus.config.load import load_as

    config = load_as(CoevolveConfig, recipe, overrides)
    from ludus.coevolve.flow import Coevolution, Stopped, stages_of, storage_of
    from ludus.coevolve.test_mode import STAND_INS, tiny
    from ludus.pipeline.monitoring.progress import Display

    if test_mode:
        config = tiny(config)
    if stages == ["report"]:
        from ludus.coevolve.report.page import write_report

        planned = [stage.label for stage in stages_of(config)]
        typer.echo(write_report(storage_of(config), planned))
        return
    if stages == ["show"]:
        from ludus.coevolve.report.show import render

        show_on_screen(render(storage_of(config), iteration, problem))
        return
    if dry_run:
        show_plan(recipe, overrides, hardware or "here", fill)
        return
    display = Display()
    try:
        with named_origins(recipe, overrides):
            stand_ins = STAND_INS if test_mode else 0
            flow = Coevolution(config, storage_of(config), display, stand_ins)
        flow.run(stages[0] if stages else None, iteration)
    except Stopped as stopped:
        display.close()
        again = f"ludus coevolve {' '.join([recipe, *overrides])}"
        again += " --test-mode" if test_mode else ""
        typer.echo(f"{stopped}; resume with: {again}", err=True)
        raise typer.Exit(stopped.exit_code) from None
    finally:
        display.close()
    typer.echo(f"{flow.storage.root}")


def _sorted_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the stage, if one is named, and the settings. Errors: ConfigError for two stages."""
    stages = [word for word in words if "=" not in word]
    if len(stages) > 1:
        raise ConfigError(f"{' '.join(stages)}: name one stage, or none for all")
    return stages, [word for word in words if "=" in word]


def _refuse_combinations(
    stages: Sequence[str],
    iteration: int | None,
    problem: str | None,
    test_mode: bool,
    dry_run: bool,
    of_dry_run: Mapping[str, object],
) -> None:
    """Refuse options that have no effect beside the others. Errors: ConfigError."""
    if iteration is not None and not stages:
        raise ConfigError("--iteration belongs to a stage: name one")
    if problem is not None and (stages != ["show"] or iteration is None):
        raise ConfigError("--problem belongs to show --iteration N: give both")
    if iteration is not None and stages == ["report"]:
        raise ConfigError("--iteration: the report holds all iterations: remove it")
    if dry_run and (stages or test_mode):
        given = stages[0] if stages else "--test-mode"
        raise ConfigError(f"--dry-run shows all stages of a whole co-evolution: remove {given}")
    for option, value in of_dry_run.items():
        if value is not None and not dry_run:
            raise ConfigError(f"{option} belongs to --dry-run: give both, or none")


def show_plan(
    recipe: str,
    overrides: Sequence[str],
    hardware: str,
    fill: float | None,
    efficiency: float | None = None,
) -> None:
    """Print the plan; exit code 1 where it does not fit."""
    from ludus.coevolve.checks import check_all
    from ludus.coevolve.flow import storage_of
    from ludus.coevolve.plan import plan
    from ludus.coevolve.plan_lines import lines
    from ludus.coevolve.roles import Roles
    from ludus.config.coevolve import CoevolveConfig
    from ludus.config.load import load_as

    config = load_as(CoevolveConfig, recipe, overrides)
    with named_origins(recipe, overrides):
        roles = Roles(config, storage_of(config))
        check_all(roles)
    estimate = plan(roles, hardware, fill, efficiency)
    for line in lines(roles, estimate):
        typer.echo(line)
    if estimate.too_large:
        raise typer.Exit(1)
