"""Environment service: environments over HTTP and WebSocket.

    POST /sessions {"env": "textcraft"}                     -> {"session": "5f0c...", "env": ...}
    POST /sessions/5f0c.../reset {"tier": null, "seed": 3}  -> the first observation
    POST /sessions/5f0c.../step {"action": "get 1 oak log"} -> the step's result
    DELETE /sessions/5f0c...

`POST /batch` carries out calls of many sessions concurrently. The WebSocket `/ws` takes the same
calls, one per message, and closes its sessions when it closes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from fastapi import FastAPI, Path, Request
from fastapi.responses import Response
from starlette.middleware import Middleware

from ludus.config.schema import RunConfig
from ludus.core.errors import LudusError
from ludus.core.system.signals import run
from ludus.core.types import Observation, Spec, StepResult, Task, ToolCall, Wire
from ludus.rollout.tool_use import open_tools
from ludus.services.envs import isolated
from ludus.services.envs.api import (
    Act,
    Action,
    CallBatch,
    CallExecutor,
    Close,
    Closed,
    Create,
    EpisodeSeed,
    EpisodeStart,
    Expert,
    Opened,
    Reset,
    SessionStatus,
    Step,
)
from ludus.services.envs.manager import SessionLimits, SessionManager
from ludus.services.envs.routing import ROUTING
from ludus.services.envs.session import EnvSchema, ExpertTurn, ServedEnv
from ludus.services.envs.websocket import add_socket
from ludus.services.server.app import ERRORS, Settings, create_app, owner_of
from ludus.services.server.auth import admin_token
from ludus.services.server.drain import DRAIN_PATH, add_drain
from ludus.services.server.peers import Peers, WorkerRouter
from ludus.services.server.serve import ServeOptions, serve
from ludus.services.server.shares import client_of
from ludus.telemetry.logs import get_logger

log = get_logger(__name__)


def environment_service(
    envs: Sequence[Spec],
    settings: Settings,
    limits: SessionLimits,
    *,
    isolate: bool = False,
    recipe: RunConfig | None = None,
    admin: str = "",
    peers: Peers | None = None,
) -> FastAPI:
    """An application that serves `envs` with ludus' API, AgentGym's, OpenEnv's and AgentJet's.

    Rollout jobs have the tools of `recipe`, with its limits. `admin` is the token for `/drain`.

    Errors: ConfigError, MissingDependency.
    """
    from ludus.services.envs import agentgym, agentgym_rows, agentjet, openenv, rollouts

    settings = replace(settings, open_paths=(*settings.open_paths, DRAIN_PATH))  # it has `admin`
    served = {spec.name: ServedEnv(spec, isolate) for spec in envs}
    sessions = SessionManager(served, limits, settings, peers)
    executor = CallExecutor(sessions, peers)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        if isolate:
            modules = [env.env_class.__module__ for env in served.values()]
            await asyncio.to_thread(isolated.warm_up, modules)
        await asyncio.to_thread(_prepare, list(served.values()))
        async with open_tools(recipe) as jobs.tools:
            expiry = asyncio.create_task(sessions.close_idle())
            try:
                yield
            finally:
                expiry.cancel()
                jobs.stop_all()
                await sessions.close_all()
                if peers is not None:
                    await peers.close()

    def health() -> Mapping[str, Any]:
        status = {"status": "draining"} if sessions.drain.on else {}
        return {"sessions": sessions.count(), "envs": sorted(served), **status}

    app = create_app(
        "environments",
        settings,
        health=health,
        lifespan=lifespan,
        middleware=[Middleware(WorkerRouter, peers=peers, routing=ROUTING)] if peers else [],
    )
    _add_env_routes(app, sessions)
    _add_session_routes(app, executor)
    add_socket(app, executor)
    add_drain(app, sessions.drain, sessions.count, admin)
    jobs = rollouts.add_routes(app, sessions, settings, recipe)
    agentjet.add_routes(app, sessions, peers)
    for spec in envs:
        openenv.add_routes(app, sessions, served[spec.name])
        if spec.name in agentgym_rows.ROWS:
            agentgym.add_routes(app, sessions, spec, isolate)
    return app


def serve_envs(
    specs: Sequence[Spec],
    options: ServeOptions,
    limits: SessionLimits,
    isolate: bool,
    say: Callable[[str], object],
    recipe: RunConfig | None = None,
) -> None:
    """`ludus serve env`: serve until stopped. `limits` hold for all workers together.

    Errors: ConfigError, MissingDependency.
    """
    for spec in specs:  # report mistakes before the service listens
        ServedEnv(spec).schema(limits.expert_deadline_s)
    if recipe is not None:
        run(_check_tools(recipe))
    names = ", ".join(spec.name for spec in specs)
    serve(
        partial(
            environment_service,
            tuple(specs),
            limits=limits,
            isolate=isolate,
            recipe=recipe,
            admin=admin_token(),
        ),
        options,
        lambda address: say(f"{names}: {address} (description: {address}/docs)"),
    )


def _prepare(served: Sequence[ServedEnv]) -> None:
    """Start the environments' engines: a client's first reset has the deadline of any other."""
    for env in served:
        try:
            env.prepare()
        except LudusError as error:  # the sessions' own resets report it to their clients
            log.warning("not prepared", env=env.name, error=str(error))


async def _check_tools(recipe: RunConfig) -> None:
    async with open_tools(recipe):
        pass


def _json(model: Wire) -> Response:
    return Response(model.model_dump_json(), media_type="application/json")


def _add_env_routes(app: FastAPI, sessions: SessionManager) -> None:
    options: dict[str, Any] = {"responses": ERRORS, "tags": ["environments"]}

    @app.get("/envs", **options)
    async def read_envs() -> list[str]:
        """Names of the served environments."""
        return sorted(sessions.served)

    @app.get("/envs/{env}", response_model=EnvSchema, **options)
    async def read_env(env: str) -> Response:
        """An environment's tools, score range, tiers, maximum of turns, expert's deadline."""
        return _json(sessions.env(env).schema(sessions.limits.expert_deadline_s))

    @app.get("/envs/{env}/task", response_model=Task, **options)
    async def read_task(env: str, seed: EpisodeSeed, tier: str | None = None) -> Response:
        """The environment's own task of a tier and a seed."""
        return _json(sessions.env(env).task(tier, seed))

    @app.post("/envs/{env}/call", response_model=ToolCall, **options)
    async def read_call(env: str, body: Action) -> Response:
        """The tool call for an action's text."""
        return _json(sessions.env(env).call_of(body.action))


SessionId = Annotated[str, Path(max_length=64)]


def _add_session_routes(app: FastAPI, executor: CallExecutor) -> None:
    options: dict[str, Any] = {"responses": ERRORS, "tags": ["sessions"]}

    async def answer(request: Request, call: Any) -> Response:
        return _json(await executor.run(call, client_of(request.scope)))

    @app.post("/sessions", response_model=Opened, **options)
    async def create(request: Request, body: Create) -> Response:
        """Open a session."""
        return await answer(request, body)

    @app.get("/sessions/{session}", response_model=SessionStatus, **options)
    async def read(request: Request, session: SessionId) -> Response:
        """State of a session."""
        entry = executor.sessions.by_id(session, owner_of(request.scope))
        return _json(
            SessionStatus(
                session=entry.id,
                env=entry.served.name,
                state=entry.state,
                num_steps=entry.num_steps,
                score=entry.score,
            )
        )

    @app.post("/sessions/{session}/reset", response_model=Observation, **options)
    async def reset(request: Request, session: SessionId, body: EpisodeStart) -> Response:
        """Start an episode."""
        call = Reset(session=session, task=body.task, tier=body.tier, seed=body.seed)
        return await answer(request, call)

    @app.post("/sessions/{session}/step", response_model=StepResult, **options)
    async def step(request: Request, session: SessionId, body: Act) -> Response:
        """Take an action."""
        call = Step(session=session, action=body.action, message=body.message)
        return await answer(request, call)

    @app.post("/sessions/{session}/expert", response_model=ExpertTurn, **options)
    async def expert(request: Request, session: SessionId) -> Response:
        """The action of the environment's expert, and the steps that it writes before it."""
        return await answer(request, Expert(session=session))

    @app.delete("/sessions/{session}", response_model=Closed, **options)
    async def close(request: Request, session: SessionId) -> Response:
        """Close a session."""
        return await answer(request, Close(session=session))

    @app.post("/batch", **options)
    async def batch(request: Request, body: CallBatch) -> Response:
        """Carry out calls concurrently; an entry each, with `status` and `result` or `error`.

        At most one call per session: two would race.
        """
        client = client_of(request.scope)
        entries = await asyncio.gather(*(executor.entry(call, client) for call in body.calls))
        return Response(f'{{"results":[{",".join(entries)}]}}', media_type="application/json")
