"""Findings of the analysis, its rules, and the risk score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """`error`: do not run it, or its result is undefined. `warning`: likely a fault, or slow.
    `info`: worth a look."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule. `kind`: `safety`, `correctness` or `performance`. `risk`: what one finding adds to
    the score, 0 to 1."""

    kind: str
    severity: Severity
    risk: float
    summary: str
    suggestion: str


E, W, I = Severity.ERROR, Severity.WARNING, Severity.INFO  # noqa: E741 - columns of the table
SAFE, RIGHT, FAST = "safety", "correctness", "performance"

RULES = {
    "system-call": Rule(SAFE, E, 0.9, "starts programs or calls the system", "remove it"),
    "file-access": Rule(SAFE, E, 0.9, "reads or changes files", "pass data as arguments"),
    "network-access": Rule(SAFE, E, 0.9, "uses the network", "remove it"),
    "dynamic-loading": Rule(SAFE, E, 0.9, "loads code at run time", "compile the code in"),
    "foreign-memory": Rule(
        SAFE, E, 0.7, "maps memory of other processes", "use memory passed as arguments"
    ),
    "host-header": Rule(
        SAFE, W, 0.3, "includes a header of the operating system", "remove the include"
    ),
    "include-path": Rule(
        SAFE, E, 0.7, "includes a file by a path", "include headers of the toolkit by their name"
    ),
    "inline-assembly": Rule(
        SAFE, W, 0.4, "holds assembly, which no rule here reads", "use an intrinsic"
    ),
    "token-pasting": Rule(
        SAFE, W, 0.4, "builds names in the preprocessor", "write the name in full"
    ),
    "hidden-name": Rule(
        SAFE, E, 0.7, "hides a name from a reader", "write the name in plain letters on one line"
    ),
    "line-directive": Rule(SAFE, W, 0.3, "changes places in messages", "remove #line"),
    "unreadable": Rule(
        SAFE, W, 0.5, "cannot be analysed in full", "write plain CUDA C++, shorter and flatter"
    ),
    "endless-loop": Rule(
        SAFE, E, 0.6, "a loop without an end", "give the loop a condition that ends it"
    ),
    "spin-wait": Rule(
        SAFE, W, 0.4, "waits for other threads by asking memory",
        "use a barrier, or a second kernel",
    ),
    "leak": Rule(SAFE, W, 0.3, "allocates what nothing frees", "free it in the same function"),
    "barrier-in-branch": Rule(
        RIGHT, E, 0.6, "a barrier that not all threads of a block reach",
        "move the barrier out of the branch",
    ),
    "barrier-after-exit": Rule(
        RIGHT, W, 0.3, "threads return before a barrier", "guard the work, not the barrier"
    ),
    "shared-race": Rule(
        RIGHT, E, 0.5, "shared memory is used without a barrier between",
        "put __syncthreads() between",
    ),
    "shared-too-large": Rule(
        RIGHT, E, 0.3, "more than 48 KB of static shared memory",
        "use smaller tiles, or dynamic shared memory",
    ),
    "bank-conflict": Rule(
        FAST, W, 0.1, "threads of a warp hit the same bank of shared memory",
        "pad the row by one element, or change the index",
    ),
    "uncoalesced": Rule(
        FAST, W, 0.1, "neighbouring threads access global memory far apart",
        "let threadIdx.x run along the contiguous dimension",
    ),
    "warp-divergence": Rule(
        FAST, W, 0.1, "lanes of a warp take different branches",
        "branch on whole warps, or on contiguous ranges of threads",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """A finding at a place of the source; `line` and `column` count from 1."""

    line: int
    column: int
    rule: str
    reason: str

    @property
    def kind(self) -> str:
        """`safety`, `correctness` or `performance`."""
        return RULES[self.rule].kind

    @property
    def severity(self) -> Severity:
        """The rule's severity."""
        return RULES[self.rule].severity

    @property
    def suggestion(self) -> str:
        """The way to mend it."""
        return RULES[self.rule].suggestion

    def __str__(self) -> str:
        place = f"{self.line}:{self.column}"
        return f"{place}: {self.severity}: {self.rule}: {self.reason}; {self.suggestion}"


@dataclass(frozen=True, slots=True)
class Analysis:
    """The findings of a source, in the order of their places.

    `risk`: 0 for no finding, towards 1: `1 - product(1 - r)` over the risks r of the rules that
    found something, each rule once. `reasons`: those rules, the largest risk first.
    """

    findings: tuple[Finding, ...]

    @property
    def rules(self) -> frozenset[str]:
        """Names of the rules that found something."""
        return frozenset(finding.rule for finding in self.findings)

    @property
    def risk(self) -> float:
        """The risk score, 0 to 1."""
        left = 1.0
        for rule in sorted(self.rules):
            left *= 1 - RULES[rule].risk
        return 1 - left

    @property
    def reasons(self) -> Sequence[str]:
        """The reasons for the risk."""
        ordered = sorted(self.rules, key=lambda rule: (-RULES[rule].risk, rule))
        return [f"{rule} ({RULES[rule].risk:g}): {RULES[rule].summary}" for rule in ordered]

    @property
    def safe(self) -> bool:
        """True without a safety error. It is no proof: the sandbox stays necessary."""
        return not any(f.kind == SAFE and f.severity is E for f in self.findings)
