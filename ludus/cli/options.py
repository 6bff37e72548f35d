"""Arguments that several verbs share, and their parsers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from ludus.core.errors import ConfigError

Recipe = Annotated[
    str,
    typer.Argument(
        help="A YAML file, a recipe's name (see `ludus recipes`), or `file.py:function` that "
        "returns a RunConfig."
    ),
]
NewRecipe = Annotated[
    str | None,
    typer.Argument(help="A YAML file, a recipe's name, or `file.py:function`; not with --resume."),
]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Settings to change: dotted.key=value ...")
]
RunsDir = Annotated[str, typer.Option("--runs-dir", help="Folder of the runs.")]
StoreUrl = Annotated[
    str | None, typer.Option("--store", help="URL of the run store, if not SQLite in runs-dir.")
]
Run = Annotated[str, typer.Argument(help="A run's id (see `ludus runs`), or its folder.")]
Checkpoint = Annotated[
    str | None,
    typer.Option("--checkpoint", help="best, latest, or a name, e.g. rl-000100; default: latest."),
]
Break = Annotated[
    list[str] | None,
    typer.Option(
        "--break",
        metavar="TAG",
        help='Stop at breakpoint_at("TAG") of your code; repeatable.',
    ),
]
Debugger = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="What breakpoints of a run wait for: pdb (default), or debugpy for an editor.",
    ),
]
Merge = Annotated[bool, typer.Option(help="Merge LoRA adapters into the weights.")]


def load(recipe: str, overrides: list[str] | None, runs_dir: str = "runs") -> Any:
    """Returns the recipe's configuration with overrides applied."""
    from ludus.config.load import load_config

    changes = list(overrides or [])
    if runs_dir != "runs":
        changes.append(f"runs_dir={runs_dir}")
    return load_config(recipe, changes)


def recipe_with_tools(recipe: str | None) -> Any:
    """Returns the configuration of `--tools`; None: not given. Errors: ConfigError."""
    if recipe is None:
        return None
    if not (config := load(recipe, None)).tools:
        raise ConfigError(f"--tools: {recipe} has no `tools`: give a recipe that has them")
    return config


def check(config: Any, recipe: str, overrides: Sequence[str] | None) -> None:
    """Check the plug-ins of a configuration. Each line of an error names its override or recipe."""
    from ludus.pipeline.parts.checks import check as check_plugins

    with named_origins(recipe, overrides):
        check_plugins(config)


def check_metrics(config: Any, recipe: str, overrides: Sequence[str] | None) -> None:
    """As `check`, of the sinks alone."""
    from ludus.config.load import check_specs
    from ludus.telemetry.sinks import SINKS

    with named_origins(recipe, overrides):
        check_specs(config, {"metrics": SINKS})


@contextmanager
def named_origins(recipe: str, overrides: Sequence[str] | None) -> Iterator[None]:
    """Put the override, or the recipe with the line, to each line of a ConfigError."""
    from ludus.config.load import located

    try:
        yield
    except ConfigError as error:
        raise ConfigError(located(recipe, overrides or (), str(error))) from None


def open_store(runs_dir: str, url: str | None) -> Any:
    """Open the run store read-only. Errors: ConfigError where there is none yet."""
    from ludus.store import RunStore

    if url is None and not (Path(runs_dir) / "ludus.db").is_file():
        raise ConfigError(f"{runs_dir} holds no runs yet: start one with `ludus train RECIPE`")
    return RunStore.open(url, runs_dir, read_only=True)


def unfinished(store: Any, runs_dir: str, run: str | None = None) -> list[str]:
    """Returns what to do about runs that were killed: unknown to the store, or said to run."""
    from ludus.store.folders import RunFolder, resume_command, unrecorded
    from ludus.store.settings import run_config

    lines = []
    rows = {row.id: row.status for row in store.runs()}
    for folder in [] if run else unrecorded(runs_dir, rows):
        with suppress(ConfigError):  # no run of this version
            if run_config(folder).store is None:
                lines.append(
                    f"{folder.id}: killed before it was recorded: {resume_command(folder)}"
                )
    for name in [name for name in rows if rows[name] == "running" and run in (None, name)]:
        folder = RunFolder(Path(runs_dir) / name)
        owner = folder.owner()
        if (
            owner is not None
            and not Path(f"/proc/{owner}").exists()
            and Path("/proc/self").exists()
        ):
            lines.append(
                f"{name}: its process, {owner}, does not run on this machine. If it was killed: "
                f"{resume_command(folder)}"
            )
    return lines


def located_run(run: str, runs_dir: str) -> tuple[str, str]:
    """Returns a run's id and the folder of its runs; `run` is an id, or the path of its folder."""
    from ludus.store.folders import find_run

    try:
        folder = find_run(runs_dir, run).path
    except ConfigError:
        if Path(run).name != run and Path(run).is_dir():
            raise
        return run, runs_dir  # its folder may be elsewhere, and the store knows it
    if runs_dir != "runs" and Path(runs_dir).resolve() != folder.parent.resolve():
        raise ConfigError(f"--runs-dir {runs_dir} has no effect beside the folder {run}: remove it")
    return folder.name, str(folder.parent)


@contextmanager
def recorded(run: str, runs_dir: str) -> Iterator[None]:
    """Explain an unknown run whose folder is there. Errors: ConfigError."""
    from ludus.store.folders import find_run, resume_command
    from ludus.store.store import UnknownName

    try:
        yield
    except UnknownName as error:
        folder = None
        with suppress(ConfigError):
            folder = find_run(runs_dir, run)
        if folder is None or "trajectory" in str(error):
            raise
        raise ConfigError(
            f"run {run!r} has a folder, {folder.path}, but is not in the store. It was killed "
            f"before it was recorded ({resume_command(folder)}), or its store is another: --store"
        ) from error


def spec(name: str, args: list[str] | None) -> Any:
    """Returns the Spec of a plug-in's name and `key=value` arguments."""
    from ludus.config import yaml12
    from ludus.core.types import Spec

    pairs: dict[str, Any] = {}
    for item in args or []:
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise ConfigError(f"{item!r}: write arguments as key=value")
        if key in pairs:
            raise ConfigError(f"{item}: {key} is given twice; give it once")
        pairs[key], _ = yaml12.parse(value, item)
    return Spec(name=name, args=pairs)


def env_specs(words: Sequence[str]) -> list[Any]:
    """Specs of environments with their arguments: `a x=1 b` is a with x=1, and b."""
    specs = named_specs(words, "an environment")
    names = [one.name for one in specs]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{repeated[0]}: named twice; name each environment once")
    return specs


def named_specs(words: Sequence[str], noun: str) -> list[Any]:
    """Specs with their arguments: `a x=1 b` is a with x=1, and b."""
    found: list[tuple[str, list[str]]] = []
    for word in words:
        if "=" not in word:
            found.append((word, []))
        elif found:
            found[-1][1].append(word)
        else:
            raise ConfigError(f"{word}: name {noun} before its arguments")
    return [spec(name, args) for name, args in found]


def show_on_screen(renderable: Any) -> None:
    """Print a rich renderable."""
    from rich.console import Console

    Console().print(renderable)
