"""A verification under way: what is known so far, and its end."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from ludus.kernels.analysis.findings import Finding
from ludus.kernels.benchmark.benchmarker import Measured
from ludus.kernels.result import Compiled, CompileStatus
from ludus.kernels.verify.compare import compare
from ludus.kernels.verify.reference import Referred
from ludus.kernels.verify.result import Speedups, Verified, VerifyStatus

MAX_SOURCE = 100_000
STOPPED = {
    CompileStatus.TIME_LIMIT: VerifyStatus.TIME_LIMIT,
    CompileStatus.MEMORY_LIMIT: VerifyStatus.MEMORY_LIMIT,
}


@dataclass(frozen=True, slots=True)
class Ran:
    """The end of a run: `outputs` of each trial, or a status with its message. `build_s` None: runs
    of this kind build nothing."""

    outputs: tuple[bytes, ...] = ()
    status: VerifyStatus | None = None
    message: str = ""
    trial: int = 0
    build_s: float | None = None
    run_s: float = 0.0


class Job:
    """The results for a kernel so far."""

    def __init__(self, trials: int) -> None:
        self.trials = trials
        self.seconds: dict[str, float] = {}
        self.findings: tuple[Finding, ...] = ()
        self.compiled: Compiled | None = None
        self.speedups: Speedups | None = None
        self.unbelieved = ""

    def uncompiled(self, compiled: Compiled) -> Verified:
        error = compiled.errors[0]
        place = f"line {error.line}: " if error.line else ""
        status = STOPPED.get(compiled.status, VerifyStatus.COMPILE_ERROR)
        return self.ended(status, f"{place}{error.message[:300]}")

    def judged(self, run: Ran, referred: Referred) -> Verified:
        """The result of the outputs."""
        self.seconds |= {"run": run.run_s} | (
            {"build": run.build_s} if run.build_s is not None else {}
        )
        if run.status is not None:
            return self.ended(run.status, run.message, run.trial if run.trial > 0 else 0)
        passed, largest, message = 0, 0.0, ""
        for number, (got, trial) in enumerate(zip(run.outputs, referred.trials, strict=True)):
            found = compare(got, trial, number)
            largest = max(largest, found.max_error)
            passed += not found.problem
            if found.problem and not message:
                message = f"trial {number + 1} of {self.trials}: {found.problem}"
        status = VerifyStatus.WRONG if message else VerifyStatus.PASSED
        told = message or f"the values of all {self.trials} trials are right"
        return self.ended(status, told, passed, largest)

    def measured(self, found: Measured) -> Verified:
        """The result on a GPU."""
        self.speedups, self.unbelieved = found.speedups, found.unbelieved
        return self.ended(found.status, found.message, found.passed, found.max_error)

    def ended(
        self, status: VerifyStatus, message: str, passed: int = 0, error: float | None = None
    ) -> Verified:
        return Verified(
            status,
            " ".join(message.split()),
            passed,
            self.trials,
            error,
            self.compiled.diagnostics if self.compiled else (),
            self.compiled,
            self.findings,
            self.speedups,
            self.unbelieved,
            self.seconds,
        )


def too_long(source: str) -> str:
    """The reason why a source is not read, or an empty text."""
    size = len(source.encode("utf-8", "replace"))
    return f"the source has {size:,} bytes, and {MAX_SOURCE:,} at most are read" * (
        size > MAX_SOURCE
    )


def trial_seeds(seed: int, number: int) -> tuple[int, ...]:
    """Seeds of the trials: another `seed`, other inputs."""
    return tuple(
        int.from_bytes(hashlib.sha256(f"kernel:{seed}:{i}".encode()).digest()[:4], "big")
        for i in range(number)
    )
