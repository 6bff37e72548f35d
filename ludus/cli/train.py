"""Verbs that run a recipe: train, debug, profile, verify, plan, evaluate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ludus.cli.options import Overrides, Recipe, Run, RunsDir, load
from ludus.core.errors import ConfigError

app = typer.Typer()


@app.command()
def train(
    recipe: Annotated[
        str | None, typer.Argument(help="A YAML file, or `file.py:function`; not with --resume.")
    ] = None,
    overrides: Overrides = None,
    resume: Annotated[
        str | None, typer.Option("--resume", metavar="RUN", help="Go on with this run.")
    ] = None,
    skip_damaged: Annotated[
        bool, typer.Option(help="Resume from an older checkpoint where the newest is damaged.")
    ] = False,
    runs_dir: RunsDir = "runs",
) -> None:
    """Train: demonstrations, SFT, RL, evaluation, report, as the recipe says."""
    from ludus.config.load import dump_config
    from ludus.pipeline import launch
    from ludus.pipeline.progress import Display

    if (recipe is None) == (resume is None) and not (resume and recipe and "=" in recipe):
        raise ConfigError("give a recipe, or --resume RUN")
    display = Display()
    try:
        if resume is not None:
            changes = ([recipe] if recipe else []) + (overrides or [])
            folder = launch.resume(resume, runs_dir, display, changes, skip_damaged=skip_damaged)
        else:
            config = load(str(recipe), overrides, runs_dir)
            typer.echo(dump_config(config), err=True)
            if config.backend == "debug":
                debug(str(recipe), overrides)
                return
            folder = launch.train(config, display, skip_damaged=skip_damaged)
    except launch.Stopped as stopped:
        display.close()
        typer.echo(str(stopped), err=True)
        raise typer.Exit(stopped.exit_code) from None
    finally:
        display.close()
    typer.echo(f"run {folder.id} is complete: {folder.report}")


@app.command()
def debug(
    recipe: Recipe,
    overrides: Overrides = None,
    tasks: Annotated[int, typer.Option(min=1, help="Tasks to play.")] = 1,
) -> None:
    """Play a few tasks in this thread, show every turn and every training row, and stop."""
    from ludus.pipeline.debug import debug as run_debug

    run_debug(load(recipe, overrides), tasks)


@app.command()
def profile(
    recipe: Recipe,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the last stage to profile.")] = 5,
    out: Annotated[
        Path, typer.Option(help="What to write: .html, .json (for speedscope) or .txt (folded).")
    ] = Path("profile.html"),
) -> None:
    """Show where a run's steps spend their time: the parts of a step, and a flame graph."""
    from ludus.diagnostics import profiling
    from ludus.pipeline.progress import Display

    profiling.check_out(out)
    config = load(recipe, overrides)
    if config.rl is None and config.sft is None:
        raise ConfigError(f"{recipe}: it has no `sft` and no `rl`: there is no step to profile")
    profiler = profiling.Profiler("rl" if config.rl else "sft", Display())
    _train_briefly(config, steps, profiler)
    profiler.write(out, f"{config.name}: {steps} steps")
    for part, seconds, share in profiler.table():
        typer.echo(f"{part:10} {seconds:8.3f} s a step  {share:6.1%}")
    typer.echo(f"{out}  ({profiler.how})")


@app.command()
def verify(
    recipe: Recipe,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="RL steps to play and train.")] = 2,
) -> None:
    """Check that sampler and learner agree in every bit, or name the operation that parts them."""
    from ludus.diagnostics import profiling
    from ludus.pipeline.progress import Display

    config = load(recipe, [*(overrides or []), "verify=true"])
    if config.rl is None:
        raise ConfigError(f"{recipe}: it has no `rl`: nothing is sampled that could be verified")
    counted = profiling.Verified(Display())
    _train_briefly(config, steps, counted)
    typer.echo(counted)
    if not counted.num_tokens:
        raise typer.Exit(1)


def _train_briefly(config: Any, steps: int, observer: Any) -> None:
    """A few steps of the last stage, in a folder that is gone afterwards."""
    import tempfile

    from ludus.diagnostics import profiling
    from ludus.pipeline import launch

    with tempfile.TemporaryDirectory(prefix="ludus-brief-") as folder:
        try:
            launch.train(profiling.short_run(config, steps, Path(folder)), observer)
        finally:
            observer.close()


@app.command()
def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    hardware: Annotated[
        str, typer.Option(help="A GPU by name (h200, a100-80gb, ...), or `here`: measured.")
    ] = "here",
    fill: Annotated[
        float, typer.Option(min=0.01, max=1, help="Part of their turns and context episodes use.")
    ] = 1.0,
    efficiency: Annotated[
        float, typer.Option(min=0.01, max=1, help="Part of the hardware's peak that is reached.")
    ] = 0.35,
    env_step_s: Annotated[
        float, typer.Option(min=0, help="Seconds of a step of the environment.")
    ] = 0.0,
) -> None:
    """Estimate what a recipe takes on some hardware: memory, time, cost. Starts nothing."""
    from ludus.diagnostics import plan as planning
    from ludus.diagnostics.hardware import find_hardware

    config = load(recipe, overrides)
    found = planning.plan(
        config,
        find_hardware(hardware, config.model),
        fill=fill,
        efficiency=efficiency,
        env_step_s=env_step_s,
    )
    for line in planning.lines(config, found):
        typer.echo(line)
    if not found.fits:
        raise typer.Exit(1)


@app.command()
def evaluate(
    run: Run,
    checkpoint: Annotated[
        str | None, typer.Option(help="Checkpoint, e.g. sft-000300; default: the newest.")
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="A second checkpoint: compare on the same tasks.")
    ] = None,
    num_tasks: Annotated[int | None, typer.Option(help="Held-out tasks; default: all.")] = None,
    samples: Annotated[int, typer.Option(help="Episodes of each task; k of pass@k.")] = 1,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    runs_dir: RunsDir = "runs",
) -> None:
    """Evaluate a run's checkpoint on its held-out tasks, or compare two with a paired test."""
    from ludus.pipeline.evaluate import evaluate_checkpoints

    names = [checkpoint, against] if against else [checkpoint]
    evaluate_checkpoints(run, runs_dir, names, num_tasks, samples, temperature)
