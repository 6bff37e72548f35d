"""Signals end a command alike: in order, and without a traceback.

    signal                         exception            exit code of the command
    SIGINT (Ctrl-C)                KeyboardInterrupt    130
    SIGTERM                        Terminated           143
    SIGHUP (a terminal closes)     HungUp               129

SIGHUP stays ignored where it is ignored (`nohup`). Python can handle signals in the main thread
only; elsewhere these functions leave them alone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from types import FrameType
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

END_S = 5.0
"""Seconds that cancelled tasks have to end."""

AGAIN_S = 0.02
"""Seconds after which a signal is sent again that arrived where nothing can be raised."""

_abandoned: list[Future[Any]] = []


class Terminated(KeyboardInterrupt):
    """SIGTERM, where Ctrl-C raises KeyboardInterrupt."""


class HungUp(Terminated):
    """SIGHUP: the terminal has closed, for example with its SSH connection."""


STOPS = {
    signal.SIGINT: KeyboardInterrupt,
    signal.SIGTERM: Terminated,
    signal.SIGHUP: HungUp,
}
"""From the general to the special kind of exception."""


EXIT_CODES = frozenset(128 + number for number in STOPS)
"""Of the commands that a signal ended."""


def exit_code(stop: KeyboardInterrupt) -> int:
    """Returns the exit code of a command that a signal ended."""
    return 128 + next(number for number, kind in reversed(STOPS.items()) if isinstance(stop, kind))


def abandon(job: Future[Any]) -> None:
    """Note that a thread may still compute a result that nobody awaits."""
    _abandoned.append(job)


def leave(code: int) -> NoReturn:
    """End the command. Python would wait for the threads of abandoned jobs; this does not.

    A further Ctrl-C ends it at once: in what packages run at the exit of Python (Ray takes half a
    second), it would print a traceback.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if not all(job.done() for job in _abandoned):
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # a closed pipe
                stream.flush()
        os._exit(code)
    raise SystemExit(code)


def raise_stop(stop: KeyboardInterrupt) -> NoReturn:
    """Handle a signal as Python handles Ctrl-C."""
    raise stop


@contextmanager
def handling(handle: Callable[[KeyboardInterrupt], object]) -> Iterator[None]:
    """Call `handle` at each signal with the exception of the signal."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _leave_terminal()
        handle(STOPS[signal.Signals(number)]())

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    numbers = [number for number in STOPS if number != signal.SIGHUP or not ignored]
    previous = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        with _sent_again_where_ignored():
            yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextmanager
def _sent_again_where_ignored() -> Iterator[None]:
    """Send a signal again that came in `__del__` or in a weakref's callback.

    Python ignores what is raised there: the command would go on as if nobody had pressed Ctrl-C.
    """
    main_thread = threading.get_ident()
    hook = sys.unraisablehook

    def on_unraisable(unraisable: sys.UnraisableHookArgs) -> None:
        stop = unraisable.exc_value
        if not isinstance(stop, KeyboardInterrupt):
            hook(unraisable)
            return
        number = exit_code(stop) - 128
        again = threading.Timer(AGAIN_S, signal.pthread_kill, (main_thread, number))
        again.daemon = True
        again.start()

    sys.unraisablehook = on_unraisable
    try:
        yield
    finally:
        sys.unraisablehook = hook


def _leave_terminal() -> None:
    """Drop further output to a terminal, which has closed: writing to it would raise an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        if _is_terminal(descriptor):
            os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _is_terminal(descriptor: int) -> bool:
    """Also of a terminal that has closed, where `isatty` returns False."""
    try:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        return os.isatty(descriptor) or name.startswith(("/dev/pts/", "/dev/tty"))
    except OSError:
        return False


@contextmanager
def ctrl_c_kept_from_children() -> Iterator[None]:
    """Block SIGINT in the threads and processes that the body starts.

    A terminal sends Ctrl-C to all processes of a command. A worker process would print a traceback;
    its parent ends it. In the main thread, Ctrl-C takes effect after the body: another thread may
    receive the signal, and a worker whose start is interrupted prints a traceback too.
    """
    resource_tracker.ensure_running()  # its start would unblock SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    handler = signal.getsignal(signal.SIGINT)
    deferred = callable(handler) and threading.current_thread() is threading.main_thread()
    received: list[tuple[int, FrameType | None]] = []
    if deferred:
        signal.signal(signal.SIGINT, lambda *given: received.append(given))
    try:
        yield
    finally:
        if deferred:
            signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if received and callable(handler):
        handler(*received[0])


async def end_tasks() -> None:
    """Cancel all other tasks of the event loop, and wait for their end.

    A task that swallows its cancellation (a user's tool) is forgotten after END_S, since
    `asyncio.Runner` would wait for it without a limit.
    """
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if not others:
        return
    for task in (await asyncio.wait(others, timeout=END_S))[1]:
        asyncio._unregister_task(task)
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # the warning tells it
        logging.getLogger(__name__).warning(
            "a task does not end: it swallows CancelledError, and is abandoned: %s",
            getattr(task.get_coro(), "__qualname__", task.get_name()),
        )


def run(
    main: Coroutine[Any, Any, T], finishes: Callable[[KeyboardInterrupt], bool] = lambda _: False
) -> T:
    """`asyncio.run`, ended by signals in order.

    A signal raises at once where `main` itself computes. Where it waits for its tasks, the first
    signal cancels it, so the tasks end in order; the next signal raises at once. So does the first
    after END_S, where a user's code blocks the event loop and nothing can be cancelled.

    Args:
        finishes: called first; True if `main` will end by itself.

    Errors: KeyboardInterrupt, Terminated; those of `main`.
    """
    task: asyncio.Task[T] | None = None
    cause: KeyboardInterrupt | None = None

    async def body() -> T:
        nonlocal task
        task = asyncio.current_task()
        return await main

    def handle(stop: KeyboardInterrupt) -> None:
        nonlocal cause
        if finishes(stop):
            return
        loop = runner.get_loop()
        loop.set_exception_handler(lambda *_: None)  # errors of tasks that nobody awaits any more
        waits = task is not None and asyncio.current_task(loop) is not task
        if task is None or not waits or cause is not None:
            raise stop
        cause = stop
        again = threading.Timer(END_S, os.kill, (os.getpid(), exit_code(stop) - 128))
        again.daemon = True
        again.start()
        loop.call_soon_threadsafe(again.cancel)
        loop.call_soon_threadsafe(task.cancel)

    with asyncio.Runner() as runner, handling(handle):
        try:
            result = runner.run(body())
        except asyncio.CancelledError:
            if cause is None:
                raise
        finally:
            runner.run(end_tasks())
        if cause is None:
            return result
    raise cause
