"""Demonstrations: faults stay with their episode, files are complete and reproducible."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

import faulty_envs
import pytest

from ludus.core.errors import ConfigError, DataError, LudusError
from ludus.core.types import Spec, Task
from ludus.data.demonstrations import (
    EPISODES_PER_JOB,
    Dropped,
    dropped_path,
    generate_demonstrations,
    load_demonstrations,
    load_dropped,
)
from ludus.data.expert import Demonstration, run_expert
from ludus.envs.babyai.env import BabyAI
from ludus.envs.textcraft.env import TextCraft

MOODY = Spec(name="faulty_envs:Moody")


def moody(seed: int, fault: str | None = None) -> Task:
    return Task(id=f"moody/{seed}", data={"seed": seed, "fault": fault})


@pytest.mark.slow
def test_faults_are_recorded_and_the_others_go_on(tmp_path: Path) -> None:
    faults = [None, "hang", "raise", None, "exit", "lose", "no expert", None]
    tasks = [moody(seed, fault) for seed, fault in enumerate(faults)]
    seen: list[Demonstration | Dropped] = []
    path = tmp_path / "demonstrations.jsonl"
    summary = generate_demonstrations(MOODY, tasks, path, timeout_s=2.0, on_episode=seen.append)
    assert [d.task_id for d in load_demonstrations(path)] == ["moody/0", "moody/3", "moody/7"]
    assert [d.task_id for d in seen] == [task.id for task in tasks]
    dropped = [json.loads(line) for line in dropped_path(path).read_text().splitlines()]
    assert [(d["task_id"], d["kind"], d["reason"]) for d in dropped] == [
        ("moody/1", "timeout", "took longer than 2 s"),
        ("moody/2", "error", "RuntimeError: the disk is full of eels [faulty_envs.py, line 229]"),
        ("moody/4", "died", "the worker process died with exit code 3"),
        ("moody/5", "lost", "the expert's reward was 0"),
        ("moody/6", "no expert", "nobody knows"),
    ]
    assert summary.num_kept == 3
    assert sum(summary.dropped.values()) == 5
    assert "1 timeout" in str(summary)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "demonstrations.dropped.jsonl",
        "demonstrations.jsonl",
    ]


@pytest.mark.slow
def test_an_environment_that_ends_its_process_again_and_again_is_told(tmp_path: Path) -> None:
    """Each start of a worker takes seconds, so thousands of episodes would take hours."""
    tasks = [moody(seed, None if seed % 4 else "exit") for seed in range(400)]
    said = r"faulty_envs:Moody: 8 of \d+ episodes of the expert ended their process, .*exit code 3"
    with pytest.raises(LudusError, match=said):
        generate_demonstrations(MOODY, tasks, tmp_path / "d.jsonl")
    assert list(tmp_path.iterdir()) == []


def test_a_worker_that_dies_outside_of_an_episode_is_told_in_a_sentence(tmp_path: Path) -> None:
    """As where the system kills it for its memory while it imports the environment."""
    env = tmp_path / "mortal.py"
    env.write_text(faulty_envs.MORTAL)
    tasks = [Task(id="digit/3", data={"seed": 3})]
    with pytest.raises(LudusError, match="a worker process of the expert died before an episode"):
        generate_demonstrations(Spec(name=f"{env}:Digit"), tasks, tmp_path / "d.jsonl")
    assert {file.name for file in tmp_path.iterdir()} - {"__pycache__"} == {"mortal.py"}


@pytest.mark.slow
def test_a_pool_that_breaks_is_followed_by_another(tmp_path: Path) -> None:
    """The first worker dies as it starts, and again the one after an episode that ends its
    process: no episode is lost or played twice."""
    env = tmp_path / "mortal_at_times.py"
    env.write_text(faulty_envs.MORTAL_AT_TIMES)
    tasks = [moody(seed, "exit" if seed == 20 else None) for seed in range(32)]
    path = tmp_path / "d.jsonl"
    summary = generate_demonstrations(Spec(name=f"{env}:Moody"), tasks, path, num_workers=1)
    assert summary.dropped == {"died": 1}
    kept = [d.task_id for d in load_demonstrations(path)]
    assert kept == [task.id for task in tasks if task.id != "moody/20"]
    assert len((tmp_path / "starts").read_text()) == 5


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        ("StepReturnsNone", "EnvError: step returned None; it has to return a StepResult"),
        ("RewardIsNan", "EnvError: step returned a reward that is no finite number or None: nan"),
        ("ResetReturnsNone", "EnvError: reset returned None; it has to return an Observation"),
        ("ActsWithNone", "EnvError: expert_action returned None; it has to return a text"),
        ("Exits", "SystemExit: 0 [faulty_envs.py, line 128]"),
    ],
)
def test_what_an_environment_returns_is_checked_as_in_rollouts(
    tmp_path: Path, env: str, reason: str
) -> None:
    path = tmp_path / "demonstrations.jsonl"
    tasks = [Task(id="digit/3", data={"seed": 3})]
    generate_demonstrations(Spec(name=f"faulty_envs:{env}"), tasks, path)
    (line,) = dropped_path(path).read_text().splitlines()
    assert (json.loads(line)["kind"], json.loads(line)["reason"]) == ("error", reason)


@pytest.mark.slow
def test_the_file_does_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    tasks = [BabyAI.task(level, s) for s in range(25) for level in ("GoToLocal", "UnlockToUnlock")]
    env = Spec(name="babyai", args={"actions": "macro"})
    one, three = tmp_path / "one.jsonl", tmp_path / "three.jsonl"
    generate_demonstrations(env, tasks, one, num_workers=1)
    generate_demonstrations(env, tasks, three, num_workers=3)
    assert one.read_bytes() == three.read_bytes()
    assert dropped_path(one).read_bytes() == dropped_path(three).read_bytes()
    assert b"no expert" in dropped_path(one).read_bytes()


def test_lost_episodes_are_kept_on_request(tmp_path: Path) -> None:
    path = tmp_path / "all.jsonl"
    generate_demonstrations(MOODY, [moody(0, "lose")], path, only_successful=False)
    (lost,) = load_demonstrations(path)
    assert (lost.success, lost.reward, lost.num_turns) == (False, 0.0, 1)


async def test_a_plain_episode_alternates_between_environment_and_expert() -> None:
    shown = await run_expert(TextCraft(), TextCraft.task("depth-2", 3))
    roles = [message.role for message in shown.messages]
    assert roles == ["user", "assistant"] * shown.num_turns + ["user"]
    assert shown.success
    assert shown.reward == 1.0


async def test_react_turns_name_their_action() -> None:
    plain = await run_expert(BabyAI(), BabyAI.task("GoToLocal", 5))
    react = await run_expert(BabyAI(), BabyAI.task("GoToLocal", 5), "react")
    turns = [m.content for m in plain.messages if m.role == "assistant"]
    assert [m.content for m in react.messages if m.role == "assistant"] == [
        f"Action: {turn}" for turn in turns
    ]


async def test_tool_turns_are_calls_and_the_answers_refer_to_them() -> None:
    shown = await run_expert(TextCraft(), TextCraft.task("depth-1", 3), "tools")
    calls = [m.tool_calls[0] for m in shown.messages if m.role == "assistant"]
    answers = [m for m in shown.messages if m.role == "tool"]
    assert all(m.content == "" for m in shown.messages if m.role == "assistant")
    assert [a.tool_call_id for a in answers] == [c.id for c in calls]
    assert calls[-1].name == "craft"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{not json", "Invalid JSON"),
        ('{"task_id": "x"}', "tier: Field required"),
        ('"text"', "an object"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "d.jsonl"
    generate_demonstrations(MOODY, [moody(0)], path)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(DataError, match=rf"d\.jsonl, line 2: .*{problem}"):
        list(load_demonstrations(path))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.jsonl: cannot read"):
        list(load_demonstrations(tmp_path / "none.jsonl"))


def test_a_wrong_spec_is_refused_before_anything_starts(tmp_path: Path) -> None:
    env = Spec(name="babyai", args={"actons": "macro"})
    with pytest.raises(ConfigError, match=r"actons is not an argument"):
        generate_demonstrations(env, [BabyAI.task(None, 0)], tmp_path / "d.jsonl")
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write demonstrations"):
        generate_demonstrations(MOODY, [moody(0)], tmp_path / "file" / "d.jsonl")


SCRIPT = """
import sys
from ludus.core.types import Spec, Task
from ludus.data.demonstrations import generate_demonstrations
if __name__ == "__main__":
    tasks = [Task(id=str(s), data={"seed": s, "fault": "hang" if s else None}) for s in range(99)]
    generate_demonstrations(Spec(name="faulty_envs:Moody"), tasks, sys.argv[1], timeout_s=1.0,
             on_episode=lambda _: print("one", flush=True))
"""


@pytest.mark.slow
def test_an_interrupt_leaves_no_half_file(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    out = tmp_path / "out"
    support = Path(faulty_envs.__file__).parent
    process = subprocess.Popen(
        [sys.executable, str(script), str(out / "d.jsonl")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{support}{os.pathsep}{support.parents[1]}"},
        start_new_session=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    assert len(list(out.iterdir())) == 2  # both are being written aside
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode != 0
    assert b"KeyboardInterrupt" in error
    assert list(out.iterdir()) == []


def test_workers_that_still_start_end_without_a_traceback(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by Ctrl-C on a busy machine: the pool gives up its locks before it ends its workers."""
    from pebble.pool import process

    stop = process.stop_process
    monkeypatch.setattr(process, "stop_process", lambda worker: (time.sleep(2), stop(worker)))

    def interrupted(task: Task) -> Literal["plain"]:
        if int(task.id) >= EPISODES_PER_JOB:  # the first job has started the workers
            raise KeyboardInterrupt
        return "plain"

    tasks = [Task(id=str(i), data={"seed": i}) for i in range(2 * EPISODES_PER_JOB)]
    with pytest.raises(KeyboardInterrupt):
        generate_demonstrations(
            Spec(name="babyai"), tasks, tmp_path / "d.jsonl", num_workers=2, format=interrupted
        )
    assert capfd.readouterr().err == ""


def test_a_damaged_line_of_dropped_episodes_is_named(tmp_path: Path) -> None:
    path = tmp_path / "demonstrations.jsonl"
    assert load_dropped(path) == []
    one = Dropped(task_id="moody/1", tier=None, kind="lost", reason="reward 0")
    dropped_path(path).write_text(f"{one.model_dump_json()}\n", encoding="utf-8")
    assert load_dropped(path) == [one]
    with dropped_path(path).open("a", encoding="utf-8") as file:
        file.write("{broken\n")
    with pytest.raises(DataError, match=r"demonstrations\.dropped\.jsonl, line 2: "):
        load_dropped(path)
