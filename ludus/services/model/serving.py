"""`ludus serve model`: from the command line to a running service."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from transformers.utils import logging as transformers_logging

from ludus.core.errors import ConfigError
from ludus.core.types import Spec
from ludus.models import SAMPLERS
from ludus.services.model.engine import STREAMING, EngineThread
from ludus.services.model.policy import ModelOverrides, Policy, load_policy
from ludus.services.model.service import ModelOptions, model_service
from ludus.services.server.app import Settings
from ludus.services.server.serve import listen, require_tokens, run

MAX_BODY_BYTES = 4_000_000


def serve_model(
    checkpoint: str,
    *,
    host: str,
    port: int,
    tokens: tuple[str, ...],
    name: str | None,
    runs_dir: str,
    overrides: ModelOverrides,
    sampler: Spec,
    max_turns: int,
    say: Callable[[str], object],
) -> None:
    """Serve until told to stop.

    Errors: ConfigError, CheckpointError, MissingDependency.
    """
    require_tokens(host, tokens)
    admin = os.environ.get("LUDUS_ADMIN_TOKEN", "").strip()
    if admin and (len(admin) < 16 or not admin.isascii()):
        raise ConfigError("LUDUS_ADMIN_TOKEN: it has at least 16 ASCII characters")
    # Where clients need no token, neither does the administrator, but for what is theirs alone.
    known = (*tokens, admin) if tokens and admin else tokens
    with (
        listen(host, port) as listening,
        tempfile.TemporaryDirectory(prefix="ludus-model-") as folder,
    ):
        transformers_logging.disable_progress_bar()  # the log is for what happens
        policy = load_policy(checkpoint, runs_dir, overrides)
        options = ModelOptions(name or policy.name, runs_dir, max_turns, admin)
        address = f"http://{host}:{listening.getsockname()[1]}"
        with closing(make_engine(policy, sampler, Path(folder))) as engine:
            app = model_service(policy, engine, Settings(known, MAX_BODY_BYTES), options)
            say(f"{options.name} ({policy.origin}): {address}/v1 (description: {address}/docs)")
            run(app, [listening])


def make_engine(policy: Policy, sampler: Spec, folder: Path) -> EngineThread:
    """The sampler that was asked for, over the policy; to be closed.

    Errors: ConfigError, MissingDependency.
    """
    if sampler.name == "in_process":
        sampler = Spec(name=STREAMING, args=sampler.args)
    built = SAMPLERS.build(
        sampler,
        "sampler",
        model=policy.model,
        context_length=policy.context_length,
        decode=policy.tokenizer.decode,
        deterministic=False,
        tokenizer=policy.tokenizer,
        folder=folder / "sampler",
    )
    engine = EngineThread(built, policy.model, len(policy.tokenizer))
    engine.set_version(policy.version)
    return engine
