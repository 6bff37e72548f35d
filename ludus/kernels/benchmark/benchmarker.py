"""Times of kernels on a GPU, and their values there.

    async with Benchmarker(trust_references=True) as benchmarker:
        device = await benchmarker.device()
        measured = await benchmarker.measure(work, problem, trials)
        measured.status, measured.message, measured.speedups

A kernel has a process of its own; its outputs come back over a socket that no code of the kernel
knows, and are compared here. A process whose context is broken, or that does not answer, is
replaced. Nothing is measured without a device: there is an error, and never a number.

NOT YET RUN ON A GPU: see docs/kernels.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

from ludus.core.errors import ConfigError, DataError, ToolError
from ludus.kernels.benchmark.decide import Device, Times, device_of, judge, summary
from ludus.kernels.benchmark.process import GoneError, Process
from ludus.kernels.benchmark.work import Work
from ludus.kernels.verify.compare import Trial, compare
from ludus.kernels.verify.problem import KernelProblem
from ludus.kernels.verify.result import Speedups, VerifyStatus

WARM_UPS, TIMED, CHECKED = 3, 100, 10
FLUSH_BYTES = 256 << 20
BASELINE = "ludus.kernels.benchmark.baseline"
MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"
ABSENT = (
    "CUDA_ERROR_NO_DEVICE", "no NVIDIA driver is installed", "CUDA_ERROR_STUB_LIBRARY",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "CUDA_ERROR_SYSTEM_NOT_READY",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Measured:
    """A kernel on a device.

    `status` is `passed` where all values are right, those of timed launches too. `times` of the
    kernel; None where it was not timed, or its time is not believed: `unbelieved` says why.
    `speedups` need the times of the reference as well.
    """

    status: VerifyStatus
    message: str
    passed: int = 0
    max_error: float | None = None
    times: Times | None = None
    speedups: Speedups | None = None
    flags: tuple[str, ...] = field(default=())
    unbelieved: str = ""


class Benchmarker:
    """Measures kernels on the first CUDA device; its calls belong to one event loop.

    Args:
        trust_references: run references on the device too, for speed-ups. They are Python, and a
            GPU has no jail here, so this is for problems that you trust: ludus' own, or a data set
            that you have read. Without it, there are times, and no speed-ups.
        kernel_s: seconds for a kernel: trials, times, re-check.
        baseline_s: seconds for a reference: torch.compile takes a minute.
    """

    def __init__(
        self,
        *,
        trust_references: bool = False,
        kernel_s: float = 60.0,
        baseline_s: float = 300.0,
        timed: int = TIMED,
        processes: tuple[Process, Process] | None = None,
    ) -> None:
        self._trust, self._kernel_s, self._baseline_s = trust_references, kernel_s, baseline_s
        self._timed = max(timed, CHECKED)
        self._worker, self._baseline = processes or (Process(), Process(BASELINE))
        self._device: Device | None = None
        self._baselines: dict[str, tuple[list[float], list[float], str]] = {}

    async def device(self) -> Device:
        """The device. Errors: ConfigError without one, with what is missing."""
        if self._device is None:
            try:
                answer, _ = await self._worker.ask({"do": "facts"}, (), self._kernel_s)
            except GoneError as error:
                raise ToolError(f"kernels: the GPU's process: {error}") from None
            if answer.get("kind") != "facts":
                self._worker.retire()
                raise ConfigError(
                    "kernels: timing needs an NVIDIA GPU and its driver, and there is none that "
                    f"can be used: {answer.get('call')}: {answer.get('name')}. Without a GPU, "
                    "leave the benchmark out: kernels are verified on the CPU, and not timed"
                )
            self._device = device_of(answer)
        return self._device

    async def measure(
        self, work: Work, problem: KernelProblem, trials: Sequence[Trial], *, timed: bool = True
    ) -> Measured:
        """Run a kernel on the inputs of each trial, and time it. The last trial follows the
        timing: no launch has seen its inputs before.

        Errors: ConfigError without a device; ToolError where ludus' own process fails.
        """
        device = await self.device()
        first = trials[0]
        job = {
            "do": "run",
            "modules": len(work.modules),
            "work": work.header(),
            "inputs": {tensor.name: len(tensor.data) for tensor in first.inputs},
            "out": len(first.out.data),
            "trials": len(trials),
            "timed": self._timed if timed else 0,
            "warm": WARM_UPS,
            "flush": FLUSH_BYTES,
            "checked": CHECKED,
        }
        blobs = [*work.modules, *(tensor.data for trial in trials for tensor in trial.inputs)]
        try:
            answer, outputs = await self._worker.ask(job, blobs, self._kernel_s)
        except GoneError as error:
            return _gone(error, self._kernel_s)
        if answer.get("kind") != "done":
            self._worker.retire()
            return _failed(answer)
        checked = _compared(answer, outputs, trials)
        if checked.status is not VerifyStatus.PASSED or not timed:
            return checked
        return await self._judged(answer, checked, work, problem, first, device)

    async def _judged(
        self,
        answer: dict[str, Any],
        checked: Measured,
        work: Work,
        problem: KernelProblem,
        trial: Trial,
        device: Device,
    ) -> Measured:
        eager, compiled, reason = await self._baseline_times(problem)
        given = {item.buffer for step in work.steps for item in step.parameters}
        read = sum(len(tensor.data) for tensor in trial.inputs if tensor.name in given)
        try:
            times = summary(answer["events"])
            eager_s = summary(eager).median if eager else None
            verdict = judge(
                answer["events"], answer["walls"], read, len(trial.out.data), device,
                problem.flops, eager_s,
            )  # fmt: skip
        except (DataError, KeyError, TypeError) as error:
            raise ToolError(f"kernels: the GPU's process: {error}") from None
        flags = verdict.flags
        if verdict.problem:
            text = f"{checked.message}; the time is not believed: {verdict.problem}"
            return replace(checked, message=text, flags=flags, unbelieved=verdict.problem)
        speedups = None
        if eager_s is not None:
            speedups = Speedups(
                max(times.median, 1e-9),
                eager_s,
                summary(compiled).median if compiled else None,
                verdict.bandwidth,
                verdict.bandwidth_share,
                verdict.throughput,
                device.name,
                flags,
            )
        told = f"{1e6 * times.median:.1f} us on {device.name}"
        if eager_s is not None:
            told += f", {eager_s / max(times.median, 1e-9):.2f} times as fast as eager PyTorch"
        elif reason:
            told += f"; no speed-up: {reason}"
        return Measured(
            checked.status, told, checked.passed, checked.max_error, times, speedups, flags
        )

    async def _baseline_times(self, problem: KernelProblem) -> tuple[list[float], list[float], str]:
        """Milliseconds of the reference, eager and compiled, and what there is to say."""
        if not self._trust:
            return [], [], "the reference is not trusted to run on the GPU (trust_references)"
        if problem.reference not in self._baselines:
            job = {
                "reference": problem.reference,
                "seed": 0,
                "warm": WARM_UPS,
                "timed": self._timed,
                "flush": FLUSH_BYTES,
            }
            try:
                answer, _ = await self._baseline.ask(job, (), self._baseline_s)
            except GoneError as error:
                answer = {"kind": "error", "text": str(error)}
            if answer.get("kind") != "done":
                self._baseline.retire()
                return [], [], f"the reference cannot be timed: {answer.get('text')}"
            found = list(answer["eager"]), list(answer["compiled"]), str(answer["reason"])
            self._baselines[problem.reference] = found
        return self._baselines[problem.reference]

    async def close(self) -> None:
        """End the processes."""
        await self._worker.close()
        await self._baseline.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


def _gone(error: GoneError, seconds: float) -> Measured:
    if error.how == "late":
        text = f"on the GPU: trials and times take more than {seconds:g} s"
        return Measured(VerifyStatus.TIME_LIMIT, text)
    if error.how == "malformed":
        raise ToolError(f"kernels: the GPU's process: {error}")
    return Measured(VerifyStatus.CRASHED, f"on the GPU: {error}")


def _failed(answer: dict[str, Any]) -> Measured:
    if answer.get("kind") == "wrong":
        return Measured(VerifyStatus.WRONG, f"on the GPU: {str(answer.get('text'))[:200]}")
    name, line = str(answer.get("name")), answer.get("line")
    place = f"line {line}: " if isinstance(line, int) and line else ""
    if name == MEMORY:
        return Measured(VerifyStatus.MEMORY_LIMIT, f"{place}the GPU's memory is not enough")
    if name in ABSENT:
        raise ConfigError(f"kernels: the GPU is gone: {name}")
    return Measured(VerifyStatus.CRASHED, f"{place}on the GPU: {answer.get('call')}: {name}")


def _compared(
    answer: dict[str, Any], outputs: Sequence[bytes], trials: Sequence[Trial]
) -> Measured:
    """Compare the outputs of the trials, and those of timed launches."""
    wanted = list(enumerate(range(len(trials))))
    try:
        timed = [(int(trial), int(number)) for trial, number in answer["checked"]]
    except (KeyError, ValueError, TypeError) as error:
        raise ToolError(f"kernels: the GPU's process: {error}") from None
    if len(outputs) != len(wanted) + len(timed) or any(
        not 0 <= trial < len(trials) for trial, _ in timed
    ):
        raise ToolError("kernels: the GPU's process: its outputs are not complete")
    passed, largest = 0, 0.0
    for place, (got, (trial, number)) in enumerate(zip(outputs, [*wanted, *timed], strict=True)):
        found = compare(got, trials[trial], number)
        largest = max(largest, found.max_error)
        if found.problem:
            what = f"trial {trial + 1} of {len(trials)}"
            if place >= len(wanted):
                what = f"timed launch {number + 1}"
            elif trial == len(trials) - 1 and len(trials) > 1:
                what += ", after the timing"
            text = f"on the GPU: {what}: {found.problem}"
            return Measured(VerifyStatus.WRONG, text, passed, largest)
        passed += place < len(wanted)
    text = f"on the GPU: the values of all {len(trials)} trials are right"
    return Measured(VerifyStatus.PASSED, text, passed, largest)
