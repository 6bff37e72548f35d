"""Obstacles to several processes that play the episodes of a run (`rollout.processes`)."""

from __future__ import annotations

from ludus.config.schema import RunConfig
from ludus.envs import ENVS

OWN = "; set that to True if its episodes share nothing"
"""Follows the name of a class of the user's own that does not declare it."""


def obstacle(config: RunConfig) -> str | None:
    """The first reason in the configuration why only the run's process can play."""
    env = ENVS.load(config.env.name) if config.env is not None else None
    name = config.env.name if config.env is not None else ""
    declared = getattr(env, "several_processes", False) is True  # no property: it may be False
    own = OWN if ":" in name else ""
    obstacles = {
        f"backend: {config.backend.name} has none of these": config.backend.name != "local",
        "rollout.deterministic is false": not config.rollout.deterministic,
        "verify compares one sampler with the learner": config.verify,
        "rl.max_staleness plays ahead in this process": bool(config.rl and config.rl.max_staleness),
        "an `agent` plays the episodes": config.agent is not None,
        "several `roles` play": bool(config.roles or config.policies),
        "`tools` may hold state": bool(config.tools),
        "a `judge` may hold state": config.judge is not None,
        "`traces` are recorded in this process": config.traces is not None,
        "there is no environment": env is None,
        f"env: {name} does not declare `several_processes`{own}": not declared,
    }
    return next((reason for reason, stands in obstacles.items() if stands), None)
