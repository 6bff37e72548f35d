"""The environment under test, and what is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from ludus.core.types import Spec, Task
from ludus.envs.base import Env
from ludus.envs.checks.play import Turn

LONGEST = 1200
"""Characters of a finding."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A result of a check: an `error` violates the protocol, a `note` is informative."""

    severity: Literal["error", "note"]
    check: str
    detail: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.check}: {self.detail}"


def shortened(detail: str) -> str:
    """The start and the end of a text that a task's id or an error makes longer than `LONGEST`."""
    half = LONGEST // 2
    return detail if len(detail) <= LONGEST else f"{detail[:half]} ... {detail[-half:]}"


@dataclass
class Subject:
    """The environment under test and the findings so far, without duplicates.

    `report` receives each finding when it is found, `tell` what the expert reached. `played` has
    the expert's actions by the place of the task in `tasks`, where its episodes do not differ with
    the same actions. `repeats`: false where an episode differed from itself. `first`: the episode
    that measured the speed.
    """

    spec: Spec | None
    env_class: Any
    make: Callable[[], Env]
    timeout_s: float
    report: Callable[[Finding], object] = lambda _: None
    tell: Callable[[str], object] = lambda _: None
    tasks: list[Task] = field(default_factory=list)
    findings: dict[Finding, None] = field(default_factory=dict)
    played: dict[int, list[str]] = field(default_factory=dict)
    repeats: bool = True
    first: list[Turn] = field(default_factory=list)

    def error(self, check: str, detail: str) -> None:
        self._add(Finding("error", check, shortened(detail)))

    def note(self, check: str, detail: str) -> None:
        self._add(Finding("note", check, shortened(detail)))

    def _add(self, finding: Finding) -> None:
        # One fault shows in several checks.
        told = ((known.severity, known.detail) for known in self.findings)
        if (finding.severity, finding.detail) not in told:
            self.findings[finding] = None
            self.report(finding)
