"""Starts the rollout processes of a run (`rollout.processes`), where its parts allow them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ludus.backends.base import Backend
from ludus.config.schema import RunConfig
from ludus.core.errors import ConfigError
from ludus.core.system.machine import num_cores
from ludus.envs import ENVS
from ludus.envs.base import Env
from ludus.models.shared_weights import SharedWeights, weight_bytes
from ludus.pipeline.parts.processes import OWN, obstacle
from ludus.rollout.hosts.processes import COUNTERS, Queue, RolloutProcess, RolloutProcesses, Setup
from ludus.store.folders import RunFolder
from ludus.telemetry.logs import get_logger

log = get_logger(__name__)

MODULE = "ludus.pipeline.rollout_process"

MOST = 4
"""Processes by default: each takes about 0.5 GB."""

MAX_BYTES = 256_000_000
"""Of a model's weights, by default: each process has a copy, and large models keep all cores busy
in one process."""

MIN_TURNS = 10_000
"""Of a run's RL at most, by default: a process takes 4 s of processor time to start, and two play
in 0.7 of the time of one. 1,280 episodes of PickupLoc, of up to 14 turns, took 22 s of one."""


def start_processes(
    config: RunConfig, folder: RunFolder, backend: Backend
) -> RolloutProcesses | None:
    """Start the processes that play beside this one; None where this one plays all.

    Errors: ConfigError where `rollout.processes` asks for several and a part of the run does not
    allow them.
    """
    asked = config.rollout.processes
    if asked is None:
        reason = _needless(config) or _obstacle(config, backend) or _too_large(backend)
    elif asked == 1:
        reason = "rollout.processes"
    elif reason := _obstacle(config, backend):
        raise ConfigError(f"rollout.processes: {asked} is not possible: {reason}")
    if reason is not None:
        tell = log.info if reason.endswith(OWN) else log.detail
        tell("one process plays all episodes", reason=reason)
        return None
    size = asked or cores(config)
    log.detail("several processes play the episodes", number=size)
    model, sampler = local_model(backend), backend.sampler
    weights = SharedWeights(model)
    threads = max(1, (config.threads or torch.get_num_threads()) // size)
    setup = Setup(config, folder.path.resolve(), threads, sys.path)
    queue = Queue()
    fds = [weights.fd, queue.fd]
    processes = [RolloutProcess(MODULE, setup, fds) for _ in range(size - 1)]
    weights.close()

    def prepare() -> int:
        weights.write()
        return sampler.policy_version

    def count(counters: dict[str, int]) -> None:
        for name in COUNTERS:
            setattr(sampler, name, getattr(sampler, name) + counters[name])

    @contextmanager
    def around() -> Iterator[None]:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    return RolloutProcesses(processes, queue, prepare, count, around)


def local_model(backend: Any) -> Any:
    """The policy of a local back end."""
    return backend.present_model()


def expected_processes(config: RunConfig) -> int:
    """Processes that play a run's episodes, this one included, as far as the configuration tells:
    for a small model with the sampler in this process."""
    if obstacle(config):
        return 1
    return config.rollout.processes or (1 if _needless(config) else cores(config))


def can_share(config: RunConfig, backend: Backend) -> bool:
    """True where several processes play by default, if RL is long."""
    return cores(config) > 1 and not (_obstacle(config, backend) or _too_large(backend))


def _needless(config: RunConfig) -> str | None:
    """The reason for which one process suffices, where the configuration gives no number."""
    if cores(config) == 1:
        return "one core"
    few = most_turns(config) < MIN_TURNS
    return f"RL plays fewer than {MIN_TURNS:,} turns" if few else None


def _too_large(backend: Backend) -> str | None:
    return "the model is large" if weight_bytes(local_model(backend)) > MAX_BYTES else None


def cores(config: RunConfig) -> int:
    """The cores of a run, at most MOST."""
    number = num_cores()
    return min(config.threads or number, number, MOST)


def most_turns(config: RunConfig) -> int:
    """Turns of RL, where SFT leaves all of its steps to it and each episode takes all its turns."""
    rl, limit = config.rl, config.rollout.max_turns
    if rl is None:
        return 0
    if limit is None:
        own = getattr(ENVS.load(config.env.name), "max_turns", None) if config.env else 1
        limit = own if isinstance(own, int) else Env.max_turns  # a property's is not known yet
    turns = limit if isinstance(limit, int) else max(limit.values(), default=1)
    return rl.most_steps(config.sft) * rl.groups_per_step * rl.group_size * turns


def _obstacle(config: RunConfig, backend: Backend) -> str | None:
    """The first reason why only this process can play."""
    if reason := obstacle(config):
        return reason
    decoder = getattr(backend.sampler, "decoder", None)
    exact = decoder is not None and decoder.batch_invariant
    return None if exact else "tokens of this sampler depend on their batch"
