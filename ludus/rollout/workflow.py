"""Agents of the user: an async function that plays a task with the model, in any framework.

    async def run(task, model):
        client = model.openai()                       # or model.base_url and model.api_key
        reply = await client.chat.completions.create(
            model=model.name, messages=[{"role": "user", "content": "2 + 2 = ?"}]
        )
        return Outcome(reward=float("4" in reply.choices[0].message.content))

It is named in the configuration: `agent: my_agent.py:run`. Parameters beyond `task`, `model`,
`env` and `tools` are its `args`. It returns an Outcome, a reward, or None: then the judge or the
environment scores the episode. A function that is not async may block; both run in a thread of
their own.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import traceback
from bdb import BdbQuit
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast, runtime_checkable

from ludus.config.registry import Registry, Row
from ludus.core.errors import (
    ConfigError,
    EnvError,
    EpisodeError,
    TrainingError,
    described,
)
from ludus.core.modules import require
from ludus.core.types import Message, Spec, Status, Task, ToolCall
from ludus.core.types import ToolSpec as ToolSpec  # for agents
from ludus.rollout.agent_env import AgentEnv
from ludus.rollout.agent_tools import AgentTools
from ludus.rollout.hosts.host import HostedEnv
from ludus.rollout.hosts.threads import EnvThread, abort_connections, in_daemon
from ludus.rollout.outcome import record_outcome
from ludus.rollout.sessions.agent_session import AgentSession
from ludus.rollout.sessions.call_options import Address, CallOptions, CallReply
from ludus.rollout.tool_use import EpisodeTools

if TYPE_CHECKING:
    import httpx
    from openai import AsyncOpenAI

T = TypeVar("T")

CONTEXT = frozenset({"task", "model", "env", "tools"})

ROWS = {
    "command": Row("ludus.rollout.command.agent:CommandAgent", "", "a program"),
    "relay": Row("ludus.rollout.relay:relay", "", "an environment's roles, one after another"),
}
AGENTS: Registry[Any] = Registry("agent", ROWS, context=CONTEXT)

MODEL_NAME = "policy"


class Model:
    """The model of an episode, for its agent. Every call is recorded, and trains.

    `base_url` and `api_key` are for OpenAI's and Anthropic's clients of any language; `name` is the
    name to ask for. With `roles` in the configuration, it is the model of the first role.
    """

    def __init__(
        self,
        session: AgentSession,
        *,
        trained: bool = True,
        clients: list[AsyncOpenAI] | None = None,
    ) -> None:
        self._session, self._trained = session, trained
        self._clients: list[AsyncOpenAI] = [] if clients is None else clients
        self.name = MODEL_NAME if trained else f"{MODEL_NAME}:untrained"

    @property
    def base_url(self) -> str:
        """URL of the gateway, up to `/v1`."""
        return self._address.base_url

    @property
    def api_key(self) -> str:
        """The key of this episode."""
        return self._address.api_key

    @property
    def socket(self) -> Path | None:
        """Unix socket of the gateway, where it has one."""
        return self._address.socket

    @property
    def context_length(self) -> int:
        return self._session.context_length

    async def at_home(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the event loop of the rollouts: for what episodes share."""
        return await self._session.at_home(work)

    def untrained(self) -> Model:
        """The same model for auxiliary calls: recorded, but without a loss."""
        return Model(self._session, trained=False, clients=self._clients)

    def role(self, name: str) -> Model:
        """The model of a role of the configuration's `roles`, with conversations, a key and a
        reward of its own. Several players may share a role. Errors: ConfigError."""
        return Model(self._session.role(name), trained=self._trained, clients=self._clients)

    async def chat(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        tools: Sequence[ToolSpec] = (),
        **options: Any,
    ) -> Message:
        """The model's next message; `options` are those of CallOptions, and `n` is 1.

        Errors: CallRefused, ContextOverflow, ConfigError, SamplerError.
        """
        return (await self.replies(messages, tools, **options))[0].message

    async def replies(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        tools: Sequence[ToolSpec] = (),
        **options: Any,
    ) -> list[CallReply]:
        """`n` turns after the same conversation, with their tokens."""
        as_schema = getattr(options.get("schema"), "model_json_schema", None)
        if as_schema is not None:  # a class of pydantic
            options["schema"] = as_schema()
        chosen = CallOptions(trained=self._trained, **options)
        if wrong := next((tool for tool in tools if not isinstance(tool, ToolSpec)), None):
            raise EnvError(
                f"model.chat: tools: {wrong!r:.80} is no ToolSpec(name=..., parameters=...)"
            )
        given = [_message(message, number) for number, message in enumerate(messages)]
        return await self._session.at_home(self._session.call(given, tools, chosen))

    def openai(self, **options: Any) -> AsyncOpenAI:
        """OpenAI's async client, connected to this episode without a socket, and closed with it.
        `options` go to the client."""
        require("openai", "agents", "model.openai()")
        from openai import AsyncOpenAI

        options = {"max_retries": 0, "http_client": self.http_client(), **options}
        client = AsyncOpenAI(base_url=self.base_url, api_key=self.api_key, **options)
        self._clients.append(client)
        return client

    def http_client(self, **options: Any) -> httpx.AsyncClient:
        """An async client of httpx that reaches the gateway without a socket, for frameworks that
        take one. A client of their own opens a connection, and reads all certificates first:
        tens of milliseconds for each episode."""
        import httpx

        gateway = self._session.gateway
        if gateway is None:
            raise EnvError("this episode has no gateway: use model.chat")
        return httpx.AsyncClient(transport=gateway.transport(), **options)

    async def close(self) -> None:
        """Close the clients that `openai` has made."""
        for client in self._clients:
            with suppress(Exception):  # an agent may have used it in another loop
                await client.close()

    @property
    def _address(self) -> Address:
        if self._session.address is None:
            raise EnvError("this episode has no gateway: use model.chat")
        return self._session.address


@runtime_checkable
class Closable(Protocol):
    """An agent of a class that holds something for the whole run."""

    async def close(self) -> None:
        """Release it. Idempotent; it may play again."""


@dataclass(frozen=True, slots=True)
class Agent:
    """An agent of the configuration, ready to play.

    Args:
        play: called with those of `task`, `model`, `env` and `tools` that it names.
        names: the names of its parameters.
        blocks: it is not async.
    """

    play: Callable[..., Any]
    names: frozenset[str]
    blocks: bool = False

    @classmethod
    def build(cls, spec: Spec) -> Agent:
        """Errors: ConfigError, MissingDependency."""
        target = AGENTS.load(spec.name)
        if inspect.isclass(target):
            made = AGENTS.build(spec, "agent")
            own = frozenset(inspect.signature(made).parameters)
            return cls(made, own, not inspect.iscoroutinefunction(made.__call__))
        names = list(inspect.signature(target).parameters)
        if not {"task", "model"} <= set(names):
            raise ConfigError(
                f"agent: {spec.name} takes ({', '.join(names)}); it has to take `task` and "
                "`model`: async def run(task, model)"
            )
        args = AGENTS.check(spec, "agent")
        return cls(
            partial(target, **args), frozenset(names), not inspect.iscoroutinefunction(target)
        )

    @property
    def needs_socket(self) -> bool:
        """True if it runs in a sandbox, where only a Unix socket of the gateway is reachable."""
        return bool(getattr(self.play, "needs_socket", False))

    async def close(self) -> None:
        """End what it has started. Idempotent; it may play again."""
        if isinstance(self.play, Closable):
            await self.play.close()

    def _raised(self, error: BaseException) -> bool:
        """True if a line of the agent's own file raised it, not a library that it calls."""
        made = getattr(self.play, "func", self.play)
        if not inspect.isroutine(made):
            made = type(made)
        frames = traceback.extract_tb(error.__traceback__)
        try:
            return not frames or frames[-1].filename == inspect.getsourcefile(made)
        except TypeError:  # compiled
            return True

    async def run(
        self,
        task: Task,
        session: AgentSession,
        env: HostedEnv | None,
        thread: EnvThread,
        tools: EpisodeTools | None = None,
    ) -> tuple[Status, str | None]:
        """Play an episode. Returns how it ended; the reward, if any, is the session's.

        Errors: EnvError where the agent raises; the sampler's.
        """
        model = Model(session)
        given: dict[str, Any] = {"task": task.model_copy(deep=True), "model": model}
        if "env" in self.names:
            if env is None:
                raise EnvError("the agent takes an `env`, and the task has none: set `env`")
            given["env"] = AgentEnv(session, env, task)
        if tools is not None:
            given["tools"] = AgentTools(session, tools)
        parts: list[AgentEnv | AgentTools] = [given[k] for k in ("env", "tools") if k in given]

        running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []

        async def act() -> Any:
            task = asyncio.current_task()
            assert task is not None
            running.append((asyncio.get_running_loop(), task))
            play = partial(self.play, **{k: v for k, v in given.items() if k in self.names})
            try:
                if self.blocks:  # in a thread without an event loop: it may run one of its own
                    return await in_daemon(play)
                return await play()
            finally:
                await model.close()
                abort_connections()

        try:
            # The episode's own deadline ends it.
            outcome = await _outside(thread).run(act, None, blocking=True)
        except asyncio.CancelledError:
            for loop, own in running:  # a blocking agent goes on until its next call
                loop.call_soon_threadsafe(own.cancel)
            raise
        except BdbQuit:
            raise
        except (Exception, SystemExit) as error:
            if failure := session.failure or _failure(parts):
                raise failure from error
            if (refused := session.refused) is not None:
                return refused
            if isinstance(error, (ConfigError, TrainingError, EpisodeError)):
                raise
            if session.any_cut is not None and not self._raised(error):
                return session.any_cut  # a framework that cannot read a turn without its end
            raise EnvError(f"the agent raised {described(error)}") from error
        if isinstance(session.failure, TrainingError):
            raise session.failure
        if failure := _failure(parts):  # frameworks tell errors to the model, and go on
            raise failure
        record_outcome(session, outcome)
        return session.cut or (Status.COMPLETED, None)


def _failure(parts: Sequence[AgentEnv | AgentTools]) -> EpisodeError | None:
    return next((part.failure for part in parts if part.failure is not None), None)


def _outside(thread: EnvThread) -> EnvThread:
    """A thread for the agent, also where episodes are played inline: agents may block, and their
    calls are answered in the calling thread."""
    return EnvThread() if thread.inline else thread


def _message(given: Message | Mapping[str, Any], number: int) -> Message:
    """A message in OpenAI's form as a Message. Errors: ValueError that names the message."""
    if isinstance(given, Message):
        return given
    try:
        content = given.get("content") or ""
        if not isinstance(content, str):
            content = "".join(part["text"] for part in content)
        calls = [
            ToolCall(
                name=call["function"]["name"],
                arguments=json.loads(call["function"]["arguments"] or "{}"),
                id=call.get("id"),
            )
            for call in given.get("tool_calls") or []
        ]
        role = "system" if given["role"] == "developer" else given["role"]
        own = {"tool_call_id": given.get("tool_call_id"), "name": given.get("name")}
        return Message(role=cast(Any, role), content=content, tool_calls=calls, **own)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"messages.{number} is no message: {described(error)}") from None
