"""Tells the findings of a run's diagnosis while it goes on, and measures what only they need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ludus.config.schema import RunConfig
from ludus.core.errors import DataError
from ludus.core.types import Group
from ludus.data.demonstrations import dropped_path
from ludus.evaluate import Evaluation, compare
from ludus.evaluate.results import read_evaluation
from ludus.report.diagnosis import Diagnosis, diagnose, read_findings
from ludus.report.diagnosis.diagnosis import write_findings
from ludus.store.folders import RunFolder
from ludus.telemetry.logs import get_logger
from ludus.telemetry.metrics import Line

log = get_logger(__name__)


class Doctor:
    """Diagnoses a run after each step: notes new findings, and keeps them in the run's folder.

    Args:
        note: receives the findings as text.
    """

    def __init__(self, config: RunConfig, folder: RunFolder, note: Callable[[str], None]) -> None:
        self._config, self._folder, self._note = config, folder, note
        self._diagnosis = Diagnosis(config, folder.id)

    def restore(self, lines: Iterable[Line]) -> None:
        """Begin with the steps that a resumed run keeps; their findings are not told again."""
        read_findings(self._folder.findings, self._note)
        self._diagnosis = diagnose(self._config, lines, self._folder.id)
        self._write()

    def step(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        """Diagnose a recorded step."""
        before = self._diagnosis.findings.copy()
        for finding in self._diagnosis.step(stage, step, metrics):
            self._note(f"warning: {finding}")
            fields = {"kind": finding.kind, "stage": stage, "step": step}
            log.record("finding", **fields, text=finding.text, advice=finding.advice)
        if self._diagnosis.findings != before:
            self._write()

    def _write(self) -> None:
        if self._diagnosis.findings or self._folder.findings.exists():
            write_findings(self._folder.findings, self._diagnosis.findings)


def unknown_metrics(groups: Sequence[Group], unknown: int | None) -> dict[str, float]:
    """`rollout/unknown_tokens`: share of unknown tokens among those that the model was given."""
    if unknown is None:
        return {}
    given = [
        segment.token_ids
        for group in groups
        for trajectory in group.trajectories
        for segment in trajectory.segments
        if not segment.sampled
    ]
    count = sum(ids.count(unknown) for ids in given)
    return {"rollout/unknown_tokens": count / max(sum(map(len, given)), 1)}


def unknown_id(tokenizer: Any) -> int | None:
    """The id of `<unk>`; None where a tokenizer has none, or uses another special token for it."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    others = (getattr(tokenizer, f"{name}_token_id", None) for name in ("eos", "bos", "pad"))
    return unknown if unknown is not None and unknown not in others else None


def sft_metrics(num_kept: int, num_too_long: int, folder: RunFolder) -> dict[str, float]:
    """Conversations that SFT trains on; those that exceed the context; the expert's failures."""
    dropped = dropped_path(folder.demonstrations)
    lines = dropped.read_bytes().count(b"\n") if dropped.exists() else 0
    counts = {"conversations": num_kept, "too_long": num_too_long, "failed": lines}
    return {f"sft/{name}": float(count) for name, count in counts.items()}


def gain_metrics(before: Path, result: Evaluation) -> dict[str, float]:
    """`evaluate/gain` and its interval: the paired difference of success to an earlier evaluation,
    over the tasks of both; `evaluate/gain_from`: that evaluation's success on them. Empty
    without that evaluation."""
    if not before.exists():
        return {}
    start = read_evaluation(before)
    try:
        gain = compare(start, result).success
    except DataError:  # nothing was scored in both, or tasks or settings changed
        return {}
    ends = {"_low": gain.low, "_high": gain.high, "_from": gain.a}
    known = {f"evaluate/gain{end}": value for end, value in ends.items() if value is not None}
    return {"evaluate/gain": gain.value, **known}
