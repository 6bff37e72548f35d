"""OpenEnv's protocol (https://github.com/huggingface/OpenEnv), for its clients.

`/openenv/NAME` is the `base_url` of an OpenEnv client, which uses the WebSocket below it. An action
is `{"text": "go forward"}`, or `{"name": tool, "arguments": {...}}` for a tool call. An observation
is `{"text": ..., "messages": [...], "info": {...}}`.

    with GenericEnvClient(base_url="http://localhost:8000/openenv/textcraft").sync() as env:
        result = env.reset(seed=3)
        result = env.step({"text": "get 1 oak log"})
"""

from __future__ import annotations

import json
import secrets
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.websockets import WebSocket

from ludus.core.types import Message, ToolCall
from ludus.services.envs.manager import SessionManager
from ludus.services.envs.session import EnvSession, ServedEnv, State
from ludus.services.server.app import ERRORS, ServiceError, accepted, parse_object, receive_text
from ludus.services.server.shares import client_of

T = TypeVar("T", bound=BaseModel)

CODES = {
    "invalid_json": "INVALID_JSON",
    "invalid": "VALIDATION_ERROR",
    "unknown_type": "UNKNOWN_TYPE",
    "too_many_sessions": "CAPACITY_REACHED",
    "out_of_memory": "CAPACITY_REACHED",
    "session_closed": "SESSION_ERROR",
    "unknown_session": "SESSION_ERROR",
}
"""OpenEnv's code by error type; EXECUTION_ERROR for all others."""


class OpenEnvAction(BaseModel):
    """An action: a text, or a tool call."""

    model_config = ConfigDict(extra="ignore")

    text: str | None = None
    name: str | None = None
    arguments: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _exactly_one(self) -> OpenEnvAction:
        if (self.text is None) == (self.name is None):
            raise ValueError("give a text, or a name (and arguments)")
        return self

    def turn(self) -> Message:
        if self.name is not None:
            call = ToolCall(name=self.name, arguments=self.arguments)
            return Message(role="assistant", tool_calls=[call])
        return Message(role="assistant", content=self.text or "")


class OpenEnvReset(BaseModel):
    """The episode to start: the environment's own task of a tier and a seed (default: random)."""

    model_config = ConfigDict(extra="ignore")

    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    tier: str | None = None
    episode_id: str | None = Field(None, max_length=255)


class OpenEnvObservation(BaseModel):
    """An observation of the environment."""

    text: str
    messages: list[Message]
    info: dict[str, Any]


class OpenEnvState(BaseModel):
    """State of the episode; `seed` is that of its task."""

    episode_id: str | None
    seed: int | None
    step_count: int


def add_routes(app: FastAPI, sessions: SessionManager, served: ServedEnv) -> None:
    """Serve one environment under `/openenv/NAME`."""
    folder = f"/openenv/{served.name}"
    options: dict[str, Any] = {"responses": ERRORS, "tags": ["openenv"]}

    @app.get(f"{folder}/health", **options)
    async def health() -> dict[str, str]:
        """True if the environment is served."""
        return {"status": "healthy"}

    @app.get(f"{folder}/metadata", **options)
    async def metadata() -> dict[str, str]:
        """The environment's name."""
        return {"name": served.name, "description": f"ludus: {served.name}"}

    @app.get(f"{folder}/schema", **options)
    async def schema() -> dict[str, Any]:
        """JSON schemas of actions, observations and states."""
        return {
            "action": OpenEnvAction.model_json_schema(),
            "observation": OpenEnvObservation.model_json_schema(),
            "state": OpenEnvState.model_json_schema(),
        }

    @app.websocket(f"{folder}/ws")
    async def socket(websocket: WebSocket) -> None:
        """One session, as long as the socket is open."""
        async with accepted(websocket):
            try:
                connection = _Connection(websocket, sessions, served)
            except ServiceError as error:
                await websocket.send_text(_error(error))
                return
            try:
                await connection.run()
            finally:
                await sessions.close(connection.session, "its socket was closed")


class _Connection:
    """A WebSocket and its session."""

    def __init__(self, websocket: WebSocket, sessions: SessionManager, served: ServedEnv) -> None:
        self._websocket, self._sessions, self._served = websocket, sessions, served
        self._episode: str | None = None
        self._seed: int | None = None
        self.session = self._open()

    def _open(self) -> EnvSession:
        return self._sessions.create(self._served, client_of(self._websocket.scope))

    async def run(self) -> None:
        """Answer messages until the client closes."""
        while True:
            text = await receive_text(self._websocket)
            try:
                answer = await self._answer(text)
            except ServiceError as error:
                answer = _error(error)
            if answer is None:
                return
            await self._websocket.send_text(answer)

    async def _answer(self, text: str) -> str | None:
        message = parse_object(text)
        kind, data = message.get("type"), message.get("data", {})
        if kind == "close":
            return None
        if kind == "reset":
            return await self._reset(_parsed(OpenEnvReset, data))
        if kind == "step":
            turn = _parsed(OpenEnvAction, data).turn()
            result = await self._sessions.step(self.session, turn)
            return self._observation(result.messages, result.reward)
        if kind == "state":
            count = self.session.num_steps
            state = OpenEnvState(episode_id=self._episode, seed=self._seed, step_count=count)
            return f'{{"type":"state","data":{state.model_dump_json()}}}'
        raise ServiceError(422, "unknown_type", f"{kind!r:.80}: use reset, step, state or close")

    async def _reset(self, given: OpenEnvReset) -> str:
        if not self._sessions.is_open(self.session):  # the environment failed: open another
            self.session = self._open()
        session = self.session
        seed = secrets.randbits(31) if given.seed is None else given.seed
        task = session.served.task(given.tier, seed)
        observation = await self._sessions.reset(session, task, own=True)
        self._episode, self._seed = given.episode_id or task.id, seed
        return self._observation(observation.messages, None)

    def _observation(self, messages: list[Message], reward: float | None) -> str:
        session = self.session
        info = {**session.info, "seed": self._seed}
        seen = OpenEnvObservation(text=session.last, messages=messages, info=info)
        done = json.dumps(session.state is State.OVER)
        return (
            f'{{"type":"observation","data":{{"observation":{seen.model_dump_json()},'
            f'"reward":{json.dumps(reward)},"done":{done}}}}}'
        )


def _parsed(kind: type[T], data: Any) -> T:
    """Errors: ServiceError."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise ServiceError.from_validation(error.errors(), kind) from None


def _error(error: ServiceError) -> str:
    data = {"message": str(error), "code": CODES.get(error.kind, "EXECUTION_ERROR")}
    return json.dumps({"type": "error", "data": data})
