"""Worker threads in which blocking environments compute.

Each of the episodes played at the same time has an EnvThread, which owns a worker thread. Python
cannot stop a thread: if an environment hangs, its worker thread is abandoned and the EnvThread
takes another, so the other episodes continue. Code that may hang and keep a core busy belongs in
a process of its own.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Any, ClassVar, Generic, Literal, TypeVar

from ludus.envs.base import exit_error

T = TypeVar("T")
Item = TypeVar("Item")
Act = Callable[[], Coroutine[Any, Any, T]]

IDLE_S = 30.0
"""Seconds after which an idle worker thread ends."""


HANDOVER_S = 0.001
"""Seconds for which an event loop stands still so that a worker thread gets Python's lock."""

Pause = Literal["start", "pause"]


class Overdue(Exception):
    """A coroutine exceeded its deadline."""


class WorkerThread:
    """A daemon thread that runs coroutines in its own event loop, one after the other.

    Released threads are reused: starting a thread costs as much as several environment steps.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[asyncio.AbstractEventLoop], bool]]
        self._jobs = queue.SimpleQueue()
        threading.Thread(target=self._work, name="ludus-env", daemon=True).start()

    @classmethod
    def take(cls) -> WorkerThread:
        """Returns an idle thread, or a new one."""
        try:
            return _idle.pop()
        except IndexError:
            return cls()

    def give_back(self) -> None:
        """Release the thread for reuse. It may have no job left."""
        _idle.append(self)

    def retire(self, last: Act[None] | None) -> None:
        """End after the running job, if that ever ends; run `last` before."""

        def leave(loop: asyncio.AbstractEventLoop) -> bool:
            if last is not None:
                with suppress(BaseException):
                    loop.run_until_complete(last())
            return False

        self._jobs.put(leave)

    async def run(self, act: Act[T], wait_for: Pause | None = None) -> T:
        """Returns the coroutine's result. If the caller is cancelled, the thread still runs it.

        With `wait_for`, the caller's loop stands still until the coroutine has started, or has
        paused or ended, for at most HANDOVER_S. So this thread gets Python's lock at once. A busy
        event loop releases the lock often and retakes it before a waiting thread wakes up: without
        this, the thread may wait for tens of milliseconds.
        """
        call = _Call(act, asyncio.get_running_loop(), wait_for)
        self._jobs.put(call.work)
        return await call.result()

    def _work(self) -> None:
        with asyncio.Runner() as runner:
            loop = runner.get_loop()
            _keep_connections(loop)
            while True:
                try:
                    job = self._jobs.get(timeout=IDLE_S)
                except queue.Empty:
                    try:
                        _idle.remove(self)
                    except ValueError:  # an EnvThread has taken this thread: a job will come
                        continue
                    return
                if not job(loop):
                    return
                del job  # holds the environment


_idle: deque[WorkerThread] = deque()
os.register_at_fork(after_in_child=_idle.clear)  # a forked process has none of these threads


class _Call(Generic[T]):
    """A coroutine on its way through a worker thread."""

    def __init__(
        self, act: Act[T], loop: asyncio.AbstractEventLoop, wait_for: Pause | None
    ) -> None:
        self._act, self._loop, self._wait_for = act, loop, wait_for
        self._turn = threading.Lock()
        self._turn.acquire()
        self._outcome: tuple[Any, BaseException | None] | None = None
        self._future: asyncio.Future[T] | None = None

    async def result(self) -> T:
        if self._wait_for is not None:
            self._turn.acquire(timeout=HANDOVER_S)
        future: asyncio.Future[T] = self._loop.create_future()
        if self._outcome is None:
            self._future = future
        if self._outcome is None:  # still: the thread will see the future
            return await future
        _settle(future, *self._outcome)
        return future.result()

    def work(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Run the coroutine, in the worker thread; False if the caller's loop has closed."""
        if self._wait_for == "start":
            self._turn.release()
        task = loop.create_task(self._run())
        if self._wait_for == "pause":
            loop.call_soon(self._turn.release)  # behind the first step of the task
        loop.run_until_complete(task)
        assert self._outcome is not None
        if self._future is not None:
            try:
                self._loop.call_soon_threadsafe(_settle, self._future, *self._outcome)
            except RuntimeError:
                return False
        return True

    async def _run(self) -> None:
        try:
            self._outcome = await self._act(), None
        except BaseException as error:
            self._outcome = None, error


def _settle(future: asyncio.Future[Any], result: Any, failure: BaseException | None) -> None:
    if future.done():
        return
    if failure is None:
        future.set_result(result)
    elif isinstance(failure, Exception):
        future.set_exception(failure)
    else:
        future.set_exception(exit_error(failure))


def _keep_connections(loop: asyncio.AbstractEventLoop) -> None:
    """Keep the loop's connections from the garbage collector, until `abort_connections`.

    Frameworks leave their clients to it. It closes the socket of an idle connection at once, and
    has OpenAI's client close the connection again a little later, from whatever loop runs then, by
    the number of the socket. If the agent's next connection has that number by then, it is no
    longer read, and the agent waits for ever. A connection that is kept is closed only once.
    """
    if hasattr(loop, "_transports"):  # asyncio's own, weak references by socket; uvloop has none
        loop._transports = {}


def abort_connections() -> None:
    """Abort the connections that are open in the running loop: its agent has ended."""
    transports = getattr(asyncio.get_running_loop(), "_transports", {})
    for transport in list(transports.values()):
        transport.abort()
    transports.clear()


async def in_daemon(act: Callable[[], T]) -> T:
    """Returns the result of a function that blocks, in a thread for it alone, with the variables of
    the context. Unlike the threads of `asyncio.to_thread`, one that hangs holds no process up."""
    future: Future[T] = Future()
    context = copy_context()

    def work() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(context.run(act))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="agent", daemon=True).start()
    return await asyncio.wrap_future(future)


class EnvThread:
    """The worker thread of one of the episodes that are played at the same time.

    With `inline`, all runs in the calling thread and no deadline applies, so a debugger can stop
    anywhere. `wait_for`: see `WorkerThread.run`.
    """

    borrows_workers: ClassVar[bool] = False
    """True if each call runs in another worker thread, even calls that do not block."""

    def __init__(self, *, inline: bool = False, wait_for: Pause | None = None) -> None:
        self.inline, self._wait_for = inline, wait_for
        self._thread: WorkerThread | None = None

    async def run(
        self, act: Act[T], deadline: float | None, *, blocking: bool, last: Act[None] | None = None
    ) -> T:
        """Run a coroutine: in the worker thread if it blocks, else in this event loop.

        A worker thread whose coroutine exceeds `deadline` seconds, or whose caller is cancelled, is
        abandoned. If its coroutine ends later, `last` runs there.

        Errors: Overdue; whatever the coroutine raises.
        """
        if self.inline:
            return await act()
        if not blocking:
            return await _within(deadline, _without_exit(act))
        self._thread = thread = self._thread or WorkerThread.take()
        try:
            return await _within(deadline, thread.run(act, self._wait_for))
        except (Overdue, asyncio.CancelledError):
            thread.retire(last)
            self._thread = None
            raise

    def close(self) -> None:
        if self._thread is not None:
            self._thread.give_back()
            self._thread = None


async def _within(deadline: float | None, work: Awaitable[T]) -> T:
    """Returns the result of `work`. Errors: Overdue; its own TimeoutError is raised unchanged."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    steps = work.__await__()
    try:
        first = next(steps)
    except StopIteration as end:  # without a pause: no timer could have fired
        return end.value  # type: ignore[no-any-return]
    try:
        async with asyncio.timeout_at(None if deadline is None else started + deadline) as timer:
            return await _Begun(steps, first)
    except TimeoutError:
        if timer.expired():
            raise Overdue from None
        raise


class _Begun(Generic[T]):
    """The rest of an awaitable that has paused once, at `first`."""

    def __init__(self, steps: Generator[Any, Any, T], first: Any) -> None:
        self._steps, self._paused_at = steps, first

    def __await__(self) -> Generator[Any, Any, T]:
        steps, paused_at = self._steps, self._paused_at
        while True:
            try:
                sent = yield paused_at
            except GeneratorExit:
                steps.close()
                raise
            except BaseException as error:
                step = partial(steps.throw, error)
            else:
                step = partial(steps.send, sent)
            try:
                paused_at = step()
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]


async def _without_exit(act: Act[T]) -> T:
    """Run `act` in this loop. Its own SystemExit or CancelledError becomes an EnvError."""
    try:
        return await act()
    except SystemExit as failure:
        raise exit_error(failure) from None
    except asyncio.CancelledError as failure:
        if is_cancelled():
            raise
        raise exit_error(failure) from None


def is_cancelled() -> bool:
    """True if a CancelledError here is the caller's, and not one that called code raised itself."""
    task = asyncio.current_task()
    return task is None or bool(task.cancelling())


async def run_pool(
    items: Iterable[Item],
    play: Callable[[EnvThread, Item], Awaitable[None]],
    concurrency: int,
    *,
    inline: bool = False,
) -> None:
    """Play the items in their order, `concurrency` at a time, each worker with its EnvThread.

    An item is taken when it is played. Between two items, a worker does not await: the next session
    opens at once when the last one closes.

    Errors: the first that `play` raises; it cancels all workers.
    """

    left = iter(items)

    async def work() -> None:
        thread = EnvThread(inline=inline)
        try:
            for item in left:
                await play(thread, item)
        finally:
            thread.close()

    workers = [asyncio.create_task(work()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
