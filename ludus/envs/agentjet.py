"""Client of environment services of AgentJet and AgentEvolver:
`env: {name: agentjet, args: {url: ..., env_type: appworld}}`.

An episode is an instance: `/create` opens it, `/step` takes the actions, `/evaluate` scores it,
`/release` closes it. A failure of the service ends the episode with EnvError; it is retried, and
never counts as a reward of 0 (AgentEvolver's own client scores it 0 and goes on).
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any, ClassVar, Literal
from weakref import WeakKeyDictionary

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ludus.core.errors import ConfigError, EnvError, ToolError, first_fault
from ludus.core.remote import Blamed, RemoteClient
from ludus.core.types import Message, Observation, StepResult, Task
from ludus.envs.base import Env, set_limits
from ludus.tasks.agentjet import EnvType, TokenEnv, Url, data_of, request_of, task_ids

RELEASE_S = 5.0
LONGEST_ACTION = 100_000
"""Characters of an action that are sent."""


class _Message(BaseModel):
    """A message of the service's state."""

    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "user", "assistant", "tool"] = "user"
    content: str | None = None
    tool_call_id: str | None = None
    name: str | None = None

    def message(self, opening: bool) -> Message:
        """The message. In a step's state the environment speaks, whatever role it gives itself."""
        role = self.role if opening or self.role == "tool" else "user"
        fields = self.model_dump(exclude={"role", "content"})
        return Message(role=role, content=self.content or "", **fields)


class _State(BaseModel):
    """The data of `/create` and `/step`."""

    model_config = ConfigDict(extra="ignore")

    state: list[_Message] | _Message
    reward: float | None = None
    is_terminated: bool = False
    info: dict[str, Any] | None = None

    def messages(self, opening: bool) -> list[Message]:
        """The state; where the service joined it for other clients, its exact messages."""
        given: Any = self.state if isinstance(self.state, list) else [self.state]
        exact = (self.info or {}).get("messages")
        with suppress(ValidationError):
            if isinstance(exact, list):
                given = [_Message.model_validate(message) for message in exact]
        return [message.message(opening) for message in given]


class AgentJet(Env):
    """An instance of an environment service of AgentJet's protocol."""

    blocking: ClassVar[bool] = False

    def __init__(
        self,
        url: Url,
        env_type: EnvType,
        reward: Annotated[
            Literal["evaluate", "end", "steps"],
            Field(
                description="evaluate: the increase of `/evaluate` after each step; end: "
                "`/evaluate` after the last step; steps: the rewards of the steps."
            ),
        ] = "evaluate",
        params: Annotated[
            dict[str, Any] | None, Field(description="`params` of `/create` and `/evaluate`.")
        ] = None,
        max_turns: Annotated[int, Field(ge=1, description="Turns of an episode.")] = 20,
        score_range: Annotated[
            tuple[float, float], Field(description="Lowest and highest reward of an episode.")
        ] = (0.0, 1.0),
        success_at: Annotated[float, Field(description="Reward of a success.")] = 1.0,
        deadline_s: Annotated[
            float,
            Field(gt=0, description="Seconds of a call; a reset waits so long for a service."),
        ] = 25.0,
        token_env: TokenEnv = None,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{url!r} does not start with http:// or https://")
        self.url, self.env_type, self.token_env = url.rstrip("/"), env_type, token_env
        set_limits(self, max_turns, score_range, success_at)
        self._reward, self._params, self._deadline_s = reward, params or {}, deadline_s
        self._instance: str | None = None
        self._lease: Any = None
        self._client: RemoteClient | None = None
        self._score, self._num_steps = 0.0, 0

    async def reset(self, task: Task) -> Observation:
        await self.close()
        self._lease = _client(self.url, self.token_env, self._deadline_s)
        self._client = await self._lease.__aenter__()
        self._instance = f"ludus-{secrets.token_hex(16)}"
        fields = {"task_id": await self._task_id(task), "params": self._params}
        opening = self._state(await self._call("/create", wait=True, **fields))
        self._score, self._num_steps = 0.0, 0
        return Observation(messages=opening.messages(True), info=opening.info or {})

    async def step(self, action: Message) -> StepResult:
        if self._instance is None:
            raise EnvError("agentjet: the episode is over, or was never reset; call reset first")
        state = self._state(await self._call("/step", messages=_wire(action)))
        self._num_steps += 1
        info = state.info or {}
        truncated = info.get("truncated") is True
        over = state.is_terminated or truncated or self._num_steps >= self.max_turns
        result = StepResult(
            messages=state.messages(False),
            reward=await self._earned(state, over),
            terminated=state.is_terminated and not truncated,
            truncated=over and (truncated or not state.is_terminated),
            info=info,
        )
        if over:
            await self.close()
        return result

    async def close(self) -> None:
        instance, self._instance = self._instance, None
        if instance is not None and self._client is not None:
            body = request_of(self.env_type, instance_id=instance)
            with suppress(Blamed, ToolError):  # the service reaps it
                await self._client.post(body, "/release", once=True, deadline_s=RELEASE_S)
        lease, self._lease, self._client = self._lease, None, None
        if lease is not None:
            await lease.__aexit__(None, None, None)

    async def _earned(self, state: _State, over: bool) -> float | None:
        """The reward of a step."""
        if self._reward == "steps":
            return state.reward
        if self._reward == "end" and not over:
            return None
        score = await self._call("/evaluate", params={"sparse": False, **self._params})
        if isinstance(score, bool) or not isinstance(score, int | float) or not _finite(score):
            raise EnvError(f"{self.url}: /evaluate must give a number, got {score!r:.60}")
        earned, self._score = score - self._score, float(score)
        return earned

    async def _task_id(self, task: Task) -> str:
        """The task's id; by its number in a split for a task that `task` made."""
        if isinstance(id := task.data.get("task_id"), str | int):
            return str(id)
        if task.source != "agentjet" or "number" not in task.data:
            raise EnvError(f"agentjet: the task {task.id!r} has no task_id in its data")
        assert self._client is not None
        split, number = task.data["split"], task.data["number"]
        key = (self.url, self.env_type, split)
        try:
            if key not in _PROFILES:
                _PROFILES[key] = await task_ids(self._client, self.env_type, split, {})
        except (ToolError, ValueError) as error:
            raise EnvError(f"{self.url}: {error}") from error
        if not _PROFILES[key]:
            raise EnvError(f"{self.url} has no task of {self.env_type!r} in the split {split}")
        found: str = _PROFILES[key][number % len(_PROFILES[key])]
        return found

    async def _call(self, path: str, *, wait: bool = False, **fields: Any) -> Any:
        """The data of an answer; with `wait`, a service that is down or full is asked again.

        Errors: EnvError.
        """
        assert self._client is not None
        body = request_of(self.env_type, instance_id=self._instance, **fields)
        try:
            return data_of(await self._client.post(body, path, once=not wait))
        except (Blamed, ToolError, ValueError) as error:
            place = "" if isinstance(error, ToolError) else f"{self.url}{path}: "
            raise EnvError(f"{place}{error}") from error

    def _state(self, data: Any) -> _State:
        try:
            return _State.model_validate(data)
        except ValidationError as error:
            raise EnvError(
                f"{self.url} does not answer as an environment service: {first_fault(error)}"
            ) from error

    @classmethod
    def check_tier(cls, tier: str) -> None:
        """Accept any split; the service checks it."""

    @classmethod
    def task(cls, tier: str | None, seed: int) -> Task:
        """The task of a number in a split (the tier; null: train), modulo the split's length."""
        split = tier or "train"
        return Task(
            id=f"agentjet/{split}/{seed}",
            data={"split": split, "number": seed},
            tier=tier,
            source="agentjet",
        )


_PROFILES: dict[tuple[str, str, str], list[str]] = {}
"""Cache of `/get_env_profile` by URL, environment and split."""

_CLIENTS: WeakKeyDictionary[Any, dict[Any, tuple[RemoteClient, int]]] = WeakKeyDictionary()
"""Clients by event loop, URL, token and deadline, with the number of their episodes."""


@asynccontextmanager
async def _client(
    url: str, token_env: str | None, deadline_s: float
) -> AsyncIterator[RemoteClient]:
    """The client that all episodes of a service share."""
    clients = _CLIENTS.setdefault(asyncio.get_running_loop(), {})
    key = (url, token_env, deadline_s)
    if key not in clients:
        made = RemoteClient(
            url, deadline_s=deadline_s, attempts=None, max_in_flight=4096, token_env=token_env
        )
        clients[key] = (made, 0)
    client, users = clients[key]
    clients[key] = (client, users + 1)
    try:
        yield client
    finally:
        client, users = clients[key]
        clients[key] = (client, users - 1)
        if users == 1:
            del clients[key]
            await client.close()


def _wire(action: Message) -> dict[str, Any]:
    """The assistant's message in OpenAI's form."""
    text = action.content[:LONGEST_ACTION].encode("utf-8", "replace").decode()  # no surrogates
    sent: dict[str, Any] = {"role": "assistant", "content": text}
    if action.tool_calls:
        sent["tool_calls"] = [call.to_openai() for call in action.tool_calls]
    return sent


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the range of floats
        return False
