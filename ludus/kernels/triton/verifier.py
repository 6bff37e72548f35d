"""Verification of the values of a kernel in Triton.

    async with TritonVerifier() as verifier:
        verified = await verifier.verify(source, KernelProblem.of(task), seed=7)
        verified.status, verified.message

Triton compiles the kernel for a GPU, without one, and its interpreter runs it on a CPU. Both happen
in the jail, apart from the reference; the outputs are compared here.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from ludus.core.errors import DataError
from ludus.kernels.benchmark.benchmarker import Benchmarker
from ludus.kernels.benchmark.work import triton_work
from ludus.kernels.cache import CompileCache
from ludus.kernels.triton.compiler import LIMITS, TritonCompiler
from ludus.kernels.triton.launches import (
    SIZES,
    TritonPlan,
    Variant,
    read_triton_launches,
    variant_of,
)
from ludus.kernels.triton.runs import Interpreter
from ludus.kernels.triton.source import read_source
from ludus.kernels.verify.job import Job, too_long, trial_seeds
from ludus.kernels.verify.problem import Interface, KernelProblem
from ludus.kernels.verify.reference import References, Referred
from ludus.kernels.verify.result import Verified, VerifyStatus
from ludus.kernels.verify.verifier import TRIALS
from ludus.sandbox.base import Limits


class TritonVerifier:
    """Verifies kernels in Triton on the CPU; its calls belong to one event loop.

    Args:
        architecture: for which Triton compiles.
        parallel: runs at the same time of each kind; default: 2 for each core.
        cache: of compilations; None compiles each source anew.
        trials: on fresh inputs, at least 2; one more follows.
        benchmark: runs kernels that passed on a GPU too, and times them. It stays open.

    Errors: MissingDependency without Triton; ConfigError for a version of Triton that does not fit
    NumPy, or where a layer of the sandbox is missing.
    """

    def __init__(
        self,
        architecture: str = "sm_90",
        parallel: int | None = None,
        cache: CompileCache | None = None,
        trials: int = TRIALS,
        compile_limits: Limits = LIMITS,
        run_limits: Limits | None = None,
        benchmark: Benchmarker | None = None,
    ) -> None:
        self._benchmark = benchmark
        self._architecture, self._trials = architecture, max(trials, 2)
        self._compiler = TritonCompiler(compile_limits, cache, parallel)
        self._references = References(parallel=parallel)
        given = {"limits": run_limits} if run_limits else {}
        self._interpreter = Interpreter(parallel=parallel, **given)

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

        Errors: ToolError where the sandbox fails: the kernel is not to blame.
        """
        job = Job(self._trials + 1)
        if text := too_long(source):
            return job.ended(VerifyStatus.REFUSED, text)
        source = source.replace("\r\n", "\n")
        began = time.monotonic()
        read = read_source(source)
        job.seconds["analyse"] = time.monotonic() - began
        if read.problem is not None:
            return job.ended(read.problem.status, str(read.problem))
        began = time.monotonic()
        referred = await self._references.trials(problem.reference, self._seeds(seed))
        job.seconds["reference"] = time.monotonic() - began
        if referred.problem:
            return job.ended(VerifyStatus.BAD_REFERENCE, referred.problem)
        face = referred.interface
        try:
            plan = read_triton_launches(source, read.kernels, face.shapes, face.numbers)
            variants = variants_of(plan, face)
        except DataError as error:
            return job.ended(VerifyStatus.BAD_LAUNCH, str(error))
        began = time.monotonic()
        done = await self._compiler.compile(source, variants, self._architecture)
        job.compiled = done.compiled
        job.seconds["compile"] = time.monotonic() - began
        if not done.compiled.ok:
            return job.uncompiled(done.compiled)
        found = job.judged(
            await self._interpreter.run(source, plan, referred.trials, seed), referred
        )
        outside = found.status is VerifyStatus.UNSUPPORTED
        if self._benchmark is None or not (found.ok or outside):
            return found
        return await self._on_device(self._benchmark, job, source, plan, problem, referred)

    async def _on_device(
        self,
        benchmark: Benchmarker,
        job: Job,
        source: str,
        plan: TritonPlan,
        problem: KernelProblem,
        referred: Referred,
    ) -> Verified:
        """The result on a GPU, with its times."""
        device = await benchmark.device()
        variants = variants_of(plan, referred.interface)
        done = await self._compiler.compile(source, variants, device.architecture)
        if not done.compiled.ok:
            return job.uncompiled(done.compiled)
        try:
            work = triton_work(done.images, plan, dtypes_of(plan, referred.interface))
        except DataError as error:
            return job.ended(VerifyStatus.UNSUPPORTED, str(error))
        return job.measured(await benchmark.measure(work, problem, referred.trials))

    def _seeds(self, seed: int) -> tuple[int, ...]:
        return trial_seeds(seed, self._trials + 1)

    async def close(self) -> None:
        """End all processes."""
        await self._compiler.close()
        await self._references.close()
        await self._interpreter.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


def variants_of(plan: TritonPlan, face: Interface) -> list[Variant]:
    """The kernels to compile for a plan, each once, in the order of the launches.

    Errors: DataError for a type that Triton does not have.
    """
    dtypes = dtypes_of(plan, face)
    for name, kind in dtypes.items():
        if kind not in SIZES:
            raise DataError(f"`{name}` is {kind}, which Triton does not have")
    return list(dict.fromkeys(variant_of(launch, dtypes) for launch in plan.launches))


def dtypes_of(plan: TritonPlan, face: Interface) -> dict[str, str]:
    """The types of all buffers by name."""
    return {**face.dtypes, **{name: kind for name, (kind, _) in plan.scratch.items()}}
