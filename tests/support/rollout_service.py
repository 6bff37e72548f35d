"""A model service with a challenger, in a thread of this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from model_world import running

from ludus.core.types import Spec
from ludus.services.model.policy import ModelOverrides, load_policy
from ludus.services.model.rollout.events import RolloutSettings, Variant
from ludus.services.model.rollout.log import RolloutLog
from ludus.services.model.rollout.service import rollout_service
from ludus.services.model.service import ModelOptions
from ludus.services.model.serving import make_engine
from ludus.services.server.app import Settings

QUICK = RolloutSettings(shares=(0.5, 0.6), min_samples=5, step_s=0.0, max_samples=500)


@contextmanager
def challenged(
    champion: Path,
    challenger: Path,
    log: Path,
    *,
    settings: RolloutSettings = QUICK,
    tokens: tuple[str, ...] = (),
    rigged: Mapping[Variant, Callable[[Any], None]] | None = None,
    **options: Any,
) -> Iterator[str]:
    """A service; yields its address. `rigged` may change the sampler of a variant first."""
    policies = [load_policy(str(path), "runs", ModelOverrides()) for path in (champion, challenger)]
    with ExitStack() as held:
        origins = [policy.origin for policy in policies]
        rollout = held.enter_context(
            closing(RolloutLog.open(log, origins[0], origins[1], settings, time.time()))
        )
        loaded = []
        for variant, policy in zip(Variant, policies, strict=True):
            engine = make_engine(policy, Spec(name="in_process"), log.parent / variant)
            held.callback(engine.close)
            if rigged and variant in rigged:
                rigged[variant](engine.sampler)
            loaded.append((policy, engine))
        app = rollout_service(
            loaded[0], loaded[1], Settings(tokens), ModelOptions("tiny", **options), rollout
        )
        yield held.enter_context(running(app))
