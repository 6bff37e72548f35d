"""Kernels in Triton's interpreter, in the jail."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ludus.kernels.ends import check_blame
from ludus.kernels.launches import Buffer
from ludus.kernels.triton import inside_run as inside
from ludus.kernels.triton.compiler import require_interpreter
from ludus.kernels.triton.launches import SIZES, TritonLaunch, TritonPlan
from ludus.kernels.verify.compare import Trial
from ludus.kernels.verify.job import Ran
from ludus.kernels.verify.result import VerifyStatus
from ludus.sandbox.base import Code, Limits, RunResult, RunStatus
from ludus.sandbox.jail import Jail

PROGRAM = f"import {inside.MODULE}; {inside.MODULE}.run()"
LIMITS = Limits(run_s=20.0, memory_mb=1024, num_processes=16, disk_mb=64, output_bytes=100_000)
MAX_BYTES = 256 << 20
"""Bytes of the tensors of all trials: more is for a GPU."""
KINDS = {
    "bounds": VerifyStatus.WRONG, "assert": VerifyStatus.WRONG, "memory": VerifyStatus.MEMORY_LIMIT,
    "unsupported": VerifyStatus.UNSUPPORTED, "error": VerifyStatus.UNSUPPORTED,
}  # fmt: skip
"""A kernel that Triton compiles, and its interpreter does not run, is no wrong one."""


class Interpreter:
    """Runs kernels in Triton's interpreter.

    Errors: MissingDependency without Triton; ConfigError for a version that does not fit NumPy.
    """

    def __init__(self, limits: Limits = LIMITS, parallel: int | None = None) -> None:
        require_interpreter()
        self._limits = limits
        self._jail = Jail(packages=("triton", "numpy"), max_runs=parallel)
        self._jail.prelude(inside.MODULE, Path(inside.__file__).read_text(encoding="utf-8"))

    async def run(self, source: str, plan: TritonPlan, trials: Sequence[Trial], seed: int) -> Ran:
        """Run the launches on the inputs of each trial.

        Errors: ToolError where the sandbox fails.
        """
        inputs = b"".join(tensor.data for trial in trials for tensor in trial.inputs)
        size = len(trials[0].out.data)
        total = len(inputs) + size * len(trials)
        if total > MAX_BYTES:
            text = f"the tensors have {total >> 20} MB; the interpreter takes {MAX_BYTES >> 20} MB"
            return Ran(status=VerifyStatus.UNSUPPORTED, message=text)
        given = json.dumps(_plan(plan, trials, seed)).encode()
        files = {"source.txt": source.encode(), "plan.json": given, "inputs.bin": inputs}
        limits = Limits(
            run_s=self._limits.run_s,
            memory_mb=self._limits.memory_mb + (2 * total >> 20),
            num_processes=self._limits.num_processes,
            disk_mb=self._limits.disk_mb + (total >> 20),
            output_bytes=self._limits.output_bytes,
        )
        fetch = ["report.json", "outputs.bin"]
        result = await self._jail.run(Code(PROGRAM, files=files, fetch=fetch), limits)
        return _ran(result, plan, size, len(trials), limits)

    async def close(self) -> None:
        """End the processes."""
        await self._jail.close()


def _ran(result: RunResult, plan: TritonPlan, size: int, trials: int, limits: Limits) -> Ran:
    def ended(status: VerifyStatus, message: str, trial: int = 0) -> Ran:
        return Ran((), status, message, trial, run_s=result.seconds)

    if result.status is RunStatus.TIME_LIMIT:
        text = f"interpreting takes more than {limits.run_s:g} s"
        return ended(VerifyStatus.TIME_LIMIT, text)
    check_blame(result, "Triton's interpreter", limits)
    if result.status is RunStatus.MEMORY_LIMIT:
        return ended(VerifyStatus.MEMORY_LIMIT, f"it needs more than {limits.memory_mb} MB")
    try:
        report = json.loads(result.files.get("report.json", b"{}"))
        kind, trial = str(report.get("kind")), int(report.get("trial", 0))
        line, text = int(report.get("line", 0)), str(report.get("text", ""))
        number = int(report.get("launch", 0))
    except (ValueError, TypeError, AttributeError, RecursionError):
        kind = "none"
    outputs = result.files.get("outputs.bin", b"")
    if kind == "done" and result.exit_code == 0 and len(outputs) == size * trials:
        split = tuple(outputs[i * size : (i + 1) * size] for i in range(trials))
        return Ran(split, run_s=result.seconds)
    if kind in KINDS and result.exit_code == inside.STOPPED:
        place = f"line {line}: " if line else ""
        if not line and 0 <= number < len(plan.launches):
            place = f"line {plan.launches[number].line}: "
        if kind in ("unsupported", "error"):
            text = f"Triton's interpreter does not run it: {text}"
        return ended(KINDS[kind], f"{place}{text[:300]}", trial)
    code = result.exit_code or 0
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return ended(VerifyStatus.CRASHED, f"the kernel's process ended with {how}")


def _plan(plan: TritonPlan, trials: Sequence[Trial], seed: int) -> dict[str, Any]:
    first = trials[0]
    buffers: list[list[Any]] = [[t.name, 0, t.dtype, len(t.data)] for t in first.inputs]
    buffers.append(["out", 1, first.out.dtype, len(first.out.data)])
    for name, (kind, count) in plan.scratch.items():
        buffers.append([name, 2, kind, SIZES[kind] * count])
    index = {item[0]: number for number, item in enumerate(buffers)}
    return {
        "trials": len(trials),
        "seed": seed,
        "buffers": buffers,
        "launches": [_step(launch, index) for launch in plan.launches],
    }


def _step(launch: TritonLaunch, index: Mapping[str, int]) -> dict[str, Any]:
    arguments: dict[str, tuple[str, int | float]] = {}
    for name, value in launch.arguments.items():
        if isinstance(value, Buffer):
            arguments[name] = "buffer", index[value.name]
        else:
            arguments[name] = ("constant" if name in launch.constants else "number"), value
    return {"kernel": launch.kernel, "grid": launch.grid, "arguments": arguments}
