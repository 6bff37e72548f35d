"""CUDA C++ with host code (`main`, `<<<...>>>`) through nvcc, in the sandbox, without a GPU.

    async with NvccCompiler() as compiler:
        compiled = await compiler.compile(source, "sm_90")

The results are those of `CudaCompiler`, which compiles device code only, and ten times as fast. The
host's object is built and thrown away: host code of a model is compiled here, and never run.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Self

from ludus.core.errors import ConfigError, DataError
from ludus.kernels import inside_nvcc as inside
from ludus.kernels.cache import CompileCache, Entry
from ludus.kernels.compiler import ALWAYS, STOPPED, check_options, unreadable
from ludus.kernels.diagnostics import MAX_DIAGNOSTICS, MAX_MESSAGE, Diagnostic, diagnostics_of
from ludus.kernels.ends import check_blame, killed
from ludus.kernels.occupancy import limits_of
from ludus.kernels.result import Compiled, CompileStatus, failed, kernels_of
from ludus.sandbox.base import Code, Limits, RunResult, RunStatus
from ludus.sandbox.bubblewrap import PACKAGES_DIR
from ludus.sandbox.jail import Jail
from ludus.sandbox.languages import PATH

PACKAGES = (
    "nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-runtime",
    "nvidia-cuda-cccl",
)  # fmt: skip
LIMITS = Limits(run_s=60.0, memory_mb=2048, num_processes=64, disk_mb=128, output_bytes=1_000_000)
PROGRAM = f"import {inside.MODULE}; {inside.MODULE}.run()"
_HOST = re.compile(
    r"(?P<file>[^\s:()][^:()\n]*):(?P<line>\d+):(?P<column>\d+): "
    r"(?P<severity>fatal error|error|warning|note): (?P<message>.*)"
)
_DRIVER = re.compile(r"nvcc (?P<severity>fatal|error|warning)\s*:\s*(?P<message>.*)")
_STOPPED = {**STOPPED, RunStatus.TIME_LIMIT: CompileStatus.TIME_LIMIT}
_MEMORY = re.compile(r"cc1plus: out of memory|virtual memory exhausted|bad_alloc|out of memory")


class NvccCompiler:
    """Compiles CUDA C++ with host code; its calls belong to one event loop.

    Args:
        limits: of each compilation.
        cache: None compiles each source anew.
        parallel: compilations at the same time; default: 2 for each core.

    Errors: ConfigError without nvcc or g++, or where a layer of the sandbox is missing.
    """

    def __init__(
        self,
        limits: Limits = LIMITS,
        cache: CompileCache | None = None,
        parallel: int | None = None,
    ) -> None:
        self._nvcc, found, packages = find_nvcc()
        if shutil.which("g++", path=PATH) is None:
            raise ConfigError("kernels: nvcc needs g++, which is not installed: apt install g++")
        self.name = f"nvcc {found}"
        self._limits, self._cache = limits, cache
        self._jail = Jail(packages=packages, max_runs=parallel)
        self._jail.prelude(inside.MODULE, Path(inside.__file__).read_text(encoding="utf-8"))

    async def compile(
        self, source: str, architecture: str = "sm_90", options: Sequence[str] = ()
    ) -> Compiled:
        """Compile a source for an architecture.

        A source that does not compile, or exceeds a limit, is a result and no error.

        Errors: ConfigError for an architecture or an option that is not known or not allowed;
        ToolError where the sandbox fails: the source is not to blame.
        """
        limits_of(architecture)
        check_options(options)
        if problem := unreadable(source):
            return Compiled(CompileStatus.ERROR, architecture, self.name, (problem,))
        given = [self._nvcc, f"-arch={architecture}", *ALWAYS, *options]
        key = CompileCache.key(self.name, source, architecture, *given)
        kept = self._cache.get(key) if self._cache else None
        if kept is not None:
            return replace(self._judged(kept, architecture), cached=True)
        files = {inside.SOURCE: source.encode(), inside.OPTIONS: json.dumps(given).encode()}
        code = Code(PROGRAM, "python", files=files, fetch=[inside.CUBIN])
        result = await self._jail.run(code, self._limits)
        if ended := self._ended(result, architecture):
            return replace(ended, seconds=result.seconds)
        cubin = result.files.get(inside.CUBIN, b"")
        entry = Entry(result.exit_code or 0, result.seconds, result.stdout.encode(), cubin)
        compiled = self._judged(entry, architecture)
        if self._cache and compiled.status in (CompileStatus.OK, CompileStatus.ERROR):
            self._cache.put(key, entry)
        return compiled

    def _ended(self, result: RunResult, architecture: str) -> Compiled | None:
        """The result, where nvcc came to no answer. Errors: ConfigError, ToolError."""
        limits, status = self._limits, _STOPPED.get(result.status)
        code, log = result.exit_code or 0, result.stdout
        if status is None:
            check_blame(result, "nvcc", limits)
            if code == inside.SIGNALLED + signal.SIGKILL or "died due to signal 9" in log:
                raise killed("nvcc")
        if code and _MEMORY.search(log):
            status = CompileStatus.MEMORY_LIMIT
        if status is not None:
            message = {
                CompileStatus.TIME_LIMIT: f"compiling takes more than {limits.run_s:g} s",
                CompileStatus.MEMORY_LIMIT: f"compiling needs more than {limits.memory_mb} MB",
                CompileStatus.OUTPUT_LIMIT: f"the log exceeds {limits.output_bytes:,} bytes, or "
                f"the files {limits.disk_mb} MB",
            }[status]
            return failed(status, architecture, self.name, message)
        if code == inside.ABSENT:
            raise ConfigError(f"kernels: the sandbox cannot run nvcc: {result.stderr[:200]}")
        if code not in (0, inside.FAILED):
            message = f"the compiler ended with code {code}"
            if code < 0 or code > inside.SIGNALLED:
                message = f"the compiler ended by signal {abs(code) % inside.SIGNALLED}"
            return failed(CompileStatus.CRASHED, architecture, self.name, message, log)
        return None

    def _judged(self, entry: Entry, architecture: str) -> Compiled:
        log = entry.log.decode("utf-8", "replace")
        found = tuple(nvcc_diagnostics(log))
        if entry.code:
            if not any(item.severity == "error" for item in found):
                last = (log.strip().splitlines() or ["nvcc failed"])[-1]
                found = (*found, Diagnostic("error", last[:MAX_MESSAGE]))
            told = Compiled(CompileStatus.ERROR, architecture, self.name, found, log=log)
            return replace(told, seconds=entry.seconds)
        try:
            kernels = kernels_of(entry.cubin, log, architecture) if entry.cubin else ()
        except DataError as error:
            return failed(CompileStatus.CRASHED, architecture, self.name, str(error), log)
        return Compiled(
            CompileStatus.OK,
            architecture,
            self.name,
            found,
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


def find_nvcc() -> tuple[str, str, tuple[str, ...]]:
    """The path of nvcc in the jail, its version, and the packages that have it: none for one of the
    system.

    Errors: ConfigError without one, with what to install.
    """
    if packaged := _packaged():
        return packaged
    path = shutil.which("nvcc", path=f"{PATH}:/usr/local/cuda/bin")
    if path is None:
        names = " ".join(PACKAGES)
        raise ConfigError(
            "kernels: host code needs nvcc, which is not installed below /usr: install the CUDA "
            f"toolkit there, or: pip install {names} (all of one minor version, such as ==13.0.*)"
        )
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"\bV(\d[\d.]*)", said)
    if found is None:
        raise ConfigError(f"kernels: {path} --version names no version: it is no nvcc")
    return path, found[1], ()


def _packaged() -> tuple[str, str, tuple[str, ...]] | None:
    """The nvcc of PyPI's packages, if all of them are installed."""
    try:
        files = distribution(PACKAGES[0]).files or []
        for name in PACKAGES:
            version(name)
    except PackageNotFoundError:
        return None
    paths = [path for path in files if path.parts[-2:] == ("bin", "nvcc")]
    if not paths:
        return None
    return f"{PACKAGES_DIR}/{paths[0]}", version(PACKAGES[0]), PACKAGES


def nvcc_diagnostics(log: str) -> list[Diagnostic]:
    """Messages of the device's compiler, then those of g++ and of nvcc itself."""
    found = diagnostics_of(log)
    for line in log.split("\n"):
        if len(found) >= MAX_DIAGNOSTICS:
            break
        if match := _HOST.fullmatch(line):
            severity = match["severity"].rpartition(" ")[2]
            place = int(match["line"]), int(match["column"]), match["file"]
            found.append(Diagnostic(severity, match["message"][:MAX_MESSAGE], *place))
        elif match := _DRIVER.fullmatch(line):
            severity = "warning" if match["severity"] == "warning" else "error"
            found.append(Diagnostic(severity, f"nvcc: {match['message']}"[:MAX_MESSAGE]))
    return found
