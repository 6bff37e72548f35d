"""Rollouts as a service: the server plays episodes with the model of an endpoint.

    POST /rollouts {"env": "textcraft", "model": "m", "base_url": "http://host:8000/v1",
                    "ids": [0, 1, 2], "max_round": 20}      -> statistics, and a record of each id
    GET /rollouts                                           -> the running jobs
    DELETE /rollouts/5f0c...                                -> ends the job; its POST then answers

With `"stream": true` the answer is JSON lines: `{"event": "start", "job": ...}`, one
`{"event": "episode", ...}` for each episode as it ends, and `{"event": "end", ...}` with the
statistics. A client that disconnects cancels its job.

A client of this route makes this machine send requests to the client's `base_url`, except to the
metadata services of a cloud machine (`models.endpoint.addresses`).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import FastAPI, Path, Request
from fastapi.responses import Response, StreamingResponse
from prometheus_client import Counter
from starlette.types import Receive, Scope, Send

from ludus.config.schema import RunConfig
from ludus.core.errors import LudusError
from ludus.core.types import ToolSpec, Wire
from ludus.rollout.jobs import EpisodeRecord, RolloutJob
from ludus.rollout.requests import RolloutAnswer, RolloutRequest, agentgym_spec, answer_of, tasks_of
from ludus.rollout.tool_use import RunTools
from ludus.services.envs.manager import SessionManager
from ludus.services.envs.session import ServedEnv, format_id
from ludus.services.server.app import ERRORS, ServiceError, Settings, owner_of
from ludus.services.server.shares import Client, Shares, client_of
from ludus.telemetry.logs import get_logger

log = get_logger(__name__)

MAX_JOBS = 16
"""Most jobs that run at the same time, in each process; each token has an equal share of them."""

DISCONNECT_POLL_S = 0.5
"""Seconds between two checks whether the client is still connected."""


class Progress(Wire):
    """A running job."""

    job: str
    env: str
    model: str
    num_ids: int
    num_done: int
    seconds: float


@dataclass(eq=False)
class OwnedJob:
    """A job, and the client that requested it. `done` holds the finished episodes."""

    id: str
    client: Client
    request: RolloutRequest
    job: RolloutJob
    done: list[EpisodeRecord]
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def progress(self) -> Progress:
        request = self.request
        return Progress(
            job=self.id,
            env=request.env,
            model=request.model,
            num_ids=len(request.ids),
            num_done=len(self.done),
            seconds=round(self.seconds, 3),
        )

    def answer(self) -> RolloutAnswer:
        """The results so far, in the order of the ids."""
        return answer_of(self.request.env, self.job.episodes, self.seconds, self.job.stopped)


class Jobs:
    """The jobs of a process, with the tools of `recipe`. Errors of all methods: ServiceError."""

    def __init__(
        self, sessions: SessionManager, settings: Settings, recipe: RunConfig | None
    ) -> None:
        self._sessions, self._recipe = sessions, recipe
        self.tools: RunTools | None = None
        """The opened tools of the recipe."""
        self._shares = Shares(MAX_JOBS, 0, settings.tokens)
        self._jobs: dict[str, OwnedJob] = {}
        self._episodes = Counter(
            "ludus_rollout_episodes",
            "Episodes by how they ended",
            ["status"],
            registry=settings.registry,
        )

    async def open(self, request: RolloutRequest, client: Client) -> OwnedJob:
        """Check a request. Returns its job, which counts from now on; `run` must follow."""
        served = self._sessions.env(request.env)
        self._require_place(client)
        try:
            endpoint = request.endpoint(self.tools)
            await endpoint.check()
            spec = agentgym_spec(served.spec, request.tier)
            tasks = await asyncio.to_thread(
                lambda: list(tasks_of(served.spec, request.ids, request.tier))
            )
            env = served if spec == served.spec else ServedEnv(spec, served.isolate)
            done: list[EpisodeRecord] = []
            tool_calls = self._recipe.rollout.tool_calls if self._recipe else None
            job = request.job(endpoint, env, tasks, done.append, self.tools, tool_calls)
        except LudusError as error:
            if isinstance(error, ServiceError):
                raise
            raise ServiceError(422, "invalid", str(error)) from error
        self._require_place(client)  # others may have taken it during the check
        owned = OwnedJob(format_id(self._sessions.new_number()), client, request, job, done)
        self._jobs[owned.id] = owned
        self._shares.add(client.tenant)
        return owned

    def _require_place(self, client: Client) -> None:
        if len(self._jobs) >= MAX_JOBS:
            raise ServiceError(429, "too_many_rollouts", f"{MAX_JOBS} jobs are running")
        if not self._shares.allows(client.tenant):
            message = f"{self._shares.limit} of your jobs are running, your share"
            raise ServiceError(429, "too_many_rollouts", message)

    async def run(self, owned: OwnedJob) -> None:
        """Play a job to its end."""
        try:
            async with owned.job.endpoint:
                await owned.job.run()
        finally:
            self._jobs.pop(owned.id, None)
            self._shares.add(owned.client.tenant, -1)
            for episode in owned.job.episodes:
                self._episodes.labels(episode.status.value).inc()

    def of(self, owner: str) -> list[Progress]:
        return [job.progress() for job in self._jobs.values() if job.client.token == owner]

    def get(self, id: str, owner: str) -> OwnedJob:
        """The owner's job. Another owner's job is reported as unknown."""
        job = self._jobs.get(id)
        if job is None or job.client.token != owner:
            raise ServiceError(404, "unknown_rollout", "no job with this id is running")
        return job

    def functions(self) -> list[ToolSpec]:
        return [] if self.tools is None else list(self.tools.functions)

    def stop_all(self) -> None:
        for owned in list(self._jobs.values()):
            owned.job.stop()


JobId = Annotated[str, Path(max_length=64)]


def add_routes(
    app: FastAPI, sessions: SessionManager, settings: Settings, recipe: RunConfig | None = None
) -> Jobs:
    """Serve `/rollouts` for the environments of `sessions`, with the tools of `recipe`."""
    jobs = Jobs(sessions, settings, recipe)
    options: dict[str, Any] = {"responses": ERRORS, "tags": ["rollouts"]}

    @app.post("/rollouts", response_model=RolloutAnswer, **options)
    async def play(request: Request, body: RolloutRequest) -> Response:
        """Play episodes with the model of an OpenAI-compatible endpoint."""
        owned = await jobs.open(body, client_of(request.scope))
        running = asyncio.create_task(jobs.run(owned))
        if body.stream:
            return _JobStream(owned, running)
        try:
            while not (await asyncio.wait({running}, timeout=DISCONNECT_POLL_S))[0]:
                if await request.is_disconnected():
                    owned.job.stop()
            await running
        finally:
            await _ensure_ended(owned, running)
        return Response(owned.answer().model_dump_json(), media_type="application/json")

    @app.get("/tools", response_model=list[ToolSpec], **options)
    async def read_tools() -> list[ToolSpec]:
        """The functions that episodes may have."""
        return jobs.functions()

    @app.get("/rollouts", response_model=list[Progress], **options)
    async def read_all(request: Request) -> list[Progress]:
        """The running jobs."""
        return jobs.of(owner_of(request.scope))

    @app.get("/rollouts/{job}", response_model=Progress, **options)
    async def read(request: Request, job: JobId) -> Progress:
        """The progress of a job."""
        return jobs.get(job, owner_of(request.scope)).progress()

    @app.delete("/rollouts/{job}", response_model=Progress, **options)
    async def stop(request: Request, job: JobId) -> Progress:
        """End a job. The client that waits for it gets the results so far."""
        owned = jobs.get(job, owner_of(request.scope))
        owned.job.stop()
        return owned.progress()

    return jobs


async def _ensure_ended(owned: OwnedJob, running: asyncio.Task[None]) -> None:
    """Stop the job if it still runs, whatever ended the response."""
    if not running.done():
        owned.job.stop()
        with suppress(asyncio.CancelledError):
            await asyncio.wait({running}, timeout=10)
        running.cancel()


class _JobStream(StreamingResponse):
    """A streamed answer. If the client disconnects, even before the first line, the job ends."""

    def __init__(self, owned: OwnedJob, running: asyncio.Task[None]) -> None:
        super().__init__(_lines(owned, running), media_type="application/x-ndjson")
        self._owned, self._running = owned, running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await _ensure_ended(self._owned, self._running)


async def _lines(owned: OwnedJob, running: asyncio.Task[None]) -> AsyncIterator[str]:
    request, done, num_sent = owned.request, owned.done, 0
    yield _line("start", {"job": owned.id, "env": request.env, "num_ids": len(request.ids)})
    over = False
    while not over:
        over = bool((await asyncio.wait({running}, timeout=0.05))[0])
        while num_sent < len(done):
            yield _line("episode", done[num_sent].model_dump(mode="json"))
            num_sent += 1
    if running.exception() is not None:
        log.error("rollout job failed", error=repr(running.exception()))
        yield _line("error", ServiceError.internal().body)
        return
    sent = set(map(id, done))
    for episode in owned.job.episodes:
        if id(episode) not in sent:
            yield _line("episode", episode.model_dump(mode="json"))
    yield _line("end", owned.answer().model_dump(mode="json", exclude={"results"}))


def _line(event: str, value: dict[str, Any]) -> str:
    return json.dumps({"event": event, **value}) + "\n"
