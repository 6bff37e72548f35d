"""The command line: `ludus VERB`. Heavy imports happen inside the verbs."""

from __future__ import annotations

import errno
import gc
import os
import sys
from typing import Annotated, Any, NoReturn

import typer

from ludus import __version__
from ludus.cli import (
    benchmark,
    checkpoints,
    cluster,
    coevolve,
    control,
    data,
    init,
    jobs,
    look,
    serve,
    train,
    view,
    vscode,
)
from ludus.core.errors import LudusError, printable
from ludus.core.modules import missing_dependency
from ludus.core.system.signals import EXIT_CODES, exit_code, handling, leave, raise_stop
from ludus.telemetry.logs import check_settings

EXTRAS = {
    "rollout": "remote",
    "rubric": "remote",
    "augment": "remote",
    "generate-data": "remote",
    "view": "serve",
    "doctor": "remote",
    "env": "serve",
    "model": "serve,train",
    "submit": "ray",
    "logs": "ray",
    "attach": "ray",
    "stop": "ray",
}
"""Extras of the verbs; `train` for the others."""


PANELS = {
    "Begin": ("doctor", "recipes", "check-env", "init", "plan", "debug", "config", "vscode"),
    "Train": ("train", "coevolve", "profile", "verify", "kill"),
    "Look at runs": ("runs", "show", "report", "view"),
    "Evaluate": ("evaluate", "benchmark", "rollout", "replay"),
    "Data and checkpoints": ("generate-data", "augment", "rubric", "export", "checkpoint"),
    "Clusters and services": ("submit", "logs", "attach", "stop", "cluster", "serve"),
}
"""The verbs by purpose, in the order of `ludus --help`."""


FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a disk that is full, or of a user's share of it."""


class _Verbs(typer.core.TyperGroup):
    """Lists verbs by purpose; prints a message on Ctrl-C and SIGTERM, where typer prints none."""

    def list_commands(self, ctx: Any) -> list[str]:
        order = [verb for verbs in PANELS.values() for verb in verbs]
        return sorted(super().list_commands(ctx), key=order.index)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        for panel, verbs in PANELS.items():
            if cmd_name in verbs:
                command.rich_help_panel = panel  # type: ignore[union-attr]
        return command

    def invoke(self, ctx: Any) -> Any:
        raised: list[KeyboardInterrupt] = []

        def stop_here(stop: KeyboardInterrupt) -> NoReturn:
            raised.append(stop)
            raise_stop(stop)

        try:
            with handling(stop_here):
                return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            _end(stop)
        except (typer.Exit, LudusError):
            raise
        except Exception:
            if not raised:
                raise
            _end(raised[0])  # an import swallowed it (torch's of numpy), and failed later


def _end(stop: KeyboardInterrupt) -> NoReturn:
    typer.echo(f"ludus: {str(stop) or 'stopped'}", err=True)
    raise typer.Exit(exit_code(stop)) from None


app = typer.Typer(
    name="ludus",
    cls=_Verbs,
    help="Train language-model agents by reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(train.app)
app.add_typer(init.app)
app.add_typer(benchmark.app)
app.add_typer(coevolve.app)
app.add_typer(control.app)
app.add_typer(jobs.app)
app.add_typer(look.app)
app.add_typer(view.app)
app.add_typer(vscode.app)
app.add_typer(data.app)
app.add_typer(checkpoints.app, name="checkpoint")
app.add_typer(cluster.app, name="cluster")
app.add_typer(serve.app, name="serve")


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    check_settings()
    if show_version:
        typer.echo(f"ludus {__version__}")
        raise typer.Exit


def main() -> None:
    """Entry point: a LudusError ends with its message and a non-zero exit code.

    So do the absence of a package that an extra installs, wherever a verb first imports it, and a
    full disk.
    """
    try:
        app()
    except LudusError as error:
        _fail(error)
    except ModuleNotFoundError as error:
        words = sys.argv[1 : 3 if sys.argv[1:2] in (["serve"], ["checkpoint"], ["cluster"]) else 2]
        extra = EXTRAS.get(words[-1], "train")
        missing = missing_dependency(error, extra, f"`ludus {' '.join(words)}`")
        if missing is None:
            raise
        _fail(missing)
    except OSError as error:
        if error.errno not in FULL:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python's exit would write the rest again
        _fail(LudusError(f"{error.filename or 'standard output'}: {error.strerror}"))
    except SystemExit as end:
        if end.code in EXIT_CODES:
            leave(end.code)
        raise
    finally:
        gc.freeze()  # Python's exit searches all objects of torch and transformers: 3 s


def _fail(error: LudusError) -> NoReturn:
    from ludus.config.secrets import without_passwords

    typer.echo(f"ludus: {printable(without_passwords(str(error)))}", err=True)
    raise SystemExit(error.exit_code) from None
