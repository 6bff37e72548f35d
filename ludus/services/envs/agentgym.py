"""AgentGym's wire format (Xi et al. 2024, arXiv:2406.04151), for its unchanged clients.

Each environment has its own path, the `env_server_base` of AgentGym's client:

    POST /agentgym/textcraft/create {}                   -> {"id": 71..., "observation": ..., ...}
    POST /agentgym/textcraft/reset {"id": 71..., "data_idx": 3}
    POST /agentgym/textcraft/step {"id": 71..., "action": "get 1 oak log"}

Observations are AgentGym's, word for word (the environments' argument `texts`), unless the served
spec sets other arguments. Differences from the original: errors have error status codes (the
original answers 200 and `{"error": ...}`), and ids cannot be guessed. An environment is one row of
`agentgym_rows.ROWS`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from fastapi import Body, FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field, create_model

from ludus.core.errors import ConfigError
from ludus.core.types import Message, Spec, Task
from ludus.services.envs.agentgym_rows import ROWS, Inspection, Row, View
from ludus.services.envs.manager import SessionManager
from ludus.services.envs.session import ID_BITS, EnvSession, ServedEnv, State
from ludus.services.server.app import ERRORS, ServiceError, owner_of
from ludus.services.server.shares import client_of
from ludus.tasks.agentgym import task_of

Id = Annotated[int, Field(ge=0, lt=2 ** (ID_BITS + 1))]


def add_routes(app: FastAPI, sessions: SessionManager, spec: Spec, isolate: bool) -> None:
    """Serve an environment under `/agentgym/NAME`; the spec's arguments override AgentGym's."""
    row = ROWS[spec.name]
    served = ServedEnv(Spec(name=spec.name, args={**row.args, **spec.args}), isolate)
    routes = _Routes(sessions, served, row)

    def add(path: str, method: str, handler: Callable[..., Any]) -> None:
        path = f"/agentgym/{spec.name}/{path}"
        app.add_api_route(path, handler, methods=[method], responses=ERRORS, tags=["agentgym"])

    add("", "GET", routes.hello)
    add("create", "POST", routes.create)
    index_type: Any = Annotated[int, Field(ge=0)]
    if row.any_task is not None:
        index_type = index_type | None
    bodies: dict[str, dict[str, Any]] = {
        "reset": {row.index_key: (index_type, row.index), **row.reset_fields},
        "step": {"action": (Annotated[str, Field(max_length=200_000)], ...)},
        "close": {},
    }
    id_field: Any = {row.id_key: (Id, ...)}
    for name, fields in bodies.items():
        body = create_model(f"{spec.name.title()}{name.title()}", **id_field, **fields)
        add(name, "POST", _typed(getattr(routes, name), body=body))
    for name, view in row.reads.items():
        add(name, "GET", _typed(partial(routes.read, view), **{row.id_key: Id}))
    for name, asked in row.inspections.items():
        if asked.method == "GET":
            add(name, "GET", _typed(partial(routes.look, asked), **{row.id_key: Id}))
        else:
            asking = create_model(f"{spec.name.title()}{name.title()}", **id_field)
            add(name, "POST", _typed(partial(routes.look_at, asked), body=asking))


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
        index = getattr(body, self._row.index_key)
        await self._sessions.reset(session, self._task(index))
        given = {name: getattr(body, name) for name in self._row.reset_fields}
        session.info = {**session.info, self._row.index_key: index, **given}
        return JSONResponse(self._row.on_reset(session))

    async def step(self, request: Request, body: Any) -> Any:
        """Take an action."""
        session = self._session(request, getattr(body, self._row.id_key))
        await self._sessions.step(session, Message(role="assistant", content=body.action))
        return JSONResponse(self._row.on_step(session))

    async def close(self, request: Request, body: Any) -> Any:
        """Close a session."""
        await self._sessions.leave(self._session(request, getattr(body, self._row.id_key)))
        return JSONResponse(True)

    async def read(self, view: View, request: Request, **query: Any) -> Any:
        """Read the session's state."""
        session = self._session(request, query[self._row.id_key])
        if session.state is State.NEW:
            raise ServiceError(409, "not_reset", "the session has not been reset")
        return JSONResponse(view(session))

    async def look(self, asked: Inspection, request: Request, **query: Any) -> Any:
        """Ask the running episode's environment."""
        session = self._session(request, query[self._row.id_key])
        return JSONResponse(asked.view(session, await self._sessions.inspect(session, asked.what)))

    async def look_at(self, asked: Inspection, request: Request, body: Any) -> Any:
        """Ask the running episode's environment."""
        return await self.look(asked, request, **body.model_dump())

    async def _start(self, session: EnvSession, goal: str | None) -> None:
        """Start the episode of a goal, or of index 0; close the session on failure."""
        try:
            named = self._row.goal_task(goal) if goal and self._row.goal_task else None
            await self._sessions.reset(session, named or self._task(0))
        except ServiceError:
            await self._sessions.close(session, "its first episode could not start")
            raise

    def _task(self, index: int | None) -> Task:
        """The task of an index; of a random one for None. Errors: ServiceError 422 for an unknown
        index."""
        if index is None and self._row.any_task is not None:
            return self._row.any_task()
        try:
            assert index is not None
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
