"""The command `init`: a calibrated recipe for an environment, a data set or an agent."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ludus.cli.options import recipe_with_tools, spec
from ludus.core.errors import ConfigError, LudusError

if TYPE_CHECKING:
    from ludus.diagnostics.calibration.agents.subject import AgentSubject
    from ludus.diagnostics.calibration.subject import Subject

app = typer.Typer()

Say = Callable[[str], object]

LAST = "\0"
"""Begins what the measuring process tells for standard output."""

SILENT_S = 300.0
"""Seconds without a sign of life after which the measuring process is killed."""

MOST_MINUTES = 30 * 24 * 60.0


@app.command()
def init(
    context: typer.Context,
    subject: Annotated[
        str,
        typer.Argument(
            help="An environment (a name, or FILE.py:Class), a file of questions and answers "
            "(.jsonl, .json, .parquet, .csv), a data set on the hub, or your own agent "
            "(FILE.py:function)."
        ),
    ],
    args: Annotated[
        list[str] | None,
        typer.Argument(
            help="Arguments of the environment, the reader or the agent: key=value ...; of an "
            "agent's tasks, environment and judge: tasks.key=value ..."
        ),
    ] = None,
    tiers: Annotated[
        str | None,
        typer.Option(
            help="Levels to train on, separated by commas; default: all; of more than four, the "
            "four shortest."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="The recipe's file; default: NAME.yaml.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="A pretrained model: a folder, or a name on the hub. An agent needs one; the "
            "default of all else is a small model from scratch."
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="Agents only: its tasks, from a file of rows, a data set on the hub, or "
            "FILE.py:reader."
        ),
    ] = None,
    env: Annotated[
        str | None,
        typer.Option(
            help="Agents only, in place of --tasks: the environment that `run(task, model, env)` "
            "takes, with the tasks of its levels."
        ),
    ] = None,
    judge: Annotated[
        str | None,
        typer.Option(
            help="Agents only: the judge that scores an agent without a reward of its own; "
            "default: `answer`, where tasks have answers."
        ),
    ] = None,
    tools: Annotated[
        str | None,
        typer.Option(
            help="Agents only: a recipe whose `tools` are given to `run(task, model, tools)`."
        ),
    ] = None,
    minutes: Annotated[
        float,
        typer.Option(
            min=1,
            max=MOST_MINUTES,
            help="Minutes that the recipe's run may take on this machine.",
        ),
    ] = 10.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the trials and of the recipe.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Measure an environment, a data set or an agent, and write a recipe for it."""
    given = spec(subject, args).args
    if out is not None and out.is_dir():
        raise ConfigError(f"--out: {out} is a folder: name a file in it")
    command = command_of(context)

    def measure(say: Say) -> list[str]:
        """Write the recipe; returns the lines that tell where."""
        from ludus.diagnostics.calibration.agents.subject import (
            AgentOptions,
            is_agent,
            open_agent,
            refuse_options,
        )
        from ludus.diagnostics.calibration.subject import open_subject

        written: list[Path] = []
        options = AgentOptions(tasks, env, judge, recipe_with_tools(tools), tools)
        if is_agent(subject):
            agent = open_agent(subject, given, tiers, options, model)
            path = out or Path(f"{agent.name}.yaml")
            _refuse_files(path, None, force, (subject, tasks, env, judge, tools))
            assert model is not None  # `open_agent` refuses an agent without one
            text, warnings, seconds = _agent(agent, model, minutes, seed, command, say)
            warnings = [*agent.tasks.warnings, *warnings]
        else:
            refuse_options(subject, options)
            found = open_subject(subject, given, tiers)
            path = out or Path(f"{found.name}.yaml")
            data = path.with_suffix(".sft.jsonl")
            _refuse_files(path, data if found.kind == "data" else None, force, (subject,))
            text, warnings, seconds = _other(found, model, minutes, seed, data, command, say)
            warnings = [*found.warnings, *warnings]
            written += [data] if data.exists() and found.kind == "data" else []
        return _finish(path, text, warnings, seconds, written, say)

    for line in _apart(measure, subject):
        typer.echo(line)


def command_of(context: typer.Context) -> str:
    """The command with its arguments, and the options that differ from their defaults, as a shell
    reads it."""
    words = ["ludus", str(context.info_name)]
    for parameter in context.command.params:
        value = context.params.get(str(parameter.name))
        if value is None or value == parameter.get_default(context):
            continue
        if parameter.param_type_name == "argument":
            words += map(str, value if isinstance(value, list | tuple) else [value])
        else:
            words += [parameter.opts[0]] if value is True else [parameter.opts[0], str(value)]
    text = shlex.join(words)
    return text if text.isprintable() else ascii(text)  # in one line


def _refuse_files(path: Path, data: Path | None, force: bool, read: Sequence[str | None]) -> None:
    """Refuse files that exist, cannot be written, or are among the files that `init` reads: those
    named by `read`, as FILE or FILE:NAME.

    Errors: ConfigError.
    """
    inputs = {Path(name.rpartition(":")[0] or name).resolve() for name in read if name}
    for file in (path, data):
        if file is None or not file.exists():
            continue
        if file.resolve() in inputs:
            raise ConfigError(f"{file} is read, and would be replaced: name another with --out")
        if not force:
            raise ConfigError(f"{file} exists: name another file with --out, or use --force")
    with _writing(path), tempfile.TemporaryFile(dir=path.parent):  # before two minutes of work
        pass


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Errors: ConfigError for a file that cannot be written."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"--out: {path} cannot be written ({error.strerror}): name a file in a folder that "
            "exists and is yours"
        ) from error


def _say(text: str) -> None:
    typer.echo(text, err=True)


def _apart(measure: Callable[[Say], list[str]], subject: str) -> list[str]:
    """Measure in a process of its own, which an environment may end. Within a program that has
    threads, such as a test, a fork is not safe: it measures here."""
    from ludus.core.system.forked import Died, Stuck, in_child
    from ludus.telemetry.logs import setup_logging

    if "torch" in sys.modules or threading.active_count() > 1:
        return measure(_say)
    lines: list[str] = []

    def work(tell: Say) -> int:
        os.environ.setdefault("LOG_LEVEL", "warning")
        setup_logging()
        for line in measure(tell):
            tell(LAST + line)
        return 0

    def hear(text: str) -> None:
        if text.startswith(LAST):
            lines.append(text.removeprefix(LAST))
        else:
            _say(text)

    try:
        ended = in_child(work, hear, lambda data: typer.echo(data, nl=False, err=True), SILENT_S)
    except Stuck as error:
        raise LudusError(f"{subject} {error}") from None
    except Died as error:
        raise LudusError(
            f"{subject} {error} while its episodes were measured, so there is no recipe: it must "
            "not call os._exit, nor crash in native code"
        ) from None
    if ended.code:
        raise typer.Exit(ended.code)
    return lines


def _agent(
    subject: AgentSubject, model: str, minutes: float, seed: int, command: str, say: Say
) -> tuple[str, list[str], float]:
    """The recipe of an agent, warnings, and the seconds that it took."""
    from ludus.diagnostics.calibration.agents.calibrate import calibrate_agent
    from ludus.diagnostics.calibration.agents.recipe import write_agent

    made = calibrate_agent(subject, model, minutes, seed, say)
    return write_agent(made, command), made.warnings, made.seconds


def _other(
    subject: Subject,
    model: str | None,
    minutes: float,
    seed: int,
    data: Path,
    command: str,
    say: Say,
) -> tuple[str, list[str], float]:
    """The same of an environment or a data set, whose conversations are written to `data`."""
    from ludus.diagnostics.calibration.calibrate import calibrate
    from ludus.diagnostics.calibration.recipe import write, write_conversations

    made = calibrate(subject, minutes, seed, say, model=model, data_file=str(data))
    if (sft := made.config.sft) is not None and sft.data is not None:
        with _writing(Path(sft.data)):
            write_conversations(made.conversations, Path(sft.data))
    return write(made, command), made.warnings, made.seconds


def _finish(
    path: Path, text: str, warnings: list[str], seconds: float, beside: Sequence[Path], say: Say
) -> list[str]:
    """Write the recipe and tell its warnings; returns the lines on the files `beside` it and on the
    command that starts it."""
    from ludus.core.files import atomic_write

    with _writing(path):
        atomic_write(path, text)
    for warning in warnings:
        say(f"warning: {warning}")
    told = [f"{file}: questions and answers for SFT, which the recipe reads" for file in beside]
    start = f"start it with: ludus train {path}"
    return [*told, f"{path}: measured in {seconds:.0f} s; {start}"]
