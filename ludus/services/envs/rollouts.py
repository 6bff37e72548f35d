"""Rollouts as a service: the server plays episodes with the model of an endpoint.

    POST /rollouts {"env": "textcraft", "model": "m", "base_url": "http://host:8000/v1",
                    "ids": [0, 1, 2], "max_round": 20}      -> the numbers, and an entry for each id
    GET /rollouts                                           -> the batches under way
    DELETE /rollouts/5f0c...                                -> it ends, and answers what it has

With `"stream": true` the answer is JSON lines: `{"event": "start", "job": ...}`, one
`{"event": "episode", ...}` for each episode as it ends, and `{"event": "end", ...}` with the
numbers. A client that goes away cancels its batch.

Who may post here has this machine send requests to the `base_url` that he names, but not to a cloud
machine's own services (`models.addresses`).
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
from prometheus_client import CollectorRegistry, Counter

from ludus.core.errors import LudusError
from ludus.core.types import Wire
from ludus.models.endpoint.client import Endpoint
from ludus.rollout.jobs import ChatAgent, EpisodeRecord, RolloutJob
from ludus.rollout.requests import RolloutAnswer, RolloutRequest, agentgym_spec, summary, tasks_of
from ludus.services.envs.manager import SessionManager
from ludus.services.envs.session import ServedEnv, format_id
from ludus.services.server.app import ERRORS, ServiceError, owner_of
from ludus.telemetry.logs import get_logger

log = get_logger(__name__)

MAX_JOBS = 16
"""Batches under way at the same time, in each process."""

PULSE_S = 0.5
"""Seconds after which it is asked again whether the client is still there."""


class Progress(Wire):
    """A batch under way."""

    job: str
    env: str
    model: str
    num_ids: int
    num_done: int
    seconds: float


@dataclass(eq=False)
class Job:
    """A batch, and who asked for it."""

    id: str
    owner: str
    request: RolloutRequest
    endpoint: Endpoint
    batch: RolloutJob
    done: list[EpisodeRecord]
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def progress(self) -> Progress:
        asked = self.request
        return Progress(
            job=self.id,
            env=asked.env,
            model=asked.model,
            num_ids=len(asked.ids),
            num_done=len(self.done),
            seconds=round(self.seconds, 3),
        )

    def answer(self) -> RolloutAnswer:
        """What there is, in the order of the ids."""
        batch = self.batch
        numbers = summary(self.request.env, batch.episodes, self.seconds, batch.stopped)
        return RolloutAnswer(**numbers.model_dump(), results=batch.episodes)


class Jobs:
    """The batches of a process. Errors of all methods: ServiceError."""

    def __init__(self, sessions: SessionManager, registry: CollectorRegistry) -> None:
        self._sessions = sessions
        self._jobs: dict[str, Job] = {}
        self._episodes = Counter(
            "ludus_rollout_episodes", "Episodes by how they ended", ["status"], registry=registry
        )

    async def open(self, request: RolloutRequest, owner: str) -> Job:
        """Check what is asked for; nothing has been played yet."""
        served = self._sessions.env(request.env)
        if len(self._jobs) >= MAX_JOBS:
            raise ServiceError(429, "too_many_rollouts", f"{MAX_JOBS} batches are under way")
        try:
            endpoint = request.endpoint()
            await endpoint.check()
            spec = agentgym_spec(served.spec, request.tier)
            tasks = await asyncio.to_thread(
                lambda: list(tasks_of(served.spec, request.ids, request.tier))
            )
            env = served if spec == served.spec else ServedEnv(spec, served.isolate)
        except LudusError as error:
            if isinstance(error, ServiceError):
                raise
            raise ServiceError(422, "invalid", str(error)) from error
        work = [
            (task, EpisodeRecord(id=id, task_id=task.id, tier=task.tier))
            for id, task in zip(request.ids, tasks, strict=True)
        ]
        agent = ChatAgent(endpoint, env, request.config(), request.seed)
        done: list[EpisodeRecord] = []
        batch = RolloutJob(agent, work, deadline_s=request.deadline_s, on_episode=done.append)
        id = format_id(self._sessions.new_number())
        return Job(id, owner, request, endpoint, batch, done)

    async def run(self, job: Job) -> None:
        """Play a batch to its end."""
        self._jobs[job.id] = job
        try:
            async with job.endpoint:
                await job.batch.run()
        finally:
            self._jobs.pop(job.id, None)
            for episode in job.batch.episodes:
                self._episodes.labels(episode.status.value).inc()

    def mine(self, owner: str) -> list[Progress]:
        """The owner's batches under way."""
        return [job.progress() for job in self._jobs.values() if job.owner == owner]

    def get(self, id: str, owner: str) -> Job:
        """The owner's batch; another's looks like none at all."""
        job = self._jobs.get(id)
        if job is None or job.owner != owner:
            raise ServiceError(404, "unknown_rollout", "no such batch is under way")
        return job

    def stop_all(self) -> None:
        """End all batches: the service shuts down."""
        for job in list(self._jobs.values()):
            job.batch.stop()


JobId = Annotated[str, Path(max_length=64)]


def add_routes(app: FastAPI, sessions: SessionManager, registry: CollectorRegistry) -> Jobs:
    """Serve `/rollouts` for the environments of `sessions`."""
    jobs = Jobs(sessions, registry)
    options: dict[str, Any] = {"responses": ERRORS, "tags": ["rollouts"]}

    @app.post("/rollouts", response_model=RolloutAnswer, **options)
    async def play(request: Request, body: RolloutRequest) -> Response:
        """Play episodes with the model of an OpenAI-compatible endpoint."""
        job = await jobs.open(body, owner_of(request.scope))
        if body.stream:
            return StreamingResponse(_told(jobs, job), media_type="application/x-ndjson")
        running = asyncio.create_task(jobs.run(job))
        try:
            while not (await asyncio.wait({running}, timeout=PULSE_S))[0]:
                if await request.is_disconnected():
                    job.batch.stop()
            await running
        finally:
            await _ended(job, running)
        return Response(job.answer().model_dump_json(), media_type="application/json")

    @app.get("/rollouts", response_model=list[Progress], **options)
    async def read_all(request: Request) -> list[Progress]:
        """The batches under way."""
        return jobs.mine(owner_of(request.scope))

    @app.get("/rollouts/{job}", response_model=Progress, **options)
    async def read(request: Request, job: JobId) -> Progress:
        """How far a batch has come."""
        return jobs.get(job, owner_of(request.scope)).progress()

    @app.delete("/rollouts/{job}", response_model=Progress, **options)
    async def stop(request: Request, job: JobId) -> Progress:
        """End a batch: who waits for it is answered what there is."""
        found = jobs.get(job, owner_of(request.scope))
        found.batch.stop()
        return found.progress()

    return jobs


async def _ended(job: Job, running: asyncio.Task[None]) -> None:
    """Leave nothing running, whatever ended the answer."""
    if not running.done():
        job.batch.stop()
        with suppress(asyncio.CancelledError):
            await asyncio.wait({running}, timeout=10)
        running.cancel()


async def _told(jobs: Jobs, job: Job) -> AsyncIterator[str]:
    """The lines of a streamed answer. Where the client goes away, the batch ends."""
    running = asyncio.create_task(jobs.run(job))
    told = 0
    try:
        yield _line(
            "start", {"job": job.id, "env": job.request.env, "num_ids": len(job.request.ids)}
        )
        over = False
        while not over:
            over = bool((await asyncio.wait({running}, timeout=0.05))[0])
            while told < len(job.done):
                yield _line("episode", job.done[told].model_dump(mode="json"))
                told += 1
        if running.exception() is not None:
            log.error("a batch broke", error=repr(running.exception()))
            yield _line("error", ServiceError.internal().body)
            return
        ended = set(map(id, job.done))
        for episode in job.batch.episodes:
            if id(episode) not in ended:
                yield _line("episode", episode.model_dump(mode="json"))
        yield _line("end", job.answer().model_dump(mode="json", exclude={"results"}))
    finally:
        await _ended(job, running)


def _line(event: str, value: dict[str, Any]) -> str:
    return json.dumps({"event": event, **value}) + "\n"
