"""The verifiers of a process: one for each setting, in a thread with an event loop of its own.

Environments of any event loop and thread share them: a verifier's processes (compiler, references,
kernels) stay warm from one episode to the next.
"""

from __future__ import annotations

import asyncio
import atexit
import hashlib
import multiprocessing
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

from ludus.core.errors import ConfigError, MissingDependency
from ludus.core.once import Once
from ludus.kernels.benchmark.benchmarker import Benchmarker
from ludus.kernels.cache import CompileCache
from ludus.kernels.verify.problem import Interface, KernelProblem
from ludus.kernels.verify.result import Verified, VerifyStatus
from ludus.kernels.verify.shim_runs import LIMITS
from ludus.kernels.verify.verifier import KernelVerifier
from ludus.telemetry.logs import get_logger

log = get_logger(__name__)

T = TypeVar("T")

MAX_RESULTS = 4096
"""Results that are kept."""
STOPPED = {VerifyStatus.TIME_LIMIT, VerifyStatus.MEMORY_LIMIT}
"""Ends that another try may not have."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Resources that the verifications of a process share. `parallel` None: 2 for each core.
    `timed`: right kernels are timed on a GPU."""

    architecture: str = "sm_90"
    trials: int = 5
    run_s: float = LIMITS.run_s
    parallel: int | None = None
    timed: bool = False


class Worker:
    """A verifier in its own thread."""

    def __init__(self, settings: Settings) -> None:
        """Errors: ConfigError, MissingDependency: a part that verifications need is absent."""
        self._once = Once[Verified](MAX_RESULTS)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.name = "ludus-kernels"
        self._thread.start()
        try:
            self._verifier = self._run(self._made(settings)).result()
        except (ConfigError, MissingDependency):
            self._stop()
            raise

    async def _made(self, settings: Settings) -> KernelVerifier:
        # References run on the device too: `trust_references` is the environment's key.
        self._benchmark = Benchmarker(trust_references=True) if settings.timed else None
        return KernelVerifier(
            settings.architecture,
            settings.parallel,
            CompileCache(),
            settings.trials,
            run_limits=replace(LIMITS, run_s=settings.run_s),
            benchmark=self._benchmark,
        )

    async def interface(self, problem: KernelProblem, seed: int) -> Interface:
        """As `KernelVerifier.interface`."""
        return await self._answer(self._verifier.interface(problem, seed))

    async def verify(self, source: str, problem: KernelProblem, seed: int) -> Verified:
        """As `KernelVerifier.verify`."""
        return await self._answer(self._verified(source, problem, seed))

    async def _verified(self, source: str, problem: KernelProblem, seed: int) -> Verified:
        """The result, kept for the next episode that writes the same."""
        key = hashlib.sha256(repr((source, problem.reference, seed)).encode()).digest()

        async def verify() -> tuple[Verified, bool]:
            found = await self._verifier.verify(source, problem, seed)
            timed = found.speedups is not None or found.unbelieved
            return found, found.status not in STOPPED and not timed

        return await self._once.of(key, verify)

    async def _answer(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(self._run(work))

    def _run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """End the processes, and the thread."""
        self._run(self._verifier.close()).result()
        if self._benchmark is not None:
            self._run(self._benchmark.close()).result()
        self._stop()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def times_kernels(*, required: bool) -> bool:
    """True if this machine times kernels; says once why not.

    Errors: ConfigError where it has to and cannot.
    """
    problem = _no_timing()
    if problem and required:
        raise ConfigError(f"timing: gpu: {problem}: set timing: off, which measures no speed-ups")
    if problem and multiprocessing.parent_process() is None:  # else the parent has told
        _tell(problem)
    return not problem


@cache
def _tell(problem: str) -> None:
    log.warning("kernels are not timed: speed-ups have no value here", reason=problem)


def _no_timing() -> str:
    """The reason why kernels cannot be timed here; empty: they can."""
    try:
        import torch
    except ModuleNotFoundError:
        return "torch is not installed"
    return "" if torch.cuda.is_available() else "this machine has no CUDA device"


_workers: dict[Settings, Worker] = {}
_lock = threading.Lock()


def worker_of(settings: Settings) -> Worker:
    """This process's worker of the settings, started on first use, ended at exit.

    Errors: ConfigError, MissingDependency.
    """
    with _lock:
        if settings not in _workers:
            _workers[settings] = Worker(settings)
        return _workers[settings]


@atexit.register
def close_workers() -> None:
    """End all workers of this process; the next use starts them again."""
    with _lock:
        workers = list(_workers.values())
        _workers.clear()
    for worker in workers:
        with suppress(Exception):  # at exit, no thread may start, which a full close needs
            worker.close()


def _after_fork() -> None:
    """Forget the parent's workers in a forked child, which has none of their threads."""
    global _lock
    _lock = threading.Lock()
    _workers.clear()


os.register_at_fork(after_in_child=_after_fork)
