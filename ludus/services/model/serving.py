"""`ludus serve model`: from the command line to a running service."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from ludus.core.types import Spec
from ludus.models import SAMPLERS
from ludus.models.vocabulary import Vocabulary
from ludus.services.model.engine import STREAMING, EngineThread
from ludus.services.model.policy import ModelOverrides, Policy, load_policy
from ludus.services.model.service import ModelOptions, model_service
from ludus.services.server.app import Settings
from ludus.services.server.auth import admin_token, client_tokens
from ludus.services.server.connections import ConnectionLimits
from ludus.services.server.serve import listen, run

MAX_BODY_BYTES = 4_000_000


def serve_model(
    checkpoint: str,
    *,
    host: str,
    port: int,
    name: str | None,
    runs_dir: str,
    overrides: ModelOverrides,
    sampler: Spec,
    max_turns: int,
    max_turns_per_token: int,
    connections: ConnectionLimits,
    say: Callable[[str], object],
) -> None:
    """Serve until stopped. Errors: ConfigError, CheckpointError, MissingDependency."""
    tokens, admin = client_tokens(), admin_token()
    # If clients need no token, the administrator needs one for /admin only.
    accepted = (*tokens, admin) if tokens and admin else tokens
    with (
        listen(host, port, tokens) as (listening, address),
        tempfile.TemporaryDirectory(prefix="ludus-model-") as folder,
    ):
        policy = load_policy(checkpoint, runs_dir, overrides)
        options = ModelOptions(name or policy.name, runs_dir, max_turns, max_turns_per_token, admin)
        with closing(make_engine(policy, sampler, Path(folder))) as engine:
            app = model_service(policy, engine, Settings(accepted, MAX_BODY_BYTES), options)
            say(f"{options.name} ({policy.origin}): {address}/v1 (description: {address}/docs)")
            run(app, [listening], connections)


def make_engine(policy: Policy, sampler: Spec, folder: Path) -> EngineThread:
    """An engine that samples from the policy; the caller closes it.

    Errors: ConfigError, MissingDependency.
    """
    if sampler.name == "in_process":
        sampler = Spec(name=STREAMING, args=sampler.args)
    built = SAMPLERS.build(
        sampler,
        "sampler",
        model=policy.model,
        context_length=policy.settings.context_length,
        decode=policy.tokenizer.decode,
        deterministic=False,
        tokenizer=policy.tokenizer,
        folder=folder / "sampler",
    )
    engine = EngineThread(built, policy.model, Vocabulary.of(policy.tokenizer))
    engine.set_version(policy.version)
    return engine
