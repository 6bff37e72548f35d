"""The numbers of a verified kernel: efficiency and quality, each 0 to 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ludus.core.errors import ConfigError
from ludus.envs.cuda.reward import Measured, Parts
from ludus.kernels.analysis.findings import FAST, Analysis, Finding
from ludus.kernels.launches import Launch, read_launches
from ludus.kernels.result import Compiled, KernelResources
from ludus.kernels.verify.problem import Interface
from ludus.kernels.verify.result import Verified, VerifyStatus


@dataclass(frozen=True, slots=True)
class LaunchUse:
    """A launch: its kernel's resources, and the theoretical occupancy with its block."""

    kernel: KernelResources
    threads: int
    occupancy: float
    limited_by: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Efficiency:
    """`value` of the three shares, and what they were made of."""

    value: float
    uses: tuple[LaunchUse, ...] = ()


def measured(verified: Verified, efficiency: Efficiency | None) -> Measured:
    """The numbers of a verification; `efficiency` of a right kernel."""
    compiled = verified.compiled is not None and verified.compiled.ok
    return Measured(
        compiles=compiled and verified.status is not VerifyStatus.BAD_LAUNCH,
        correct=verified.ok,
        speedup=verified.speedups.over_eager if verified.speedups else None,
        efficiency=efficiency.value if efficiency else 0.0,
        quality=quality_of(verified.findings),
        decoy=verified.status is VerifyStatus.REFUSED,
        unbelieved=bool(verified.unbelieved),
    )


def efficiency_of(source: str, verified: Verified, face: Interface, numbers: Parts) -> Efficiency:
    """The efficiency of a kernel that passed: the mean occupancy of its launches, its spilled
    registers, and the analysis' findings of slow patterns, by their weights."""
    assert verified.compiled is not None
    plan = read_launches(source, face.shapes, face.numbers)
    uses = tuple(use for launch in plan.launches if (use := _use(launch, verified.compiled)))
    occupancy = sum(use.occupancy for use in uses) / len(uses) if uses else 0.0
    spilled = sum(kernel.spills for kernel in verified.compiled.kernels)
    rules = {finding.rule for finding in verified.findings if finding.kind == FAST}
    shares = (
        (numbers.occupancy, occupancy),
        (numbers.spills, max(0.0, 1.0 - spilled / numbers.spill_bytes)),
        (numbers.patterns, max(0.0, 1.0 - numbers.pattern_cost * len(rules))),
    )
    total = sum(weight for weight, _ in shares)
    return Efficiency(sum(weight * share for weight, share in shares) / total, uses)


def quality_of(findings: Sequence[Finding]) -> float:
    """1 minus the analysis' risk by its rules of safety and correctness."""
    return 1.0 - Analysis(tuple(f for f in findings if f.kind != FAST)).risk


def _use(launch: Launch, compiled: Compiled) -> LaunchUse | None:
    """The use of a launch; None where the kernel's name is not that of one in the cubin."""
    named = [k for k in compiled.kernels if _plain(k.name) == launch.name]
    exact = [k for k in named if k.name.replace(" ", "") == launch.kernel]
    if not named:
        return None
    kernel, threads = (exact or named)[0], launch.block[0] * launch.block[1] * launch.block[2]
    try:
        found = kernel.occupancy(threads, launch.shared_bytes)
    except ConfigError:  # an architecture without a row in the table of limits
        return None
    return LaunchUse(kernel, threads, found.share, found.limited_by)


def _plain(name: str) -> str:
    return name.partition("<")[0].rpartition("::")[2]
