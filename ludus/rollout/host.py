"""Running environments so that none of them can stop the others.

A seat is one of the episodes played at the same time. It owns a worker thread, in which blocking
environments compute. When an environment hangs, its thread is left behind (Python cannot stop it)
and the seat starts another: the other episodes go on. Code that may hang and burn a core for ever
belongs in a process of its own.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from ludus.core.errors import EnvError, EpisodeError, EpisodeTimeout
from ludus.core.types import Message, Observation, StepResult, Task
from ludus.envs.base import Env

T = TypeVar("T")
_Job = tuple[Callable[[], Coroutine[Any, Any, Any]], asyncio.AbstractEventLoop, asyncio.Future[Any]]


class WorkerThread:
    """A daemon thread that runs coroutines in its own event loop, one after the other."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="ludus-env", daemon=True).start()

    async def run(self, make: Callable[[], Coroutine[Any, Any, T]], timeout: float) -> T:
        """The coroutine's result. Errors: TimeoutError; then this thread must not be used again."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._jobs.put((make, loop, future))
        return await asyncio.wait_for(future, timeout)

    def stop(self) -> None:
        """End the thread after the jobs it has."""
        self._jobs.put(None)

    def _work(self) -> None:
        own = asyncio.new_event_loop()
        while (job := self._jobs.get()) is not None:
            make, loop, future = job
            try:
                outcome: Any = own.run_until_complete(make())
                failure: BaseException | None = None
            except BaseException as error:
                outcome, failure = None, error
            try:
                loop.call_soon_threadsafe(_settle, future, outcome, failure)
            except RuntimeError:  # the caller's loop has closed: nobody waits any more
                break
        own.close()


def _settle(future: asyncio.Future[Any], outcome: Any, failure: BaseException | None) -> None:
    if future.done():
        return
    if failure is None:
        future.set_result(outcome)
    elif isinstance(failure, Exception):
        future.set_exception(failure)
    else:
        future.set_exception(EnvError(f"the environment called for exit: {failure!r}"))


class HostedEnv:
    """One episode's environment, with deadlines, and with its answers checked.

    Errors: EnvError where the environment raises or returns rubbish, EpisodeTimeout where it takes
    longer than `step_deadline` seconds.
    """

    def __init__(self, make: Callable[[], Env], seat: Seat, step_deadline: float) -> None:
        self._make = make
        self._seat = seat
        self._deadline = step_deadline
        self._env: Env | None = None

    @property
    def env(self) -> Env:
        """The environment itself; available after `reset`."""
        if self._env is None:
            raise EnvError("the environment was used before reset")
        return self._env

    async def reset(self, task: Task) -> Observation:
        """Build the environment and start the task's episode."""

        async def build_and_reset() -> Observation:
            self._env = self._make()
            return await self._env.reset(task)

        result = await self._call("reset", build_and_reset)
        if not isinstance(result, Observation):
            raise EnvError(f"reset returned {_kind(result)}; it has to return an Observation")
        _check_messages("reset", result.messages)
        return result

    async def step(self, action: Message) -> StepResult:
        """Take one action."""
        result = await self._call("step", lambda: self.env.step(action))
        if not isinstance(result, StepResult):
            raise EnvError(f"step returned {_kind(result)}; it has to return a StepResult")
        if result.reward is not None and not math.isfinite(result.reward):
            raise EnvError(f"step returned the reward {result.reward}; it has to be finite")
        _check_messages("step", result.messages)
        return result

    async def close(self) -> None:
        """Close the environment; what goes wrong there is not the episode's fault any more."""
        env, self._env = self._env, None
        if env is not None:
            try:
                await self._seat.run(env.close, self._deadline, blocking=env.blocking)
            except Exception:
                return

    async def _call(self, what: str, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        blocking = self._env is None or self._env.blocking
        try:
            return await self._seat.run(make, self._deadline, blocking=blocking)
        except TimeoutError:
            self._env = None  # it still runs in the thread that was left behind
            raise EpisodeTimeout(
                f"the environment's {what} took longer than rollout.step_deadline_s = "
                f"{self._deadline:g} s"
            ) from None
        except EpisodeError:
            raise
        except Exception as error:
            raise EnvError(
                f"the environment's {what} raised {type(error).__name__}: {error}"
            ) from error


class Seat:
    """One of the episodes that are played at the same time, and its worker thread.

    With `inline` nothing leaves the calling thread and no deadline applies, so that a debugger can
    stop anywhere.
    """

    def __init__(self, *, inline: bool = False) -> None:
        self._inline = inline
        self._thread: WorkerThread | None = None

    async def run(
        self, make: Callable[[], Coroutine[Any, Any, T]], timeout: float, *, blocking: bool
    ) -> T:
        """Run a coroutine, in the worker thread if it blocks. Errors: TimeoutError."""
        if self._inline:
            return await make()
        if not blocking:
            return await asyncio.wait_for(make(), timeout)
        self._thread = self._thread or WorkerThread()
        try:
            return await self._thread.run(make, timeout)
        except (TimeoutError, asyncio.CancelledError):
            self._thread.stop()
            self._thread = None
            raise

    def close(self) -> None:
        """End the worker thread."""
        if self._thread is not None:
            self._thread.stop()
            self._thread = None


def _check_messages(what: str, messages: list[Message]) -> None:
    if not all(isinstance(message, Message) for message in messages):
        raise EnvError(f"{what} returned something else than Message among its messages")


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
