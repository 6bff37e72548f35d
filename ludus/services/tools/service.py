"""Tool service: tools over HTTP, wire-compatible with verl-tool's server.

    GET /tools             -> the functions: name, description, JSON schema
    POST /get_observation  -> an observation for each trajectory

A trajectory's state (a Python session) begins with its first action, and ends with `finish`,
`is_last_step`, or after an idle time. Nothing is answered from a cache: the same action twice runs
twice. The actions of one trajectory in a request run in their order, those of several at the same
time.

As in verl-tool, a tool that fails is an observation with the key `error`, done, and not valid.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from pydantic import BaseModel, Field, model_validator

from ludus.core.errors import ConfigError, LudusError
from ludus.core.types import Spec, ToolSpec
from ludus.services.server.app import ERRORS, ServiceError, Settings, create_app
from ludus.services.server.peers import Peers
from ludus.services.server.serve import ServeOptions, serve
from ludus.services.server.shares import Client, Shares, client_of
from ludus.services.tools.actions import calls_of
from ludus.tools.base import ToolResult
from ludus.tools.toolbox import Toolbox
from ludus.tools.verl_tool import CALLS_BEFORE

MAX_BATCH = 4_096
SWEEP_S = 5.0


@dataclass(frozen=True)
class ToolLimits:
    """Limits of the service: trajectories with state, calls at the same time, seconds."""

    max_trajectories: int = 4_096
    max_concurrent: int = 64
    idle_s: float = 900.0
    deadline_s: float = 60.0


class Actions(BaseModel):
    """verl-tool's request; every list has an entry for each trajectory."""

    trajectory_ids: list[str] = Field(min_length=1, max_length=MAX_BATCH)
    actions: list[str] = Field(min_length=1, max_length=MAX_BATCH)
    extra_fields: list[dict[str, Any]] | None = None
    finish: list[bool] | None = None
    is_last_step: list[bool] | None = None

    @model_validator(mode="after")
    def _of_one_length(self) -> Actions:
        for name in ("actions", "extra_fields", "finish", "is_last_step"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.trajectory_ids):
                raise ValueError(f"{name} has {len(values)} entries, not as trajectory_ids")
        return self

    def flag(self, name: str, index: int) -> bool:
        """`finish` or `is_last_step`, also as verl-tool's tools find it in `extra_fields`."""
        values = getattr(self, name)
        if values is not None:
            return bool(values[index])
        return bool(self._extra(index).get(name, False))

    def has_earlier(self, index: int) -> bool:
        """True if calls of the trajectory were answered before, as ludus' client says."""
        return bool(self._extra(index).get(CALLS_BEFORE, 0))

    def _extra(self, index: int) -> dict[str, Any]:
        return self.extra_fields[index] if self.extra_fields else {}


class Observations(BaseModel):
    """verl-tool's answer. An observation is a text, or an object with `obs` and a reason."""

    observations: list[str | dict[str, Any]]
    dones: list[bool]
    valids: list[bool]
    processing_time_ms: float
    queue_time_ms: float = 0.0


@dataclass
class _Trajectory:
    """The state of a trajectory: its episode's id for the tools, and its order of actions.

    `lost`: the client had answers before this service knew the trajectory.
    """

    client: Client
    lost: bool = False
    episode: str = field(default_factory=lambda: uuid.uuid4().hex)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    used: float = field(default_factory=time.monotonic)
    waiting: int = 0


Outcome = tuple[str | dict[str, Any], bool, bool]
"""Observation, done, valid."""


class ToolService:
    """Trajectories and their calls. A trajectory belongs to the token that began it."""

    def __init__(self, toolbox: Toolbox, limits: ToolLimits, tokens: Sequence[str]) -> None:
        self.toolbox, self.limits = toolbox, limits
        self._places = asyncio.Semaphore(limits.max_concurrent)
        self._shares = Shares(limits.max_trajectories, 0, tokens)
        self._open: dict[tuple[str, str], _Trajectory] = {}

    @property
    def num_trajectories(self) -> int:
        return len(self._open)

    async def answer(self, actions: Actions, client: Client) -> Observations:
        """Errors: ServiceError where the client holds too many trajectories."""
        started = time.perf_counter()
        new = {
            trajectory
            for index, trajectory in enumerate(actions.trajectory_ids)
            if (client.token, trajectory) not in self._open and not actions.flag("finish", index)
        }
        if new and not self._shares.allows(client.tenant, len(new)):
            raise ServiceError(
                429,
                "too_many_trajectories",
                f"{self._shares.limit} trajectories are open: end some with `finish`",
            )
        tasks = [
            self._one(actions, index, self._enter(client, trajectory, actions.has_earlier(index)))
            for index, trajectory in enumerate(actions.trajectory_ids)
        ]
        outcomes: list[Outcome] = await asyncio.gather(*tasks)
        observations, dones, valids = map(list, zip(*outcomes, strict=True))
        elapsed = (time.perf_counter() - started) * 1000
        return Observations(
            observations=observations, dones=dones, valids=valids, processing_time_ms=elapsed
        )

    async def end_idle(self) -> None:
        """End trajectories that nobody has used for `idle_s` seconds."""
        while True:
            await asyncio.sleep(min(SWEEP_S, self.limits.idle_s))
            before = time.monotonic() - self.limits.idle_s
            idle = [key for key, one in self._open.items() if not one.waiting and one.used < before]
            await asyncio.gather(*map(self._end, idle))

    async def close(self) -> None:
        await asyncio.gather(*map(self._end, list(self._open)))
        await self.toolbox.close()

    def _enter(self, client: Client, name: str, has_earlier: bool) -> _Trajectory:
        key = (client.token, name)
        if key not in self._open:
            self._open[key] = _Trajectory(client, lost=has_earlier)
            self._shares.add(client.tenant)
        self._open[key].waiting += 1
        return self._open[key]

    async def _one(self, actions: Actions, index: int, one: _Trajectory) -> Outcome:
        """An entry of a request. asyncio.Lock is first come, first served: the order is kept."""
        finish = actions.flag("finish", index)
        try:
            async with one.turn:
                if finish:
                    return "", True, True
                async with self._places:
                    return await self._run(actions.actions[index], one)
        finally:
            one.waiting -= 1
            one.used = time.monotonic()
            last = finish or actions.flag("is_last_step", index)
            if last and not one.waiting:
                await self._end((one.client.token, actions.trajectory_ids[index]))

    async def _run(self, action: str, one: _Trajectory) -> Outcome:
        calls = calls_of(action, self.toolbox.specs)
        if isinstance(calls, str):
            return {"obs": "", "invalid_reason": calls}, False, False
        names = ", ".join(call.name for call in calls)
        if one.lost and any(self.toolbox.keeps_state(call.name) for call in calls):
            error = (
                "the state of this trajectory is lost: since its last call the server was "
                f"restarted, or {self.limits.idle_s:g} s (--idle) passed"
            )
            return {"obs": "", "error": error, "tool_type": names}, True, False
        try:
            results: Sequence[ToolResult] = await self.toolbox.call(calls, one.episode)
        except LudusError as error:
            return {"obs": "", "error": str(error), "tool_type": names}, True, False
        text = "\n".join(result.content for result in results)
        failed = any(result.failed for result in results)
        return text, any(result.done for result in results), not failed

    async def _end(self, key: tuple[str, str]) -> None:
        if (one := self._open.pop(key, None)) is not None:
            self._shares.add(one.client.tenant, -1)
            await self.toolbox.end(one.episode)


def tool_service(
    specs: Sequence[Spec], settings: Settings, limits: ToolLimits, *, peers: Peers | None = None
) -> FastAPI:
    """An application that serves the functions of `specs`. One process: tools keep state."""
    services: list[ToolService] = []

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        toolbox = await Toolbox.open(specs, deadline_s=limits.deadline_s)
        service = ToolService(toolbox, limits, settings.tokens)
        services.append(service)
        sweeping = asyncio.create_task(service.end_idle())
        try:
            yield
        finally:
            sweeping.cancel()
            await service.close()

    def health() -> Mapping[str, Any]:
        names = [spec.name for spec in services[0].toolbox.specs]
        return {"trajectories": services[0].num_trajectories, "tools": names}

    app = create_app("tools", settings, health=health, lifespan=lifespan)

    @app.get("/tools", responses=ERRORS, tags=["tools"])
    async def read_tools() -> list[ToolSpec]:
        """The functions: name, description, JSON schema of the arguments."""
        return services[0].toolbox.specs

    @app.post("/get_observation", responses=ERRORS, tags=["tools"])
    async def get_observation(request: Request, body: Actions) -> Observations:
        """Carry out an action for each trajectory."""
        return await services[0].answer(body, client_of(request.scope))

    return app


def serve_tools(
    specs: Sequence[Spec], options: ServeOptions, limits: ToolLimits, say: Callable[[str], object]
) -> None:
    """`ludus serve tools`: serve until stopped.

    Errors: ConfigError, MissingDependency.
    """
    if options.workers != 1:
        raise ConfigError("tools keep state: they are served by one process")
    functions = asyncio.run(_functions(specs))  # report mistakes before the service listens
    serve(
        partial(tool_service, tuple(specs), limits=limits),
        options,
        lambda address: say(f"{', '.join(functions)}: {address} (description: {address}/docs)"),
    )


async def _functions(specs: Sequence[Spec]) -> list[str]:
    async with await Toolbox.open(specs) as toolbox:
        return [spec.name for spec in toolbox.specs]
