"""`ludus serve model`: from the command line to a running service."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ludus.core.errors import ConfigError
from ludus.core.files import temporary_folder
from ludus.core.types import Spec
from ludus.models import SAMPLERS
from ludus.models.vocabulary import Vocabulary
from ludus.services.model.engine import STREAMING, EngineThread
from ludus.services.model.policy import ModelOverrides, Policy, load_policy
from ludus.services.model.rollout.events import SHARES_TAKEN, RolloutSettings
from ludus.services.model.rollout.log import RolloutLog
from ludus.services.model.rollout.service import require_alike, rollout_service
from ludus.services.model.service import ModelOptions, model_service
from ludus.services.server.app import Settings
from ludus.services.server.auth import admin_token, client_tokens
from ludus.services.server.connections import ConnectionLimits
from ludus.services.server.serve import listen, run

MAX_BODY_BYTES = 4_000_000

FOLDERS = "ludus-model-service-"
"""Begin of the names of temporary folders. Folders with another name, as services had them that
locked none, may be in use: they are left alone."""

RENAMED = {"step_time": "step_s", "feedback_time": "feedback_s", "answer_time": "answer_s"}
"""Options of the command whose setting has another name."""


@dataclass(frozen=True)
class Challenge:
    """An A/B roll-out: the challenger's checkpoint, settings, and the log (None: in `runs_dir`)."""

    checkpoint: str
    settings: RolloutSettings
    log: str | None = None


def challenge_of(checkpoint: str | None, options: Mapping[str, Any]) -> Challenge | None:
    """The roll-out of the command's options; None: not given.

    Errors: ConfigError for a wrong option, and for one without a challenger.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if checkpoint is None:
        if given:
            option = next(iter(given)).replace("_", "-")
            raise ConfigError(f"--{option} has an effect with --challenger only")
        return None
    log = given.pop("rollout_log", None)
    if log == "":
        raise ConfigError(
            "--rollout-log is empty: give the path of a file, or leave the option out for "
            "rollout-A-B.jsonl in the runs folder"
        )
    if "shares" in given:
        given["shares"] = _shares(given["shares"])
    fields = {RENAMED.get(name, name): value for name, value in given.items()}
    try:
        settings = RolloutSettings(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0])
        name = next((option for option, key in RENAMED.items() if key == field), field)
        told = f"{options[name]}: {first['msg'][:1].lower()}{first['msg'][1:]}"
        if name == "shares":
            told = f"{options[name]}: {SHARES_TAKEN}"
        raise ConfigError(f"--{name.replace('_', '-')} {told}") from None
    settings.check()
    return Challenge(checkpoint, settings, log)


def _shares(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) / 100 for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--shares {text}: percentages such as 5,10,25,50") from None


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
    challenge: Challenge | None = None,
) -> None:
    """Serve until stopped. Errors: ConfigError, CheckpointError, DataError, MissingDependency."""
    tokens, admin = client_tokens(), admin_token()
    # If clients need no token, the administrator needs one for /admin only.
    accepted = (*tokens, admin) if tokens and admin else tokens
    settings = Settings(accepted, MAX_BODY_BYTES)
    with (
        listen(host, port, tokens) as (listening, address),
        ExitStack() as held,
    ):
        folder = held.enter_context(temporary_folder(FOLDERS))
        policy = load_policy(checkpoint, runs_dir, overrides)
        options = ModelOptions(name or policy.name, runs_dir, max_turns, max_turns_per_token, admin)
        if challenge is None:
            engine = held.enter_context(closing(make_engine(policy, sampler, folder)))
            app, told = model_service(policy, engine, settings, options), policy.origin
        else:
            other = load_policy(challenge.checkpoint, runs_dir, overrides)
            require_alike(policy, other)
            rollout = held.enter_context(closing(_open_log(challenge, policy, other, runs_dir)))
            engines = [
                held.enter_context(closing(make_engine(one, sampler, folder / part)))
                for part, one in (("champion", policy), ("challenger", other))
            ]
            loaded = (policy, engines[0]), (other, engines[1])
            app = rollout_service(*loaded, settings, options, rollout)
            told = f"{policy.origin} against {other.origin}, log {rollout.path}"
        say(f"{options.name} ({told}): {address}/v1 (description: {address}/docs)")
        run(app, [listening], connections)


def _open_log(
    challenge: Challenge, champion: Policy, challenger: Policy, runs_dir: str
) -> RolloutLog:
    if challenge.log is None:
        path = Path(runs_dir) / default_log(champion, challenger)
    else:
        path = Path(challenge.log)
    origins = (champion.origin, challenger.origin)
    return RolloutLog.open(path, *origins, challenge.settings, time.time())


def default_log(champion: Policy, challenger: Policy) -> str:
    """The name of a roll-out's log: other models, another name."""
    return f"rollout-{_label(champion)}-{_label(challenger)}.jsonl"


def _label(policy: Policy) -> str:
    name = policy.origin
    if policy.folder is not None:  # many folders have the same name
        digest = hashlib.sha256(str(policy.folder).encode("utf-8", "surrogateescape")).hexdigest()
        name = f"{policy.name}-{digest[:8]}"
    return re.sub(r"[^\w.-]+", "-", name)


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
