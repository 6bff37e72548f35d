"""Verification of a kernel's values: analysis, compiler, then runs on fresh inputs.

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
from ludus.kernels.benchmark.benchmarker import Benchmarker
from ludus.kernels.benchmark.work import cuda_work
from ludus.kernels.cache import CompileCache
from ludus.kernels.compiler import CudaCompiler
from ludus.kernels.launches import Plan, device_code, read_launches
from ludus.kernels.result import Compiled
from ludus.kernels.verify.job import STOPPED, Job, too_long, trial_seeds
from ludus.kernels.verify.problem import Interface, KernelProblem
from ludus.kernels.verify.reference import References, Referred
from ludus.kernels.verify.result import Verified, VerifyStatus
from ludus.kernels.verify.shim_runs import Shim
from ludus.kernels.verify.subset import Problem, problems
from ludus.sandbox.base import Limits

UNSUPPORTED = VerifyStatus.UNSUPPORTED
TRIALS = 5
"""Trials on fresh inputs; one more, with another seed, follows them."""
KEPT_COMPILED = 1024
"""Compilations that are kept in memory."""
COMPILE_LIMITS = Limits(run_s=20.0, memory_mb=1024, num_processes=16, output_bytes=1_000_000)


class KernelVerifier:
    """Verifies kernels on the CPU; its calls belong to one event loop.

    Args:
        architecture: for which NVRTC compiles.
        parallel: runs at the same time of each kind; default: 2 for each core.
        cache: of compilations; None compiles each source anew.
        trials: on fresh inputs, at least 2; one more follows.
        benchmark: runs kernels that passed on a GPU too, and those that the CPU does not run, and
            times them; without it, nothing is timed. It stays open.

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
        benchmark: Benchmarker | None = None,
    ) -> None:
        self._benchmark = benchmark
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

        Errors: ToolError where the sandbox or the GPU's process fails: the kernel is not to blame;
        ConfigError where a benchmark is given, and there is no GPU.
        """
        job = Job(self._trials + 1)
        if text := too_long(source):
            return job.ended(VerifyStatus.REFUSED, text)
        code = device_code(source)  # so what is known of the same code is found
        began = time.monotonic()
        job.findings, refused, outside = _looked_at(code)
        job.seconds["analyse"] = time.monotonic() - began
        if refused:
            return job.ended(VerifyStatus.REFUSED, refused)
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
        if outside is None:
            found = job.judged(await self._shim.run(code, plan, referred.trials, seed), referred)
            if self._benchmark is None or not (found.ok or found.status is UNSUPPORTED):
                return found
        elif self._benchmark is None:
            return job.ended(UNSUPPORTED, str(outside))
        return await self._on_device(self._benchmark, job, source, plan, problem, referred)

    async def _on_device(
        self,
        benchmark: Benchmarker,
        job: Job,
        source: str,
        plan: Plan,
        problem: KernelProblem,
        referred: Referred,
    ) -> Verified:
        """The result on a GPU, with its times."""
        device = await benchmark.device()
        try:
            work = await cuda_work(self._compiler, source, plan, device.architecture)
        except DataError as error:
            return job.ended(VerifyStatus.BAD_LAUNCH, str(error))
        if isinstance(work, Compiled):
            return job.uncompiled(work)
        return job.measured(await benchmark.measure(work, problem, referred.trials))

    async def _compiled(self, code: str) -> Compiled:
        """Errors: ToolError."""

        async def compile_() -> tuple[Compiled, bool]:
            compiled = await self._compiler.compile(code, self._architecture)
            return compiled, compiled.status not in STOPPED

        return await self._once.of(
            hashlib.sha256(code.encode("utf-8", "surrogatepass")).digest(), compile_
        )

    def _seeds(self, seed: int) -> tuple[int, ...]:
        return trial_seeds(seed, self._trials + 1)

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


def _check_kernels(plan: Plan, compiled: Compiled) -> None:
    """Errors: DataError for a launch of a kernel that the cubin lacks."""
    names = {kernel.name.partition("<")[0].rpartition("::")[2] for kernel in compiled.kernels}
    for launch in plan.launches:
        if "<" not in launch.kernel and launch.name not in names:
            known = ", ".join(sorted(names)) or "none"
            raise DataError(
                f"line {launch.line}: there is no kernel `{launch.name}`: the kernels are {known}"
            )
