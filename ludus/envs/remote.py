"""Client of an environment service: `env: {name: remote, args: {url: ..., env: textcraft}}`.

Rollouts are the same as with the local environment, token for token: turns and answers are passed
on unchanged.

If the service dies, running episodes end with EnvError and are retried; a new episode waits for the
service to return. Pings while an answer is pending detect a dead service within two seconds.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, cached_property
from typing import Annotated, Any, ClassVar, TypeVar

import httpx
from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus, WebSocketException

from ludus.core.errors import (
    ConfigError,
    EnvError,
    EpisodeTimeout,
    ToolError,
    Unscorable,
    first_fault,
)
from ludus.core.types import Message, Observation, StepResult, Task, ToolCall, ToolSpec
from ludus.envs.base import Env, NoExpert

LONGEST_ACTION = 100_000
"""Characters of an action that are sent; the built-in environments read at most 500."""

PULSE_S = 0.5
"""Seconds without an answer before a ping is sent."""

SILENCE_S = 1.0
"""Timeout of the ping, in seconds."""

CONNECT_S = 1.5
EXPERT_S = 150.0
"""Seconds for a call of the expert, where the service does not report its deadline."""

EXPERT_SLACK_S = 5.0
"""Seconds that the service's own deadline is given to be reported."""

MAX_BYTES = 16_000_000
"""Limit of an answer's size."""

T = TypeVar("T")
ERRORS = {"env_timeout": EpisodeTimeout, "tool_error": ToolError, "unscorable": Unscorable}


class _Error(BaseModel):
    type: str
    message: str


class _Answer(BaseModel):
    """An answer on the WebSocket; an error's status is not 200."""

    status: int
    result: Any = None
    error: _Error = _Error(type="", message="no error is told")


class _Refusal(BaseModel):
    """The body of an HTTP answer whose status is not 200."""

    error: _Error


class _Schema(BaseModel):
    """`GET /envs/NAME`, as far as it is read here."""

    tools: list[ToolSpec]
    score_range: tuple[float, float]
    success_at: float
    max_turns: int
    expert_deadline_s: float = EXPERT_S


class _Session(BaseModel):
    session: str


class _Expert(BaseModel):
    action: str


class RemoteEnv(Env):
    """A session of an environment service.

    Its own tasks hold a tier and a seed, from which the service makes the task, so the
    environment's packages are needed at the service only. LUDUS_TOKEN is the service's token.
    """

    blocking: ClassVar[bool] = False

    def __init__(
        self,
        url: Annotated[str, Field(description="The service's address, http://host:port.")],
        env: Annotated[
            str | None, Field(description="Name of the environment; null: the service's only one.")
        ] = None,
        patience_s: Annotated[
            float, Field(ge=0, description="Seconds that a reset waits for the service to return.")
        ] = 25.0,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{url!r} does not start with http:// or https://")
        self.url, self.patience_s = url.rstrip("/"), patience_s
        self._name = env
        self._socket: ClientConnection | None = None
        self._session: str | None = None
        self._playing = False
        self._number = 0
        self._texts: dict[str, str] = {}

    async def reset(self, task: Task) -> Observation:
        own = task.source == "remote"
        episode = task.data if own else {"task": task.model_dump(mode="json", exclude_none=True)}
        deadline = time.monotonic() + self.patience_s
        while True:
            try:
                await self._open()
                opening = await self._call("reset", **episode)
                break
            except _Gone as error:
                await self.close()
                if time.monotonic() > deadline:
                    raise EnvError(str(error)) from error
                await asyncio.sleep(0.2)
        self._playing = True
        return self._read(Observation, opening)

    async def step(self, action: Message) -> StepResult:
        if not self._playing:
            raise EnvError("remote: the episode is over, or was never reset; call reset first")
        content = action.content[:LONGEST_ACTION]
        message = action.model_copy(update={"content": content})
        try:
            answer = await self._call("step", message=message.model_dump(mode="json"))
        except _Gone as error:
            await self.close()
            raise EnvError(str(error)) from error
        result = self._read(StepResult, answer)
        self._playing = not result.done
        return result

    async def close(self) -> None:
        socket, self._socket = self._socket, None
        self._session, self._playing = None, False
        if socket is not None:  # the service closes the session with it
            with suppress(Exception):
                await socket.close()

    async def _open(self) -> None:
        """Connect and open a session, unless open already."""
        if self._socket is None:
            address = "ws" + self.url.removeprefix("http") + "/ws"
            try:
                self._socket = await connect(
                    address,
                    additional_headers=_headers(),
                    compression=None,
                    open_timeout=CONNECT_S,
                    close_timeout=CONNECT_S,
                    ping_interval=None,
                    max_size=MAX_BYTES,
                    proxy=None,
                )
            except InvalidStatus as error:
                if error.response.status_code in (401, 403):
                    raise EnvError(f"{self.url} refuses the token: set LUDUS_TOKEN") from error
                raise _Gone(f"{self.url} answers {error.response.status_code}") from error
            except (OSError, TimeoutError, WebSocketException) as error:
                raise _Gone(self._no_answer(error)) from error
        if self._session is None:
            if self._name is None:
                self._name = await asyncio.to_thread(self._only_env)
            answer = await self._call("create", session=None, env=self._name)
            self._session = self._read(_Session, answer).session

    async def _call(self, op: str, **arguments: Any) -> Any:
        """Returns the result of a call. Errors: _Gone, and the error that the service reports."""
        assert self._socket is not None
        self._number += 1
        call = {"id": self._number, "op": op, "session": self._session, **arguments}
        text = json.dumps({key: value for key, value in call.items() if value is not None})
        try:
            await self._socket.send(text)
            received = await self._answer(self._socket)
        except (OSError, WebSocketException) as error:
            message = f"the environment service at {self.url} is gone ({_reason(error)})"
            raise _Gone(message) from error
        answer = self._read(_Answer, self._parse(received))
        if answer.status == 200:
            return answer.result
        kind, message = answer.error.type, answer.error.message
        if answer.status == 503 or kind == "too_many_sessions":
            raise _Gone(f"{self.url}: {message}")
        self._session, self._playing = None, False  # the service has closed the session
        raise ERRORS.get(kind, EnvError)(f"{self.url}: {message}")

    async def _answer(self, socket: ClientConnection) -> str | bytes:
        """Returns the next message. Errors: OSError if the service does not answer a ping."""
        reading = asyncio.ensure_future(socket.recv())
        try:
            while not (await asyncio.wait({reading}, timeout=PULSE_S))[0]:
                pong = asyncio.ensure_future(await socket.ping())
                sent = time.monotonic()
                done, _ = await asyncio.wait(
                    {reading, pong}, timeout=SILENCE_S, return_when=asyncio.FIRST_COMPLETED
                )
                # A longer wait means that this process was suspended: ping again.
                if not done and time.monotonic() - sent < 2 * SILENCE_S:
                    raise OSError(f"it has been silent for {PULSE_S + SILENCE_S:g} s")
            return await reading
        finally:
            reading.cancel()

    def tools(self) -> Sequence[ToolSpec]:
        return self._schema.tools

    def call_of(self, action: str) -> ToolCall:
        call = self._ask(ToolCall, "POST", f"/envs/{self._served}/call", {"action": action})
        self._texts[call.model_dump_json()] = action
        return call

    def text_of(self, call: ToolCall) -> str:
        """The text of a call made by `call_of`; empty for any other call, which the service reads
        at the step."""
        return self._texts.get(call.model_dump_json(), "")

    def expert_action(self) -> str:
        if not self._playing:
            raise NoExpert("remote: no episode is being played")
        try:
            path, limit = f"/sessions/{self._session}/expert", self._schema.expert_deadline_s
            return self._ask(_Expert, "POST", path, {}, limit + EXPERT_SLACK_S).action
        except _NotFound as error:
            raise NoExpert(str(error)) from error

    @property
    def score_range(self) -> tuple[float, float]:  # type: ignore[override]
        """The environment's score range, as the service reports it."""
        return self._schema.score_range

    @property
    def success_at(self) -> float:  # type: ignore[override]
        """The environment's success threshold, as the service reports it."""
        return self._schema.success_at

    @property
    def max_turns(self) -> int:  # type: ignore[override]
        """The environment's turn limit, as the service reports it."""
        return self._schema.max_turns

    @cached_property
    def _served(self) -> str:
        if self._name is None:
            self._name = self._only_env()
        return self._name

    @property
    def _schema(self) -> _Schema:
        key = (self.url, self._served)
        if key not in _SCHEMAS:
            _SCHEMAS[key] = self._ask(_Schema, "GET", f"/envs/{self._served}")
        return _SCHEMAS[key]

    def _only_env(self) -> str:
        names = self._ask(list[str], "GET", "/envs")
        if len(names) != 1:
            raise EnvError(f"{self.url} serves {', '.join(names)}: name one as args.env")
        return names[0]

    def _ask(
        self,
        kind: type[T],
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        answer_s: float = CONNECT_S,
    ) -> T:
        """Returns a route's answer, of type `kind`. Blocks, for about 1 ms but for the expert's;
        not used during an episode.

        Errors: EnvError where there is no such answer, of MAX_BYTES at most, within twice
        `answer_s`.
        """
        timeout = httpx.Timeout(CONNECT_S, read=answer_s)
        deadline, content, url = time.monotonic() + answer_s, bytearray(), self.url + path
        try:
            with httpx.stream(
                method, url, json=body, headers=_headers(), timeout=timeout
            ) as response:
                for part in response.iter_bytes():
                    content += part
                    if len(content) > MAX_BYTES or time.monotonic() > deadline:
                        raise EnvError(f"{url}: the answer is too large, or too slow")
        except httpx.HTTPError as error:
            raise EnvError(self._no_answer(error)) from error
        if response.has_redirect_location:
            raise EnvError(
                f"{self.url} redirects to {response.headers['location']!r:.200}: give that address"
            )
        answer = self._parse(bytes(content))
        if response.status_code == 200:
            return self._read(kind, answer)
        told = self._read(_Refusal, answer).error.message
        raise (_NotFound if response.status_code == 404 else EnvError)(f"{self.url}: {told}")

    def _parse(self, text: str | bytes) -> Any:
        try:
            return json.loads(text)
        except (RecursionError, ValueError) as error:
            raise EnvError(self._no_answer(error)) from error

    def _read(self, kind: type[T], answer: Any) -> T:
        """Returns an answer as `kind`. Errors: EnvError where it is something else."""
        try:
            hashable: Any = kind
            validated: T = _adapter(hashable).validate_python(answer)
            return validated
        except ValidationError as error:
            raise EnvError(
                f"{self.url} does not answer as an environment service: {first_fault(error)}"
            ) from error

    def _no_answer(self, error: Exception) -> str:
        problem = f"no environment service answers at {self.url} ({_reason(error)})"
        return f"{problem}: start it with `ludus serve env`"

    @classmethod
    def check_tier(cls, tier: str) -> None:
        """Accept any tier; the service checks it."""

    @classmethod
    def task(cls, tier: str | None, seed: int) -> Task:
        """A task of a tier and a seed, from which the service makes its own task."""
        return Task(
            id=f"remote/{tier or 'any'}/{seed}",
            data={"tier": tier, "seed": seed},
            tier=tier,
            source="remote",
        )


_SCHEMAS: dict[tuple[str, str], _Schema] = {}
"""Cache of `GET /envs/NAME` by URL and name; the answer does not change while a service runs."""


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


class _Gone(Exception):
    """The service is unavailable, perhaps for a short time."""


class _NotFound(EnvError):
    """The service answers 404."""


def _headers() -> dict[str, str]:
    token = os.environ.get("LUDUS_TOKEN", "")
    return {"Authorization": f"Bearer {token}"} if token else {}


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
