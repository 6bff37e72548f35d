"""References run in the jail, in torch; what they gave is kept for the next kernel of a problem."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from ludus.core.errors import DataError
from ludus.core.once import Once
from ludus.kernels.ends import check_blame
from ludus.kernels.verify import inside
from ludus.kernels.verify.compare import Trial, read_trials, unfit
from ludus.kernels.verify.problem import Interface
from ludus.sandbox.base import Code, Limits, RunStatus
from ludus.sandbox.jail import Jail

PROGRAM = f"import {inside.MODULE}; {inside.MODULE}.run()"
LIMITS = Limits(run_s=30.0, memory_mb=4096, num_processes=64, disk_mb=512)
KEPT_BYTES = 256 << 20
"""Bytes of the trials that are kept."""


@dataclass(frozen=True, slots=True)
class Referred:
    """Trials of a reference, or in `problem` why there are none."""

    problem: str
    trials: tuple[Trial, ...] = ()

    @property
    def interface(self) -> Interface:
        """The arguments of a kernel."""
        first = self.trials[0]
        tensors = (*first.inputs, first.out)
        return Interface(
            {tensor.name: tensor.shape for tensor in tensors},
            {tensor.name: tensor.dtype for tensor in tensors},
            first.numbers,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(len(t.data) for trial in self.trials for t in (*trial.inputs, trial.out))


class References:
    """Runs references, each in a fork of a process that has loaded torch."""

    def __init__(self, limits: Limits = LIMITS, parallel: int | None = None) -> None:
        self._limits = limits
        self._jail = Jail(packages=("torch", "numpy"), max_runs=parallel)
        self._jail.prelude(inside.MODULE, Path(inside.__file__).read_text(encoding="utf-8"))
        self._once = Once[Referred](size=lambda found: found.num_bytes, max_size=KEPT_BYTES)

    async def trials(self, reference: str, seeds: tuple[int, ...]) -> Referred:
        """The trials of a reference, one for each seed.

        Errors: ToolError where the sandbox fails.
        """
        key = hashlib.sha256(f"{seeds}{reference}".encode("utf-8", "surrogatepass")).digest()
        return await self._once.of(key, lambda: self._run(reference, seeds))

    async def _run(self, reference: str, seeds: tuple[int, ...]) -> tuple[Referred, bool]:
        """Also whether it would end so again. Errors: ToolError."""
        try:
            text = reference.encode()
        except UnicodeEncodeError:
            return Referred("the reference is no valid text"), True
        files = {"reference.py": text, "seeds.json": json.dumps(seeds).encode()}
        code = Code(PROGRAM, "python", files=files, fetch=["trials.bin"])
        result = await self._jail.run(code, self._limits)
        limits = self._limits
        if result.status is RunStatus.TIME_LIMIT:
            return Referred(f"the reference takes more than {limits.run_s:g} s"), False
        check_blame(result, "the reference's process", limits)
        if result.status is RunStatus.MEMORY_LIMIT:
            return Referred(f"the reference needs more than {limits.memory_mb} MB"), True
        if result.status is RunStatus.OUTPUT_LIMIT:
            return Referred(f"the reference's tensors exceed {limits.disk_mb} MB"), True
        if result.exit_code != 0 or "trials.bin" not in result.files:
            said = (result.stderr.strip().splitlines() or [f"exit code {result.exit_code}"])[-1]
            return Referred(f"the reference: {said[:300]}"), True
        try:
            trials = read_trials(result.files["trials.bin"], len(seeds))
        except DataError as error:
            return Referred(str(error)), True
        problem = unfit(trials)
        return Referred(f"the reference: {problem}" if problem else "", tuple(trials)), True

    async def close(self) -> None:
        """End the processes."""
        await self._jail.close()
