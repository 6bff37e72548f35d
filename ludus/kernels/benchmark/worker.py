"""The process that launches kernels: `python -m ludus.kernels.benchmark.worker <socket>`.

It runs ludus' own code, and code of the device. It never holds the reference's output: outputs go
to ludus' process over the socket, and are compared there. After an error of the driver it ends,
for a context with such an error stays broken.

    facts                       name, architecture and limits of the device
    run, blobs                  outputs of the trials; times; outputs of some timed launches; the
                                output of one more trial, whose inputs no launch has seen
"""

from __future__ import annotations

import ctypes
import random
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ludus.kernels.benchmark.driver import CudaError, Driver
from ludus.sandbox.inside.frames import receive_frame, send_frame

GUARD, GUARD_BYTE, ALIGNMENT = 4096, 0xA5, 256
POISON = (0xFF, 0x71)
"""Of the trials 0, 2, ... and 1, 3, ..., as in `verify.compare`."""
COPIED = 1 << 29
"""Bytes of the copy that measures the bandwidth."""


class WrongError(Exception):
    """A launch wrote where it may not."""


class Buffers:
    """Buffers of a work on the device, each between two guards."""

    def __init__(self, driver: Driver, sizes: Mapping[str, int]) -> None:
        self._driver, self.sizes = driver, dict(sizes)
        self._starts = {name: driver.allocate(self._whole(size)) for name, size in sizes.items()}
        for name, size in sizes.items():
            driver.fill(self._starts[name], GUARD_BYTE, self._whole(size))

    @staticmethod
    def _whole(size: int) -> int:
        return 2 * GUARD + -(-size // ALIGNMENT) * ALIGNMENT

    def address(self, name: str) -> int:
        """The address of a buffer's first byte."""
        return self._starts[name] + GUARD

    def poison(self, names: Sequence[str], number: int) -> None:
        """Fill what a launch has to write."""
        for name in names:
            self._driver.fill(self.address(name), POISON[number % 2], self.sizes[name])

    def read(self, name: str) -> bytes:
        """The bytes of a buffer."""
        return self._driver.download(self.address(name), self.sizes[name])

    def check(self, inputs: Mapping[str, bytes]) -> None:
        """Raise WrongError for a guard that was written, or an input that was changed."""
        guard = bytes([GUARD_BYTE])
        for name, size in self.sizes.items():
            rest = self._whole(size) - GUARD - size
            before = self._driver.download(self._starts[name], GUARD)
            after = self._driver.download(self.address(name) + size, rest)
            if before != guard * GUARD or after != guard * rest:
                raise WrongError(f"a write beside the buffer `{name}`")
        for name, data in inputs.items():
            if self.read(name) != data:
                raise WrongError(f"the input `{name}` is changed: inputs may be read only")

    def free(self) -> None:
        """Release all."""
        for address in self._starts.values():
            self._driver.free(address)


class Launcher:
    """The launches of a work, with their arguments in place."""

    def __init__(
        self, driver: Driver, work: Mapping[str, Any], cubins: Sequence[bytes], buffers: Buffers
    ) -> None:
        self._driver, self.line = driver, 0
        self._modules = [driver.load(cubin) for cubin in cubins]
        self._kept: list[Any] = []
        self._steps = []
        for step in work["steps"]:
            self.line = step["line"]
            module = self._modules[step["module"]]
            function = driver.function(module, step["symbol"], step["shared"])
            values = [self._value(kind, value, buffers) for kind, value in step["parameters"]]
            self._kept += values
            pointers = (ctypes.c_void_p * len(values))(
                *(ctypes.cast(value, ctypes.c_void_p).value for value in values)
            )
            sizes = step["grid"], step["block"], step["shared"]
            self._steps.append((step["line"], function, sizes, pointers))

    @staticmethod
    def _value(kind: str, value: str, buffers: Buffers) -> ctypes.Array[ctypes.c_char]:
        data = (
            bytes.fromhex(value)
            if kind == "bytes"
            else (buffers.address(value).to_bytes(8, "little"))
        )
        return ctypes.create_string_buffer(data, len(data))

    def __call__(self) -> None:
        for line, function, (grid, block, shared), pointers in self._steps:
            self.line = line
            self._driver.launch(function, grid, block, shared, pointers)

    def unload(self) -> None:
        """Release the modules."""
        for module in self._modules:
            self._driver.unload(module)


class Bench:
    """A work on the device: trials, then times."""

    def __init__(self, driver: Driver, job: Mapping[str, Any], blobs: Sequence[bytes]) -> None:
        self._driver, self._job = driver, job
        cubins, data = blobs[: job["modules"]], blobs[job["modules"] :]
        names = list(job["inputs"])
        self._inputs = [
            dict(zip(names, data[i : i + len(names)], strict=True))
            for i in range(0, len(data), len(names))
        ]
        scratch = job["work"]["scratch"]
        self._written = ["out", *scratch]
        self._buffers = Buffers(driver, {**job["inputs"], "out": job["out"], **scratch})
        self._staged = [
            {name: self._stage(value) for name, value in inputs.items()} for inputs in self._inputs
        ]
        self.launches = Launcher(driver, job["work"], cubins, self._buffers)

    def _stage(self, data: bytes) -> int:
        address = self._driver.allocate(max(len(data), 1))
        self._driver.upload(address, data)
        return address

    def _prepare(self, trial: int, number: int) -> None:
        for name, address in self._staged[trial].items():
            self._driver.copy(self._buffers.address(name), address, self._buffers.sizes[name])
        self._buffers.poison(self._written, number)

    def trial(self, trial: int) -> bytes:
        """The output for the inputs of a trial."""
        self._prepare(trial, trial)
        self.launches()
        self._driver.synchronize()
        self._buffers.check(self._inputs[trial])
        return self._buffers.read("out")

    def times(self) -> tuple[dict[str, Any], list[bytes]]:
        """Milliseconds of each timed launch, by events and by the wall; outputs of some of them."""
        job, driver = self._job, self._driver
        trials = max(len(self._inputs) - 1, 1)
        chosen = sorted(random.SystemRandom().sample(range(job["timed"]), job["checked"]))
        flush = driver.allocate(job["flush"])
        begin, end = driver.event(), driver.event()
        events, walls, outputs, checked = [], [], [], []
        for number in range(-job["warm"], job["timed"]):
            trial = number % trials
            self._prepare(trial, number)
            driver.fill(flush, number & 0xFF, job["flush"])
            driver.synchronize()
            started = time.perf_counter()
            driver.record(begin)
            self.launches()
            driver.record(end)
            driver.synchronize()
            wall = 1e3 * (time.perf_counter() - started)
            if number < 0:
                continue
            events.append(driver.milliseconds(begin, end))
            walls.append(wall)
            if number in chosen:
                outputs.append(self._buffers.read("out"))
                checked.append([trial, number])
        self._buffers.check(self._inputs[trial])
        driver.free(flush)
        return {"events": events, "walls": walls, "checked": checked}, outputs

    def free(self) -> None:
        """Release all."""
        self.launches.unload()
        self._buffers.free()
        for staged in self._staged:
            for address in staged.values():
                self._driver.free(address)


def facts(driver: Driver) -> dict[str, Any]:
    """The device, and the bandwidth of a copy on it in bytes/s, read and written."""
    half = driver.allocate(COPIED), driver.allocate(COPIED)
    begin, end = driver.event(), driver.event()
    best = float("inf")
    for _ in range(6):
        driver.record(begin)
        driver.copy(*half, COPIED)
        driver.record(end)
        driver.synchronize()
        best = min(best, driver.milliseconds(begin, end))
    for address in half:
        driver.free(address)
    return {**driver.facts(), "copied": 2 * COPIED / (1e-3 * best)}


def run(
    driver: Driver, job: Mapping[str, Any], blobs: Sequence[bytes]
) -> tuple[dict[str, Any], list[bytes]]:
    """Trials, times, one more trial. Errors: CudaError, WrongError."""
    line = 0
    bench = None
    try:
        bench = Bench(driver, job, blobs)
        trials = job["trials"]
        outputs = [bench.trial(number) for number in range(trials - 1)]
        told: dict[str, Any] = {"events": [], "walls": [], "checked": []}
        more: list[bytes] = []
        if job["timed"]:
            told, more = bench.times()
        outputs.append(bench.trial(trials - 1))
        bench.free()
        return {"kind": "done", **told}, [*outputs, *more]
    except CudaError as error:
        line = bench.launches.line if bench else 0
        return {"kind": "error", "name": error.name, "call": error.call, "line": line}, []
    except WrongError as error:
        return {"kind": "wrong", "text": str(error)}, []


def serve(sock: socket.socket, make: Callable[[], Driver]) -> None:
    """Answer until the socket ends, or the device has an error."""
    driver: Driver | None = None
    while (frame := receive_frame(sock)) is not None:
        job, blobs = frame
        try:
            driver = driver or make()
            answer: tuple[dict[str, Any], Sequence[bytes]] = (
                ({"kind": "facts", **facts(driver)}, ())
                if job["do"] == "facts"
                else run(driver, job, blobs)
            )
        except CudaError as error:
            answer = {"kind": "error", "name": error.name, "call": error.call, "line": 0}, ()
        send_frame(sock, *answer)
        if answer[0]["kind"] in ("error", "wrong"):
            return


def main() -> None:
    """Serve the socket whose number is the argument."""
    serve(socket.socket(fileno=int(sys.argv[1])), Driver)


if __name__ == "__main__":
    main()
