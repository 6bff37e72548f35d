"""Exports, read back by other eyes: json, pyarrow, the carriers."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from store_examples import branched, make_groups

from ludus.core.errors import ConfigError, MissingDependency, StoreError
from ludus.core.types import Constraint, Group, Message, Segment, Status, Task, ToolCall, Trajectory
from ludus.store import RunStore
from ludus.store.export import export


def strictly(constant: str) -> Any:
    raise AssertionError(f"{constant} is not JSON")


def lines(path: Path) -> list[dict[str, Any]]:
    texts = path.read_text(encoding="utf-8").split("\n")
    assert texts.pop() == ""
    return [json.loads(text, parse_constant=strictly) for text in texts]


@pytest.fixture
def filled(tmp_path: Path) -> Iterator[RunStore]:
    with RunStore.open(None, tmp_path) as store:
        store.create_run("run-1", "demo", {}, {})
        store.record_step("run-1", "sft", 0, [], {"sft/loss": math.nan})
        for step in range(2):
            metrics = {"rl/reward": 0.1 * step, "rl/kl": math.inf}
            groups = make_groups(step)
            store.record_step(
                "run-1", "rl", step, groups, metrics, seconds=0.5, policy_version=step
            )
        yield store


def test_trajectories_as_json_lines(filled: RunStore, tmp_path: Path) -> None:
    done = export(filled, "run-1", tmp_path / "deep" / "out.jsonl")
    assert (done.num_rows, done.skipped) == (12, {})
    rows = lines(done.path)
    for row, record in zip(rows, filled.records("run-1"), strict=True):
        trajectory = record.trajectory
        assert (row["run"], row["stage"], row["step"]) == ("run-1", "rl", record.row.step)
        for name in (
            "id",
            "task_id",
            "reward",
            "scores",
            "explanation",
            "error",
            "dropped",
            "metrics",
        ):
            assert row[name] == getattr(trajectory, name)
        segments = [
            Segment(
                part["parent"],
                part["token_ids"],
                part["logprobs"],
                part["message"] and Message.model_validate(part["message"]),
                part["policy_version"],
                part["reward"],
                part["metrics"],
                constraint=part["constraint"]
                and Constraint(
                    part["constraint"]["grammar"], tuple(part["constraint"]["stop_token_ids"])
                ),
            )
            for part in row["segments"]
        ]
        runs = [s.runs if s.sampled else None for s in trajectory.segments]
        assert [_pairs(part["version_runs"]) for part in row["segments"]] == runs
        assert segments == trajectory.segments
        assert [part["sampled"] for part in row["segments"]] == [s.sampled for s in segments]


def _pairs(runs: list[list[int]] | None) -> list[tuple[int, int]] | None:
    return None if runs is None else [(version, count) for version, count in runs]


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_versions_of_tokens(filled: RunStore, tmp_path: Path, format: str) -> None:
    runs = [(3, 1), (4, 2)]
    turn = Segment(0, [4, 2, 2], [-0.5] * 3, policy_version=3, version_runs=runs)
    segments = [Segment(-1, [1]), turn, Segment(0, [2], [-0.5], policy_version=4)]
    group = Group("g", Task(id="x"), [Trajectory("t", "g", "x", segments, reward=1.0)])
    filled.create_run("run-2", "demo", {}, {})
    filled.record_step("run-2", "rl", 0, [group], {})
    path = export(filled, "run-2", tmp_path / f"out.{format}").path
    if format == "parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        [row] = parquet.read_table(path).to_pylist()
    else:
        [row] = lines(path)
    assert [_pairs(part["version_runs"]) for part in row["segments"]] == [None, runs, [(4, 1)]]
    assert [part["policy_version"] for part in row["segments"]] == [None, 3, 4]


def test_trajectories_as_parquet(filled: RunStore, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    done = export(filled, "run-1", tmp_path / "out.parquet", format="parquet", decode=str)
    rows = parquet.read_table(done.path).to_pylist()
    assert done.num_rows == len(rows) == 12
    for row, record in zip(rows, filled.records("run-1"), strict=True):
        trajectory = record.trajectory
        assert (row["id"], row["reward"]) == (trajectory.id, trajectory.reward)
        assert (row["status"], row["tier"]) == (trajectory.status.value, record.row.tier)
        assert dict(row["scores"]) == trajectory.scores
        assert len(row["segments"]) == len(trajectory.segments)
        for part, segment in zip(row["segments"], trajectory.segments, strict=True):
            assert part["token_ids"] == segment.token_ids
            assert part["logprobs"] == segment.logprobs
            assert (part["parent"], part["sampled"]) == (segment.parent, segment.sampled)
            assert part["text"] == str(segment.token_ids)
            message = part["message"] and Message.model_validate_json(part["message"])
            assert message == segment.message
    assert rows[2]["error"] == 'the environment raised C:\\new "\x00?"'


def test_many_row_groups(filled: RunStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr("ludus.store.export._ROW_GROUP", 5)
    path = export(filled, "run-1", tmp_path / "out.parquet", format="parquet").path
    assert parquet.ParquetFile(path).num_row_groups == 3
    ids = [row.id for row in filled.trajectories("run-1")]
    assert parquet.read_table(path).column("id").to_pylist() == ids


def test_steps(filled: RunStore, tmp_path: Path) -> None:
    rows = lines(export(filled, "run-1", tmp_path / "steps.jsonl", what="steps", decode=str).path)
    assert [(row["stage"], row["step"]) for row in rows] == [("sft", 0), ("rl", 0), ("rl", 1)]
    assert rows[0]["metrics"] == {"sft/loss": "NaN"}, "honest, and still JSON"
    assert rows[2]["metrics"] == {"rl/reward": 0.1, "rl/kl": "Infinity"}
    assert (rows[2]["policy_version"], rows[2]["seconds"]) == (1, 0.5)
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "steps.parquet"
    export(filled, "run-1", path, what="steps", format="parquet", stage="rl", step=1)
    [row] = parquet.read_table(path).to_pylist()
    assert dict(row["metrics"]) == {"rl/reward": 0.1, "rl/kl": math.inf}


def test_sft_data_filtered_by_score(filled: RunStore, tmp_path: Path) -> None:
    path = tmp_path / "sft.jsonl"
    done = export(filled, "run-1", path, what="sft", min_score=0.5, decode=lambda ids: f"<{ids}>")
    low = "reward below 0.5, or none"
    assert (done.num_rows, done.skipped) == (1, {low: 8, "duplicate conversation": 3})
    for row in lines(path):
        assert row.keys() == {"messages", "reward", "task_id"}
        assert row["reward"] >= 0.5
        messages = [Message.model_validate(message) for message in row["messages"]]
        assert [(m.role, m.content) for m in messages] == [
            ("user", "go to the red ball"),
            ("assistant", "<[4, 1]>"),  # the last path, which was scored; decoded
        ]
    done = export(filled, "run-1", path, what="sft", decode=str)
    assert (done.num_rows, done.skipped) == (
        1,
        {"status error_env": 4, "duplicate conversation": 7},
    )


def test_sft_data_has_no_held_out_tasks_and_no_duplicates(filled: RunStore, tmp_path: Path) -> None:
    def said(id: str, text: str, reward: float = 1.0) -> Group:
        question = Segment(-1, [1], None, Message(role="user", content="?"))
        answer = Segment(0, [2], [-0.1], Message(role="assistant", content=text))
        trajectory = Trajectory(id, "g", f"task-{id}", [question, answer], reward=reward)
        return Group("g", Task(id=f"task-{id}"), [trajectory])

    for stage, groups in (
        ("evaluate/before", [said("a", "held out"), said("b", "same")]),
        ("sft", [said("c", "same")]),
        ("rl", [said("d", "same"), said("e", "new"), said("f", "low", 0.0)]),
        ("rl/left", [said("g", "left")]),
        ("evaluate/after", [said("h", "held out"), said("i", "lost", 0.0)]),
    ):
        filled.record_step("run-1", stage, 7, groups, {})

    def texts(**selection: Any) -> tuple[list[str], Any]:
        done = export(
            filled, "run-1", tmp_path / "x.jsonl", what="sft", min_score=1.0, step=7, **selection
        )
        return [row["messages"][1]["content"] for row in lines(done.path)], done.skipped

    assert texts() == (
        ["same", "new", "left"],
        {"reward below 1, or none": 1, "held-out evaluation": 4, "duplicate conversation": 1},
    )
    assert texts(stage="evaluate/before") == (["held out", "same"], {})
    assert texts(stage="rl") == (["same", "new"], {"reward below 1, or none": 1})
    with pytest.raises(ConfigError, match=r"no stage 'evaluate/befor' .*did you mean evaluate/bef"):
        texts(stage="evaluate/befor")
    done = export(filled, "run-1", tmp_path / "all.jsonl", step=7)
    assert done.num_rows == 9


def test_the_format_follows_the_suffix(filled: RunStore, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    done = export(filled, "run-1", tmp_path / "out.PARQUET")
    assert parquet.read_table(done.path).num_rows == 12
    for name in ("out.jsonl", "out.ndjson"):
        assert len(lines(export(filled, "run-1", tmp_path / name).path)) == 12
    assert len(lines(export(filled, "run-1", tmp_path / "out", format="jsonl").path)) == 12
    for name, format, reason in (
        ("x.parquet", "jsonl", r"x\.parquet ends in \.parquet, but the format is jsonl: name it"),
        ("x.jsonl", "parquet", r"x\.jsonl ends in \.jsonl, but the format is parquet: name it"),
        ("x.csv", None, r"x\.csv names no format: name it \*\.jsonl or \*\.parquet, or set"),
        ("x", None, r"x names no format"),
    ):
        with pytest.raises(ConfigError, match=reason):
            export(filled, "run-1", tmp_path / name, format=format)
        assert not (tmp_path / name).exists()


def test_sft_data_leaves_out_what_is_no_conversation(filled: RunStore, tmp_path: Path) -> None:
    question = Segment(-1, [1], None, Message(role="user", content="?"))
    answer = Segment(0, [2], [-0.1], Message(role="assistant", content="!"))
    unsaid = Segment(0, [2], [-0.1])
    alone = Segment(-1, [2], [-0.1], Message(role="assistant", content="!"))
    glue = Segment(0, [9], None)
    whole = Trajectory("whole", "g", "t", [question, glue, Segment(1, [2], [0.0], answer.message)])
    whole.reward = 1.0
    group = [
        whole,
        Trajectory("unscored", "g", "t", [question, answer]),
        Trajectory("nan", "g", "t", [question, answer], reward=math.nan),
        Trajectory("unsaid", "g", "t", [question, unsaid], reward=1.0),
        Trajectory("alone", "g", "t", [alone], reward=1.0),
        Trajectory("silent", "g", "t", [question], reward=1.0),
        Trajectory("broken", "g", "t", [question, answer], status=Status.ERROR_TOOL, reward=1.0),
    ]
    filled.record_step("run-1", "x", 0, [Group("g", Task(id="t"), group)], {})
    done = export(filled, "run-1", tmp_path / "sft.jsonl", what="sft", stage="x")
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    assert lines(done.path) == [{"messages": chat, "reward": 1.0, "task_id": "t"}]
    assert done.skipped == {
        "no reward": 2,
        "a sampled turn without a message (pass decode)": 1,
        "no message before the first assistant message": 1,
        "no assistant message": 1,
        "status error_tool": 1,
    }


def test_sft_data_keeps_the_functions_and_the_part_of_a_task(
    filled: RunStore, tmp_path: Path
) -> None:
    def group(id: str, **fields: Any) -> Group:
        question = Segment(-1, [1], None, Message(role="user", content="?"))
        answer = Segment(0, [2], [-0.1], Message(role="assistant", content="!"))
        trajectory = Trajectory(id, "g", id, [question, answer], reward=1.0)
        return Group("g", Task(id=id, **fields), [trajectory])

    groups = [
        group("all"),
        group("none", tools=[]),
        group("one", tools=["add"], data={"part": "maths"}),
        group("twice", tools=["add"], data={"part": "maths"}),
    ]
    filled.record_step("run-1", "x", 0, groups, {})
    done = export(filled, "run-1", tmp_path / "sft.jsonl", what="sft", stage="x")
    assert done.skipped == {"duplicate conversation": 1}, "equal messages and functions"
    rows = [(row.get("tools"), row.get("part")) for row in lines(done.path)]
    assert rows == [(None, None), ([], None), (["add"], "maths")]
    parquet = pytest.importorskip("pyarrow.parquet")
    export(filled, "run-1", tmp_path / "sft.parquet", what="sft", stage="x")
    found = parquet.read_table(tmp_path / "sft.parquet").to_pylist()
    assert [(row["tools"], row["part"]) for row in found] == rows


@pytest.mark.parametrize("tools", [[], [{"name": "add"}]])
def test_sft_data_of_an_agent_says_that_its_tools_are_not_there(
    filled: RunStore, tmp_path: Path, tools: list[Any]
) -> None:
    filled.create_run("agent-1", "agent", {"agent": {"name": "a.py:run"}, "tools": tools}, {})
    groups = []
    for id, calls in (("with", [ToolCall(name="add", arguments={})]), ("bare", [])):
        question = Segment(-1, [1], None, Message(role="user", content=id))
        message = Message(role="assistant", content="!", tool_calls=calls)
        trajectory = Trajectory(
            id, id, id, [question, Segment(0, [2], [-0.1], message)], reward=1.0
        )
        groups.append(Group(id, Task(id=id), [trajectory]))
    filled.record_step("agent-1", "rl", 0, groups, {})
    done = export(filled, "agent-1", tmp_path / "sft.jsonl", what="sft")
    assert (done.num_rows, done.skipped) == (2, {})
    lack = "calls of tools that the agent offered, without their descriptions"
    assert done.incomplete == ({} if tools else {lack: 1})


def test_sft_data_as_parquet_keeps_tool_calls(filled: RunStore, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    whole = branched("t", "g")
    whole.segments = whole.segments[:4]
    filled.record_step("run-1", "x", 0, [Group("g", Task(id="t"), [whole])], {})
    path = tmp_path / "sft.parquet"
    export(filled, "run-1", path, what="sft", stage="x", format="parquet")
    [row] = parquet.read_table(path).to_pylist()
    for message in row["messages"]:
        for call in message["tool_calls"]:
            call["arguments"] = json.loads(call["arguments"])
    messages = [Message.model_validate(message) for message in row["messages"]]
    assert messages == [segment.message for segment in whole.segments]


def test_a_wrong_choice_is_refused(filled: RunStore, tmp_path: Path) -> None:
    path = tmp_path / "out"
    with pytest.raises(ConfigError, match=r"format 'parket' is unknown \(did you mean parquet\?\)"):
        export(filled, "run-1", path, format="parket")
    with pytest.raises(ConfigError, match=r"what 'step' is unknown \(did you mean steps\?\)"):
        export(filled, "run-1", path, format="jsonl", what="step")
    with pytest.raises(ConfigError, match="steps have neither score"):
        export(filled, "run-1", path, format="jsonl", what="steps", min_score=1.0)
    with pytest.raises(StoreError, match=r"did you mean run-1\?"):
        export(filled, "run1", path, format="jsonl")
    assert not path.exists()


def test_a_failed_export_leaves_the_old_file(
    filled: RunStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.jsonl"
    export(filled, "run-1", path)
    before = path.read_bytes()

    def interrupted(ids: list[int]) -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(filled, "run-1", path, decode=interrupted)
    assert path.read_bytes() == before
    assert {name for name in os.listdir(tmp_path) if "out" in name} == {"out.jsonl"}
    with pytest.raises(StoreError, match="cannot write"):
        export(filled, "run-1", path / "inside" / "a-file.jsonl")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingDependency, match=r"pip install 'ludus-rl\[data\]'"):
        export(filled, "run-1", tmp_path / "out.parquet")
    assert path.read_bytes() == before
