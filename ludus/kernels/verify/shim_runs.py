"""Kernels on the CPU: built by g++ in the jail, and run there in a call of its own.

What is built is kept by content: kernels that differ in their launches alone are built once.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ludus.core.errors import ConfigError, ToolError
from ludus.core.once import Once
from ludus.kernels.ends import (
    check_blame,
    cpu_seconds,
    killed,
    out_of_time,
    waiting_longer,
)
from ludus.kernels.launches import Buffer, Plan
from ludus.kernels.shim import inside
from ludus.kernels.verify.compare import Trial
from ludus.kernels.verify.job import Ran
from ludus.kernels.verify.result import VerifyStatus
from ludus.kernels.verify.subset import SHIM, prepared
from ludus.sandbox.base import Code, Limits, RunResult, RunStatus
from ludus.sandbox.jail import Jail
from ludus.sandbox.languages import language_named

BUILD_RUNNER = f"import {inside.MODULE}; {inside.MODULE}.build_runner()"
BUILD = f"import {inside.MODULE}; {inside.MODULE}.build({{}})"
RUN = f"import {inside.MODULE}; {inside.MODULE}.run({{}}, {{}})"
BUILD_LIMITS = Limits(run_s=120.0, memory_mb=2048, num_processes=16, disk_mb=64)
LIMITS = Limits(run_s=10.0, memory_mb=1024, num_processes=16, disk_mb=64, output_bytes=100_000)
MAX_BYTES = 256 << 20
"""Bytes of the tensors of all trials: more is for a GPU."""
KEPT_BYTES = 64 << 20
"""Bytes of the built kernels that are kept."""
KINDS = {
    "crash": VerifyStatus.CRASHED, "bounds": VerifyStatus.WRONG, "input": VerifyStatus.WRONG,
    "deadlock": VerifyStatus.WRONG, "launch": VerifyStatus.BAD_LAUNCH,
    "memory": VerifyStatus.MEMORY_LIMIT, "link": VerifyStatus.MEMORY_LIMIT,
}  # fmt: skip
_PLACE = re.compile(r"^(kernel\.cu|launch):(\d+):(?:\d+:)? (?:fatal )?error: (.*)$", re.M)


@dataclass(frozen=True, slots=True)
class Built:
    """The end of a build: an exit code of `inside` and what g++ said, or a shared object. Its
    threads may wait for each other. `status` for a build that was stopped."""

    code: int | None
    said: str
    shared: bytes
    waits: bool
    seconds: float
    status: VerifyStatus | None = None


class Shim:
    """Runs kernels on the CPU.

    Errors: ConfigError without g++.
    """

    def __init__(self, limits: Limits = LIMITS, parallel: int | None = None) -> None:
        try:
            language_named("cpp")
        except ConfigError:
            raise ConfigError(
                "kernels: running them on the CPU needs g++, which is not installed: "
                "apt install g++"
            ) from None
        self._limits = limits
        self._jail = Jail(packages=(), max_runs=parallel)
        self._jail.prelude(inside.MODULE, Path(inside.__file__).read_text(encoding="utf-8"))
        self._header = (SHIM / "cuda.h").read_bytes()
        self._runner: dict[str, bytes] = {}
        self._once = Once[Built](size=lambda built: len(built.shared), max_size=KEPT_BYTES)

    async def run(self, source: str, plan: Plan, trials: Sequence[Trial], seed: int) -> Ran:
        """Build a kernel, and run its launches on the inputs of each trial.

        Errors: ToolError where the sandbox fails.
        """
        size = len(trials[0].out.data)
        total = sum(len(tensor.data) for trial in trials for tensor in trial.inputs)
        total += size * len(trials)
        if total > MAX_BYTES:
            text = f"the tensors have {total >> 20} MB; the CPU shim takes {MAX_BYTES >> 20} MB"
            return Ran(status=VerifyStatus.UNSUPPORTED, message=text)
        built = await self._built(source, plan)
        if built.status is not None:
            return Ran((), built.status, built.said, build_s=built.seconds)
        if built.code == inside.FORBIDDEN:
            text = f"the kernel's code: {built.said[:200]}"
            return Ran((), VerifyStatus.REFUSED, text, build_s=built.seconds)
        if built.code != inside.BUILT:
            return Ran((), *_said(built.said, plan), build_s=built.seconds)
        files = {
            "kernel.so": built.shared,
            "plan.txt": _plan_text(plan, trials, seed).encode(),
            "inputs.bin": b"".join(tensor.data for trial in trials for tensor in trial.inputs),
            **await self._runner_files(),
        }
        limits = Limits(
            run_s=self._limits.run_s,
            memory_mb=self._limits.memory_mb + (2 * total >> 20),
            num_processes=self._limits.num_processes,
            disk_mb=self._limits.disk_mb + (total >> 20),
            output_bytes=self._limits.output_bytes,
        )
        text = RUN.format(built.waits, cpu_seconds(limits))
        code = Code(text, files=files, fetch=["report.txt", "outputs.bin"])
        result = await self._jail.run(code, waiting_longer(limits))
        return _ended(result, plan, len(trials), size, limits, built)

    async def _built(self, source: str, plan: Plan) -> Built:
        """The build of a source with the kernels of a plan; kept, if it was not stopped.

        Errors: ToolError.
        """
        text = _with_entries(source, plan).encode()
        seconds = 0.0

        async def build() -> tuple[Built, bool]:
            nonlocal seconds
            built = await self._build(text, _included(source))
            seconds = built.seconds
            return built, built.status is None

        built = await self._once.of(hashlib.sha256(text).digest(), build)
        return replace(built, seconds=seconds)

    async def _build(self, text: bytes, headers: Collection[str]) -> Built:
        files = {
            "kernel.cpp": text,
            "headers/cuda.h": self._header,
            **{f"headers/{name}": b"" for name in headers},
            **await self._runner_files(),
        }
        limits = self._limits
        text_ = BUILD.format(cpu_seconds(limits))
        code = Code(text_, files=files, fetch=["kernel.so", "built.json"])
        result = await self._jail.run(code, waiting_longer(limits))
        check_blame(result, "g++", limits)
        if result.exit_code == inside.TOO_SLOW or out_of_time(result):
            text_ = f"compiling for the CPU takes more than {cpu_seconds(limits)} s"
            return Built(None, text_, b"", False, result.seconds, VerifyStatus.TIME_LIMIT)
        if result.status is RunStatus.MEMORY_LIMIT:
            text_ = f"compiling for the CPU needs more than {limits.memory_mb} MB"
            return Built(None, text_, b"", False, result.seconds, VerifyStatus.MEMORY_LIMIT)
        if result.exit_code == inside.KILLED:
            raise killed("g++")
        facts = json.loads(result.files.get("built.json", b"{}"))
        shared = result.files.get("kernel.so", b"")
        code_ = result.exit_code if facts or result.exit_code else inside.COMPILE_FAILED
        return Built(code_, result.stderr, shared, bool(facts.get("waits")), result.seconds)

    async def _runner_files(self) -> dict[str, bytes]:
        if not self._runner:
            files = {"runner.cpp": (SHIM / "runner.cpp").read_bytes()}
            fetch = ["runner", "libgcc.txt"]
            result = await self._jail.run(
                Code(BUILD_RUNNER, files=files, fetch=fetch), BUILD_LIMITS
            )
            if result.exit_code != 0 or len(result.files) != len(fetch):
                raise ToolError(f"kernels: g++ does not build the runner: {result.stderr[:500]}")
            self._runner = dict(result.files)
        return self._runner

    async def close(self) -> None:
        """End the processes."""
        await self._jail.close()


def _ended(
    result: RunResult, plan: Plan, num_trials: int, size: int, limits: Limits, built: Built
) -> Ran:
    """The end of a run; `size` of the output of a trial. Errors: ToolError."""

    def ended(status: VerifyStatus, message: str, trial: int = 0) -> Ran:
        return Ran((), status, message, trial, built.seconds, result.seconds)

    check_blame(result, "the kernel's process", limits)
    if out_of_time(result):
        text = f"running takes more than {cpu_seconds(limits)} s of processor time"
        return ended(VerifyStatus.TIME_LIMIT, text)
    if result.status is RunStatus.MEMORY_LIMIT:
        text = f"the kernel needs more than {limits.memory_mb} MB"
        return ended(VerifyStatus.MEMORY_LIMIT, text)
    code = result.exit_code
    report = result.files.get("report.txt", b"").decode("utf-8", "replace").split("\t", 3)
    if len(report) == 4 and report[0] in KINDS:
        place = f"trial {int(report[1]) + 1}"
        if 0 <= (i := int(report[2])) < len(plan.launches):
            launch = plan.launches[i]
            place = f"line {launch.line}: `{launch.name}`"
        return ended(KINDS[report[0]], f"{place}: {_text(report)}", int(report[1]))
    outputs = result.files.get("outputs.bin", b"")
    done = code == 0 and report[0] == "done" and len(outputs) == size * num_trials
    if not done:
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return ended(VerifyStatus.CRASHED, f"the kernel's process ended with {how}")
    split = tuple(outputs[i * size : (i + 1) * size] for i in range(num_trials))
    return Ran(split, build_s=built.seconds, run_s=result.seconds)


def _text(report: Sequence[str]) -> str:
    if report[0] == "input":
        return f"the input `{report[3]}` was changed: inputs may be read only"
    return report[3]


def _said(stderr: str, plan: Plan) -> tuple[VerifyStatus, str]:
    """The messages of g++: of the source (which NVRTC accepted), or of the launches."""
    for file, line, message in _PLACE.findall(stderr):
        if file == "launch":
            launch = plan.launches[min(int(line), len(plan.launches)) - 1]
            text = f"line {launch.line}: `{launch.kernel}` cannot be launched so: {message[:200]}"
            return VerifyStatus.BAD_LAUNCH, text
        text = f"line {line}: the CPU shim does not compile it: {message[:200]}"
        return VerifyStatus.UNSUPPORTED, text
    said = (stderr.strip().splitlines() or ["g++ failed"])[0]
    return VerifyStatus.UNSUPPORTED, f"the CPU shim does not compile it: {said[:200]}"


def _included(source: str) -> set[str]:
    return set(re.findall(r"#\s*include\s*[<\"]([\w./]+)[>\"]", source)) - {"cuda.h"}


def _with_entries(source: str, plan: Plan) -> str:
    """The source, and a function for each launch behind it. What the functions use is declared
    before the source, and its names are not allowed there."""
    entries = [
        '#line 1 "kernel.cu"', prepared(source), '#line 1 "launch"',
        *(
            f'extern "C" __attribute__((visibility("default"))) void ludus_entry_{i}'
            f"(const ludus_value *ludus_v, int ludus_n) "
            f"{{ ludus_call({launch.kernel}, ludus_v, ludus_n); }}"
            for i, launch in enumerate(plan.launches)
        ),
    ]  # fmt: skip
    return "\n".join([*entries, ""])


def _plan_text(plan: Plan, trials: Sequence[Trial], seed: int) -> str:
    first = trials[0]
    buffers = [(tensor.name, 0, len(tensor.data)) for tensor in first.inputs]
    buffers.append(("out", 1, len(first.out.data)))
    buffers += [(name, 2, size) for name, size in plan.scratch.items()]
    index = {name: i for i, (name, _, _) in enumerate(buffers)}
    lines = [f"{len(trials)} {len(buffers)} {len(plan.launches)} {seed % 2**63}"]
    lines += [f"{name} {role} {size}" for name, role, size in buffers]
    for launch in plan.launches:
        sizes = (*launch.grid, *launch.block, launch.shared_bytes, len(launch.arguments))
        values = []
        for item in launch.arguments:
            if isinstance(item, Buffer):
                values.append(f"0 {index[item.name]}")
            elif isinstance(item, float):
                values.append(f"2 {item!r}")
            else:
                values.append(f"1 {int(item)}")
        lines.append(" ".join([*map(str, sizes), *values]))
    return "\n".join([*lines, ""])
