"""AgentGym's wire format (Xi et al. 2024, arXiv:2406.04151), for its unchanged clients.

Each environment has its own path, the `env_server_base` of AgentGym's client:

    POST /agentgym/textcraft/create {}                   -> {"id": 71..., "observation": ..., ...}
    POST /agentgym/textcraft/reset {"id": 71..., "data_idx": 3}
    POST /agentgym/textcraft/step {"id": 71..., "action": "get 1 oak log"}

Differences from the original: errors have error status codes (the original answers 200 and
`{"error": ...}`), and ids cannot be guessed. An environment is one row of `ROWS`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

from fastapi import Body, FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field, create_model

from ludus.core.errors import ConfigError
from ludus.core.types import Message, Spec, Task
from ludus.services.envs.manager import SessionManager
from ludus.services.envs.session import ID_BITS, EnvSession, ServedEnv, State
from ludus.services.server.app import ERRORS, ServiceError, owner_of
from ludus.services.server.shares import client_of
from ludus.tasks.agentgym import ITEMS, task_of

Id = Annotated[int, Field(ge=0, lt=2 ** (ID_BITS + 1))]
View = Callable[[EnvSession], Any]
"""Makes the JSON of a response from a session."""


def _last(session: EnvSession) -> str:
    return session.last


def _actions(session: EnvSession) -> list[str]:
    return [str(action) for action in session.info.get("available_actions", [])]


FIELDS: dict[str, View] = {
    "id": lambda session: session.number,
    "observation": _last,
    "reward": lambda session: session.reward,
    "score": lambda session: session.score,
    "done": lambda session: session.state is State.OVER,
    "available_actions": _actions,
    "task_type": lambda session: str(session.info.get("type", "")),
}


def _fields(*names: str) -> View:
    """A response of these fields."""
    return lambda session: {name: FIELDS[name](session) for name in names}


_created = _fields("id")
_result = _fields("observation", "reward", "done")
_scored = _fields("observation", "reward", "score", "done")


@dataclass(frozen=True)
class Row:
    """AgentGym's API of one environment; `tasks.agentgym` knows its items.

    `on_create`, `on_reset` and `on_step` make the responses; `reads` are the GET routes. With
    `starts`, `create` also starts an episode; `goal_task` makes its task from a requested goal.
    """

    id_key: str = "id"
    index_key: str = "data_idx"
    on_create: View = _created
    on_reset: View = _result
    on_step: View = _result
    reads: Mapping[str, View] = field(default_factory=dict)
    starts: bool = False
    goal_task: Callable[[str], Task] | None = None


def _science_opening(session: EnvSession) -> dict[str, Any]:
    """The task description and the first observation, split from one text."""
    description, _, look = session.last.partition("\n\n")
    return {
        "task_name": str(session.info.get("task", "")),
        "var_num": int(session.info.get("variation", 0)),
        "task_description": description,
        "observation": look or description,
        "reward": 0.0,
        "score": 0.0,
        "deleted": False,
        "done": False,
    }


def _science_step(session: EnvSession) -> dict[str, Any]:
    """Rewards and scores of the engine, up to 100 instead of 1."""
    score = float(session.info.get("score", 0.0))
    return {**_scored(session), "reward": 100 * session.reward, "score": score}


def _textcraft_goal(goal: str) -> Task:
    item = goal.strip().lower().removeprefix("craft ").rstrip(".")
    return Task(id=f"textcraft/goal/{item}", data={"goal": item, "seed": 0})


def _webshop_state(session: EnvSession) -> dict[str, Any]:
    info = session.info
    return {
        "url": str(info.get("url", "")),
        "html": str(info.get("html", session.last)),
        "instruction_text": _webshop_instruction(session),
    }


def _webshop_instruction(session: EnvSession) -> str:
    return f"Instruction: {session.info.get('instruction', '')}"


def _webshop_actions(session: EnvSession) -> dict[str, Any]:
    """Clickables include the search button, as in AgentGym, though a click on it does nothing."""
    actions = _actions(session)
    search = any(action.startswith("search[") for action in actions)
    clicks = [action[6:-1] for action in actions if action.startswith("click[")]
    return {"has_search_bar": search, "clickables": ["search", *clicks] if search else clicks}


ROWS: dict[str, Row] = {
    "babyai": Row(
        on_reset=lambda session: {**_scored(session), "deleted": False},
        on_step=_scored,
        reads={"observation": _last},
    ),
    "textcraft": Row(
        on_create=_fields("id", "observation", "done", "reward"),
        reads={"observation": _last, "goal": lambda session: session.info.get("goal", "")},
        starts=True,
        goal_task=_textcraft_goal,
    ),
    "scienceworld": Row(
        on_reset=_science_opening,
        on_step=_science_step,
        reads={"observation": _last, "detail": lambda s: s.info},
    ),
    "alfworld": Row(
        index_key="game",
        on_reset=_fields("id", "observation", "available_actions", "task_type"),
        on_step=_fields("observation", "reward", "available_actions", "done"),
        reads={"observation": _last, "available_actions": _actions, "detail": lambda s: s.info},
    ),
    "webshop": Row(
        id_key="env_idx",
        index_key="session_id",
        on_create=lambda session: session.number,
        on_reset=lambda session: [session.last, None],
        on_step=lambda session: {
            "state": session.last,
            "reward": session.reward,
            "done": session.state is State.OVER,
            "info": None,
        },
        reads={
            "observation": _last,
            "available_actions": _webshop_actions,
            "instruction_text": _webshop_instruction,
            "state": _webshop_state,
        },
    ),
}


def add_routes(app: FastAPI, sessions: SessionManager, spec: Spec, isolate: bool) -> None:
    """Serve an environment under `/agentgym/NAME`; the spec's arguments override AgentGym's."""
    row = ROWS[spec.name]
    served = ServedEnv(Spec(name=spec.name, args={**ITEMS[spec.name].args, **spec.args}), isolate)
    routes = _Routes(sessions, served, row)

    def add(path: str, method: str, handler: Callable[..., Any]) -> None:
        path = f"/agentgym/{spec.name}/{path}"
        app.add_api_route(path, handler, methods=[method], responses=ERRORS, tags=["agentgym"])

    add("", "GET", routes.hello)
    add("create", "POST", routes.create)
    bodies: dict[str, dict[str, Any]] = {
        "reset": {row.index_key: (Annotated[int, Field(ge=0)], ...)},
        "step": {"action": (Annotated[str, Field(max_length=200_000)], ...)},
        "close": {},
    }
    id_field: Any = {row.id_key: (Id, ...)}
    for name, fields in bodies.items():
        body = create_model(f"{spec.name.title()}{name.title()}", **id_field, **fields)
        add(name, "POST", _typed(getattr(routes, name), body=body))
    for name, view in row.reads.items():
        add(name, "GET", _typed(partial(routes.read, view), **{row.id_key: Id}))


class CreateBody(BaseModel):
    """The body of `create`; other fields are ignored."""

    goal: str | None = Field(None, max_length=200)
    commands: str | None = None


class _Routes:
    """The handlers of one environment."""

    def __init__(self, sessions: SessionManager, served: ServedEnv, row: Row) -> None:
        self._sessions, self._served, self._row = sessions, served, row

    async def hello(self) -> str:
        """The environment's name."""
        return f"This is environment {self._served.name}."

    async def create(
        self, request: Request, body: Annotated[CreateBody | None, Body()] = None
    ) -> Any:
        """Open a session."""
        start = body or CreateBody(goal=None, commands=None)
        if start.commands:
            raise ServiceError(
                422, "invalid", "commands: not supported; the recipes are ludus' own"
            )
        session = self._sessions.create(self._served, client_of(request.scope))
        if self._row.starts:
            await self._start(session, start.goal)
        return JSONResponse(self._row.on_create(session))

    async def reset(self, request: Request, body: Any) -> Any:
        """Start the episode of an index."""
        session = self._session(request, getattr(body, self._row.id_key))
        await self._sessions.reset(session, self._task(getattr(body, self._row.index_key)))
        return JSONResponse(self._row.on_reset(session))

    async def step(self, request: Request, body: Any) -> Any:
        """Take an action."""
        session = self._session(request, getattr(body, self._row.id_key))
        await self._sessions.step(session, Message(role="assistant", content=body.action))
        return JSONResponse(self._row.on_step(session))

    async def close(self, request: Request, body: Any) -> Any:
        """Close a session."""
        await self._sessions.leave(self._session(request, getattr(body, self._row.id_key)))
        return JSONResponse({"closed": True})

    async def read(self, view: View, request: Request, **query: Any) -> Any:
        """Read the session's state."""
        session = self._session(request, query[self._row.id_key])
        if session.state is State.NEW:
            raise ServiceError(409, "not_reset", "the session has not been reset")
        return JSONResponse(view(session))

    async def _start(self, session: EnvSession, goal: str | None) -> None:
        """Start the episode of a goal, or of index 0; close the session on failure."""
        try:
            named = self._row.goal_task(goal) if goal and self._row.goal_task else None
            await self._sessions.reset(session, named or self._task(0))
        except ServiceError:
            await self._sessions.close(session, "its first episode could not start")
            raise

    def _task(self, index: int) -> Task:
        """The task of an index. Errors: ServiceError 422 for an unknown index."""
        try:
            return task_of(self._served.name, self._served.env_class, index)
        except ConfigError as error:
            raise ServiceError(422, "bad_task", str(error)) from error

    def _session(self, request: Request, number: int) -> EnvSession:
        session = self._sessions.get(number, owner_of(request.scope))
        if session.served is not self._served:
            raise ServiceError(404, "unknown_session", "there is no such session here")
        return session


def _typed(handler: Callable[..., Any], **types: Any) -> Callable[..., Any]:
    """A route for a handler, with the types of its parameters; FastAPI reads the signature."""

    async def route(**arguments: Any) -> Any:
        return await handler(**arguments)

    method = handler.func if isinstance(handler, partial) else handler
    route.__name__, route.__doc__ = method.__name__, method.__doc__
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=type)
        for name, type in {"request": Request, **types}.items()
    ]
    route.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return route
