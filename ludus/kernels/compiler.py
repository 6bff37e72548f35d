"""CUDA C++ to cubins, in the sandbox: NVRTC, without a toolkit and without a GPU.

    async with CudaCompiler() as compiler:
        compiled = await compiler.compile(source, "sm_90")
        compiled.errors                         (Diagnostic('error', 'identifier "x" ...', 3, 12),)
        compiled.kernel("matmul").registers     38

A zygote in the jail has loaded NVRTC and compiled once. Each compilation is a fork of it in fresh
namespaces, with limits of its own, so it finds the compiler warm, and nothing of other sources.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Self

from ludus.core.errors import ConfigError, DataError, MissingDependency
from ludus.kernels import inside
from ludus.kernels.cache import CompileCache, Entry
from ludus.kernels.diagnostics import Diagnostic, diagnostics_of
from ludus.kernels.ends import check_blame, cpu_seconds, out_of_time, waiting_longer
from ludus.kernels.occupancy import limits_of
from ludus.kernels.result import Compiled, CompileStatus, failed, kernels_of
from ludus.sandbox.base import Code, Limits, RunResult, RunStatus
from ludus.sandbox.jail import Jail

NVRTC = "nvidia-cuda-nvrtc"
PACKAGES = (NVRTC, "nvidia-cuda-runtime", "nvidia-cuda-crt", "nvidia-cuda-cccl")
"""The compiler, and the headers of the runtime (`cuda_fp16.h`), of wmma, and of libcu++."""
LIMITS = Limits(run_s=30.0, memory_mb=1024, num_processes=16, disk_mb=64, output_bytes=1_000_000)
MAX_SOURCE = 1_000_000
"""Limit of a source's length, in bytes."""
OPTIONS = (
    r"-?-use_fast_math", r"--(fmad|ftz|prec-sqrt|prec-div)=(true|false)",
    r"--maxrregcount=\d{1,3}", r"-?-std=c\+\+(11|14|17|20)", r"-D[A-Za-z_]\w*(=[\w.+-]*)?",
    r"--device-as-default-execution-space", r"--extra-device-vectorization", r"--restrict",
    r"-?-lineinfo",
)  # fmt: skip
"""Patterns of options that a caller may give; others could read or write files."""
ALWAYS = ("--ptxas-options=-v",)
PROGRAM = f"import {inside.MODULE}; {inside.MODULE}.run({{}})"
OUT_OF_MEMORY, INVALID_OPTION, COMPILATION = 1, 5, 6
"""Codes of NVRTC (nvrtc.h, nvrtcResult)."""
EXHAUSTED = re.compile(r"^kernel\.cu\(\d+\): catastrophic error: out of memory$", re.M)
STOPPED = {
    RunStatus.MEMORY_LIMIT: CompileStatus.MEMORY_LIMIT,
    RunStatus.OUTPUT_LIMIT: CompileStatus.OUTPUT_LIMIT,
}


class CudaCompiler:
    """Compiles CUDA C++; its calls belong to one event loop.

    It starts with the first compilation, in about half a second.

    Args:
        limits: of each compilation.
        cache: None compiles each source anew.
        parallel: compilations at the same time; default: 2 for each core.

    Errors: MissingDependency without NVRTC; ConfigError where a layer of the sandbox is missing.
    """

    def __init__(
        self,
        limits: Limits = LIMITS,
        cache: CompileCache | None = None,
        parallel: int | None = None,
    ) -> None:
        self._versions = [_version(name) for name in PACKAGES]
        self.name = f"NVRTC {self._versions[0]}"
        self._limits, self._cache = limits, cache
        self._jail = Jail(packages=PACKAGES, max_runs=parallel)
        self._jail.prelude(inside.MODULE, Path(inside.__file__).read_text(encoding="utf-8"))

    async def compile(
        self,
        source: str,
        architecture: str = "sm_90",
        options: Sequence[str] = (),
        names: Sequence[str] = (),
    ) -> Compiled:
        """Compile a source for an architecture. `names`: kernels whose symbols are needed, such as
        `tile<64>`; the result is not kept then.

        A source that does not compile, or exceeds a limit, is a result and no error.

        Errors: ConfigError for an architecture or an option that the compiler does not have, or
        that is not allowed; ToolError where the sandbox fails: the source is not to blame.
        """
        limits_of(architecture)
        check_options(options)
        if problem := unreadable(source):
            return Compiled(CompileStatus.ERROR, architecture, self.name, (problem,))
        given = [f"--gpu-architecture={architecture}", *ALWAYS, *options]
        key = CompileCache.key(source, architecture, *given, *self._versions)
        cache = None if names else self._cache
        kept = cache.get(key) if cache else None
        if kept is not None:
            return replace(self._judged(kept, architecture), cached=True)
        files = {inside.SOURCE: source.encode(), inside.OPTIONS: json.dumps(given).encode()}
        if names:
            files[inside.NAMES] = json.dumps(names).encode()
        text = PROGRAM.format(cpu_seconds(self._limits))
        code = Code(text, "python", files=files, fetch=[inside.CUBIN, inside.SYMBOLS])
        result = await self._jail.run(code, waiting_longer(self._limits))
        ended = self._ended(result, architecture)
        if isinstance(ended, Compiled):
            return replace(ended, seconds=result.seconds)
        compiled = self._judged(ended, architecture)
        if cache and compiled.status in (CompileStatus.OK, CompileStatus.ERROR):
            cache.put(key, ended)
        return replace(compiled, symbols=_symbols(result)) if names else compiled

    def _ended(self, result: RunResult, architecture: str) -> Entry | Compiled:
        """NVRTC's answer; a result, where it did not come to one.

        Errors: ConfigError, ToolError.
        """
        check_blame(result, "NVRTC", self._limits)
        if out_of_time(result):
            return self._stopped(CompileStatus.TIME_LIMIT, architecture, result.stdout)
        if status := STOPPED.get(result.status):
            return self._stopped(status, architecture, result.stdout)
        code = result.exit_code or 0
        if code == inside.TOO_LARGE:
            return self._stopped(CompileStatus.OUTPUT_LIMIT, architecture, result.stdout)
        if code < 0:
            message = f"the compiler ended by signal {-code}"
            if -code == signal.SIGABRT:
                message += f"; it does so where {self._limits.memory_mb} MB are not enough"
            return failed(CompileStatus.CRASHED, architecture, self.name, message, result.stdout)
        if 0 < code <= inside.FAILED:
            message = (result.stderr.strip().splitlines() or [f"exit code {code}"])[-1][:300]
            return failed(CompileStatus.CRASHED, architecture, self.name, message)
        code = code - inside.FAILED if code else 0
        if code == OUT_OF_MEMORY or (code and EXHAUSTED.search(result.stdout)):
            return self._stopped(CompileStatus.MEMORY_LIMIT, architecture, result.stdout)
        if code == INVALID_OPTION:
            said = (result.stdout.strip().splitlines() or ["an invalid option"])[0]
            raise ConfigError(
                f"{architecture}: {self.name} refuses it: {said[:200]}; it compiles for "
                f"{result.stderr.strip()[:300]}"
            )
        cubin = result.files.get(inside.CUBIN, b"")
        return Entry(code, result.seconds, result.stdout.encode(), cubin)

    def _stopped(self, status: CompileStatus, architecture: str, log: str) -> Compiled:
        limits = self._limits
        message = {
            CompileStatus.TIME_LIMIT: f"compiling takes more than {cpu_seconds(limits)} s",
            CompileStatus.MEMORY_LIMIT: f"compiling needs more than {limits.memory_mb} MB",
            CompileStatus.OUTPUT_LIMIT: f"the log exceeds {limits.output_bytes:,} bytes, or the "
            f"cubin {limits.disk_mb} MB",
        }[status]
        return replace(
            failed(status, architecture, self.name, message),
            diagnostics=(Diagnostic("error", message), *diagnostics_of(log)),
            log=log,
        )

    def _judged(self, entry: Entry, architecture: str) -> Compiled:
        log = entry.log.decode("utf-8", "replace")
        if entry.code:
            status = CompileStatus.ERROR if entry.code == COMPILATION else CompileStatus.CRASHED
            message = f"the compiler ended with code {entry.code}"
            told = failed(status, architecture, self.name, message, log)
            return replace(told, seconds=entry.seconds)
        try:
            kernels = kernels_of(entry.cubin, log, architecture)
        except DataError as error:
            return failed(CompileStatus.CRASHED, architecture, self.name, str(error), log)
        return Compiled(
            CompileStatus.OK,
            architecture,
            self.name,
            tuple(diagnostics_of(log)),
            kernels,
            entry.cubin,
            log,
            entry.seconds,
        )

    async def close(self) -> None:
        """End the compiler's processes."""
        await self._jail.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def compile_cuda(
    source: str,
    architecture: str = "sm_90",
    options: Sequence[str] = (),
    limits: Limits = LIMITS,
    cache: CompileCache | None = None,
) -> Compiled:
    """Compile one source; for several, a `CudaCompiler` that stays is faster.

    Errors: those of `CudaCompiler` and of its `compile`.
    """
    async with CudaCompiler(limits, cache, parallel=1) as compiler:
        return await compiler.compile(source, architecture, options)


def _symbols(result: RunResult) -> dict[str, str]:
    try:
        found = json.loads(result.files.get(inside.SYMBOLS, b"{}"))
        return {str(name): str(symbol) for name, symbol in found.items()}
    except (ValueError, AttributeError, RecursionError):
        return {}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        raise MissingDependency(package, "kernels", "compiling CUDA") from None


def check_options(options: Sequence[str]) -> None:
    """Errors: ConfigError for an option that is not allowed."""
    for option in options:
        if not any(re.fullmatch(pattern, option) for pattern in OPTIONS):
            raise ConfigError(
                f"options: {option[:100]!r} is not allowed: give --use_fast_math, --fmad, --ftz, "
                "--prec-sqrt, --prec-div, --maxrregcount, --std, -DNAME=VALUE, --restrict, "
                "--lineinfo, --extra-device-vectorization or --device-as-default-execution-space"
            )


def unreadable(source: str) -> Diagnostic | None:
    """A source that the compiler would read otherwise than we do."""
    if len(source) > MAX_SOURCE or len(source.encode("utf-8", "replace")) > MAX_SOURCE:
        message = f"the source has more than {MAX_SOURCE:,} bytes"
        return Diagnostic("error", message)
    match = re.search("[\0\ud800-\udfff]", source)
    if match is None:
        return None
    line = source.count("\n", 0, match.start()) + 1
    column = match.start() - source.rfind("\n", 0, match.start())
    what = "a NUL character" if match[0] == "\0" else "a lone surrogate"
    return Diagnostic("error", f"{what} in the source", line, column, inside.SOURCE)
