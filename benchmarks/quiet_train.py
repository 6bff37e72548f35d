"""`ludus train` with the clock of `quiet.py`: processor time, plus the time in which all wait.

    python benchmarks/quiet_train.py train babyai-tiny rl.steps=10 ...
    python benchmarks/quiet_train.py --wall train babyai-tiny backend.name=ray ...

Other load on the machine does not count, and waiting takes no time. The process computes as on one
core: what a second thread computes counts too. Environments must not sleep in threads (BabyAI and
TextCraft do not).
`--wall` keeps the clock on the wall, for runs of several processes.

The machine's speed is probed all the time, and the cores that other programs use (`speed.py`):
`machine/probe_s` and `machine/others`. The probes count in no other time of the run, but for those
of `--wall`, which the waiting loop does beside the other processes.
"""

from __future__ import annotations

import asyncio
import sys
import time
from concurrent.futures import Future
from typing import Any

from quiet import QuietLoop

LOOPS: list[Loop] = []


class Loop(QuietLoop):
    """Counts the jobs of other threads that it waits for."""

    def __init__(self) -> None:
        super().__init__()
        LOOPS.append(self)

    def computes(self, future: Any) -> Any:
        """Note that another thread computes until the future is done."""
        self._quiet.computing += 1

        def end(_: Any) -> None:
            self._quiet.computing -= 1

        future.add_done_callback(end)
        return future

    def run_in_executor(self, *args: Any) -> Any:
        return self.computes(super().run_in_executor(*args))


class Policy(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self) -> Any:
        return Loop()


def quiet_clock() -> float:
    while True:  # a signal's handler may leave seconds out between the two
        skipped_s = sum(loop._quiet.skipped_s for loop in LOOPS)
        now = time.process_time()
        if skipped_s == sum(loop._quiet.skipped_s for loop in LOOPS):
            return now + skipped_s


def install() -> None:
    """Replace `time.perf_counter` and the event loops; before ludus is imported."""
    asyncio.set_event_loop_policy(Policy())
    time.perf_counter = quiet_clock
    wrap = asyncio.wrap_future

    def wrap_future(future: Future[Any], *, loop: Any = None) -> Any:
        running = loop or asyncio.get_running_loop()
        wrapped = wrap(future, loop=running)
        return running.computes(wrapped) if isinstance(running, Loop) else wrapped

    asyncio.wrap_future = wrap_future  # type: ignore[assignment]


def count_threads() -> None:
    """Have the loop wait for environments that compute in threads of their own."""
    from ludus.rollout.hosts.threads import WorkerThread

    run = WorkerThread.run

    async def counted(self: WorkerThread, *args: Any) -> Any:
        loop = asyncio.get_running_loop()
        work = loop.counted(run) if isinstance(loop, Loop) else run
        return await work(self, *args)

    WorkerThread.run = counted  # type: ignore[method-assign]


def note_speed(quiet: bool) -> None:
    """Have each step tell the machine's speed and its other load, outside of the run's time."""
    from speed import OtherLoad, OwnWork, Speedometer

    from ludus.loop.loop import StepClock

    def leave_out(seconds: float) -> None:
        if quiet and LOOPS:
            LOOPS[-1]._quiet.skipped_s -= seconds

    speed = Speedometer(leave_out)
    others, own, metrics = OtherLoad(), OwnWork(), StepClock.metrics

    def measured(self: StepClock, groups: Any) -> dict[str, float]:
        found = metrics(self, groups) | ({} if quiet else own.by_kind())
        return {**found, "machine/probe_s": speed.mean(), "machine/others": others.mean()}

    StepClock.metrics = measured  # type: ignore[method-assign]


if __name__ == "__main__":
    if on_wall := "--wall" in sys.argv:
        sys.argv.remove("--wall")
    else:
        install()
        count_threads()
    note_speed(quiet=not on_wall)
    from ludus.cli import main

    sys.exit(main())
