"""The diagnosis while a run goes on: notes, the file in the run's folder, resumed runs; metrics."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from ludus.config.load import load_config
from ludus.core.types import Group, Segment, Status, Task, Trajectory
from ludus.evaluate import Evaluation, summarise
from ludus.loop.metrics import group_metrics
from ludus.pipeline.monitoring.diagnosis import (
    Doctor,
    gain_metrics,
    sft_metrics,
    unknown_id,
    unknown_metrics,
)
from ludus.report.diagnosis import read_findings
from ludus.store.folders import RunFolder
from ludus.telemetry.logs import setup_logging, shutdown_logging
from ludus.telemetry.metrics import Line

CUT = {"rollout/truncated_length": 0.5, "rollout/episodes": 256.0, "rollout/tokens": 27000.0}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    setup_logging(tmp_path)
    yield RunFolder(tmp_path)
    shutdown_logging()


def doctor(folder: RunFolder, notes: list[str]) -> Doctor:
    return Doctor(load_config("recipes/babyai-tiny.yaml"), folder, notes.append)


def test_a_finding_is_noted_logged_and_kept(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    notes: list[str] = []
    own = doctor(folder, notes)
    for step in range(10):
        assert not folder.findings.exists()
        own.step("rl", step, CUT)
    [note] = notes
    assert note.startswith("warning: rl step 9: a limit of tokens cut 50 % of the episodes")
    [found] = read_findings(folder.findings)
    assert str(found) in note
    [line] = map(json.loads, (folder.path / "log.jsonl").read_text().splitlines())
    assert (line["event"], line["kind"], line["level"]) == ("finding", "length", "warning")
    assert "finding" not in capsys.readouterr().err, "the note told it already"


def test_a_resumed_run_keeps_its_findings_and_tells_none_again(folder: RunFolder) -> None:
    notes: list[str] = []
    own = doctor(folder, notes)
    own.restore(Line("rl", step, 0.0, CUT) for step in range(12))
    assert len(read_findings(folder.findings)) == 1
    for step in range(12, 30):
        own.step("rl", step, CUT)
    assert notes == []
    own.restore([])  # from the start: nothing is found yet
    assert read_findings(folder.findings) == []


def trajectory(
    status: Status = Status.COMPLETED, success: float = 0.0, turns: int = 1, error: str = ""
) -> Trajectory:
    segments = [Segment(-1, [5, 0, 0, 7])]
    segments += [Segment(turn, [0], [-0.1]) for turn in range(turns)]
    return Trajectory(
        "t", "g", "task", segments, status=status, reward=success, error=error or None,
        metrics={"success": success},
    )  # fmt: skip


def group(*trajectories: Trajectory, name: str = "a") -> Group:
    return Group(name, Task(id=name), list(trajectories))


def test_metrics_of_groups_and_of_limits() -> None:
    long, turns = Status.TRUNCATED_LENGTH, Status.TRUNCATED_TURNS
    groups = [
        group(trajectory(success=1.0, turns=2), trajectory(success=1.0, turns=4)),
        group(trajectory(turns, turns=8), trajectory(success=1.0, turns=3)),
        group(trajectory(long), trajectory(long, error="model.context_length is 32")),
        group(Trajectory("x", "g", "task", status=Status.ERROR_ENV)),
    ]
    metrics = group_metrics(groups)
    assert metrics["rollout/groups_failed"] == metrics["rollout/groups_solved"] == 1 / 3
    shares = [metrics[f"rollout/truncated_{limit}"] for limit in ("turns", "length", "context")]
    assert shares == pytest.approx([1 / 6, 2 / 6, 1 / 6])
    assert metrics["rollout/turns_of_success"] == 3
    assert metrics["rollout/turns_of_truncated"] == 8
    assert "rollout/groups_failed" not in group_metrics(groups[-1:])


def test_unknown_tokens_are_counted_among_those_given() -> None:
    assert unknown_metrics([group(trajectory(), trajectory())], 0) == {
        "rollout/unknown_tokens": 0.5  # the sampled 0 does not count
    }
    assert unknown_metrics([], 0) == {"rollout/unknown_tokens": 0.0}
    assert unknown_metrics([group(trajectory())], None) == {}
    ids = {"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": None}
    assert unknown_id(SimpleNamespace(unk_token_id=0, **ids)) == 0
    assert unknown_id(SimpleNamespace(unk_token_id=2, **ids)) is None  # GPT-2's end of text
    assert unknown_id(SimpleNamespace(**ids)) is None


def test_sft_counts_what_it_leaves_out(folder: RunFolder) -> None:
    assert sft_metrics(7, 2, folder)["sft/failed"] == 0
    (folder.path / "demonstrations.dropped.jsonl").write_text("{}\n{}\n{}\n")
    counts = {"sft/conversations": 7, "sft/too_long": 2, "sft/failed": 3}
    assert sft_metrics(7, 2, folder) == counts


def evaluation(rewards: list[float]) -> Evaluation:
    groups = [group(trajectory(success=r), name=f"task-{i}") for i, r in enumerate(rewards)]
    return summarise(groups, label="x")


def test_the_gain_is_over_the_tasks_of_both(tmp_path: Path) -> None:
    before = tmp_path / "before-000000.json"
    assert gain_metrics(before, evaluation([1.0])) == {}
    before.write_text(evaluation([0.0] * 20 + [1.0] * 20).model_dump_json())
    gain = gain_metrics(before, evaluation([1.0] * 20))  # a periodic one, of fewer tasks
    assert gain["evaluate/gain"] == 1.0
    assert 0 < gain["evaluate/gain_low"] < gain["evaluate/gain_high"] == 1.0
