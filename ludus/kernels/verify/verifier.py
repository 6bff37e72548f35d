"""Whether a kernel computes the right values: analysis, compiler, then runs on fresh inputs.

    async with KernelVerifier() as verifier:
        verified = await verifier.verify(source, KernelProblem.of(task), seed=7)
        verified.status, verified.message

The reference, the compiler and the kernel have a process each, in the jail. The outputs are
compared here: a kernel's process never holds the reference's output.
"""

from __future__ import annotations

import hashlib
import time
from contextlib import AsyncExitStack
from functools import lru_cache
from types import TracebackType
from typing import Self

from ludus.core.errors import DataError
from ludus.core.once import Once
from ludus.kernels.analysis.analyse import analyse
from ludus.kernels.analysis.findings import SAFE, Analysis, Finding, Severity
from ludus.kernels.cache import CompileCache
from ludus.kernels.compiler import CudaCompiler
from ludus.kernels.launches import Plan, device_code, read_launches
from ludus.kernels.result import Compiled, CompileStatus
from ludus.kernels.verify.compare import compare
from ludus.kernels.verify.problem import Interface, KernelProblem
from ludus.kernels.verify.reference import References, Referred
from ludus.kernels.verify.result import Verified, VerifyStatus
from ludus.kernels.verify.shim_runs import Shim, ShimRun
from ludus.kernels.verify.subset import Problem, problems
from ludus.sandbox.base import Limits

TRIALS = 5
"""Trials on fresh inputs; one more, with another seed, follows them."""
MAX_SOURCE = 100_000
KEPT_COMPILED = 1024
"""Compilations that are kept in memory."""
COMPILE_LIMITS = Limits(run_s=20.0, memory_mb=1024, num_processes=16, output_bytes=1_000_000)
STOPPED = {
    CompileStatus.TIME_LIMIT: VerifyStatus.TIME_LIMIT,
    CompileStatus.MEMORY_LIMIT: VerifyStatus.MEMORY_LIMIT,
}


class KernelVerifier:
    """Verifies kernels on the CPU; its calls belong to one event loop.

    Args:
        architecture: for which NVRTC compiles.
        parallel: runs at the same time of each kind; default: 2 for each core.
        cache: of compilations; None compiles each source anew.
        trials: on fresh inputs, at least 2; one more follows.

    Errors: ConfigError without g++, or where a layer of the sandbox is missing; MissingDependency
    without NVRTC.
    """

    def __init__(
        self,
        architecture: str = "sm_90",
        parallel: int | None = None,
        cache: CompileCache | None = None,
        trials: int = TRIALS,
        compile_limits: Limits = COMPILE_LIMITS,
        run_limits: Limits | None = None,
    ) -> None:
        self._architecture, self._trials = architecture, max(trials, 2)
        self._compiler = CudaCompiler(compile_limits, cache, parallel)
        self._once = Once[Compiled](KEPT_COMPILED)
        self._references = References(parallel=parallel)
        self._shim = Shim(run_limits, parallel) if run_limits else Shim(parallel=parallel)

    async def interface(self, problem: KernelProblem, seed: int = 0) -> Interface:
        """Names, shapes and types that a kernel of a problem is given.

        Errors: DataError for a reference with which no test is possible; ToolError.
        """
        referred = await self._references.trials(problem.reference, self._seeds(seed))
        if referred.problem:
            raise DataError(referred.problem)
        return referred.interface

    async def verify(self, source: str, problem: KernelProblem, seed: int = 0) -> Verified:
        """Verify a kernel. What is wrong with it, or with the reference, is a result.

        Give each episode another seed: outputs of a known seed could be learnt by heart.

        Errors: ToolError where the sandbox fails: the kernel is not to blame.
        """
        job = _Job(self._trials + 1)
        code = device_code(source)  # so what is known of the same code is found
        if (text := _too_long(source)) or (text := job.analysed(code)):
            return job.ended(VerifyStatus.REFUSED, text)
        began = time.monotonic()
        referred = await self._references.trials(problem.reference, self._seeds(seed))
        job.seconds["reference"] = time.monotonic() - began
        if referred.problem:
            return job.ended(VerifyStatus.BAD_REFERENCE, referred.problem)
        began = time.monotonic()
        job.compiled = await self._compiled(code)
        job.seconds["compile"] = time.monotonic() - began
        if not job.compiled.ok:
            return job.uncompiled(job.compiled)
        try:
            face = referred.interface
            plan = read_launches(source, face.shapes, face.numbers)
            _check_kernels(plan, job.compiled)
        except DataError as error:
            return job.ended(VerifyStatus.BAD_LAUNCH, str(error))
        if job.outside is not None:
            return job.ended(VerifyStatus.UNSUPPORTED, str(job.outside))
        return job.judged(await self._shim.run(code, plan, referred.trials, seed), referred)

    async def _compiled(self, code: str) -> Compiled:
        """Errors: ToolError."""

        async def compile_() -> tuple[Compiled, bool]:
            compiled = await self._compiler.compile(code, self._architecture)
            return compiled, compiled.status not in STOPPED

        return await self._once.of(
            hashlib.sha256(code.encode("utf-8", "surrogatepass")).digest(), compile_
        )

    def _seeds(self, seed: int) -> tuple[int, ...]:
        return tuple(
            int.from_bytes(hashlib.sha256(f"kernel:{seed}:{i}".encode()).digest()[:4], "big")
            for i in range(self._trials + 1)
        )

    async def close(self) -> None:
        """End all processes."""
        async with AsyncExitStack() as stack:  # all, also where one fails
            for part in (self._compiler, self._references, self._shim):
                stack.push_async_callback(part.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


class _Job:
    """What is known so far of a kernel."""

    def __init__(self, trials: int) -> None:
        self.trials = trials
        self.seconds: dict[str, float] = {}
        self.findings: tuple[Finding, ...] = ()
        self.compiled: Compiled | None = None
        self.outside: Problem | None = None

    def analysed(self, code: str) -> str:
        """Why the code is refused, or an empty text."""
        began = time.monotonic()
        self.findings, refused, self.outside = _looked_at(code)
        self.seconds["analyse"] = time.monotonic() - began
        return refused

    def uncompiled(self, compiled: Compiled) -> Verified:
        error = compiled.errors[0]
        place = f"line {error.line}: " if error.line else ""
        status = STOPPED.get(compiled.status, VerifyStatus.COMPILE_ERROR)
        return self.ended(status, f"{place}{error.message[:300]}")

    def judged(self, run: ShimRun, referred: Referred) -> Verified:
        """The result of the outputs."""
        self.seconds |= {"build": run.build_s, "run": run.run_s}
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
            None,
            self.seconds,
        )


@lru_cache(maxsize=1024)
def _looked_at(code: str) -> tuple[tuple[Finding, ...], str, Problem | None]:
    """The findings of the analysis, why the code is refused or an empty text, and what the CPU does
    not run."""
    found: Analysis = analyse(code)
    outside = None
    for problem in problems(code):
        if problem.refused:
            return found.findings, str(problem), outside
        outside = outside or problem
    unsafe = [f for f in found.findings if f.kind == SAFE and f.severity is Severity.ERROR]
    if not unsafe:
        return found.findings, "", outside
    first = unsafe[0]
    text = f"line {first.line}: {first.rule}: {first.reason}; {first.suggestion}"
    return found.findings, text, outside


def _too_long(source: str) -> str:
    size = len(source.encode("utf-8", "replace"))
    return f"the source has {size:,} bytes, and {MAX_SOURCE:,} at most are read" * (
        size > MAX_SOURCE
    )


def _check_kernels(plan: Plan, compiled: Compiled) -> None:
    """Errors: DataError for a launch of a kernel that the cubin lacks."""
    names = {kernel.name.partition("<")[0].rpartition("::")[2] for kernel in compiled.kernels}
    for launch in plan.launches:
        if "<" not in launch.kernel and launch.name not in names:
            known = ", ".join(sorted(names)) or "none"
            raise DataError(
                f"line {launch.line}: there is no kernel `{launch.name}`: the kernels are {known}"
            )
