"""Worker processes for computations that may never end.

A request goes to an idle worker as a line of JSON, and comes back as lines. The kernel ends a
worker whose computation exceeds its CPU time, even where it hangs in C code or its parent is dead:

    worker   starts a timer of CPU time, computes, answers     (`serve`)
    pool     reads the answers; a worker that died is replaced  (`Workers`)

Pools of one module with equal limits are one: judges that differ only in what they ask share their
processes.

The limit is CPU time, so the load of the machine does not decide a score.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, NoReturn
from weakref import WeakSet, WeakValueDictionary

from ludus.core.errors import Unscorable
from ludus.core.system.processes import started

START_S = 120.0
"""Seconds in which a worker has to start."""

MAX_REQUESTS = 1000
"""Requests after which a worker is replaced: what its packages keep in memory is released."""

ABANDONED_S = 1.0
"""Seconds for which a computation goes on that nobody waits for. Most end sooner, and to start
another process costs about as much."""

Record = dict[str, Any]


class TooLong(Exception):
    """The computation exceeded its CPU time. `answers` holds what came before."""

    def __init__(self, answers: list[Record]) -> None:
        super().__init__("the computation exceeded its CPU time")
        self.answers = answers


class Crashed(Unscorable):
    """The worker died twice on a request. `answers` holds what came before."""

    def __init__(self, told: str, answers: list[Record]) -> None:
        super().__init__(told)
        self.answers = answers


class Workers:
    """A pool of processes that run `module`, whose main block calls `serve`.

    Starts processes when they are needed. At most `size` requests run at once; others wait. Objects
    with equal arguments share processes and `size`. Use from any thread and any event loop.

    Args:
        cpu_s: CPU seconds of a request, or of a step whose worker calls `restart_limit`.
        memory_mb: address space of a worker.
        num_limits: the limits that a request can take, for the limit of wall time.
    """

    def __init__(
        self, module: str, size: int, cpu_s: float, memory_mb: int, num_limits: float = 1.0
    ) -> None:
        self._command = [sys.executable, "-P", "-m", module, repr(cpu_s), str(memory_mb)]
        self._module = module
        self._wall_s = 30.0 + 10.0 * cpu_s * num_limits
        self._pool = _Pool.of(size, *self._command, str(num_limits))
        self._idle = self._pool.idle
        self._jobs: set[_Job] = set()

    async def ask(self, request: Record) -> list[Record]:
        """Returns the worker's answers to a request. If the caller is cancelled, the worker ends.

        Errors: TooLong; Crashed where the worker died for another reason, also in a second attempt;
        Unscorable where it cannot start.
        """
        loop = asyncio.get_running_loop()
        job = _Job()
        self._jobs.add(job)
        self._pool.join(self)
        try:
            return await loop.run_in_executor(self._pool.threads, self._ask, request, job)
        except asyncio.CancelledError:
            job.abandon_later()
            raise
        finally:
            self._jobs.discard(job)

    async def close(self) -> None:
        """End what was asked here and, unless others use them, the workers; a later request starts
        new ones."""
        for job in list(self._jobs):
            job.abandon()
        await asyncio.to_thread(self._pool.leave, self)

    def _ask(self, request: Record, job: _Job) -> list[Record]:
        for attempt in range(2):
            try:
                return self._try(request, job)
            except _Died as error:
                if job.abandoned:
                    raise Unscorable(f"a worker of {self._module} {error}") from error
                if attempt:
                    told = f"a worker of {self._module} {error}, twice"
                    raise Crashed(told, error.answers) from error
        raise AssertionError("the last attempt returns or raises")

    def _try(self, request: Record, job: _Job) -> list[Record]:
        """Errors: TooLong, _Died, Unscorable."""
        if job.abandoned:
            raise _Died("was not asked: nobody waits for its answer", [])
        try:
            worker = self._idle.pop()
        except IndexError:
            worker = self._start()
        answers: list[Record] = []
        try:
            with job.by(worker):
                self._exchange(worker, request, answers, self._wall_s)
        except BaseException:
            _end(worker)
            if worker.returncode == -signal.SIGPROF:
                raise TooLong(answers) from None
            raise
        if answers[-1]["ends"]:
            _end(worker)
        else:
            self._idle.append(worker)
        return answers

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONHASHSEED": "0"}  # the order of sympy's terms
        worker = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # Ctrl+C is for the parent
        )
        started(worker.pid, "judge's worker")
        answers: list[Record] = []
        try:
            self._exchange(worker, None, answers, START_S)
        except BaseException as error:
            _end(worker)
            raise Unscorable(f"a worker of {self._module} cannot start: it {error}") from error
        if fault := answers[-1].get("fault"):
            _end(worker)
            raise Unscorable(f"a worker of {self._module} cannot start: {fault}")
        return worker

    def _exchange(
        self,
        worker: subprocess.Popen[bytes],
        request: Record | None,
        answers: list[Record],
        seconds: float,
    ) -> None:
        """Add the worker's answers up to its last. Errors: _Died."""
        assert worker.stdin is not None
        assert worker.stdout is not None
        timer = threading.Timer(seconds, worker.kill)
        timer.start()
        try:
            if request is not None:
                worker.stdin.write(json.dumps(request).encode() + b"\n")
                worker.stdin.flush()
            while line := worker.stdout.readline():
                answers.append(json.loads(line))
                if "ends" in answers[-1]:
                    return
        except OSError:
            pass  # a broken pipe: it died
        finally:
            timer.cancel()
        worker.wait()
        raise _Died(f"died with exit code {worker.returncode}", answers)


class _Pool:
    """Processes and threads that the `Workers` of equal arguments share."""

    _all: ClassVar[WeakValueDictionary[tuple[object, ...], _Pool]] = WeakValueDictionary()
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, size: int) -> None:
        self.threads = ThreadPoolExecutor(size, "ludus-judge")
        self.idle: list[subprocess.Popen[bytes]] = []
        self._users: WeakSet[Workers] = WeakSet()
        weakref.finalize(self, _end_all, self.idle)

    @classmethod
    def of(cls, size: int, *command: str) -> _Pool:
        key = (os.getpid(), size, *command)  # a fork has none of its parent's threads
        with cls._lock:
            found = cls._all.get(key)
            if found is None:
                found = cls._all[key] = cls(size)
            return found

    def join(self, user: Workers) -> None:
        with self._lock:
            self._users.add(user)

    def leave(self, user: Workers) -> None:
        """End the idle workers if nobody else uses them."""
        with self._lock:
            self._users.discard(user)
            is_last = not self._users
        if is_last:
            _end_all(self.idle)


class _Job:
    """A request, and the worker that computes it."""

    def __init__(self) -> None:
        self.abandoned = False
        self._worker: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    @contextmanager
    def by(self, worker: subprocess.Popen[bytes]) -> Iterator[None]:
        """The time in which `worker` computes this, and may be killed for it."""
        with self._lock:
            self._worker = worker
            if self.abandoned:
                worker.kill()
        try:
            yield
        finally:
            with self._lock:
                self._worker = None

    def abandon(self) -> None:
        """End the computation."""
        with self._lock:
            self.abandoned = True
            if self._worker is not None:
                self._worker.kill()

    def abandon_later(self) -> None:
        """End the computation if it goes on for ABANDONED_S."""
        timer = threading.Timer(ABANDONED_S, self.abandon)
        timer.daemon = True
        timer.start()


class _Died(Exception):
    """A worker ended before its last answer."""

    def __init__(self, told: str, answers: list[Record]) -> None:
        super().__init__(told)
        self.answers = answers


def _end(worker: subprocess.Popen[bytes]) -> None:
    worker.kill()
    worker.wait()
    for pipe in (worker.stdin, worker.stdout):
        assert pipe is not None
        with suppress(OSError):  # what was left to write
            pipe.close()


def _end_all(workers: list[subprocess.Popen[bytes]]) -> None:
    while workers:
        _end(workers.pop())


def serve(prepare: Callable[[], Callable[[Record], Iterable[Record]]]) -> NoReturn:
    """Answer requests from stdin until it ends; call this in the worker's main block.

    Args:
        prepare: imports what the requests need, and returns the function that answers them.
    """
    cpu_s, memory_mb = float(sys.argv[1]), int(sys.argv[2])
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a package prints is no answer
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))

    def write(record: Record) -> None:
        output.write(json.dumps(record).encode() + b"\n")
        output.flush()

    try:
        answer = prepare()
    except Exception as error:
        write({"fault": f"{type(error).__name__}: {error}", "ends": True})
        sys.exit(1)
    write({"ends": False})
    for number, line in enumerate(sys.stdin.buffer, start=1):
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        for record in answer(json.loads(line)):
            write(record)
        signal.setitimer(signal.ITIMER_PROF, 0)
        ends = number >= MAX_REQUESTS or _peak_mb() > memory_mb // 2
        write({"ends": ends})
        if ends:
            break
    sys.exit(0)


def restart_limit() -> None:
    """Begin the limit of CPU time anew. Call this in a worker, before each step of a request."""
    signal.setitimer(signal.ITIMER_PROF, float(sys.argv[1]))


def _peak_mb() -> int:
    """Peak memory of this process in MB."""
    try:  # Linux starts `ru_maxrss` at that of the parent, which may be a large trainer
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) >> 10 for line in status if line.startswith("VmHWM:"))
    except OSError:  # macOS, in bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 20
