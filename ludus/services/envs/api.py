"""Calls of the environment service by HTTP routes and WebSockets, and their results."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, model_validator

from ludus.core.types import Message, Task, Wire
from ludus.services.envs.manager import SessionManager
from ludus.services.envs.session import State, parse_id
from ludus.services.server.app import ServiceError
from ludus.services.server.peers import Peers
from ludus.services.server.shares import Client

MAX_CALLS = 1024
"""Maximum calls of one `POST /batch`, and concurrent calls on one WebSocket."""

EpisodeSeed = Annotated[int, Field(ge=0, lt=2**63)]


class Create(Wire):
    """Open a session."""

    op: Literal["create"] = "create"
    env: str = Field(description="An environment from `/envs`.")


class SessionCall(Wire):
    """A call of an open session."""

    session: str = Field(description="The session's id, as returned by `create`.", max_length=64)


class EpisodeStart(Wire):
    """The episode to start: a task, or the environment's own task of a tier and a seed."""

    task: Task | None = None
    tier: str | None = None
    seed: EpisodeSeed | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> EpisodeStart:
        if (self.task is None) == (self.seed is None):
            raise ValueError("give a task, or a seed (and a tier)")
        return self


class Act(Wire):
    """An action: its text, or the assistant's message with its tool calls."""

    action: str | None = None
    message: Message | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Act:
        if (self.action is None) == (self.message is None):
            raise ValueError("give an action or a message")
        return self

    def turn(self) -> Message:
        return self.message or Message(role="assistant", content=self.action or "")


class Reset(SessionCall, EpisodeStart):
    """Start an episode."""

    op: Literal["reset"] = "reset"


class Step(SessionCall, Act):
    """Take an action."""

    op: Literal["step"] = "step"


class Expert(SessionCall):
    """Ask the environment's expert for its action."""

    op: Literal["expert"] = "expert"


class Close(SessionCall):
    """Close a session."""

    op: Literal["close"] = "close"


Call = Annotated[Create | Reset | Step | Expert | Close, Field(discriminator="op")]
CALL: TypeAdapter[Any] = TypeAdapter(Call)


class CallBatch(Wire):
    """Calls of different sessions, carried out concurrently."""

    calls: list[Call] = Field(max_length=MAX_CALLS)


class Opened(Wire):
    """An open session."""

    session: str
    env: str


class SessionStatus(Wire):
    """State of a session. `score` is the sum of the episode's rewards so far."""

    session: str
    env: str
    state: State
    num_steps: int
    score: float


class Action(Wire):
    """An action's text."""

    action: str = Field(max_length=10_000)


class Closed(Wire):
    """The session is closed."""

    closed: bool = True


class CallExecutor:
    """Carries out calls. Errors of all methods but `entry`: ServiceError."""

    def __init__(self, sessions: SessionManager, peers: Peers | None = None) -> None:
        self.sessions, self._peers = sessions, peers

    async def run(self, call: Any, client: Client) -> Wire:
        """The result of a call of this worker's session."""
        if isinstance(call, Create):
            session = self.sessions.create(self.sessions.env(call.env), client)
            return Opened(session=session.id, env=call.env)
        session = self.sessions.by_id(call.session, client.token)
        if isinstance(call, Step):
            return await self.sessions.step(session, call.turn())
        if isinstance(call, Reset):
            own = call.task is None
            task = call.task or session.served.task(call.tier, call.seed or 0)
            return await self.sessions.reset(session, task, own=own)
        if isinstance(call, Expert):
            return await self.sessions.expert(session)
        await self.sessions.leave(session)
        return Closed()

    async def entry(self, call: Any, client: Client) -> str:
        """The result or error of a call of any worker's session, as an entry of `POST /batch`."""
        try:
            if self._peers is not None and not isinstance(call, Create):
                worker = self._peers.owner(parse_id(call.session))
                if worker != self._peers.worker:
                    body = b'{"calls":[' + CALL.dump_json(call) + b"]}"
                    answer = await self._peers.post(worker, "/batch", body, client.token)
                    if answer.status_code != 200:
                        return json.dumps({"status": answer.status_code, **answer.json()})
                    return json.dumps(answer.json()["results"][0])
            return result_entry(await self.run(call, client))
        except ServiceError as error:
            return error.entry


def result_entry(result: Wire) -> str:
    """A result as an entry of `POST /batch`."""
    return f'{{"status":200,"result":{result.model_dump_json()}}}'
