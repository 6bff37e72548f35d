"""The speed of the machine while a run goes on, by work that is always the same; its other load.

Other load slows a core too: caches, memory and the clock rate are shared. `SpeedProbe` computes the
same each time: products of matrices, as the model does, and Python, as the loop and environments
do. Neighbours of a core change from second to second, so a run is probed three times a second.
"""

from __future__ import annotations

import atexit
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import torch

TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
IDLE, IO_WAIT = 3, 4
"""Places in the first line of /proc/stat."""

EVERY_S = 0.3
"""Interval at which the speed is measured."""

ROWS, WIDTH, LAYERS = 400, 128, 3
OBJECTS = 8_000


class SpeedProbe:
    """Work of about 10 ms. Nothing of the run is touched, its random numbers neither."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(0)
        self._rows = torch.randn(ROWS, WIDTH, generator=random)
        self._matrix = torch.randn(WIDTH, 4 * WIDTH, generator=random)

    def seconds(self) -> float:
        """Processor seconds of the work, in this thread."""
        began = time.thread_time()
        self._products()
        self._objects()
        return time.thread_time() - began

    def _products(self) -> None:
        with torch.no_grad():
            hidden = self._rows
            for _ in range(LAYERS):
                hidden = torch.nn.functional.silu(hidden @ self._matrix) @ self._matrix.T / WIDTH

    def _objects(self) -> None:
        table: dict[int, tuple[int, str]] = {}
        for number in range(OBJECTS):
            table[number % 997] = number, str(number)
        sorted(table.items())


class Speedometer:
    """Probes the speed again and again, in the main thread, until the process ends.

    The timer is one of the wall: while one of processor time is set, Linux tells a process's
    processor time in steps of 4 ms.

    Args:
        leave_out: is given the processor seconds of each probe, which are not the run's.
    """

    def __init__(self, leave_out: Callable[[float], None]) -> None:
        self._probe, self._leave_out = SpeedProbe(), leave_out
        self._found: list[float] = []
        self._probe.seconds()
        signal.signal(signal.SIGALRM, self._measure)
        signal.setitimer(signal.ITIMER_REAL, EVERY_S, EVERY_S)
        atexit.register(signal.setitimer, signal.ITIMER_REAL, 0)

    def _measure(self, *_: object) -> None:
        seconds = self._probe.seconds()
        self._found.append(seconds)
        self._leave_out(seconds)

    def mean(self) -> float:
        """The mean of the probes since the last call."""
        if not self._found:
            self._measure()
        found, self._found = self._found, []
        return sum(found) / len(found)


class OtherLoad:
    """Cores that other programs use: the machine's busy time without this process's family."""

    def __init__(self) -> None:
        self._last = self._now()

    def mean(self) -> float:
        """Their mean number since the last call."""
        now = self._now()
        wall, others = (after - before for after, before in zip(now, self._last, strict=True))
        self._last = now
        return max(others, 0.0) / max(wall, 1e-9)

    @staticmethod
    def _now() -> tuple[float, float]:
        """Seconds on the wall; of processors at work for others, so far."""
        numbers = list(map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]))
        busy = sum(numbers) - numbers[IDLE] - numbers[IO_WAIT]
        own = sum(map(used, family(os.getpid())))
        return time.monotonic(), (busy - own) / TICKS_A_SECOND


class OwnWork:
    """Processor seconds of this process and of each kind of its descendants, by their title."""

    def __init__(self) -> None:
        self._last: dict[int, int] = {}

    def by_kind(self) -> dict[str, float]:
        """Those since the last call, as metrics `machine/KIND_s`."""
        now = {process: used(process) for process in family(os.getpid())}
        found: Counter[str] = Counter()
        for process, ticks in now.items():
            found[kind(process)] += ticks - self._last.get(process, 0)
        self._last = now
        return {f"machine/{name}_s": ticks / TICKS_A_SECOND for name, ticks in found.items()}


def kind(process: int) -> str:
    """The class of an actor of Ray; `loop` is this process, and `rest` are all others."""
    if process == os.getpid():
        return "loop"
    with suppress(OSError):
        title = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")[0].decode()
        if actor := re.match(r"ray::(\w+)", title):
            return actor[1]
    return "rest"


def family(process: int) -> Iterator[int]:
    """Yields a process and its descendants."""
    yield process
    for thread in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):
            for child in thread.read_text().split():
                yield from family(int(child))


def used(process: int) -> int:
    """Ticks of processor time of a process, and of its children that have ended."""
    with suppress(OSError):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15]))
    return 0
