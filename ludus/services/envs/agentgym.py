"""AgentGym's wire format (Xi et al. 2024, arXiv:2406.04151), so that its clients work unchanged.

Each environment has a folder of its own, which is the `env_server_base` of AgentGym's client:

    POST /agentgym/textcraft/create {}                   -> {"id": 71..., "observation": ..., ...}
    POST /agentgym/textcraft/reset {"id": 71..., "data_idx": 3}
    POST /agentgym/textcraft/step {"id": 71..., "action": "get 1 oak log"}

What differs from the original: errors have honest status codes (the original answers 200 and
`{"error": ...}`), and ids cannot be guessed. An environment is one row of `ROWS`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Body, FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field, create_model

from ludus.core.errors import ConfigError
from ludus.core.types import Message, Spec, Task
from ludus.services.envs.manager import SessionManager
from ludus.services.envs.session import ID_BITS, EnvSession, ServedEnv, State
from ludus.services.server.app import ERRORS, ServiceError, owner_of
from ludus.tasks.agentgym import ITEMS, task_of

Id = Annotated[int, Field(ge=0, lt=2 ** (ID_BITS + 1))]
Tell = Callable[[EnvSession], Any]


@dataclass(frozen=True)
class Row:
    """How AgentGym speaks with one environment; `tasks.agentgym` knows its items.

    `created`, `was_reset` and `stepped` shape the answers; `asks` are the routes that only read.
    `starts` says that `create` starts an episode already, and may name its goal.
    """

    id_key: str = "id"
    index_key: str = "data_idx"
    created: Tell = lambda session: {"id": session.number}
    was_reset: Tell = lambda session: {"observation": session.last, "reward": 0.0, "done": False}
    stepped: Tell = lambda session: {
        "observation": session.last,
        "reward": session.reward,
        "done": session.state is State.OVER,
    }
    asks: Mapping[str, Tell] = field(default_factory=dict)
    starts: bool = False
    goal: Callable[[str], Task] | None = None


def _scored(session: EnvSession) -> dict[str, Any]:
    """The answer to a step of the environments that also tell the score so far."""
    return {
        "observation": session.last,
        "reward": session.reward,
        "score": session.score,
        "done": session.state is State.OVER,
    }


def _actions(session: EnvSession) -> list[str]:
    return [str(action) for action in session.info.get("available_actions", [])]


def _last(session: EnvSession) -> str:
    return session.last


def _science_opening(session: EnvSession) -> dict[str, Any]:
    """The description and the first look, which the environment tells in one text."""
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
    """Scores are the engine's own here, to 100, and not the environment's, to 1."""
    told = _scored(session)
    score = float(session.info.get("score", 0.0))
    return {**told, "reward": 100 * session.reward, "score": score}


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
    """The search bar's own button is listed too, though a click on it does nothing."""
    actions = _actions(session)
    search = any(action.startswith("search[") for action in actions)
    clicks = [action[6:-1] for action in actions if action.startswith("click[")]
    return {"has_search_bar": search, "clickables": ["search", *clicks] if search else clicks}


ROWS: dict[str, Row] = {
    "babyai": Row(
        was_reset=lambda session: {**_scored(session), "deleted": False},
        stepped=_scored,
        asks={"observation": _last},
    ),
    "textcraft": Row(
        created=lambda session: {
            "id": session.number,
            "observation": session.last,
            "done": False,
            "reward": 0.0,
        },
        asks={"observation": _last, "goal": lambda session: session.info.get("goal", "")},
        starts=True,
        goal=_textcraft_goal,
    ),
    "scienceworld": Row(
        was_reset=_science_opening,
        stepped=_science_step,
        asks={"observation": _last, "detail": lambda s: s.info},
    ),
    "alfworld": Row(
        index_key="game",
        was_reset=lambda session: {
            "id": session.number,
            "observation": session.last,
            "available_actions": _actions(session),
            "task_type": str(session.info.get("type", "")),
        },
        stepped=lambda session: {
            "observation": session.last,
            "reward": session.reward,
            "available_actions": _actions(session),
            "done": session.state is State.OVER,
        },
        asks={"observation": _last, "available_actions": _actions, "detail": lambda s: s.info},
    ),
    "webshop": Row(
        id_key="env_idx",
        index_key="session_id",
        created=lambda session: session.number,
        was_reset=lambda session: [session.last, None],
        stepped=lambda session: {
            "state": session.last,
            "reward": session.reward,
            "done": session.state is State.OVER,
            "info": None,
        },
        asks={
            "observation": _last,
            "available_actions": _webshop_actions,
            "instruction_text": _webshop_instruction,
            "state": _webshop_state,
        },
    ),
}


def add_routes(app: FastAPI, sessions: SessionManager, spec: Spec, isolate: bool) -> None:
    """Serve an environment under `/agentgym/NAME`, with AgentGym's arguments beneath its own."""
    row = ROWS[spec.name]
    served = ServedEnv(Spec(name=spec.name, args={**ITEMS[spec.name].args, **spec.args}), isolate)
    routes = _Routes(sessions, served, row)
    folder = f"/agentgym/{spec.name}"
    options: dict[str, Any] = {"responses": ERRORS, "tags": ["agentgym"]}
    app.add_api_route(folder + "/", routes.hello, methods=["GET"], **options)
    for name in ("create", "reset", "step", "close"):
        handler = getattr(routes, name)()
        app.add_api_route(f"{folder}/{name}", handler, methods=["POST"], **options)
    for name, tell in row.asks.items():
        app.add_api_route(f"{folder}/{name}", routes.ask(tell), methods=["GET"], **options)


class _Start(BaseModel):
    """What `create` may be given; the rest is AgentGym's own business."""

    goal: str | None = Field(None, max_length=200)
    commands: str | None = None


class _Routes:
    """The handlers of one environment. Bodies are models made from the row's keys."""

    def __init__(self, sessions: SessionManager, served: ServedEnv, row: Row) -> None:
        self._sessions, self._served, self._row = sessions, served, row
        id_key: Any = {row.id_key: (Id, ...)}
        index: Any = {row.index_key: (Annotated[int, Field(ge=0)], ...)}
        title = served.name.title()
        self._of: type[BaseModel] = create_model(f"{title}Session", **id_key)
        self._reset: type[BaseModel] = create_model(f"{title}Reset", **id_key, **index)
        self._step: type[BaseModel] = create_model(
            f"{title}Step", **id_key, action=(Annotated[str, Field(max_length=200_000)], ...)
        )

    async def hello(self) -> str:
        """Say who is there."""
        return f"This is environment {self._served.name}."

    def create(self) -> Callable[..., Any]:
        async def create(request: Request, body: Annotated[_Start | None, Body()] = None) -> Any:
            """Open a session."""
            start = body or _Start(goal=None, commands=None)
            if start.commands:
                raise ServiceError(422, "invalid", "commands: the recipes here are ludus' own")
            session = self._sessions.create(self._served, owner_of(request.scope))
            if self._row.starts:
                await self._start(session, start.goal)
            return JSONResponse(self._row.created(session))

        return create

    async def _start(self, session: EnvSession, goal: str | None) -> None:
        """Start the episode of a goal, or of index 0; where that fails, nothing stays open."""
        try:
            named = self._row.goal(goal) if goal and self._row.goal else None
            task = named or self._task(0)
            await self._sessions.reset(session, task)
        except ServiceError:
            await self._sessions.close(session, "its first episode could not start")
            raise

    def reset(self) -> Callable[..., Any]:
        async def reset(request: Request, body: Any) -> Any:
            """Start the episode of an index."""
            index = getattr(body, self._row.index_key)
            session = self._find(request, getattr(body, self._row.id_key))
            await self._sessions.reset(session, self._task(index))
            return JSONResponse(self._row.was_reset(session))

        reset.__annotations__["body"] = self._reset
        return reset

    def step(self) -> Callable[..., Any]:
        async def step(request: Request, body: Any) -> Any:
            """Take an action."""
            session = self._find(request, getattr(body, self._row.id_key))
            action = Message(role="assistant", content=body.action)
            await self._sessions.step(session, action)
            return JSONResponse(self._row.stepped(session))

        step.__annotations__["body"] = self._step
        return step

    def close(self) -> Callable[..., Any]:
        async def close(request: Request, body: Any) -> Any:
            """End a session."""
            await self._sessions.leave(self._find(request, getattr(body, self._row.id_key)))
            return JSONResponse({"closed": True})

        close.__annotations__["body"] = self._of
        return close

    def ask(self, tell: Tell) -> Callable[..., Any]:
        async def ask(request: Request, **query: Any) -> Any:
            """Read without acting."""
            session = self._find(request, query[self._row.id_key])
            if session.state is State.NEW:
                raise ServiceError(409, "not_reset", "the session has not been reset")
            return JSONResponse(tell(session))

        return _with_query(ask, self._row.id_key)

    def _task(self, index: int) -> Task:
        """The task of an index. Errors: ServiceError 422 for one that there is not."""
        try:
            return task_of(self._served.name, self._served.env_class, index)
        except ConfigError as error:
            raise ServiceError(422, "bad_task", str(error)) from error

    def _find(self, request: Request, number: int) -> EnvSession:
        session = self._sessions.get(number, owner_of(request.scope))
        if session.served is not self._served:
            raise ServiceError(404, "unknown_session", "there is no such session here")
        return session


def _with_query(handler: Any, key: str) -> Callable[..., Any]:
    """The handler, with a query parameter of that name in its signature."""
    parameters = [
        inspect.Parameter("request", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Request),
        inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, annotation=Id),
    ]
    handler.__signature__ = inspect.Signature(parameters)
    made: Callable[..., Any] = handler
    return made
