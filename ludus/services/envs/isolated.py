"""An environment in a process of its own, so that it may crash or hang and take nobody along.

The process is forked from a server that has imported the environment already (a few milliseconds),
plays for one session, and is killed when the session ends or a call passes its deadline. It ends by
itself when the service does: its pipe closes.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any

from ludus.core.errors import EnvError
from ludus.core.types import Message, Observation, Spec, StepResult, Task, ToolCall, ToolSpec
from ludus.envs import ENVS
from ludus.envs.base import Env

CLOSE_WAIT_S = 2.0
WATCH_S = 0.5


class IsolatedEnv(Env):
    """The environment of a spec, in a process of its own.

    Its calls block until the process answers: it belongs into a worker thread. Errors: what the
    environment raises; EnvError where the process dies.
    """

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._process: Any = None
        self._pipe: Connection | None = None

    async def reset(self, task: Task) -> Observation:
        await self.close()
        context = server()
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._spec), daemon=True)
        self._process.start()
        theirs.close()
        self.score_range, self.success_at, self.max_turns = self._ask("facts")  # type: ignore[misc]
        observation: Observation = self._ask("reset", task)
        return observation

    async def step(self, action: Message) -> StepResult:
        result: StepResult = self._ask("step", action)
        return result

    async def close(self) -> None:
        """Let the environment close what it holds, then end its process."""
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            with suppress(EOFError, OSError):
                pipe.send(("close", ()))
                pipe.poll(CLOSE_WAIT_S)
            pipe.close()
        self.kill()

    def kill(self) -> None:
        """End the process and what it started, whatever they are doing."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # it has no group yet, or has ended
            process.kill()
        process.join(CLOSE_WAIT_S)

    def tools(self) -> Sequence[ToolSpec]:
        tools: Sequence[ToolSpec] = self._ask("tools")
        return tools

    def text_of(self, call: ToolCall) -> str:
        text: str = self._ask("text_of", call)
        return text

    def call_of(self, action: str) -> ToolCall:
        call: ToolCall = self._ask("call_of", action)
        return call

    def expert_action(self) -> str:
        action: str = self._ask("expert_action")
        return action

    def _ask(self, what: str, *args: Any) -> Any:
        if self._pipe is None:
            raise EnvError(f"{self._spec.name}: no episode is being played; call reset first")
        try:
            self._pipe.send((what, args))
            answer, error = self._pipe.recv()
        except (EOFError, OSError):
            raise EnvError(f"{self._spec.name}: the environment's process died") from None
        if error is not None:
            raise error
        return answer


@cache
def server() -> ForkServerContext:
    """The server that processes are forked from, shared by all sessions."""
    return multiprocessing.get_context("forkserver")


def warm_up(modules: Sequence[str]) -> None:
    """Start the server, and import modules in it, so that no session waits for that."""
    server().set_forkserver_preload([__name__, *modules])
    first = server().Process(target=_nothing, daemon=True)
    first.start()
    first.join()


def _nothing() -> None:
    """What the first process does."""


def _serve(pipe: Connection, spec: Spec) -> None:
    """The process: answers one call after the other until the pipe closes.

    What the environment prints goes nowhere: standard output belongs to the service.
    """
    os.setsid()  # a group of its own: what the environment starts ends with it
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the process ends
    with asyncio.Runner() as runner, suppress(EOFError, OSError, KeyboardInterrupt):
        env: Env | None = None
        while True:
            what, args = pipe.recv()
            try:
                env = env or ENVS.build(spec)
                if what == "facts":
                    answer: Any = (env.score_range, env.success_at, env.max_turns)
                elif what in ("reset", "step", "close"):
                    answer = runner.run(getattr(env, what)(*args))
                else:
                    answer = getattr(env, what)(*args)
                outcome: tuple[Any, Exception | None] = (answer, None)
            except Exception as error:
                outcome = (None, _portable(error))
            pipe.send(outcome)
    os.killpg(0, signal.SIGKILL)  # the session is over: nothing that it started stays


def _end_with(parent: int) -> None:
    """End this process's group when the service is gone, even where the environment hangs."""
    while os.getppid() == parent:
        time.sleep(WATCH_S)
    os.killpg(0, signal.SIGKILL)


def _portable(error: Exception) -> Exception:
    """The error, or one that says the same, where it cannot be sent."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return EnvError(f"{type(error).__name__}: {error}")
    return error
