"""Groups on their way from a host's workers: complete lines only, nothing lost."""

from __future__ import annotations

import math
from pathlib import Path

from ludus.backends.hosted import (
    EpisodesReader,
    EpisodesWriter,
    HostedGroup,
    StepsReader,
    task_lines,
)
from ludus.core.types import Group, Message, Segment, Task, ToolCall, Trajectory


def group(id: str) -> Group:
    call = ToolCall(name="look", arguments={"at": [1, None]}, id="c")
    segments = [
        Segment(-1, [1, 2], message=Message(role="user", content="half a pair: \ud800\n\x00")),
        Segment(0, [3], [-0.5], Message(role="assistant", tool_calls=[call]), 4, 1.0),
    ]
    other = Trajectory(f"{id}/b", id, "t", role="villager")
    played = Trajectory(f"{id}/a", id, "t", segments, reward=math.inf, others=[other])
    return Group(id, Task(id="t", data={"seed": 3}, tier="x"), [played])


def test_groups_arrive_as_they_were(tmp_path: Path) -> None:
    writer, reader = EpisodesWriter(tmp_path / "e"), EpisodesReader(tmp_path / "e")
    first, second = (HostedGroup("rl", 0, group(id)) for id in ("g0", "g1"))
    assert reader.groups() == []
    writer.write(first)
    assert reader.groups() == [first]
    assert reader.groups() == []
    writer.write(second)
    writer.close()
    assert reader.groups() == [second]


def test_half_a_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    reader = StepsReader(path)
    assert reader.steps() == []
    path.write_text('{"step": 1, "data": {"a": 1.5}}\n{"step": 2, ')
    assert reader.steps() == [(1, {"a": 1.5})]
    assert reader.steps() == []
    with path.open("a") as file:
        file.write('"data": {}}\n')
    assert reader.steps() == [(2, {})]


def test_a_task_is_a_line_whatever_its_text(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    said = Message(role="user", content="one\u2028two\x85three\x1c\r\nfour")
    tasks = [Task(id="a", prompt=[said]), Task(id="b")]
    path.write_text("".join(task.model_dump_json() + "\n" for task in tasks), encoding="utf-8")
    assert [Task.model_validate_json(line) for line in task_lines(path)] == tasks
