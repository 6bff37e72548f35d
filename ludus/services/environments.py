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
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Path, Request
from fastapi.responses import Response
from pydantic import Field, TypeAdapter, ValidationError, model_validator
from starlette.middleware import Middleware
from starlette.websockets import WebSocket, WebSocketDisconnect

from ludus.core.logs import get_logger
from ludus.core.types import Message, Observation, Spec, StepResult, Task, ToolCall, Wire
from ludus.services import isolated
from ludus.services.app import (
    ERRORS,
    ServiceError,
    Settings,
    create_app,
    invalid,
    owner_of,
    parse_json,
)
from ludus.services.sessions import EnvSchema, Limits, Served, Sessions, State
from ludus.services.workers import HandOver, Peers

log = get_logger(__name__)

MAX_CALLS = 1024
"""Calls in a batch, and calls under way on one WebSocket."""

MAX_SEED = 2**63


class Create(Wire):
    """Open a session."""

    op: Literal["create"] = "create"
    env: str = Field(description="One of those that `/envs` lists.")


class OfSession(Wire):
    """A call of an open session."""

    session: str = Field(description="Its id, as `create` gave it.", max_length=64)


class Episode(Wire):
    """Which episode to start: a task, or the environment's own of a tier and a seed."""

    task: Task | None = None
    tier: str | None = None
    seed: Annotated[int, Field(ge=0, lt=MAX_SEED)] | None = None

    @model_validator(mode="after")
    def _one(self) -> Episode:
        if (self.task is None) == (self.seed is None):
            raise ValueError("give a task, or a seed (and a tier)")
        return self


class Act(Wire):
    """What to do: the action's text, or the assistant's message with its tool calls."""

    action: str | None = None
    message: Message | None = None

    @model_validator(mode="after")
    def _one(self) -> Act:
        if (self.action is None) == (self.message is None):
            raise ValueError("give an action or a message")
        return self

    def turn(self) -> Message:
        """The assistant's message."""
        return self.message or Message(role="assistant", content=self.action or "")


class Reset(OfSession, Episode):
    """Start an episode."""

    op: Literal["reset"] = "reset"


class Step(OfSession, Act):
    """Take an action."""

    op: Literal["step"] = "step"


class Expert(OfSession):
    """Ask the environment's expert for its action."""

    op: Literal["expert"] = "expert"


class Close(OfSession):
    """End a session."""

    op: Literal["close"] = "close"


Call = Annotated[Create | Reset | Step | Expert | Close, Field(discriminator="op")]
CALL: TypeAdapter[Any] = TypeAdapter(Call)


class Batch(Wire):
    """Calls of different sessions, carried out at the same time."""

    calls: list[Call] = Field(max_length=MAX_CALLS)


class Opened(Wire):
    """An open session."""

    session: str
    env: str


class Standing(Wire):
    """Where a session stands. `score` is the sum of the episode's rewards so far."""

    session: str
    env: str
    state: State
    num_steps: int
    score: float


class Action(Wire):
    """An action's text."""

    action: str = Field(max_length=10_000)


class Closed(Wire):
    """The session has ended."""

    closed: bool = True


class Service:
    """Carries out calls. Errors of all methods: ServiceError."""

    def __init__(self, sessions: Sessions, peers: Peers | None = None) -> None:
        self.sessions, self.peers = sessions, peers

    async def carry_out(self, call: Any, owner: str) -> Wire:
        """One call's answer."""
        if isinstance(call, Create):
            return self.create(call.env, owner)
        session = self.sessions.by_id(call.session, owner)
        if isinstance(call, Step):
            return await self.sessions.step(session, call.turn())
        if isinstance(call, Reset):
            own = call.task is None
            task = call.task or session.served.task(call.tier, call.seed or 0)
            return await self.sessions.reset(session, task, own=own)
        if isinstance(call, Expert):
            return Action(action=await self.sessions.expert(session))
        await self.sessions.leave(session)
        return Closed()

    def create(self, env: str, owner: str) -> Opened:
        """A new session."""
        session = self.sessions.create(self.sessions.env(env), owner)
        return Opened(session=session.id, env=env)

    async def outcome(self, call: Any, owner: str) -> str:
        """A call's answer or error, as the JSON of a batch's entry."""
        try:
            if self.peers is not None and not isinstance(call, Create):
                worker = self.peers.worker_of(call.session)
                if worker != self.peers.worker:
                    return await self.peers.carry_out(worker, CALL.dump_json(call), owner)
            result = await self.carry_out(call, owner)
        except ServiceError as error:
            return json.dumps({"status": error.status, **error.body})
        return f'{{"status":200,"result":{result.model_dump_json()}}}'


def environment_service(
    envs: Sequence[Spec],
    settings: Settings,
    limits: Limits,
    *,
    isolate: bool = False,
    peers: Peers | None = None,
) -> FastAPI:
    """The application that serves `envs`: ludus' API, AgentGym's and OpenEnv's.

    Errors: ConfigError, MissingDependency for environments that cannot be served.
    """
    from ludus.services import agentgym, openenv, rollouts

    served = {spec.name: Served(spec, isolate) for spec in envs}
    place = (peers.worker, peers.num_workers) if peers else (0, 1)
    sessions = Sessions(served, limits, settings.registry, *place)
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
    _add_socket(app, service)
    jobs = rollouts.add_routes(app, sessions, settings.registry)
    for spec in envs:
        openenv.add_routes(app, sessions, served[spec.name])
        if spec.name in agentgym.ROWS:
            agentgym.add_routes(app, sessions, spec, isolate)
    return app


EpisodeSeed = Annotated[int, Field(ge=0, lt=MAX_SEED)]


def _json(model: Wire) -> Response:
    return Response(model.model_dump_json(), media_type="application/json")


def _add_env_routes(app: FastAPI, sessions: Sessions) -> None:
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


def _add_socket(app: FastAPI, service: Service) -> None:
    @app.websocket("/ws")
    async def socket(websocket: WebSocket) -> None:
        """Calls, one a message, each with an `id` that its answer repeats.

        Sessions that were opened here end with the socket.
        """
        await websocket.accept()
        talk = _Talk(websocket, service)
        try:
            while True:
                talk.hear(await websocket.receive_text())
        except (WebSocketDisconnect, KeyError):  # KeyError: a message of bytes
            pass
        finally:
            await talk.end()
            with suppress(RuntimeError, WebSocketDisconnect):
                await websocket.close()


class _Talk:
    """One socket: its calls under way, and the sessions that it opened."""

    def __init__(self, websocket: WebSocket, service: Service) -> None:
        self._websocket, self._service = websocket, service
        self._owner = owner_of(websocket.scope)
        self._opened: set[str] = set()
        self._calls: set[asyncio.Task[None]] = set()

    def hear(self, text: str) -> None:
        """Start to carry out a message's call."""
        task = asyncio.create_task(self._answer(text))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def end(self) -> None:
        """Stop what is under way, and close the sessions."""
        for task in self._calls:
            task.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        for id in self._opened:
            with suppress(ServiceError):
                session = self._service.sessions.by_id(id, self._owner)
                await self._service.sessions.close(session, "its socket was closed")

    async def _answer(self, text: str) -> None:
        number: Any = None
        try:
            message = parse_json(text)
            if not isinstance(message, dict):
                raise ServiceError(422, "invalid", "a message is a JSON object")
            given = message.pop("id", None)
            if isinstance(given, bool) or not isinstance(given, int | str | None):
                raise ServiceError(422, "invalid", "id: it has to be a number or a text")
            number = given
            outcome = await self._carry_out(message)
        except ServiceError as error:
            outcome = json.dumps({"status": error.status, **error.body})
        except Exception as error:
            log.error("a call broke", error=f"{type(error).__name__}: {error}")
            broke = ServiceError(500, "internal", "the service broke; its log says how")
            outcome = json.dumps({"status": 500, **broke.body})
        with suppress(RuntimeError, WebSocketDisconnect):
            await self._websocket.send_text(f'{{"id":{json.dumps(number)},{outcome[1:]}')

    async def _carry_out(self, message: dict[str, Any]) -> str:
        if len(self._calls) > MAX_CALLS:
            raise ServiceError(429, "too_many_calls", f"{MAX_CALLS} calls are under way")
        try:
            call = CALL.validate_python(message)
        except ValidationError as error:
            raise invalid(error.errors()) from None
        if isinstance(call, Create):
            opened = self._service.create(call.env, self._owner)
            self._opened.add(opened.session)
            return f'{{"status":200,"result":{opened.model_dump_json()}}}'
        if isinstance(call, Close):
            self._opened.discard(call.session)
        return await self._service.outcome(call, self._owner)
