"""`ludus serve env`: from the command line to a running service."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ludus.core.types import Spec
from ludus.services.envs.manager import SessionLimits
from ludus.services.envs.service import environment_service
from ludus.services.envs.session import ServedEnv
from ludus.services.server.auth import client_tokens
from ludus.services.server.serve import ServeOptions, serve


def serve_envs(
    specs: Sequence[Spec],
    *,
    host: str,
    port: int,
    workers: int,
    isolate: bool,
    limits: SessionLimits,
    say: Callable[[str], object],
) -> None:
    """Serve until stopped. `limits` hold for all workers together.

    Errors: ConfigError, MissingDependency.
    """
    options = ServeOptions(host, port, workers, client_tokens())
    for spec in specs:  # report mistakes before the service listens
        _ = ServedEnv(spec).schema
    names = ", ".join(spec.name for spec in specs)
    serve(
        partial(environment_service, tuple(specs), limits=limits, isolate=isolate),
        options,
        lambda address: say(f"{names}: {address} (description: {address}/docs)"),
    )
