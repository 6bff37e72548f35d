"""An environment that a service plays: `env: {name: remote, args: {url: ..., env: textcraft}}`.

The rollouts are those of the environment itself, token for token: the service is sent each turn as
it is, and its answers are the environment's.

A service that dies ends the episodes under way with EnvError: they are tried again, and never count
as a reward of 0. An episode that starts waits for the service to return. Whether it lives is asked
while an answer is awaited: one that is gone is noticed in less than two seconds.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from typing import Annotated, Any, ClassVar

import httpx
from pydantic import Field
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus, WebSocketException

from ludus.core.errors import EnvError, EpisodeTimeout, ToolError, Unscorable
from ludus.core.types import Message, Observation, StepResult, Task, ToolCall, ToolSpec
from ludus.envs.base import Env, NoExpert

LONGEST_ACTION = 100_000
"""Characters of an action that are sent; no environment of ours looks at more than 500."""

PULSE_S = 0.5
"""Seconds that an answer may take before the service is asked whether it lives."""

SILENCE_S = 1.0
"""Seconds that it may take to say so."""

CONNECT_S = 1.5
MAX_BYTES = 16_000_000
ERRORS = {"env_timeout": EpisodeTimeout, "tool_error": ToolError, "unscorable": Unscorable}


class RemoteEnv(Env):
    """One session of an environment service.

    Tasks of its own are a tier and a seed, which the service makes a task from: nothing but ludus
    has to be installed here. Where the service asks for a token, it is taken from LUDUS_TOKEN.
    """

    blocking: ClassVar[bool] = False

    def __init__(
        self,
        url: Annotated[str, Field(description="The service's address, http://host:port.")],
        env: Annotated[
            str | None, Field(description="Which of its environments; null: its only one.")
        ] = None,
        patience_s: Annotated[
            float, Field(ge=0, description="Seconds that a reset waits for the service to return.")
        ] = 25.0,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url: {url!r} does not start with http:// or https://")
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
                told = await self._call("reset", **episode)
                break
            except _Gone as error:
                await self.close()
                if time.monotonic() > deadline:
                    raise EnvError(str(error)) from error
                await asyncio.sleep(0.2)
        self._playing = True
        return Observation.model_validate(told)

    async def step(self, action: Message) -> StepResult:
        if not self._playing:
            raise EnvError("remote: the episode is over, or was never reset; call reset first")
        content = action.content[:LONGEST_ACTION]
        message = action.model_copy(update={"content": content})
        try:
            told = await self._call("step", message=message.model_dump(mode="json"))
        except _Gone as error:
            await self.close()
            raise EnvError(str(error)) from error
        result = StepResult.model_validate(told)
        self._playing = not result.done
        return result

    async def close(self) -> None:
        socket, self._socket = self._socket, None
        self._session, self._playing = None, False
        if socket is not None:  # the service closes the session with it
            with suppress(Exception):
                await socket.close()

    async def _open(self) -> None:
        """Connect, and open a session, where that is not done."""
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
                raise _Gone(
                    f"no environment service answers at {self.url} ({_reason(error)}): "
                    "start it with `ludus serve env`"
                ) from error
        if self._session is None:
            told = await self._call("create", session=None, env=await self._env_name())
            self._session = told["session"]

    async def _env_name(self) -> str:
        if self._name is None:
            self._name = await asyncio.to_thread(self._only_env)
        return self._name

    async def _call(self, op: str, **given: Any) -> Any:
        """The result of a call. Errors: _Gone, and those that the service's error stands for."""
        assert self._socket is not None
        self._number += 1
        call = {"id": self._number, "op": op, "session": self._session, **given}
        text = json.dumps({key: value for key, value in call.items() if value is not None})
        try:
            await self._socket.send(text)
            answer = json.loads(await self._answer(self._socket))
        except (OSError, WebSocketException) as error:
            message = f"the environment service at {self.url} is gone ({_reason(error)})"
            raise _Gone(message) from error
        if answer["status"] == 200:
            return answer["result"]
        kind, message = answer["error"]["type"], answer["error"]["message"]
        if answer["status"] == 503 or kind == "too_many_sessions":
            raise _Gone(f"{self.url}: {message}")
        self._session, self._playing = None, False  # what broke has ended there
        raise ERRORS.get(kind, EnvError)(f"{self.url}: {message}")

    async def _answer(self, socket: ClientConnection) -> str | bytes:
        """The next message. A service that gives no sign of life for a while is gone."""
        reading = asyncio.ensure_future(socket.recv())
        try:
            while not (await asyncio.wait({reading}, timeout=PULSE_S))[0]:
                alive = asyncio.ensure_future(await socket.ping())
                asked = time.monotonic()
                waited, _ = await asyncio.wait(
                    {reading, alive}, timeout=SILENCE_S, return_when=asyncio.FIRST_COMPLETED
                )
                # Where this process itself did not run, nothing could be heard: ask again.
                if not waited and time.monotonic() - asked < 2 * SILENCE_S:
                    raise OSError(f"it has been silent for {PULSE_S + SILENCE_S:g} s")
            return await reading
        finally:
            reading.cancel()

    def tools(self) -> Sequence[ToolSpec]:
        return [ToolSpec.model_validate(tool) for tool in self._facts["tools"]]

    def call_of(self, action: str) -> ToolCall:
        told = self._ask("POST", f"/envs/{self._served}/call", {"action": action})
        call = ToolCall.model_validate(told)
        self._texts[call.model_dump_json()] = action
        return call

    def text_of(self, call: ToolCall) -> str:
        """The text of a call that `call_of` gave. Any other is read by the service, at the step:
        an empty text says so."""
        return self._texts.get(call.model_dump_json(), "")

    def expert_action(self) -> str:
        if not self._playing:
            raise NoExpert("remote: no episode is being played")
        try:
            told = self._ask("POST", f"/sessions/{self._session}/expert", {})
        except _NotFound as error:
            raise NoExpert(str(error)) from error
        action: str = told["action"]
        return action

    @property
    def score_range(self) -> tuple[float, float]:  # type: ignore[override]
        """The environment's, as the service tells it."""
        low, high = self._facts["score_range"]
        return low, high

    @property
    def success_at(self) -> float:  # type: ignore[override]
        """The environment's, as the service tells it."""
        return float(self._facts["success_at"])

    @property
    def max_turns(self) -> int:  # type: ignore[override]
        """The environment's, as the service tells it."""
        return int(self._facts["max_turns"])

    @cached_property
    def _served(self) -> str:
        if self._name is None:
            self._name = self._only_env()
        return self._name

    @property
    def _facts(self) -> dict[str, Any]:
        key = (self.url, self._served)
        if key not in _FACTS:
            _FACTS[key] = self._ask("GET", f"/envs/{self._served}")
        return _FACTS[key]

    def _only_env(self) -> str:
        names = self._ask("GET", "/envs")
        if len(names) != 1:
            raise EnvError(f"{self.url} serves {', '.join(names)}: name one as args.env")
        return str(names[0])

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """What a route answers. Blocks for about a millisecond; not used within an episode."""
        try:
            answer = httpx.request(
                method, self.url + path, json=body, headers=_headers(), timeout=CONNECT_S
            )
            told = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise EnvError(
                f"no environment service answers at {self.url} ({_reason(error)}): "
                "start it with `ludus serve env`"
            ) from error
        if answer.status_code == 200:
            return told
        kind = _NotFound if answer.status_code == 404 else EnvError
        raise kind(f"{self.url}: {told['error']['message']}")

    @classmethod
    def check_tier(cls, tier: str) -> None:
        """The service knows the tiers: none is refused before it is asked."""

    @classmethod
    def task(cls, tier: str | None, seed: int) -> Task:
        """The episode of a tier and a seed; the service makes the task."""
        return Task(
            id=f"remote/{tier or 'any'}/{seed}",
            data={"tier": tier, "seed": seed},
            tier=tier,
            source="remote",
        )


_FACTS: dict[tuple[str, str], dict[str, Any]] = {}
"""What services said of their environments: it does not change while they run."""


class _Gone(Exception):
    """The service does not answer now; it may return."""


class _NotFound(EnvError):
    """The service has no such thing."""


def _headers() -> dict[str, str]:
    token = os.environ.get("LUDUS_TOKEN", "")
    return {"Authorization": f"Bearer {token}"} if token else {}


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
