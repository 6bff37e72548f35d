"""Calls of the environment service, as they come in a batch or over a socket, and their answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, model_validator

from ludus.core.types import Message, Task, Wire
from ludus.services.envs.manager import SessionManager
from ludus.services.envs.session import State
from ludus.services.server.app import ServiceError
from ludus.services.server.peers import Peers

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

    def __init__(self, sessions: SessionManager, peers: Peers | None = None) -> None:
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
            return error.outcome
        return f'{{"status":200,"result":{result.model_dump_json()}}}'
