"""Environment service of AgentJet and AgentEvolver (https://github.com/modelscope/AgentJet), for
their unchanged clients.

All requests are a POST of `{env_type, task_id, instance_id, messages, params}`, and all answers
`{"success": true, "data": ...}`:

    /get_env_profile {"env_type": "textcraft", "params": {"split": "train"}}  -> ["depth-1/0", ...]
    /create {"env_type": "textcraft", "task_id": "depth-1/0", "instance_id": "mine"}
        -> {"state": [{"role": "user", "content": ...}], "reward": 0.0, "is_terminated": false,
            "info": {"instance_id": "mine", "task_id": "depth-1/0"}}
    /step {"instance_id": "mine", "messages": {"role": "assistant", "content": "get 1 oak log"}}
    /evaluate {"instance_id": "mine", "params": {"sparse": false}}            -> 1.0
    /get_info {"instance_id": "mine"}, /release {"instance_id": "mine"}

A task id is `SEED` or `TIER/SEED`, or an item of AgentGym's (`textcraft_12`). The client reads only
the first message of a step's state, so several messages are joined there, and listed in
`info["messages"]`. Differences from the original: errors have the form and the status codes of the
other routes (the original sends tracebacks), and `create` with the id of an open instance starts
that instance anew (the original leaks it).
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ludus.core.errors import ConfigError
from ludus.core.types import Message, Task, ToolCall
from ludus.services.envs.manager import MAX_REMEMBERED, SessionManager
from ludus.services.envs.session import ID_BITS, EnvSession, ServedEnv, State, text_of
from ludus.services.server.app import ERRORS, ServiceError, owner_of
from ludus.services.server.peers import Peers
from ludus.services.server.shares import client_of
from ludus.tasks.agentgym import ITEM, ITEMS, index_of, task_of

PATHS = ("/create", "/step", "/evaluate", "/get_info", "/release", "/get_env_profile")

FIRST_SEED = {"train": 0, "val": 10**6, "dev": 10**6, "test": 2 * 10**6}
"""Seed of the first task of a split, so that splits share no seed."""

T = TypeVar("T", bound=BaseModel)
Text = Annotated[str, Field(min_length=1, max_length=200)]


class ServiceRequest(BaseModel):
    """The body of every request; other fields are ignored."""

    model_config = ConfigDict(extra="ignore")

    env_type: Text | None = None
    task_id: Text | Annotated[int, Field(ge=0, lt=2**63)] | None = None
    instance_id: Text | None = None
    messages: dict[str, Any] | None = None
    params: dict[str, Any] | None = None


class Profile(BaseModel):
    """`params` of `/get_env_profile`; other fields are ignored."""

    split: Literal["train", "val", "dev", "test"] = "train"
    num_tasks: Annotated[int, Field(ge=1, le=100_000)] = 100
    tiers: Annotated[list[str], Field(min_length=1, max_length=1000)] | None = None
    first_seed: Annotated[int, Field(ge=0, lt=2**62)] | None = None


class Evaluation(BaseModel):
    """`params` of `/evaluate`; other fields are ignored."""

    sparse: bool = False


class Question(BaseModel):
    """`params` of `/get_info`; other fields are ignored."""

    what: Annotated[str, Field(max_length=200)] | None = None


@dataclass(frozen=True)
class Instance:
    """A session under the id that its client chose."""

    session: EnvSession
    id: str
    task_id: str
    success_at: float


def number_of(instance_id: str) -> int:
    """A number by which the workers share out instances: any worker can compute it."""
    return int.from_bytes(hashlib.sha256(instance_id.encode(errors="replace")).digest()[:8])


def id_in(body: bytes) -> int | None:
    """The number of the instance in a request, if it names one."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return None  # the route reports the error
    id = fields.get("instance_id") if isinstance(fields, dict) else None
    return number_of(id) if isinstance(id, str) and id else None


def add_routes(app: FastAPI, sessions: SessionManager, peers: Peers | None = None) -> None:
    """Serve all environments at the root of the service, which is AgentJet's `env_url`."""
    routes = _Routes(sessions, peers)

    @app.get("/healthz", tags=["agentjet"], response_class=PlainTextResponse, responses=ERRORS)
    async def healthz() -> str:
        """True if the service runs."""
        return "OK"

    for path in PATHS:
        handler = getattr(routes, path[1:])
        app.add_api_route(path, handler, methods=["POST"], responses=ERRORS, tags=["agentjet"])


class _Routes:
    """The handlers, and the instances by owner and id."""

    def __init__(self, sessions: SessionManager, peers: Peers | None) -> None:
        self._sessions, self._peers = sessions, peers
        self._instances: dict[tuple[str, str], Instance] = {}

    async def get_env_profile(self, body: ServiceRequest) -> Any:
        """Ids of the environment's tasks, of a split."""
        served = self._served(body)
        asked = _params(Profile, body)
        first = FIRST_SEED[asked.split] if asked.first_seed is None else asked.first_seed
        tiers: Sequence[str | None] = asked.tiers or list(served.env_class.tiers()) or [None]
        for tier in asked.tiers or ():
            try:
                served.env_class.check_tier(tier)
            except ConfigError as error:
                raise ServiceError.invalid("params.tiers", str(error)) from error
        served.task(tiers[0], first)  # refuses an environment that makes no tasks
        count = len(tiers)
        chosen = ((tiers[i % count], first + i // count) for i in range(asked.num_tasks))
        return _answer([str(seed) if tier is None else f"{tier}/{seed}" for tier, seed in chosen])

    async def create(self, request: Request, body: ServiceRequest) -> Any:
        """Start the episode of a task."""
        served = self._served(body)
        if body.task_id is None or body.task_id == "":
            raise ServiceError.invalid("task_id", "is required: an id from /get_env_profile")
        task_id = str(body.task_id)
        task = _task(served, task_id)
        id = body.instance_id or self._new_id()
        owner = owner_of(request.scope)
        await self._leave(owner, id)
        session = self._sessions.create(served, client_of(request.scope))
        self._forget()
        success_at = served.success_of(task)
        self._instances[owner, id] = instance = Instance(session, id, task_id, success_at)
        try:
            observation = await self._sessions.reset(session, task)
        except ServiceError:
            await self._sessions.close(session, "its episode could not start")
            raise
        state = [_wire(message) for message in observation.messages]
        return _answer(self._state(instance, state, observation.info))

    async def step(self, request: Request, body: ServiceRequest) -> Any:
        """Take the action in `messages`, an assistant's message."""
        instance = self._instance(request, body)
        result = await self._sessions.step(instance.session, _turn(body.messages or {}))
        info = dict(result.info)
        state = [_wire(message) for message in result.messages]
        if len(state) != 1:
            info["messages"] = state
            state = [{"role": "user", "content": text_of(result.messages)}]
        if result.truncated:
            info["truncated"] = True
        return _answer(self._state(instance, state, info))

    async def evaluate(self, request: Request, body: ServiceRequest) -> Any:
        """The sum of the episode's rewards so far; with `sparse`, 1 for a solved task, else 0."""
        instance = self._instance(request, body)
        score = instance.session.score
        if _params(Evaluation, body).sparse:
            score = float(score >= instance.success_at)
        return _answer(score)

    async def get_info(self, request: Request, body: ServiceRequest) -> Any:
        """The tools and the state; with `params.what`, a view of the running episode."""
        instance = self._instance(request, body)
        session = instance.session
        if what := _params(Question, body).what:
            return _answer(await self._sessions.inspect(session, what))
        tools = [
            {"type": "function", "function": tool.model_dump(mode="json")}
            for tool in session.served.tools()
        ]
        return _answer(
            {
                "env_type": session.served.name,
                "task_id": instance.task_id,
                "tools": tools,
                "num_steps": session.num_steps,
                "score": session.score,
                "is_terminated": session.state is State.OVER,
                "info": session.info,
            }
        )

    async def release(self, request: Request, body: ServiceRequest) -> Any:
        """Close an instance; `success` is false if there is none."""
        if body.instance_id is None:
            raise ServiceError.invalid("instance_id", "is required")
        released = await self._leave(owner_of(request.scope), body.instance_id)
        return JSONResponse({"success": released, "data": None})

    def _state(
        self, instance: Instance, state: list[dict[str, Any]], info: dict[str, Any]
    ) -> dict[str, Any]:
        session = instance.session
        return {
            "state": state,
            "reward": session.reward,
            "is_terminated": session.state is State.OVER,
            "info": {**info, "instance_id": instance.id, "task_id": instance.task_id},
        }

    def _served(self, body: ServiceRequest) -> ServedEnv:
        if body.env_type is None:
            raise ServiceError.invalid("env_type", "is required: a name from /envs")
        return self._sessions.env(body.env_type)

    def _instance(self, request: Request, body: ServiceRequest) -> Instance:
        """The owner's instance. Errors: ServiceError 404, or 410 for one that has ended."""
        if body.instance_id is None:
            raise ServiceError.invalid("instance_id", "is required")
        owner = owner_of(request.scope)
        instance = self._instances.get((owner, body.instance_id))
        self._sessions.get(instance.session.number if instance else None, owner)
        assert instance is not None
        return instance

    async def _leave(self, owner: str, id: str) -> bool:
        """Close an instance; False if there is none. Errors: ServiceError 409 during a call."""
        instance = self._instances.get((owner, id))
        if instance is None or not self._sessions.is_open(instance.session):
            return False
        await self._sessions.leave(instance.session)
        return True

    def _forget(self) -> None:
        """Drop the ids of ended instances once there are many."""
        if len(self._instances) > self._sessions.limits.max_sessions + MAX_REMEMBERED:
            kept = self._instances.items()
            self._instances = {k: i for k, i in kept if self._sessions.is_open(i.session)}

    def _new_id(self) -> str:
        """A random id that this worker owns."""
        while True:
            id = secrets.token_hex(ID_BITS // 8)
            if self._peers is None or self._peers.owner(number_of(id)) == self._peers.worker:
                return id


def _answer(data: Any) -> JSONResponse:
    return JSONResponse({"success": True, "data": data})


def _params(kind: type[T], body: ServiceRequest) -> T:
    """The request's `params`. Errors: ServiceError."""
    try:
        return kind.model_validate(body.params or {})
    except ValidationError as error:
        refused = ServiceError.from_validation(error.errors(), kind)
        raise ServiceError(422, refused.kind, f"params.{refused}") from None


def _task(served: ServedEnv, id: str) -> Task:
    """The task of an id. Errors: ServiceError 422."""
    items = ITEMS.get(served.name)
    if items is not None and (match := ITEM.fullmatch(id)) and match[1] == items.prefix:
        try:
            return task_of(served.name, served.env_class, index_of(served.name, id))
        except ConfigError as error:
            raise ServiceError(422, "bad_task", str(error)) from error
    tier, slash, seed = id.rpartition("/")
    if not (seed.isascii() and seed.isdigit() and int(seed) < 2**63):
        raise ServiceError(422, "bad_task", f"{id!r:.80} is not an id: use SEED or TIER/SEED")
    return served.task(tier if slash else None, int(seed))


def _wire(message: Message) -> dict[str, Any]:
    """A message in OpenAI's form, without empty fields."""
    fields = message.model_dump(mode="json", exclude_defaults=True)
    return {**fields, "role": message.role, "content": message.content}


def _turn(given: dict[str, Any]) -> Message:
    """The assistant's message of a step: its content is a text, or a list of parts with texts.

    Errors: ServiceError.
    """
    content = given.get("content")
    if isinstance(content, list):
        parts: list[Any] = [p.get("text") if isinstance(p, dict) else None for p in content]
        if not all(isinstance(part, str) for part in parts):
            raise ServiceError.invalid("messages.content", "every part must have a text")
        content = "".join(parts)
    if content is not None and not isinstance(content, str):
        raise ServiceError.invalid("messages.content", f"must be a text, got {content!r:.60}")
    role = given.get("role", "assistant")
    if role not in ("assistant", "user"):  # AgentEvolver's agents send actions as the user's
        raise ServiceError.invalid("messages.role", f"must be assistant, got {role!r:.60}")
    calls = given.get("tool_calls") or []
    if not isinstance(calls, list) or len(calls) > 128:
        raise ServiceError.invalid("messages.tool_calls", "must be a list of at most 128 calls")
    if content is None and not calls:
        raise ServiceError.invalid("messages", 'send {"role": "assistant", "content": ACTION}')
    return Message(
        role="assistant",
        content=content or "",
        tool_calls=[_call(call, index) for index, call in enumerate(calls)],
    )


def _call(given: Any, index: int) -> ToolCall:
    """A tool call in OpenAI's form, or in ours. Errors: ServiceError."""
    function = given.get("function", given) if isinstance(given, dict) else None
    try:
        if not isinstance(function, dict) or not isinstance(given, dict):
            raise ValueError("must be an object")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        return ToolCall(name=function.get("name"), arguments=arguments, id=given.get("id"))
    except (RecursionError, ValueError) as error:
        reason = f"{error}".partition("\n")[0]
        raise ServiceError.invalid(f"messages.tool_calls.{index}", reason) from None
