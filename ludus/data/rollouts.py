"""`ludus rollout`: the job of `POST /rollouts`, from the command line."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from ludus.config.messages import option_faults
from ludus.config.schema import RunConfig
from ludus.core.errors import ConfigError, DataError
from ludus.core.files import atomic_write
from ludus.core.system.signals import run
from ludus.core.types import Spec
from ludus.rollout.hosts.host import LocalEnvs
from ludus.rollout.jobs import EpisodeRecord, RolloutJob
from ludus.rollout.requests import RolloutAnswer, RolloutRequest, agentgym_spec, answer_of, tasks_of
from ludus.rollout.tool_use import open_tools

KEY = "LUDUS_API_KEY"
"""The environment variable of the endpoint's key: a command line is visible to other users."""


def request(**options: object) -> RolloutRequest:
    """The request of the command's options; None means not given. Errors: ConfigError."""
    fields = {name: value for name, value in options.items() if value is not None}
    if key := os.environ.get(KEY):
        fields["api_key"] = key
    try:
        return RolloutRequest.model_validate(fields)
    except ValidationError as error:
        raise ConfigError(option_faults(error, RolloutRequest)) from None


def rollout(
    env: Spec,
    request: RolloutRequest,
    out: Path | None,
    say: Callable[[str], object],
    recipe: RunConfig | None = None,
) -> tuple[RolloutAnswer, KeyboardInterrupt | None]:
    """Play the job, report each finished episode, and write the answer to `out`.

    The episodes have the tools of `recipe`, with its limits. Ctrl-C and SIGTERM end the job early.
    Returns the answer with the episodes so far, and the signal's exception, or None.

    Errors: ConfigError for a wrong request, DataError where `out` cannot be written.
    """
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise DataError(f"{out}: cannot be written: it is a folder, or its folder does not exist")
    started = time.monotonic()
    stops: list[KeyboardInterrupt] = []
    end_job: list[Callable[[], object]] = []

    def finishes(stop: KeyboardInterrupt) -> bool:
        stops.append(stop)
        for end in end_job:
            end()
        return bool(end_job) and len(stops) == 1

    job = run(_play(env, request, recipe, say, end_job.append), finishes)
    answer = answer_of(env.name, job.episodes, time.monotonic() - started, job.stopped)
    if out is not None:
        try:
            atomic_write(out, json.dumps(answer.model_dump(mode="json"), ensure_ascii=False))
        except OSError as error:
            raise DataError(f"{out}: cannot be written: {error.strerror}") from error
    return answer, stops[0] if stops else None


async def _play(
    env: Spec,
    request: RolloutRequest,
    recipe: RunConfig | None,
    say: Callable[[str], object],
    on_start: Callable[[Callable[[], object]], object],
) -> RolloutJob:
    """Play the job. `on_start` receives a function that ends it early, for signal handlers."""
    envs = LocalEnvs(agentgym_spec(env, request.tier))
    _ = envs.prototype  # refuse wrong arguments before the first episode
    tasks = list(tasks_of(env, request.ids, request.tier))
    num_done = 0

    def report(episode: EpisodeRecord) -> None:
        nonlocal num_done
        num_done += 1
        reward = "no reward" if episode.reward is None else f"reward {episode.reward:g}"
        error = f": {episode.error}" if episode.error else ""
        say(f"{num_done}/{len(tasks)} {episode.id} {episode.status.value}, {reward}{error}")

    tool_calls = None if recipe is None else recipe.rollout.tool_calls
    async with open_tools(recipe) as tools, request.endpoint(tools) as endpoint:
        job = request.job(endpoint, envs, tasks, report, tools, tool_calls)
        loop = asyncio.get_running_loop()
        on_start(lambda: loop.call_soon_threadsafe(job.stop))
        await job.run()
    return job
