"""`ludus train` with the clock of `quiet.py`: processor time, plus the time in which all wait.

    python benchmarks/quiet_train.py train babyai-tiny rl.steps=10 ...

Other load on the machine does not count, and waiting takes no time. The process computes as on one
core: what a second thread computes counts too. Environments must not block (BabyAI does not).
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
    return time.process_time() + sum(loop._quiet.skipped_s for loop in LOOPS)


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


if __name__ == "__main__":
    install()
    from ludus.cli import main

    sys.exit(main())
