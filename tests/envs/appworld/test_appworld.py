"""AppWorld without its engine: task names, tiers, bad input, the gate's rules for addresses."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import pytest

from ludus.core.errors import ConfigError, EnvError
from ludus.core.types import Message, Task, ToolCall
from ludus.envs.appworld import engines, processes, tasks
from ludus.envs.appworld.appworld_side import frames
from ludus.envs.appworld.env import AppWorld


@pytest.fixture(autouse=True)
def no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("APPWORLD_ROOT", raising=False)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Downloaded data, by its folders."""
    (tmp_path / "data" / "tasks" / "82e2fac_1").mkdir(parents=True)
    (tmp_path / "data" / "datasets").mkdir()
    (tmp_path / "data" / "datasets" / "train.txt").write_text("82e2fac_1\n82e2fac_2:easy\n")
    monkeypatch.setenv("APPWORLD_ROOT", str(tmp_path))
    return tmp_path


def test_seeds_take_turns_through_the_kinds_of_a_tier() -> None:
    made = [AppWorld.task("medium", seed) for seed in range(6)]
    assert [task.data["kind"] for task in made] == ["pay", "like", "spent"] * 2
    assert len({task.id for task in made}) == 6
    assert [tasks.name_of(task)[0] for task in made[:2]] == ["pay_0", "like_1"]


def test_the_held_out_part_has_other_tasks_and_further_kinds() -> None:
    held_out = [AppWorld.task("unseen/medium", seed) for seed in range(8)]
    assert {task.data["kind"] for task in held_out} == {"pay", "like", "spent", "request"}
    names = {tasks.name_of(task)[0] for task in held_out}
    assert names.isdisjoint(tasks.name_of(AppWorld.task("medium", s))[0] for s in range(8))


def test_a_tier_may_name_one_kind() -> None:
    assert AppWorld.task("hard:settle", 4).data["kind"] == "settle"
    with pytest.raises(ConfigError, match="its kinds are settle, relation-pay, playlist"):
        AppWorld.check_tier("hard:relation-text")  # held out


def test_an_unknown_tier_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no tier 'meduim' .did you mean medium"):
        AppWorld.check_tier("meduim")


def test_downloaded_tasks_are_tiers_of_their_own(data: Path) -> None:
    assert AppWorld.tiers()[-1] == "train"
    assert [AppWorld.task("train", seed).data["task"] for seed in range(3)] == [
        "82e2fac_1",
        "82e2fac_2",
        "82e2fac_1",
    ]
    assert tasks.data_root(str(data / "data")) == data


def test_downloaded_tiers_without_data_say_what_to_set() -> None:
    assert AppWorld.tiers() == [
        "easy",
        "medium",
        "hard",
        "unseen/easy",
        "unseen/medium",
        "unseen/hard",
    ]
    with pytest.raises(ConfigError, match=r"APPWORLD_ROOT.*appworld download data"):
        AppWorld.task("dev", 0)


def test_data_that_holds_no_tasks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"env.args.data: .* has no folder data/tasks"):
        tasks.data_root(str(tmp_path))


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"task": "../../etc"},
        {"task": 3},
        {"kind": "pay", "split": "test", "seed": 1},
        {"kind": "request", "split": "train", "seed": 1},
        {"kind": "pay", "split": "train", "seed": -1},
        {"kind": ["pay"], "split": "train", "seed": 1},
        {"kind": "pay", "split": ["train"], "seed": 1},
    ],
)
def test_a_task_that_names_none_is_an_error_of_the_task(given: dict[str, object]) -> None:
    with pytest.raises(EnvError, match="appworld: task 'mine'"):
        tasks.name_of(Task(id="mine", prompt=[], data=given))


def test_without_the_engine_the_error_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LUDUS_APPWORLD_PYTHON", raising=False)
    with pytest.raises(ConfigError, match=r"there is no .*absent: run `make appworld`"):
        AppWorld(python=str(tmp_path / "absent"))
    monkeypatch.setenv("LUDUS_APPWORLD_PYTHON", str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match="gone: run `make appworld`"):
        AppWorld()


def test_a_python_without_the_engine_says_so(tmp_path: Path) -> None:
    import sys

    with pytest.raises(ConfigError, match="has no package appworld: run `make appworld`"):
        processes.probe(sys.executable)
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho broken >&2\n")
    program.chmod(0o755)
    with pytest.raises(ConfigError, match="does not run: broken"):
        processes.probe(str(program))


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ("print(1)", "print(1)"),
        ("I look first.\n```python\nprint(1)\n```\nThen more.", "print(1)\n"),
        ("```py\nprint(1)\n```\n```\nprint(2)\n```", "print(1)\n"),
        ("```python\nprint(1)", "print(1)"),
        ("", ""),
    ],
)
def test_code_is_the_first_fenced_block_or_all(content: str, code: str) -> None:
    env = object.__new__(AppWorld)
    env._expert = None
    assert env._code(Message(role="assistant", content=content)) == code


def test_a_call_that_fits_no_tool_is_answered_by_the_interpreter() -> None:
    env = object.__new__(AppWorld)
    env._expert = None
    call = ToolCall(name="python", arguments={"code": "1"})
    code = env._code(Message(role="assistant", tool_calls=[call]))
    assert code.startswith("raise Exception(")
    assert "there is execute" in code
    call = env.call_of("print(1)")
    assert env._code(Message(role="assistant", tool_calls=[call])) == "print(1)"


def test_long_outputs_lose_their_middle() -> None:
    text = "a" * 80_000 + "b" * 80_000
    short = engines.shortened(text)
    assert len(short) < engines.MAX_OUTPUT + 100
    assert (short[:3], short[-3:]) == ("aaa", "bbb")
    assert "60000 characters left out" in short


def test_messages_pass_whole_and_end_with_the_stream() -> None:
    ours, theirs = socket.socketpair()
    value = {"text": "x" * 300_000, "number": 3}
    sender = threading.Thread(target=frames.send, args=(theirs, value))
    sender.start()
    assert frames.receive(ours) == value
    sender.join()
    theirs.sendall(frames.HEAD.pack(frames.MAX_BYTES + 1))
    with pytest.raises(ValueError, match="a message of"):
        frames.receive(ours)
    theirs.close()
    with pytest.raises(EOFError):
        frames.receive(ours)
    ours.close()


def test_a_slow_sender_does_not_pass_the_time_limit() -> None:
    """A process that drips bytes must not hold its host up."""
    ours, theirs = socket.socketpair()
    data = json.dumps({"output": "x" * 100}).encode()
    theirs.sendall(frames.HEAD.pack(len(data)) + data[:10])
    shell = object.__new__(processes.Shell)
    shell._sock = ours
    assert shell.run({}, 0.05) is None
    ours.close()
    theirs.close()


def test_a_closed_engine_leaves_no_socket_open(tmp_path: Path) -> None:
    engine = engines.Engine(tmp_path, engines.Settings("python"))
    pairs = [socket.socketpair() for _ in range(3)]
    *worlds, engine._evaluator = (processes.Helper(ours, "helper") for ours, _ in pairs)
    engine._free += worlds
    engine.close()
    for ours, theirs in pairs:
        assert ours.fileno() == -1
        theirs.close()
