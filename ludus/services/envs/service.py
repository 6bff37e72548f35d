"""The environment service: environments over HTTP and WebSocket.

    POST /sessions {"env": "textcraft"}                     -> {"session": "5f0c...", "env": ...}
    POST /sessions/5f0c.../reset {"tier": null, "seed": 3}  -> the first observation
    POST /sessions/5f0c.../step {"action": "get 1 oak log"} -> the step's result
    DELETE /sessions/5f0c...

`POST /batch` carries out many calls at once, of many sessions; the WebSocket `/ws` takes the same
calls, one a message, and closes its sessions when it is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import FastAPI, Path, Request
from fastapi.responses import Response
from pydantic import Field
from starlette.middleware import Middleware

from ludus.core.types import Observation, Spec, StepResult, Task, ToolCall, Wire
from ludus.services.envs import isolated
from ludus.services.envs.api import (
    MAX_SEED,
    Act,
    Action,
    Batch,
    Close,
    Closed,
    Create,
    Episode,
    Expert,
    Opened,
    Reset,
    Service,
    Standing,
    Step,
)
from ludus.services.envs.manager import SessionLimits, SessionManager
from ludus.services.envs.session import EnvSchema, ServedEnv
from ludus.services.envs.websocket import add_socket
from ludus.services.server.app import ERRORS, Settings, create_app, owner_of
from ludus.services.server.peers import HandOver, Peers


def environment_service(
    envs: Sequence[Spec],
    settings: Settings,
    limits: SessionLimits,
    *,
    isolate: bool = False,
    peers: Peers | None = None,
) -> FastAPI:
    """The application that serves `envs`: ludus' API, AgentGym's and OpenEnv's.

    Errors: ConfigError, MissingDependency for environments that cannot be served.
    """
    from ludus.services.envs import agentgym, openenv, rollouts

    served = {spec.name: ServedEnv(spec, isolate) for spec in envs}
    place = (peers.worker, peers.num_workers, peers.tally) if peers else (0, 1, None)
    sessions = SessionManager(served, limits, settings.registry, *place)
    service = Service(sessions, peers)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        if isolate:
            modules = [env.env_class.__module__ for env in served.values()]
            await asyncio.to_thread(isolated.warm_up, modules)
        reaper = asyncio.create_task(sessions.reap())
        try:
            yield
        finally:
            reaper.cancel()
            jobs.stop_all()
            await sessions.close_all()
            if peers is not None:
                await peers.close()

    def health() -> Mapping[str, Any]:
        return {"sessions": sessions.count(), "envs": sorted(served)}

    inner = [Middleware(HandOver, peers=peers)] if peers else []
    app = create_app("environments", settings, health=health, lifespan=lifespan, middleware=inner)
    _add_env_routes(app, sessions)
    _add_session_routes(app, service)
    add_socket(app, service)
    jobs = rollouts.add_routes(app, sessions, settings.registry)
    for spec in envs:
        openenv.add_routes(app, sessions, served[spec.name])
        if spec.name in agentgym.ROWS:
            agentgym.add_routes(app, sessions, spec, isolate)
    return app


EpisodeSeed = Annotated[int, Field(ge=0, lt=MAX_SEED)]


def _json(model: Wire) -> Response:
    return Response(model.model_dump_json(), media_type="application/json")


def _add_env_routes(app: FastAPI, sessions: SessionManager) -> None:
    options: dict[str, Any] = {"responses": ERRORS, "tags": ["environments"]}

    @app.get("/envs", **options)
    async def read_envs() -> list[str]:
        """The names of the environments that are served."""
        return sorted(sessions.served)

    @app.get("/envs/{env}", response_model=EnvSchema, **options)
    async def read_env(env: str) -> Response:
        """An environment's tools, range of scores, tiers and turns."""
        return _json(sessions.env(env).schema)

    @app.get("/envs/{env}/task", response_model=Task, **options)
    async def read_task(env: str, seed: EpisodeSeed, tier: str | None = None) -> Response:
        """The environment's own task of a tier and a seed."""
        return _json(sessions.env(env).task(tier, seed))

    @app.post("/envs/{env}/call", response_model=ToolCall, **options)
    async def read_call(env: str, body: Action) -> Response:
        """The tool call that an action's text stands for."""
        return _json(sessions.env(env).call_of(body.action))


SessionId = Annotated[str, Path(max_length=64)]


def _add_session_routes(app: FastAPI, service: Service) -> None:
    options: dict[str, Any] = {"responses": ERRORS, "tags": ["sessions"]}

    async def answer(request: Request, call: Any) -> Response:
        return _json(await service.carry_out(call, owner_of(request.scope)))

    @app.post("/sessions", response_model=Opened, **options)
    async def create(request: Request, body: Create) -> Response:
        """Open a session."""
        return await answer(request, body)

    @app.get("/sessions/{session}", response_model=Standing, **options)
    async def read(request: Request, session: SessionId) -> Response:
        """Where a session stands."""
        found = service.sessions.by_id(session, owner_of(request.scope))
        return _json(
            Standing(
                session=found.id,
                env=found.served.name,
                state=found.state,
                num_steps=found.num_steps,
                score=found.score,
            )
        )

    @app.post("/sessions/{session}/reset", response_model=Observation, **options)
    async def reset(request: Request, session: SessionId, body: Episode) -> Response:
        """Start an episode."""
        call = Reset(session=session, task=body.task, tier=body.tier, seed=body.seed)
        return await answer(request, call)

    @app.post("/sessions/{session}/step", response_model=StepResult, **options)
    async def step(request: Request, session: SessionId, body: Act) -> Response:
        """Take an action."""
        call = Step(session=session, action=body.action, message=body.message)
        return await answer(request, call)

    @app.post("/sessions/{session}/expert", response_model=Action, **options)
    async def expert(request: Request, session: SessionId) -> Response:
        """The action that the environment's expert would take."""
        return await answer(request, Expert(session=session))

    @app.delete("/sessions/{session}", response_model=Closed, **options)
    async def close(request: Request, session: SessionId) -> Response:
        """End a session."""
        return await answer(request, Close(session=session))

    @app.post("/batch", **options)
    async def batch(request: Request, body: Batch) -> Response:
        """Carry out calls at the same time: one entry each, with `status` and `result` or `error`.

        A batch has one call a session: two would race.
        """
        owner = owner_of(request.scope)
        entries = await asyncio.gather(*(service.outcome(call, owner) for call in body.calls))
        return Response(f'{{"results":[{",".join(entries)}]}}', media_type="application/json")
