"""Triton to cubins, in the sandbox: without a GPU.

async with TritonCompiler() as compiler:
    compiled = await compiler.compile(source, [variant], "sm_90")
    compiled.errors                         (Diagnostic('error', ..., 7, 12),)
    compiled.kernel("add").registers        15
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

from ludus.core.errors import ConfigError, DataError, MissingDependency
from ludus.kernels.cache import CompileCache, Entry
from ludus.kernels.diagnostics import Diagnostic
from ludus.kernels.ends import check_blame
from ludus.kernels.occupancy import limits_of
from ludus.kernels.result import Compiled, CompileStatus, KernelResources, failed, kernels_of
from ludus.kernels.triton import inside_compile as inside
from ludus.kernels.triton.launches import Variant
from ludus.sandbox.base import Code, Limits, RunResult, RunStatus
from ludus.sandbox.jail import Jail

PACKAGE = "triton"
LIMITS = Limits(run_s=30.0, memory_mb=4096, num_processes=32, disk_mb=64, output_bytes=1_000_000)
"""LLVM reserves far more addresses than it uses."""
PROGRAM = f"import {inside.MODULE}; {inside.MODULE}.run()"
STOPPED = {
    RunStatus.TIME_LIMIT: CompileStatus.TIME_LIMIT,
    RunStatus.MEMORY_LIMIT: CompileStatus.MEMORY_LIMIT,
    RunStatus.OUTPUT_LIMIT: CompileStatus.OUTPUT_LIMIT,
}


@dataclass(frozen=True, slots=True)
class Image:
    """A compiled variant: its cubin, and what a launch needs to know. `shared_bytes` are dynamic
    shared memory; `scratch`: bytes of memory that a launch must give."""

    variant: Variant
    symbol: str
    cubin: bytes
    num_warps: int
    shared_bytes: int
    scratch: int


@dataclass(frozen=True, slots=True)
class TritonCompiled:
    """The result of a compilation; `images` in the order of the variants."""

    compiled: Compiled
    images: tuple[Image, ...] = ()


class TritonCompiler:
    """Compiles kernels in Triton; its calls belong to one event loop.

    Args:
        limits: of each compilation.
        cache: None compiles each source anew.
        parallel: compilations at the same time; default: 2 for each core.

    Errors: MissingDependency without Triton; ConfigError where a layer of the sandbox is missing.
    """

    def __init__(
        self,
        limits: Limits = LIMITS,
        cache: CompileCache | None = None,
        parallel: int | None = None,
    ) -> None:
        self.name = f"Triton {triton_version()}"
        self._limits, self._cache = limits, cache
        self._jail = Jail(packages=(PACKAGE, "numpy"), max_runs=parallel)
        self._jail.prelude(inside.MODULE, Path(inside.__file__).read_text(encoding="utf-8"))

    async def compile(
        self, source: str, variants: Sequence[Variant], architecture: str = "sm_90"
    ) -> TritonCompiled:
        """Compile a source that `read_source` has allowed.

        A source that does not compile, or exceeds a limit, is a result and no error.

        Errors: ConfigError for an unknown architecture; ToolError where the sandbox fails.
        """
        limits_of(architecture)
        jobs = [_job(variant) for variant in variants]
        given = {"capability": int(architecture.rstrip("af").removeprefix("sm_")), "jobs": jobs}
        text = json.dumps(given)
        key = CompileCache.key(self.name, source, architecture, text)
        kept = self._cache.get(key) if self._cache else None
        if kept is not None:
            done = self._judged(kept, variants, architecture)
            return replace(done, compiled=replace(done.compiled, cached=True))
        fetch = ["answer.json", *(f"{i}.cubin" for i in range(len(jobs)))]
        files = {"source.txt": source.encode(), "jobs.json": text.encode()}
        result = await self._jail.run(Code(PROGRAM, files=files, fetch=fetch), self._limits)
        if told := self._ended(result, architecture):
            return TritonCompiled(replace(told, seconds=result.seconds))
        cubins = [result.files.get(f"{i}.cubin", b"") for i in range(len(jobs))]
        answer = result.files["answer.json"]
        entry = Entry(result.exit_code or 0, result.seconds, answer, _joined(cubins))
        compiled = self._judged(entry, variants, architecture)
        kinds = (CompileStatus.OK, CompileStatus.ERROR)
        if self._cache and compiled.compiled.status in kinds:
            self._cache.put(key, entry)
        return compiled

    def _ended(self, result: RunResult, architecture: str) -> Compiled | None:
        """The result, where the compiler came to no answer. Errors: ToolError."""
        limits, status = self._limits, STOPPED.get(result.status)
        if status is None:
            check_blame(result, "Triton's compiler", limits)
        if "MemoryError" in result.stderr[-2000:]:
            status = CompileStatus.MEMORY_LIMIT
        if status is not None:
            message = {
                CompileStatus.TIME_LIMIT: f"compiling takes more than {limits.run_s:g} s",
                CompileStatus.MEMORY_LIMIT: f"compiling needs more than {limits.memory_mb} MB",
                CompileStatus.OUTPUT_LIMIT: f"the log or the cubins exceed {limits.disk_mb} MB",
            }[status]
            return failed(status, architecture, self.name, message)
        if result.exit_code in (0, inside.REFUSED) and "answer.json" in result.files:
            return None
        code = result.exit_code or 0
        message = f"the compiler ended by signal {-code}" if code < 0 else f"exit code {code}"
        said = result.stderr.strip().splitlines()
        message += f": {said[-1][:200]}" if said else ""
        return failed(CompileStatus.CRASHED, architecture, self.name, message)

    def _judged(
        self, entry: Entry, variants: Sequence[Variant], architecture: str
    ) -> TritonCompiled:
        try:
            answer = json.loads(entry.log)
            if "error" in answer:
                return TritonCompiled(self._refused(answer, architecture, entry.seconds))
            images, kernels = [], []
            for variant, facts, cubin in zip(
                variants, answer["facts"], _split(entry.cubin), strict=True
            ):
                image = _image(variant, facts, cubin)
                found = kernels_of(cubin, str(facts["log"]), architecture)
                kernels += [_with_shared(kernel, image) for kernel in found]
                images.append(image)
        except (ValueError, KeyError, TypeError, AttributeError, DataError) as error:
            message = f"its answer cannot be read: {str(error)[:200]}"
            told = failed(CompileStatus.CRASHED, architecture, self.name, message)
            return TritonCompiled(told)
        most = limits_of(architecture).shared_per_block
        for image in images:
            if image.shared_bytes > most:
                message = (
                    f"`{image.variant.kernel}` needs {image.shared_bytes:,} bytes of shared "
                    f"memory, and {architecture} has {most:,} for a block"
                )
                told = failed(CompileStatus.ERROR, architecture, self.name, message)
                return TritonCompiled(replace(told, seconds=entry.seconds))
        log = "".join(str(facts["log"]) for facts in answer["facts"])
        return TritonCompiled(
            Compiled(
                CompileStatus.OK,
                architecture,
                self.name,
                (),
                tuple(kernels),
                images[0].cubin if images else b"",
                log[: self._limits.output_bytes],
                entry.seconds,
            ),
            tuple(images),
        )

    def _refused(self, answer: dict[str, Any], architecture: str, seconds: float) -> Compiled:
        line, column = answer.get("line"), answer.get("column")
        error = Diagnostic(
            "error",
            str(answer["error"]),
            line if isinstance(line, int) else None,
            column if isinstance(column, int) else None,
            inside.FILE,
        )
        return Compiled(CompileStatus.ERROR, architecture, self.name, (error,), seconds=seconds)

    async def close(self) -> None:
        """End the compiler's processes."""
        await self._jail.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def triton_version() -> str:
    """Triton's version. Errors: MissingDependency."""
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        raise MissingDependency(PACKAGE, "triton", "compiling Triton") from None


def require_interpreter() -> None:
    """Errors: ConfigError where Triton's interpreter does not work with this NumPy."""
    found, numpy = triton_version(), version("numpy")
    if _numbers(found) < (3, 9) and _numbers(numpy) >= (2, 4):
        raise ConfigError(
            f"kernels: the interpreter of Triton {found} does not work with NumPy {numpy}: "
            "install triton>=3.9, or numpy<2.4"
        )


def _numbers(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def _job(variant: Variant) -> dict[str, Any]:
    return {
        "kernel": variant.kernel,
        "signature": dict(variant.signature),
        "constants": dict(variant.constants),
        "aligned": list(variant.aligned),
        "options": dict(variant.options),
    }


def _image(variant: Variant, facts: dict[str, Any], cubin: bytes) -> Image:
    if int(facts["num_ctas"]) != 1:
        raise ValueError("clusters of blocks")
    scratch = int(facts["global_scratch_size"]) + int(facts["profile_scratch_size"])
    warps, shared = int(facts["num_warps"]), int(facts["shared"])
    return Image(variant, str(facts["name"]), cubin, warps, shared, scratch)


def _with_shared(kernel: KernelResources, image: Image) -> KernelResources:
    """Triton takes all of its shared memory at the launch, so ptxas does not see it."""
    return replace(kernel, shared_bytes=kernel.shared_bytes + image.shared_bytes)


def _joined(cubins: Sequence[bytes]) -> bytes:
    return b"".join(len(cubin).to_bytes(8, "little") + cubin for cubin in cubins)


def _split(data: bytes) -> list[bytes]:
    cubins, at = [], 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 8], "little")
        cubins.append(data[at + 8 : at + 8 + size])
        at += 8 + size
    return cubins
