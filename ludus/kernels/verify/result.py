"""The result of a verification."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from ludus.kernels.analysis.findings import Finding
from ludus.kernels.diagnostics import Diagnostic
from ludus.kernels.result import Compiled


class VerifyStatus(StrEnum):
    """End of a verification. Only `passed` says that the values are right. `bad_reference` and
    `unsupported` say nothing against the kernel."""

    PASSED = "passed"
    WRONG = "wrong"  # values, bounds, inputs that changed, a deadlock
    REFUSED = "refused"  # forbidden: host code, files, names of the harness
    UNSUPPORTED = "unsupported"  # valid CUDA that the CPU shim does not run
    COMPILE_ERROR = "compile_error"
    BAD_LAUNCH = "bad_launch"  # a launch line is missing or wrong
    CRASHED = "crashed"
    TIME_LIMIT = "time_limit"
    MEMORY_LIMIT = "memory_limit"
    BAD_REFERENCE = "bad_reference"  # no test of a kernel is possible with it


@dataclass(frozen=True, slots=True)
class Speedups:
    """Measured on a GPU: seconds of the kernel, of eager PyTorch and of torch.compile (medians).

    `bandwidth` in bytes/s, of inputs, parameters and output, once each; `bandwidth_share` of the
    device's limit. `throughput` in operations/s, where the problem tells them. `flags`: what a
    reader should look at before believing it.
    """

    kernel_s: float
    eager_s: float
    compiled_s: float | None
    bandwidth: float
    bandwidth_share: float | None = None
    throughput: float | None = None
    device: str = ""
    flags: tuple[str, ...] = ()

    @property
    def over_eager(self) -> float:
        """Speed-up over eager PyTorch."""
        return self.eager_s / self.kernel_s

    @property
    def over_compile(self) -> float | None:
        """Speed-up over torch.compile, where that ran."""
        return None if self.compiled_s is None else self.compiled_s / self.kernel_s

    @property
    def suspicious(self) -> bool:
        """Above 10x: look at the kernel before believing it."""
        return self.over_eager > 10


@dataclass(frozen=True, slots=True)
class Verified:
    """The result of a verification.

    `message`: one line for the author of the kernel, with the place where there is one. `passed`
    of `trials`. `max_error`: the largest absolute difference seen, None where no output was
    compared. `speedups`: None without a GPU, and where the time is not believed: `unbelieved` says
    why. `seconds` by stage: `compile`, `analyse`, `reference`, `build`, `run`.
    """

    status: VerifyStatus
    message: str
    passed: int = 0
    trials: int = 0
    max_error: float | None = None
    diagnostics: tuple[Diagnostic, ...] = ()
    compiled: Compiled | None = None
    findings: tuple[Finding, ...] = ()
    speedups: Speedups | None = None
    unbelieved: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """True if the values of all trials are right."""
        return self.status is VerifyStatus.PASSED
