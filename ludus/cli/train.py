"""Commands that run a recipe: train, debug, profile, verify, plan, evaluate."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ludus.cli.coevolve import show_plan
from ludus.cli.options import (
    Break,
    Debugger,
    NewRecipe,
    Overrides,
    Recipe,
    RunsDir,
    check,
    check_metrics,
    load,
    named_origins,
)
from ludus.core.errors import ConfigError

app = typer.Typer()


@app.command()
def train(
    recipe: NewRecipe = None,
    overrides: Overrides = None,
    resume: Annotated[
        str | None, typer.Option("--resume", metavar="RUN", help="Resume this run.")
    ] = None,
    skip_damaged: Annotated[
        bool, typer.Option(help="Resume from an older checkpoint where the newest is damaged.")
    ] = False,
    with_env_service: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Play this environment of the recipe in a service of its own (`ludus serve env "
            "NAME`), started and ended with the run.",
        ),
    ] = None,
    skip_sft: Annotated[
        bool, typer.Option("--skip-sft", help="Leave out demonstrations and SFT.")
    ] = False,
    skip_rl: Annotated[bool, typer.Option("--skip-rl", help="Leave out RL.")] = False,
    quick_test: Annotated[
        bool,
        typer.Option(
            "--quick-test",
            help="A few steps of a tiny model on the CPU, in a run NAME-quick: tests the parts.",
        ),
    ] = False,
    view: Annotated[
        bool, typer.Option("--view", help="Serve the live page (`ludus view`) while the run goes.")
    ] = False,
    break_at: Break = None,
    debugger: Debugger = None,
    runs_dir: RunsDir = "runs",
) -> None:
    """Train a recipe: demonstrations, SFT, RL, evaluation, report."""
    if (recipe is None) == (resume is None) and not (resume and recipe and "=" in recipe):
        raise ConfigError("give either a recipe or --resume RUN")
    of_a_start = {"--skip-sft": skip_sft, "--skip-rl": skip_rl, "--quick-test": quick_test}
    given = [flag for flag, on in of_a_start.items() if on]
    config = None  # what is wrong is told before slow imports
    if resume is None:
        config = load(str(recipe), overrides, runs_dir)
        if given:
            check_metrics(config, str(recipe), overrides)  # a quick test leaves them out
            config = _reduced(config, skip_sft, skip_rl, quick_test)
    elif given:
        raise ConfigError(f"{given[0]} belongs to the start of a run: a resumed one is as it began")
    else:
        _check_free(resume, runs_dir)

    if sys.stderr.isatty():
        typer.echo("loading PyTorch, then the checks before a run ...", err=True)
    from ludus.config.load import dump_changes
    from ludus.pipeline import launch
    from ludus.pipeline.breakpoints import switched_on
    from ludus.pipeline.monitoring.progress import Display
    from ludus.pipeline.parts.companions import LaunchOptions, check_options

    display, options = Display(), LaunchOptions(with_env_service, bool(break_at), view, quick_test)
    in_process = config is not None and config.backend.name == "debug"
    stops = switched_on(break_at or [], display.note, debugger=debugger, here=in_process)
    opened = ExitStack()
    try:
        opened.enter_context(stops)
        if config is None:
            changes = ([recipe] if recipe else []) + (overrides or [])
            folder = launch.resume(
                str(resume), runs_dir, display, changes, skip_damaged=skip_damaged, options=options
            )
        else:
            if not in_process:
                check(config, str(recipe), overrides)  # before the settings are printed
                check_options(options, config.env)
            elif with_env_service:
                raise ConfigError("--with-env-service: `backend: debug` plays in one process")
            elif view:
                raise ConfigError("--view: `backend: debug` leaves no run to show")
            typer.echo(f"# differs from the defaults:\n{dump_changes(config)}", err=True)
            if in_process:
                debug(str(recipe), overrides)
                return
            with named_origins(str(recipe), overrides):
                folder = launch.train(config, display, skip_damaged=skip_damaged, options=options)
    except launch.Stopped as stopped:
        display.close()
        typer.echo(str(stopped), err=True)
        raise typer.Exit(stopped.exit_code) from None
    finally:
        display.close()
        opened.close()
    where = folder.report if folder.report.exists() else folder.path
    typer.echo(f"run {folder.id} is complete: {where}")


def _check_free(run_id: str, runs_dir: str) -> None:
    """Errors: ConfigError for no such run; LudusError for one in use."""
    from ludus.store.folders import find_run

    find_run(runs_dir, run_id).lock().close()


def _reduced(config: Any, skip_sft: bool, skip_rl: bool, quick_test: bool) -> Any:
    """The recipe with less to do."""
    from ludus.pipeline.quick import quick, without_stages

    note = partial(typer.echo, err=True)
    config = without_stages(config, sft=skip_sft, rl=skip_rl, note=note)
    if quick_test:
        config, notes = quick(config)
        typer.echo("\n  ".join([f"--quick-test: {notes[0]}", *notes[1:]]), err=True)
    return config


@app.command()
def debug(
    recipe: Recipe,
    overrides: Overrides = None,
    tasks: Annotated[int, typer.Option(min=1, help="Tasks to play.")] = 1,
    break_at: Break = None,
) -> None:
    """Play a few tasks in one thread; print every turn and training row. Trains nothing."""
    from ludus.pipeline.breakpoints import switched_on
    from ludus.pipeline.debug import debug as run_debug

    config = load(recipe, overrides)
    check(config, recipe, overrides)
    with switched_on(break_at or [], partial(typer.echo, err=True), here=True):
        run_debug(config, tasks)


@app.command()
def profile(
    recipe: Recipe,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the last stage to profile.")] = 5,
    out: Annotated[
        Path, typer.Option(help="File to write: .html, .json (speedscope) or .txt (folded stacks).")
    ] = Path("profile.html"),
) -> None:
    """Profile a run's steps: time by part, and a flame graph by function."""
    from ludus.diagnostics import profiling
    from ludus.pipeline.monitoring.progress import Display

    profiling.check_out(out)
    config = load(recipe, overrides)
    if config.rl is None and config.sft is None:
        raise ConfigError(f"{recipe}: no `sft` and no `rl`: there is no step to profile")
    check(config, recipe, overrides)
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
    """Check that sampler and learner compute the same bits; name the first different operation."""
    from ludus.diagnostics import profiling
    from ludus.pipeline.monitoring.progress import Display
    from ludus.pipeline.parts.effects import IGNORED_BY_VERIFY

    config = load(recipe, [*(overrides or []), "verify=true"])
    if config.rl is None:
        raise ConfigError(f"{recipe}: no `rl`: nothing is sampled, so nothing can be verified")
    args = {k: v for k, v in config.sampler.args.items() if k not in IGNORED_BY_VERIFY}
    sampler = config.sampler.model_copy(update={"args": args})  # the recipe's, for the run
    config = config.model_copy(update={"sampler": sampler})
    check(config, recipe, overrides)
    counter = profiling.VerifiedCounter(Display())
    _train_briefly(config, steps, counter)
    typer.echo(counter)
    if not counter.num_tokens:
        raise typer.Exit(1)


def _train_briefly(config: Any, steps: int, observer: Any) -> None:
    """Train a few steps in a temporary folder."""
    import tempfile

    from ludus.diagnostics import profiling
    from ludus.pipeline import launch

    with tempfile.TemporaryDirectory(prefix="ludus-brief-") as folder:
        try:
            launch.train(profiling.short_run(config, steps, Path(folder)), observer)
        except launch.Stopped as stopped:  # the folder is removed: there is nothing to resume
            typer.echo(f"ludus: stopped{stopped.exceeded and ': '}{stopped.exceeded}", err=True)
            raise typer.Exit(stopped.exit_code) from None
        finally:
            observer.close()


@app.command()
def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    hardware: Annotated[
        str,
        typer.Option(help="A GPU by name (h200, a100-80gb, ...), or `here`: measure this machine."),
    ] = "here",
    fill: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            max=1,
            help="Fraction of turns and context that episodes use; default: as the expert plays.",
        ),
    ] = None,
    efficiency: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            max=1,
            help="Fraction of the hardware's peak that is reached; default: 0.35, and 0.8 of "
            "sampling on this machine's CPU.",
        ),
    ] = None,
    env_step_s: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds of an environment step; default: as measured here."),
    ] = None,
    tool_calls: Annotated[
        float | None,
        typer.Option(min=0, help="Tool calls an episode; default: as the expert makes them."),
    ] = None,
    tool_call_s: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Seconds of a tool call on another machine; default: Python in the sandbox here.",
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="SPEC",
            help="Simulate the RL stage on the cluster of this YAML file "
            "(docs/cluster-planning.md).",
        ),
    ] = None,
    advice: Annotated[
        bool, typer.Option("--advice", help="With --cluster: search for the best placements.")
    ] = False,
    runs_dir: RunsDir = "runs",
) -> None:
    """Estimate memory, time and cost of a recipe on given hardware. Trains nothing.

    Plays a few episodes of the environment's expert. Uses no network. Of a co-evolution, it prints
    the plan of all stages, as `ludus coevolve RECIPE --dry-run` does. With --cluster, it simulates
    the RL stage on many machines; overrides of SPEC begin with `cluster.`.
    """
    from ludus.config.load import is_coevolution

    if advice and cluster is None:
        raise ConfigError("--advice belongs to --cluster SPEC")
    if cluster is not None:
        if is_coevolution(recipe):
            raise ConfigError("--cluster: a co-evolution cannot be simulated: name a run's recipe")
        differs = {"--hardware": hardware != "here", "--efficiency": efficiency is not None}
        differs |= {"--env-step-s": env_step_s is not None, "--tool-calls": tool_calls is not None}
        differs |= {"--tool-call-s": tool_call_s is not None}
        if wrong := [option for option, differing in differs.items() if differing]:
            raise ConfigError(f"{wrong[0]} does not belong to --cluster: set it in {cluster}")
        _simulate(recipe, overrides or [], cluster, fill, advice, runs_dir)
        return
    if is_coevolution(recipe):
        of_a_run = {"--tool-calls": tool_calls, "--tool-call-s": tool_call_s}
        of_a_run["--env-step-s"] = env_step_s
        if given := [option for option, value in of_a_run.items() if value is not None]:
            raise ConfigError(f"{given[0]} belongs to the plan of a run: remove it")
        show_plan(recipe, overrides or [], hardware, fill, efficiency)
        return
    from ludus.diagnostics import plan as planning
    from ludus.diagnostics.episodes import measure
    from ludus.diagnostics.hardware import find_hardware
    from ludus.diagnostics.plan_lines import lines

    config = load(recipe, overrides)
    check(config, recipe, overrides)
    on = find_hardware(hardware, config.model)
    with named_origins(recipe, overrides):
        usage = measure(config)
    estimate = planning.plan(
        config,
        on,
        fill=fill,
        efficiency=efficiency,
        env_step_s=env_step_s,
        usage=usage,
        num_calls=tool_calls,
        call_s=tool_call_s,
    )
    if usage is None and fill is None:
        typer.echo("no expert: episodes are taken to use all turns and the whole context (--fill)")
    if usage is not None and usage.failed:
        typer.echo(usage.failed)
    for line in lines(config, estimate):
        typer.echo(line)
    if not estimate.fits:
        raise typer.Exit(1)


def _simulate(
    recipe: str,
    overrides: list[str],
    cluster: str,
    fill: float | None,
    advice: bool,
    runs_dir: str,
) -> None:
    """`ludus plan --cluster`."""
    from ludus.core.modules import require
    from ludus.diagnostics.simulation.spec import load_spec

    require("simpy", "plan", "--cluster")
    prefix = "cluster."
    changes = [item.removeprefix(prefix) for item in overrides if item.startswith(prefix)]
    spec = load_spec(cluster, changes)
    of_run = [item for item in overrides if not item.startswith(prefix)]
    config = load(recipe, of_run, runs_dir)
    check(config, recipe, of_run)

    from ludus.diagnostics.episodes import measure
    from ludus.diagnostics.simulation import plan as simulation
    from ludus.diagnostics.simulation.advice import advice_lines, search
    from ludus.diagnostics.simulation.bottleneck import find_bottleneck
    from ludus.diagnostics.simulation.lines import lines

    usage = measure(config) if simulation.needs_expert(spec, fill) else None
    inputs = simulation.inputs_of(config, spec, usage, fill, runs_dir)
    outcome = simulation.simulate(inputs, spec)
    for line in lines(inputs, outcome, find_bottleneck(inputs, spec)):
        typer.echo(line)
    if advice:
        typer.echo("")
        for line in advice_lines(search(inputs, spec)):
            typer.echo(line)


@app.command()
def evaluate(
    subject: Annotated[
        str | None,
        typer.Argument(
            help="A run (RUN or RUN/CHECKPOINT), a Hugging Face folder, or MODEL@URL.",
            metavar="MODEL",
        ),
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(help="A run's checkpoint: best, latest, or its name; default: latest."),
    ] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(help="An OpenAI-compatible endpoint, up to /v1. API key: LUDUS_API_KEY."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model's name at the endpoint.")] = None,
    against: Annotated[
        str | None,
        typer.Option(
            help="A second model, as MODEL above or a checkpoint of the run, compared by a paired "
            "test."
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(help="Recipe with the held-out tasks and environment; default: the run's."),
    ] = None,
    num_tasks: Annotated[int | None, typer.Option(help="Held-out tasks; default: all.")] = None,
    samples: Annotated[int, typer.Option(help="Episodes of each task: k of pass@k.")] = 1,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    out: Annotated[
        Path | None,
        typer.Option(help="New file (JSON lines) for the episodes: messages, scores, errors."),
    ] = None,
    runs_dir: RunsDir = "runs",
) -> None:
    """Evaluate a run, a Hugging Face folder or an endpoint's model on held-out tasks."""
    if (subject is None) == (endpoint is None) or (endpoint is None) != (model is None):
        raise ConfigError("name a run or a Hugging Face folder, or give --endpoint and --model")
    from ludus.pipeline.evaluation.subjects import evaluate_subjects, find_subject

    text = f"{model}@{endpoint}" if subject is None else subject
    first = find_subject(f"{text}/{checkpoint}" if checkpoint else text, runs_dir)
    subjects = [first, find_subject(against, runs_dir, first)] if against else [first]
    evaluate_subjects(
        subjects,
        load(recipe, None) if recipe else None,
        num_tasks=num_tasks,
        samples=samples,
        temperature=temperature,
        out=out,
    )
