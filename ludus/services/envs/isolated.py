"""An environment in its own process, so a crash or hang stays contained.

The process is forked from a server that has imported the environment already (a few milliseconds).
It serves one session, and is killed when the session ends or a call exceeds its deadline. It exits
when the service does.
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
from typing import Any, cast

from ludus.core.errors import EnvError
from ludus.core.types import Message, Observation, Spec, StepResult, Task, ToolCall, ToolSpec
from ludus.envs.base import Env, limits_of
from ludus.rollout.hosts.host import LocalEnvs

CLOSE_WAIT_S = 2.0
PARENT_POLL_S = 0.5

_LIMITS = "limits"
"""The request for `score_range`, `success_at` and `max_turns`."""


class IsolatedEnv(Env):
    """The environment of a spec, in its own process.

    Calls block until the process answers, so they need a worker thread. Errors: those of the
    environment; EnvError if the process dies.
    """

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._process: Any = None
        self._pipe: Connection | None = None
        self._is_fresh = False
        """The process has been prepared for the next reset."""

    async def prepare(self, task: Task) -> None:
        await self._start()
        self._ask("prepare", task)
        self._is_fresh = True

    async def reset(self, task: Task) -> Observation:
        if not self._is_fresh:
            await self._start()
        self._is_fresh = False
        self.score_range, self.success_at, self.max_turns = self._ask(_LIMITS)  # type: ignore[misc]
        return cast(Observation, self._ask("reset", task))

    async def _start(self) -> None:
        await self.close()
        context = server()
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve_calls, args=(theirs, self._spec), daemon=True)
        self._process.start()
        theirs.close()

    async def step(self, action: Message) -> StepResult:
        return cast(StepResult, self._ask("step", action))

    async def close(self) -> None:
        """Close the environment, then end its process."""
        self._is_fresh = False
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            with suppress(EOFError, OSError):
                pipe.send(("close", ()))
                pipe.poll(CLOSE_WAIT_S)
            pipe.close()
        self.kill()

    def kill(self) -> None:
        """Kill the process and its children."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # no group yet, or ended
            process.kill()
        process.join(CLOSE_WAIT_S)

    def tools(self) -> Sequence[ToolSpec]:
        return cast(Sequence[ToolSpec], self._ask("tools"))

    def text_of(self, call: ToolCall) -> str:
        return cast(str, self._ask("text_of", call))

    def call_of(self, action: str) -> ToolCall:
        return cast(ToolCall, self._ask("call_of", action))

    def expert_steps(self) -> str | None:
        return cast(str | None, self._ask("expert_steps"))

    def expert_action(self) -> str:
        return cast(str, self._ask("expert_action"))

    def inspect(self, what: str) -> Any:
        return self._ask("inspect", what)

    def _ask(self, method: str, *args: Any) -> Any:
        if self._pipe is None:
            raise EnvError(f"{self._spec.name}: no episode is running; call reset first")
        try:
            self._pipe.send((method, args))
            answer, error = self._pipe.recv()
        except (EOFError, OSError):
            raise EnvError(f"{self._spec.name}: the environment's process died") from None
        if error is not None:
            raise error
        return answer


@cache
def server() -> ForkServerContext:
    """The fork server, shared by all sessions."""
    return multiprocessing.get_context("forkserver")


def warm_up(modules: Sequence[str]) -> None:
    """Start the fork server and import modules in it, so that no session waits for them."""
    server().set_forkserver_preload([__name__, *modules])
    first = server().Process(target=time.sleep, args=(0,), daemon=True)
    first.start()
    first.join()


def _serve_calls(pipe: Connection, spec: Spec) -> None:
    """Main function of the process: answer calls until the pipe closes.

    The environment's output is discarded: standard output belongs to the service.
    """
    os.setsid()  # a new group, to kill the children too
    threading.Thread(target=_exit_with, args=(os.getppid(),), daemon=True).start()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the process ends
    with asyncio.Runner() as runner, suppress(EOFError, OSError, KeyboardInterrupt):
        env: Env | None = None
        while True:
            method, args = pipe.recv()
            try:
                env = env or LocalEnvs(spec).make()
                if method == _LIMITS:
                    answer: Any = (*limits_of(env), env.max_turns)
                elif method in ("prepare", "reset", "step", "close"):
                    answer = runner.run(getattr(env, method)(*args))
                else:
                    answer = getattr(env, method)(*args)
                outcome: tuple[Any, Exception | None] = (answer, None)
            except Exception as error:
                outcome = (None, _portable(error))
            pipe.send(outcome)
    os.killpg(0, signal.SIGKILL)  # kill what the environment started


def _exit_with(parent: int) -> None:
    """Kill this process's group when the service is gone, even if the environment hangs."""
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    os.killpg(0, signal.SIGKILL)


def _portable(error: Exception) -> Exception:
    """The error, or an EnvError with its text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return EnvError(f"{type(error).__name__}: {error}")
    return error
