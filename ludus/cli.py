"""The command line: `ludus VERB`. Nothing heavy is imported before a verb needs it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ludus import __version__
from ludus.core.errors import ConfigError, LudusError


class _Verbs(typer.core.TyperGroup):
    """Ctrl-C ends any verb with a word; typer's own end is silent."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("ludus: stopped", err=True)
            raise typer.Exit(130) from None


app = typer.Typer(
    name="ludus",
    cls=_Verbs,
    help="Train language-model agents by reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
checkpoint_app = typer.Typer(help="Checkpoints: list, check, export.", no_args_is_help=True)
app.add_typer(checkpoint_app, name="checkpoint")
serve_app = typer.Typer(help="Services over HTTP and WebSocket.", no_args_is_help=True)
app.add_typer(serve_app, name="serve")

Recipe = Annotated[
    str, typer.Argument(help="A YAML file, or `file.py:function` that returns a RunConfig.")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Settings to change: dotted.key=value ...")
]
RunsDir = Annotated[str, typer.Option("--runs-dir", help="Folder of the runs.")]
StoreUrl = Annotated[
    str | None, typer.Option("--store", help="URL of the run store, if not SQLite in runs-dir.")
]
Run = Annotated[str, typer.Argument(help="A run's id (see `ludus runs`).")]


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if show_version:
        typer.echo(f"ludus {__version__}")
        raise typer.Exit


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
    from ludus import launch
    from ludus.core.config import dump_config
    from ludus.progress import Display

    if (recipe is None) == (resume is None) and not (resume and recipe and "=" in recipe):
        raise ConfigError("give a recipe, or --resume RUN")
    display = Display()
    try:
        if resume is not None:
            changes = ([recipe] if recipe else []) + (overrides or [])
            folder = launch.resume(resume, runs_dir, display, changes, skip_damaged=skip_damaged)
        else:
            config = _load(str(recipe), overrides, runs_dir)
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
    from ludus.debug import debug as run_debug

    run_debug(_load(recipe, overrides), tasks)


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
    import tempfile

    from ludus import launch, profiling
    from ludus.progress import Display

    profiling.check_out(out)
    config = _load(recipe, overrides)
    if config.rl is None and config.sft is None:
        raise ConfigError(f"{recipe}: it has no `sft` and no `rl`: there is no step to profile")
    profiler = profiling.Profiler("rl" if config.rl else "sft", Display())
    with tempfile.TemporaryDirectory(prefix="ludus-profile-") as folder:
        try:
            launch.train(profiling.short_run(config, steps, Path(folder)), profiler)
        finally:
            profiler.close()
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
    import tempfile

    from ludus import launch, profiling
    from ludus.progress import Display

    config = _load(recipe, [*(overrides or []), "verify=true"])
    if config.rl is None:
        raise ConfigError(f"{recipe}: it has no `rl`: nothing is sampled that could be verified")
    display = Display()
    counted = profiling.Verified(display)
    with tempfile.TemporaryDirectory(prefix="ludus-verify-") as folder:
        try:
            launch.train(profiling.short_run(config, steps, Path(folder)), counted)
        finally:
            display.close()
    typer.echo(counted)
    if not counted.num_tokens:
        raise typer.Exit(1)


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
    from ludus import planning

    config = _load(recipe, overrides)
    found = planning.plan(
        config,
        planning.hardware(hardware, config),
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
    from ludus.evaluating import evaluate_checkpoints

    names = [checkpoint, against] if against else [checkpoint]
    evaluate_checkpoints(run, runs_dir, names, num_tasks, samples, temperature)


@app.command()
def report(run: Run, runs_dir: RunsDir = "runs", store: StoreUrl = None) -> None:
    """Write a run's report again, from what is stored."""
    from ludus import launch

    typer.echo(launch.report_again(run, runs_dir, store))


@app.command()
def runs(runs_dir: RunsDir = "runs", store: StoreUrl = None) -> None:
    """List the runs in the store."""
    from ludus.launch import open_store
    from ludus.store.show import render_runs

    with open_store(runs_dir, store) as opened:
        _print(render_runs(opened))


@app.command()
def show(
    run: Run,
    trajectory: Annotated[
        str | None, typer.Argument(help="A trajectory's id: read its rollout.")
    ] = None,
    runs_dir: RunsDir = "runs",
    store: StoreUrl = None,
) -> None:
    """Show a run, or one of its rollouts with trained tokens told apart."""
    from ludus.launch import decoder, open_store
    from ludus.store.show import render_run, render_trajectory

    with open_store(runs_dir, store) as opened:
        if trajectory is None:
            _print(render_run(opened, run))
        else:
            decode = decoder(run, runs_dir)
            _print(render_trajectory(opened, run, trajectory, decode))


@app.command()
def export(
    run: Run,
    path: Annotated[Path, typer.Argument(help="The file to write.")],
    format: Annotated[str, typer.Option(help="jsonl or parquet.")] = "jsonl",
    what: Annotated[str, typer.Option(help="trajectories, steps, or sft.")] = "trajectories",
    min_score: Annotated[
        float | None, typer.Option(help="Only episodes whose reward reaches this.")
    ] = None,
    runs_dir: RunsDir = "runs",
    store: StoreUrl = None,
) -> None:
    """Write a run's trajectories, steps, or an SFT data set to a file."""
    from ludus.launch import decoder, open_store
    from ludus.store.export import export as write

    with open_store(runs_dir, store) as opened:
        written = write(
            opened,
            run,
            path,
            format=format,
            what=what,
            min_score=min_score,
            decode=decoder(run, runs_dir),
        )
    typer.echo(f"{written.num_rows} lines in {written.path}")
    for reason, count in written.skipped.items():
        typer.echo(f"left out: {count} ({reason})", err=True)


@app.command()
def config(
    key: Annotated[
        str | None, typer.Argument(help="A key, a section, or a plug-in's name; default: all.")
    ] = None,
    markdown: Annotated[bool, typer.Option(help="Print the page of the documentation.")] = False,
) -> None:
    """Print the reference of every key, and of every plug-in's arguments."""
    from ludus.core.reference import config_reference, show_reference
    from ludus.registries import REGISTRIES

    if markdown:
        sys.stdout.write(config_reference(REGISTRIES))
    else:
        _print(show_reference(key, REGISTRIES))


@app.command("check-env")
def check_env_command(
    name: Annotated[str, typer.Argument(help="A registered environment, or module:Class.")],
    args: Annotated[list[str] | None, typer.Argument(help="Its arguments: key=value ...")] = None,
    tasks: Annotated[int, typer.Option(min=1, help="Tasks to try.")] = 6,
) -> None:
    """Check that an environment keeps the protocol: deterministic, robust, quiet."""
    from ludus.envs.check import check_env

    findings = asyncio.run(check_env(_spec(name, args), num_tasks=tasks))
    for finding in findings:
        typer.echo(finding)
    if any(finding.severity == "error" for finding in findings):
        raise typer.Exit(1)
    typer.echo(f"{name} keeps the protocol")


@app.command()
def doctor(runs_dir: RunsDir = "runs") -> None:
    """Check this machine, and say what to install."""
    from ludus.doctor import exit_code, render_checks, run_doctor

    checks = run_doctor(runs_dir)
    _print(render_checks(checks))
    raise typer.Exit(exit_code(checks))


@checkpoint_app.command("list")
def checkpoint_list(run: Run, runs_dir: RunsDir = "runs") -> None:
    """List a run's checkpoints."""
    from ludus.runs import find_run
    from ludus.train.checkpoint import CheckpointStore

    for info in CheckpointStore(find_run(runs_dir, run).checkpoints).list():
        kept = ", pinned" if info.pinned else ""
        metric = "" if info.metric is None else f", metric {info.metric:.4g}"
        typer.echo(f"{info.path.name}: {info.stage} step {info.step}{metric}{kept}")


@checkpoint_app.command("check")
def checkpoint_check(
    path: Annotated[str, typer.Argument(help="A run's id, or the path of a checkpoint.")],
    runs_dir: RunsDir = "runs",
) -> None:
    """Find truncated, altered or missing files."""
    from ludus.runs import find_run
    from ludus.train.checkpoint import check

    folder = Path(path) if Path(path).is_dir() else find_run(runs_dir, path).checkpoints
    problems = check(folder)
    for problem in problems:
        typer.echo(problem)
    if problems:
        raise typer.Exit(1)
    typer.echo("all files are as they were written")


@checkpoint_app.command("export")
def checkpoint_export(
    run: Run,
    path: Annotated[Path, typer.Argument(help="The Hugging Face folder to write.")],
    checkpoint: Annotated[
        str | None, typer.Option(help="Checkpoint, e.g. rl-000100; default: the newest.")
    ] = None,
    merge: Annotated[bool, typer.Option(help="Merge LoRA adapters into the weights.")] = True,
    overwrite: Annotated[bool, typer.Option(help="Replace what is in the folder.")] = False,
    runs_dir: RunsDir = "runs",
) -> None:
    """Export a checkpoint as a Hugging Face folder that `from_pretrained` loads."""
    from ludus.evaluating import export_checkpoint

    export_checkpoint(run, runs_dir, checkpoint, path, merge=merge, overwrite=overwrite)
    typer.echo(str(path))


Model = Annotated[str | None, typer.Option(help="The model's name at the endpoint.")]
BaseUrl = Annotated[
    str | None, typer.Option(help="OpenAI-compatible, up to /v1. Its key: LUDUS_API_KEY.")
]
Ids = Annotated[
    str | None, typer.Option(help="AgentGym's, or seeds where there are none: 0-99,babyai_120.")
]
Form = Annotated[str, typer.Option(help="plain, react, or tools.")]
SystemPrompt = Annotated[
    Path | None, typer.Option(help="A file: put before the environment's messages.")
]
MaxRound = Annotated[
    int | None, typer.Option(min=1, help="Turns of an episode; default: the environment's own.")
]
Concurrency = Annotated[int, typer.Option(min=1, max=512, help="Episodes at the same time.")]


@app.command()
def rollout(
    env: Annotated[str, typer.Argument(help="A registered environment, or module:Class.")],
    args: Annotated[list[str] | None, typer.Argument(help="Its arguments: key=value ...")] = None,
    model: Model = None,
    base_url: BaseUrl = None,
    ids: Ids = "0-9",
    tier: Annotated[str | None, typer.Option(help="Ids are seeds of this tier.")] = None,
    out: Annotated[Path | None, typer.Option(help="A JSON file for all episodes.")] = None,
    max_round: MaxRound = None,
    format: Form = "react",
    system_prompt: SystemPrompt = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest turn.")] = 512,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the sampling.")] = 0,
    concurrency: Concurrency = 16,
    deadline: Annotated[float, typer.Option(min=0.1, help="Seconds for all episodes.")] = 3600.0,
) -> None:
    """Play episodes with the model of an OpenAI-compatible endpoint, as `POST /rollouts` does."""
    from ludus.data import options, rollouts

    asked = rollouts.request(
        env=env,
        model=model,
        base_url=base_url,
        ids=options.ids(ids),
        tier=tier,
        max_round=max_round,
        format=format,
        system_prompt=options.text_of(system_prompt),
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        concurrency=concurrency,
        deadline_s=deadline,
    )
    answer = rollouts.rollout(_spec(env, args), asked, out, lambda line: typer.echo(line, err=True))
    typer.echo(answer.model_dump_json(exclude={"results"}))
    if not answer.num_evaluated:
        raise typer.Exit(1)


@app.command("generate-data")
def generate_data(
    folder: Annotated[
        Path, typer.Argument(help="Where the data set goes; one that is begun goes on.")
    ],
    envs: Annotated[
        list[str],
        typer.Argument(help="Environments, each followed by its arguments: NAME [key=value ...]"),
    ],
    source: Annotated[str, typer.Option(help="expert, model, or mixed.")] = "expert",
    num_tasks: Annotated[int, typer.Option(min=1, help="Tasks of each environment.")] = 100,
    first_seed: Annotated[int, typer.Option(min=0, help="Seed of the first task.")] = 0,
    tier: Annotated[list[str] | None, typer.Option(help="Only these; default: all.")] = None,
    ids: Ids = None,
    items: Annotated[
        str | None, typer.Option(help="The tasks of a file of AgentEval or AgentTraj.")
    ] = None,
    format: Form = "react",
    system_prompt: SystemPrompt = None,
    model: Model = None,
    base_url: BaseUrl = None,
    samples: Annotated[int, typer.Option(min=1, help="Of the model, of each task.")] = 4,
    keep: Annotated[int, typer.Option(min=1, help="Best episodes kept of each task.")] = 1,
    min_score: Annotated[
        float | None, typer.Option(min=0, max=1, help="Kept from here on; default: successes.")
    ] = None,
    max_round: MaxRound = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest turn.")] = 512,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the sampling.")] = 0,
    concurrency: Concurrency = 16,
    workers: Annotated[int, typer.Option(min=1, help="Processes of the expert.")] = 2,
) -> None:
    """Make SFT data of an expert's episodes, a model's best ones, or both; with a data card."""
    from ludus.data import options
    from ludus.data.generate import generate
    from ludus.services import serving

    wanted = options.generation(
        [_spec(name, args) for name, args in serving.named(envs)],
        source=source,
        num_tasks=num_tasks,
        first_seed=first_seed,
        tiers=tier,
        ids=ids,
        items=items,
        format=format,
        system_prompt=system_prompt,
        model=model,
        base_url=base_url,
        samples=samples,
        keep=keep,
        min_score=min_score,
        max_round=max_round,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        concurrency=concurrency,
        workers=workers,
    )
    made = generate(wanted, folder, lambda line: typer.echo(line, err=True))
    typer.echo(
        f"{made.num_kept} episodes: {made.folder}/data.jsonl (card: {made.folder}/README.md)"
    )


@serve_app.command("env")
def serve_env(
    envs: Annotated[
        list[str],
        typer.Argument(help="Environments, each followed by its arguments: NAME [key=value ...]"),
    ],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8000,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Processes.")] = 1,
    isolate: Annotated[
        bool, typer.Option("--isolate", help="A process of its own for every session.")
    ] = False,
    max_sessions: Annotated[int, typer.Option(min=1, help="Open at the same time.")] = 4096,
    max_memory_mb: Annotated[
        int, typer.Option(min=0, help="No new session above this, in each process; 0: no limit.")
    ] = 0,
    idle: Annotated[float, typer.Option(min=1, help="Seconds until a session is closed.")] = 900.0,
    step_deadline: Annotated[float, typer.Option(min=0.1, help="Seconds of a step.")] = 30.0,
) -> None:
    """Serve environments: ludus' API, AgentGym's and OpenEnv's. Tokens: LUDUS_TOKENS=a,b."""
    from ludus.services import serving

    limits = {
        "max_sessions": max_sessions,
        "max_memory_mb": max_memory_mb,
        "idle_s": idle,
        "step_deadline_s": step_deadline,
    }
    specs = [_spec(name, args) for name, args in serving.named(envs)]
    serving.serve_env(specs, host, port, workers, isolate, limits, typer.echo)


@serve_app.command("model")
def serve_model(
    checkpoint: Annotated[
        str, typer.Argument(help="A run, a checkpoint's folder, or a Hugging Face folder.")
    ],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8000,
    name: Annotated[
        str | None,
        typer.Option(help="The model's name to clients; default: the run's or folder's."),
    ] = None,
    sampler: Annotated[str, typer.Option(help="in_process or vllm.")] = "in_process",
    sampler_arg: Annotated[
        list[str] | None, typer.Option(help="An argument of the sampler: key=value; repeat it.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, or cuda:N; default: the run's, else cpu.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32 or bfloat16; default: the run's or the weights'.")
    ] = None,
    context_length: Annotated[
        int | None, typer.Option(min=16, help="Most tokens of prompt and answer together.")
    ] = None,
    chat_template: Annotated[
        str | None, typer.Option(help="plain, qwen3, or a Jinja file; default: the model's own.")
    ] = None,
    thinking: Annotated[
        str | None, typer.Option(help="keep, strip or forbid; default: the run's, else keep.")
    ] = None,
    max_turns: Annotated[int, typer.Option(min=1, help="Sampled at the same time.")] = 512,
    runs_dir: RunsDir = "runs",
) -> None:
    """Serve a model over OpenAI's API. Tokens: LUDUS_TOKENS=a,b; to swap: LUDUS_ADMIN_TOKEN."""
    from ludus.services import serving

    wish = {
        "device": device,
        "dtype": dtype,
        "context_length": context_length,
        "chat_template": chat_template,
        "thinking": thinking,
    }
    serving.serve_model(
        checkpoint,
        host=host,
        port=port,
        name=name,
        runs_dir=runs_dir,
        wish=wish,
        sampler=_spec(sampler, sampler_arg),
        max_turns=max_turns,
        say=typer.echo,
    )


def _load(recipe: str, overrides: list[str] | None, runs_dir: str = "runs") -> Any:
    from ludus.core.config import load_config

    changes = list(overrides or [])
    if runs_dir != "runs":
        changes.append(f"runs_dir={runs_dir}")
    return load_config(recipe, changes)


def _spec(name: str, args: list[str] | None) -> Any:
    from ludus.core import yaml12
    from ludus.core.types import Spec

    pairs: dict[str, Any] = {}
    for item in args or []:
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise ConfigError(f"{item!r}: arguments are given as key=value")
        pairs[key], _ = yaml12.parse(value, item)
    return Spec(name=name, args=pairs)


def _print(renderable: Any) -> None:
    from rich.console import Console

    Console().print(renderable)


def main() -> None:
    """Entry point: a user's mistake ends with one clear message and a non-zero exit code."""
    try:
        app()
    except LudusError as error:
        typer.echo(f"ludus: {error}", err=True)
        raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    main()
