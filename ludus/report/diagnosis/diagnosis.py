"""Diagnosis of a run: checks its metrics step by step, and tells each fault once.

The findings are a function of the configuration and the metrics alone: a resumed run, the report
and a later `ludus report` come to the same ones by reading `metrics.jsonl`. Nothing here changes
what is trained.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from ludus.config.schema import RunConfig
from ludus.config.training import RECENT
from ludus.core.files import atomic_write, read_json
from ludus.report.diagnosis import heldout, learning, rollouts
from ludus.report.diagnosis.findings import (
    REACHED,
    SFT_STEPS,
    WINDOW,
    Check,
    Finding,
    History,
    mean,
)
from ludus.telemetry.metrics import Line

SFT: dict[str, Check] = {"demonstrations": learning.demonstrations}
RL: dict[str, Check] = {
    "short": heldout.short_of_target,
    "fall": learning.sudden_fall,
    "length": rollouts.cut_by_length,
    "turns": rollouts.cut_by_turns,
    "reach": rollouts.out_of_reach,
    "signal": rollouts.no_signal,
    "sharp": learning.too_sharp,
    "entropy": learning.entropy_collapse,
    "noise": learning.entropy_rise,
    "unknown": rollouts.unknown_tokens,
    "excluded": rollouts.excluded,
    "decline": learning.decline,
    "narrow": learning.narrows,
    "flat": learning.flat,
    "drift": learning.drift,
    "gradient": learning.gradient_jump,
    "sampler": learning.sampler_gap,
}
CHECKS: dict[str, dict[str, Check]] = {
    "sft": SFT,
    "rl": RL,
    "evaluate/start": {"unknown": rollouts.unknown_tokens},
    "evaluate/sft": {},  # read by the next one
    "evaluate/before": {
        "unknown": rollouts.unknown_tokens,
        "short": heldout.short_of_target,
        "memory": heldout.by_heart,
    },
    "evaluate/rl": {"memory": heldout.by_heart, "evaluation": heldout.loses},
    "evaluate/after": {
        "short": heldout.short_of_target,
        "memory": heldout.by_heart,
        "evaluation": heldout.no_gain,
    },
}
"""The checks after a step of each stage, by kind of finding."""

COVERED = {
    "length": ("fall",),
    "turns": ("fall", "length"),
    "signal": ("fall", "turns", "reach"),
    "sharp": ("reach",),
    "entropy": ("fall",),
    "decline": ("fall", "noise"),
    "narrow": ("fall", "length", "turns", "reach", "signal", "entropy", "noise", "decline"),
    "evaluation": ("memory",),
    "flat": ("fall", "length", "turns", "reach", "signal", "noise", "decline", "narrow"),
}
"""Kinds that other kinds explain: not told while one of those is present."""

AFTER_OTHERS = {"evaluation"}
"""Kinds whose advice comes after that of other findings, where there are any."""

RARE = {"flat": learning.TREND_STEPS, "decline": WINDOW}
"""Kinds that are tested in every n-th step only."""

ONCE = {"sharp", "demonstrations", "short"}
"""Kinds that are tested once: they are of the start."""

OF_ALL_STAGES = {"unknown", "memory", "short"}
"""Kinds that are told once, in whatever stage they are found first."""

WATCHED = (
    "rollout/episodes", "rollout/excluded", "rollout/reward", "rollout/success",
    "rollout/groups_with_signal", "rollout/groups_failed", "rollout/groups_solved",
    "train/groups_with_advantage",
    "rollout/truncated_turns", "rollout/truncated_length", "rollout/truncated_context",
    "rollout/turns_of_success", "rollout/turns_of_truncated", "rollout/unknown_tokens",
    "rollout/tokens", "tasks/tier", "train/entropy", "train/grad_norm", "train/kl", "train/ratio",
    "train/clip_fraction", "train/sampler_gap", "train/first_kl", "train/staleness",
    "evaluate/gain", "evaluate/gain_low",
    "evaluate/gain_high", "evaluate/gain_from", "evaluate/success", heldout.TRAINED,
    REACHED, SFT_STEPS, "sft/conversations", "sft/failed", "sft/too_long",
)  # fmt: skip
"""The metrics that checks read."""


class Diagnosis:
    """Reads a run's metrics in order; `findings` are those told so far, with commands for `run`."""

    def __init__(self, config: RunConfig, run: str = "RUN") -> None:
        self.findings: list[Finding] = []
        self._config, self._run = config, run
        self._histories: dict[str, History] = {}

    def step(self, stage: str, step: int, metrics: Mapping[str, float]) -> list[Finding]:
        """Add a step; returns its new findings: a new kind, or one that got clearly worse."""
        checks = CHECKS.get(stage)
        if checks is None:
            return []
        metrics = {**metrics, **self._of_others(stage)}
        history = self._histories.setdefault(stage, History(WATCHED))
        history.add(metrics)
        new: list[Finding] = []
        present: dict[str, int] = {}
        for kind, check in checks.items():
            covered = any(cover in present for cover in COVERED.get(kind, ()))
            found = None if covered else check(history, self._config)
            if found is None:
                continue
            present[kind] = found.level
            if found.level > self._told(stage, kind):
                advice = found.advice.replace(" RUN`", f" {self._run}`")
                others = any(f.lasting and f.kind != kind for f in (*self.findings, *new))
                if kind in AFTER_OTHERS and others:
                    advice = f"See the other findings; else {advice[0].lower()}{advice[1:]}"
                new.append(Finding(kind, stage, step, found.level, found.text, advice))
        self._refresh(stage, present, history.num_steps)
        self.findings += new
        return new

    def _of_others(self, stage: str) -> dict[str, float]:
        """Metrics of other stages that the checks of RL and of an evaluation read."""
        found: dict[str, float] = {}
        if not stage.startswith(("rl", "evaluate/")):
            return found
        rl = self._histories.get("rl") if stage != "rl" else None
        if rl and (success := rl.mean("rollout/success")) is not None:
            newest = mean(rl.last("rollout/success", heldout.NEWEST))
            if newest > success - heldout.FELL:  # a policy that loses all is not one by heart
                found[heldout.TRAINED] = success
        if measured := self._histories.get("evaluate/sft"):
            found[REACHED] = mean(measured.last("evaluate/success", RECENT))
        if sft := self._histories.get("sft"):
            found[SFT_STEPS] = sft.num_steps
        return found

    def _told(self, stage: str, kind: str) -> int:
        same = [f for f in self.findings if f.kind == kind]
        told = (f.level for f in same if f.stage == stage or kind in OF_ALL_STAGES)
        return max(told, default=0)

    def _refresh(self, stage: str, present: Mapping[str, int], num_steps: int) -> None:
        """Note which of the stage's findings its newest step still shows."""
        for index, finding in enumerate(self.findings):
            tested = finding.kind not in ONCE and not num_steps % RARE.get(finding.kind, 1)
            if finding.stage != stage or not tested:
                continue
            if (lasting := finding.kind in present) != finding.lasting:
                self.findings[index] = replace(finding, lasting=lasting)


def diagnose(config: RunConfig, lines: Iterable[Line], run: str = "RUN") -> Diagnosis:
    """Returns the diagnosis after all lines of a run's metrics."""
    diagnosis = Diagnosis(config, run)
    for line in lines:
        diagnosis.step(line.stage, line.step, line.metrics)
    return diagnosis


def write_findings(path: Path, findings: Iterable[Finding]) -> None:
    """Write the findings to a run's folder, for the viewer and `ludus show`."""
    atomic_write(path, json.dumps([asdict(f) for f in findings], indent=1), flush=False)


def read_findings(path: Path, tell: Callable[[str], object] = lambda _: None) -> list[Finding]:
    """Returns the findings of a run's folder; none where the file is absent or damaged. `tell`
    receives what is wrong with a damaged one."""
    try:
        return [Finding(**found) for found in read_json(path)]
    except FileNotFoundError:
        return []
    except (ValueError, TypeError):
        tell(
            f"{path} is damaged: the findings are left out. The run writes it again when it is "
            "resumed, and `ludus report` finds them in the metrics"
        )
        return []
