"""`ludus view`: the live page."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated

import typer

from ludus.cli.options import RunsDir
from ludus.cli.serve import MaxConnections, MaxPerAddress

app = typer.Typer()


@app.command()
def view(
    runs_dir: RunsDir = "runs",
    store: Annotated[
        str | None,
        typer.Option(envvar="LUDUS_STORE", help="URL of the run store, if not SQLite in runs-dir."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 8300,
    token: Annotated[
        str | None,
        typer.Option(
            help="Token to open the page with, or `new` to make one; default: LUDUS_TOKENS."
        ),
    ] = None,
    rollout_log: Annotated[
        list[Path] | None,
        typer.Option(help="Log of an A/B roll-out outside of runs-dir; repeatable."),
    ] = None,
    migrate: Annotated[
        bool, typer.Option("--migrate", help="First upgrade a store of an older ludus.")
    ] = False,
    max_connections: MaxConnections = 1024,
    max_per_address: MaxPerAddress = 256,
) -> None:
    """Show runs, the running step, rollouts and A/B roll-outs on a web page that reads only."""
    from ludus.services.server.auth import check_tokens, client_tokens
    from ludus.services.server.connections import ConnectionLimits
    from ludus.services.server.serve import ServeOptions
    from ludus.services.viewer.service import serve_viewer
    from ludus.store import RunStore

    if token == "new":
        tokens: tuple[str, ...] = (secrets.token_urlsafe(24),)
    else:
        tokens = client_tokens() if token is None else check_tokens("--token", [token])
    if migrate:
        RunStore.upgrade(store, runs_dir)
    connections = ConnectionLimits(max_connections, max_per_address)
    options = ServeOptions(host, port, 1, tokens, connections)
    serve_viewer(options, Path(runs_dir), store, typer.echo, rollout_log or ())
