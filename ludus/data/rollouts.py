"""`ludus rollout`: the batch that `POST /rollouts` plays, from the command line."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from ludus.core.errors import ConfigError, DataError
from ludus.core.files import atomic_write
from ludus.core.types import Spec
from ludus.rollout.jobs import ChatAgent, EpisodeRecord, RolloutJob
from ludus.rollout.requests import (
    LocalEnvs,
    RolloutAnswer,
    RolloutRequest,
    agentgym_spec,
    summary,
    tasks_of,
)

KEY = "LUDUS_API_KEY"
"""The environment variable of the endpoint's key: keys have no place on a command line."""


def request(**given: object) -> RolloutRequest:
    """The request of the options; those that are None are left out. Errors: ConfigError."""
    told = {name: value for name, value in given.items() if value is not None}
    if key := os.environ.get(KEY):
        told["api_key"] = key
    try:
        return RolloutRequest.model_validate(told)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{place.replace('_', '-')}: {first['msg']}") from None


def rollout(
    env: Spec,
    asked: RolloutRequest,
    out: Path | None,
    say: Callable[[str], object],
) -> RolloutAnswer:
    """Play a batch, tell each episode as it ends, and write the answer to `out`.

    Ctrl-C ends it early; what was played so far is written all the same.

    Errors: ConfigError for a wrong request, DataError where `out` cannot be written.
    """
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise DataError(f"{out}: cannot be written: it is a folder, or its folder does not exist")
    started = time.monotonic()
    batch = asyncio.run(_play(env, asked, say))
    numbers = summary(env.name, batch.episodes, time.monotonic() - started, batch.stopped)
    answer = RolloutAnswer(**numbers.model_dump(), results=batch.episodes)
    if out is not None:
        _write(out, answer)
    return answer


async def _play(env: Spec, asked: RolloutRequest, say: Callable[[str], object]) -> RolloutJob:
    tasks = list(tasks_of(env, asked.ids, asked.tier))
    work = [
        (task, EpisodeRecord(id=id, task_id=task.id, tier=task.tier))
        for id, task in zip(asked.ids, tasks, strict=True)
    ]
    made = LocalEnvs(agentgym_spec(env, asked.tier))
    num_done = 0

    def note(episode: EpisodeRecord) -> None:
        nonlocal num_done
        num_done += 1
        reward = "no reward" if episode.reward is None else f"reward {episode.reward:g}"
        error = f": {episode.error}" if episode.error else ""
        say(f"{num_done}/{len(work)} {episode.id} {episode.status.value}, {reward}{error}")

    async with asked.endpoint() as endpoint:
        agent = ChatAgent(endpoint, made, asked.config(), asked.seed)
        batch = RolloutJob(agent, work, deadline_s=asked.deadline_s, on_episode=note)
        with suppress(NotImplementedError):  # not every platform has it
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, batch.stop)
        await batch.run()
    return batch


def _write(out: Path, answer: RolloutAnswer) -> None:
    try:
        atomic_write(out, json.dumps(answer.model_dump(mode="json"), ensure_ascii=False))
    except OSError as error:
        raise DataError(f"{out}: cannot be written: {error.strerror}") from error
