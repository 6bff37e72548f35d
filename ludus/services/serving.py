"""`ludus serve`: from the command line to a running service; what it needs is imported late."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ludus.core.errors import ConfigError, MissingDependency
from ludus.core.types import Spec


def named(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Environments and their arguments: `a x=1 b` is a with x=1, and b.

    Errors: ConfigError where an argument stands before any name, or a name stands twice.
    """
    found: list[tuple[str, list[str]]] = []
    for word in words:
        if "=" not in word:
            found.append((word, []))
        elif found:
            found[-1][1].append(word)
        else:
            raise ConfigError(f"{word}: name an environment before its arguments")
    names = [name for name, _ in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{twice[0]}: it is named twice; one service serves it once")
    return found


def serve_env(
    specs: Sequence[Spec],
    host: str,
    port: int,
    workers: int,
    isolate: bool,
    limits: Mapping[str, Any],
    say: Callable[[str], object],
) -> None:
    """Serve until told to stop. `limits`: those of `SessionLimits`, for all workers together.

    Errors: ConfigError, MissingDependency.
    """
    try:
        from ludus.services.envs.manager import SessionLimits
        from ludus.services.server.serve import ServeOptions, serve
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("ludus"):
            raise
        raise MissingDependency(str(error.name), "serve", "ludus serve") from error
    options = ServeOptions(
        envs=tuple(specs),
        host=host,
        port=port,
        workers=workers,
        tokens=tokens(),
        isolate=isolate,
        limits=SessionLimits(**limits),
    )
    names = ", ".join(spec.name for spec in specs)
    serve(options, lambda address: say(f"{names}: {address} (description: {address}/docs)"))


def serve_model(checkpoint: str, *, overrides: Mapping[str, Any], **options: Any) -> None:
    """Serve until stopped. `overrides`: fields of ModelOverrides; `options`: of `serve_model`.

    Errors: ConfigError, CheckpointError, MissingDependency.
    """
    try:
        from ludus.services.model import serving as model_serving
        from ludus.services.model.policy import ModelOverrides
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("ludus"):
            raise
        raise MissingDependency(str(error.name), "serve,train", "ludus serve model") from error
    model_serving.serve_model(
        checkpoint, tokens=tokens(), overrides=ModelOverrides(**overrides), **options
    )


def tokens() -> tuple[str, ...]:
    """The tokens that clients may come with. Errors: ConfigError for one that is easily guessed."""
    given = [token.strip() for token in os.environ.get("LUDUS_TOKENS", "").split(",")]
    found = tuple(token for token in given if token)
    if any(len(token) < 16 or not token.isascii() for token in found):
        raise ConfigError("LUDUS_TOKENS: a token has at least 16 ASCII characters")
    return found
