"""The command line: `ludus VERB`. Heavy imports happen inside the verbs."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ludus import __version__
from ludus.cli import checkpoints, data, look, serve, train
from ludus.core.errors import LudusError


class _Verbs(typer.core.TyperGroup):
    """Prints a message on Ctrl-C; typer prints nothing."""

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
app.add_typer(train.app)
app.add_typer(look.app)
app.add_typer(data.app)
app.add_typer(checkpoints.app, name="checkpoint")
app.add_typer(serve.app, name="serve")


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if show_version:
        typer.echo(f"ludus {__version__}")
        raise typer.Exit


def main() -> None:
    """Entry point: a LudusError ends with its message and a non-zero exit code."""
    try:
        app()
    except LudusError as error:
        typer.echo(f"ludus: {error}", err=True)
        raise SystemExit(error.exit_code) from None
