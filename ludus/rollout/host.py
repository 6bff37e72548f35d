"""Running environments so that none of them can stop the others.

A seat is one of the episodes played at the same time. It owns a worker thread, in which blocking
environments compute. When an environment hangs, its thread is left behind (Python cannot stop it)
and the seat takes another: the other episodes go on. Code that may hang and burn a core for ever
belongs in a process of its own.
"""

from __future__ import annotations

import asyncio
import math
import os
import queue
import threading
from bdb import BdbQuit
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from ludus.core.errors import EnvError, EpisodeTimeout, ToolError, Unscorable
from ludus.core.types import Message, Observation, StepResult, Task, ToolCall
from ludus.envs.base import Env
from ludus.telemetry.occupancy import busy

T = TypeVar("T")
Act = Callable[[], Coroutine[Any, Any, T]]

IDLE_S = 30.0
"""Seconds that a worker thread waits for a new seat before it ends."""


class Overdue(Exception):
    """A coroutine took longer than it was given."""


class WorkerThread:
    """A daemon thread that runs coroutines in its own event loop, one after the other.

    Threads that are given back wait for the next seat, for starting one costs as much as several
    steps of an environment.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[asyncio.AbstractEventLoop], bool]]
        self._jobs = queue.SimpleQueue()
        threading.Thread(target=self._work, name="ludus-env", daemon=True).start()

    @classmethod
    def take(cls) -> WorkerThread:
        """One that waits, or a new one."""
        try:
            return _idle.pop()
        except IndexError:
            return cls()

    def give_back(self) -> None:
        """Wait for the next seat. The thread may have no job left."""
        _idle.append(self)

    def retire(self, last: Act[None] | None) -> None:
        """End after the job under way, if that ever ends; run `last` before."""

        def leave(own: asyncio.AbstractEventLoop) -> bool:
            if last is not None:
                with suppress(BaseException):
                    own.run_until_complete(last())
            return False

        self._jobs.put(leave)

    async def run(self, act: Act[T]) -> T:
        """The coroutine's result. Where the caller is cancelled, the thread still runs it."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def work(own: asyncio.AbstractEventLoop) -> bool:
            outcome: Any = None
            failure: BaseException | None = None
            try:
                outcome = own.run_until_complete(act())
            except BaseException as error:
                failure = error
            try:
                loop.call_soon_threadsafe(_settle, future, outcome, failure)
            except RuntimeError:  # the caller's loop has closed: nobody waits any more
                return False
            return True

        self._jobs.put(work)
        return await future

    def _work(self) -> None:
        with asyncio.Runner() as runner:
            own = runner.get_loop()
            while True:
                try:
                    job = self._jobs.get(timeout=IDLE_S)
                except queue.Empty:
                    try:
                        _idle.remove(self)
                    except ValueError:  # a seat has this thread: its next job will come
                        continue
                    return
                if not job(own):
                    return
                del job  # holds the environment


_idle: deque[WorkerThread] = deque()
os.register_at_fork(after_in_child=_idle.clear)  # a forked process has none of these threads


def _settle(future: asyncio.Future[Any], outcome: Any, failure: BaseException | None) -> None:
    if future.done():
        return
    if failure is None:
        future.set_result(outcome)
    elif isinstance(failure, Exception):
        future.set_exception(failure)
    else:
        future.set_exception(_exit(failure))


def _exit(failure: BaseException) -> EnvError:
    return EnvError(f"the environment called for exit: {failure!r}")


class HostedEnv:
    """One episode's environment, with deadlines, and with its answers checked.

    A blocking environment lives in its seat's thread from its making to its end, any other in the
    event loop of the rollouts.

    Errors: EnvError where the environment raises or returns rubbish, EpisodeTimeout where it takes
    longer than `step_deadline` seconds; an environment may raise ToolError or Unscorable itself.
    """

    def __init__(
        self, make: Callable[[], Env], seat: Seat, step_deadline: float, *, blocking: bool = True
    ) -> None:
        self._make = make
        self._seat = seat
        self._deadline = step_deadline
        self._blocking = blocking
        self._env: Env | None = None
        self._left_behind = False

    @property
    def env(self) -> Env:
        """The environment itself; available after `reset`."""
        if self._env is None:
            raise EnvError("the environment was used before reset")
        return self._env

    async def reset(self, task: Task) -> Observation:
        """Build the environment and start the episode, on a copy of the task."""
        own_task = task.model_copy(deep=True)

        async def act() -> Observation:
            self._env = self._make()
            return await self._env.reset(own_task)

        result = await self._call("reset", act)
        if not isinstance(result, Observation):
            raise EnvError(f"reset returned {_kind(result)}; it has to return an Observation")
        _check_messages("reset", result.messages)
        return result

    async def step(self, action: Message) -> StepResult:
        """Take one action."""

        async def act() -> StepResult:
            return await self.env.step(action)

        return _checked(await self._call("step", act))

    async def call(self, call: ToolCall) -> StepResult:
        """Take the action that a tool call stands for, and answer as the tool.

        A call that the environment cannot read is answered with what is wrong.
        """

        async def act() -> StepResult:
            try:
                text = self.env.text_of(call)
            except (KeyError, TypeError, ValueError) as error:
                return StepResult(messages=[Message(role="user", content=f"{call.name}: {error}")])
            action = Message(role="assistant", content=text, tool_calls=[call])
            return await self.env.step(action)

        result = _checked(await self._call("step", act))
        answer = {"role": "tool", "name": call.name, "tool_call_id": call.id}
        first = [message.model_copy(update=answer) for message in result.messages[:1]]
        return result.model_copy(update={"messages": first + result.messages[1:]})

    async def close(self) -> None:
        """Close the environment; what goes wrong there is not the episode's fault any more."""
        if self._env is not None and not self._left_behind:
            with suppress(Exception), busy("env_wait"):
                await self._seat.run(self._release, self._deadline, blocking=self._blocking)

    async def _release(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            await env.close()

    async def _call(self, what: str, act: Act[T]) -> T:
        run = self._seat.run(act, self._deadline, blocking=self._blocking, last=self._release)
        try:
            with busy("env_wait"):
                return await run
        except Overdue:
            self._left_behind = self._blocking
            raise EpisodeTimeout(
                f"the environment's {what} took longer than rollout.step_deadline_s = "
                f"{self._deadline:g} s"
            ) from None
        except asyncio.CancelledError:
            self._left_behind = self._blocking and not self._seat.inline
            raise
        except (EnvError, ToolError, EpisodeTimeout, Unscorable, BdbQuit):
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
        self.inline = inline
        self._thread: WorkerThread | None = None

    async def run(
        self, act: Act[T], deadline: float, *, blocking: bool, last: Act[None] | None = None
    ) -> T:
        """Run a coroutine, in the worker thread if it blocks.

        A thread in which it takes longer than `deadline` seconds, or whose caller is cancelled, is
        left behind: should the coroutine come to its end after all, `last` runs there.

        Errors: Overdue; whatever the coroutine raises.
        """
        if self.inline:
            return await act()
        if not blocking:
            return await _within(deadline, _contained(act))
        self._thread = thread = self._thread or WorkerThread.take()
        try:
            return await _within(deadline, thread.run(act))
        except (Overdue, asyncio.CancelledError):
            thread.retire(last)
            self._thread = None
            raise

    def close(self) -> None:
        """Give the worker thread back."""
        if self._thread is not None:
            self._thread.give_back()
            self._thread = None


async def _within(deadline: float, work: Awaitable[T]) -> T:
    """The result of `work`. Errors: Overdue; a TimeoutError of its own passes as it is."""
    try:
        async with asyncio.timeout(deadline) as timer:
            return await work
    except TimeoutError:
        if timer.expired():
            raise Overdue from None
        raise


async def _contained(act: Act[T]) -> T:
    """Run it in this loop, where an exit or cancellation of its own making would end the run."""
    try:
        return await act()
    except SystemExit as failure:
        raise _exit(failure) from None
    except asyncio.CancelledError as failure:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise _exit(failure) from None


def _checked(result: StepResult) -> StepResult:
    """The answer to a step. Errors: EnvError where it is rubbish."""
    if not isinstance(result, StepResult):
        raise EnvError(f"step returned {_kind(result)}; it has to return a StepResult")
    reward = result.reward
    if reward is not None and not (isinstance(reward, int | float) and math.isfinite(reward)):
        raise EnvError(f"step returned the reward {reward!r}; it has to be a finite number or None")
    _check_messages("step", result.messages)
    return result


def _check_messages(what: str, messages: list[Message]) -> None:
    if not isinstance(messages, list):
        raise EnvError(f"{what} returned {_kind(messages)} for messages; it has to be a list")
    for message in messages:
        if not isinstance(message, Message) or not isinstance(message.content, str):
            raise EnvError(f"{what} returned {_kind(message)} among its messages, not a Message")


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
