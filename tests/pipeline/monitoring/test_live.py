"""The record of the running step: counts, rates, atomic, gone at the end."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from ludus.core.types import Segment, Trajectory
from ludus.pipeline.monitoring import live as module
from ludus.pipeline.monitoring.live import LiveRecord
from ludus.telemetry.episodes import Episodes
from ludus.telemetry.occupancy import busy


class Heard:
    """An observer that keeps what it hears."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def stage(self, name: str, total: int, start: int = 0) -> None:
        self.said.append(("stage", name, total, start))

    def tick(self) -> None:
        self.said.append("tick")

    def episode(self, trajectory: Trajectory) -> None:
        self.said.append(trajectory.id)

    def step(self, stage: str, step: int, metrics: dict[str, float]) -> None:
        self.said.append(("step", stage, step))

    def note(self, text: str) -> None:
        self.said.append(text)

    def close(self) -> None:
        self.said.append("closed")


@pytest.fixture
def episodes(monkeypatch: pytest.MonkeyPatch) -> Episodes:
    """Episodes of this test only."""
    made = Episodes()
    monkeypatch.setattr(module, "EPISODES", made)
    return made


def playing(num_turns: int) -> Trajectory:
    turns = [Segment(n, [1, 2], [-0.1, -0.1], policy_version=0) for n in range(num_turns)]
    return Trajectory(f"t{num_turns}", "g", "t", [Segment(-1, [5] * 9), *turns])


def test_episodes_of_a_step(tmp_path: Path, episodes: Episodes) -> None:
    record = LiveRecord(tmp_path / "live.json", Heard(), every_s=999)
    record.stage("rl", 20, 3)
    places = [episodes.begin(playing(n)) for n in (2, 0, 2, 99)]
    with busy("env_wait"), busy("env_wait"), busy("judge"):
        state = record.state()
    assert (state["stage"], state["step"], state["steps"]) == ("rl", 3, 20)
    assert (state["playing"], state["done"], state["tokens"]) == (4, 0, 206)
    assert len(state["by_turn"]) == module.MAX_TURNS
    assert (state["by_turn"][0], state["by_turn"][2], state["by_turn"][-1]) == (1, 2, 1)
    assert (state["busy"]["env_wait"], state["busy"]["judge"]) == (2, 1)
    assert [one["id"] for one in state["slowest"]] == ["t2", "t0", "t2", "t99"]
    for place in places[:3]:
        episodes.end(place)
    state = record.state()
    assert (state["playing"], state["done"], state["tokens"]) == (1, 3, 206)
    assert state["tokens_per_s"] == 0.0
    record.step("rl", 3, {})
    state = record.state()
    assert (state["step"], state["done"], state["tokens"]) == (4, 0, 0)
    record.close()


def test_the_file_comes_and_goes(tmp_path: Path, episodes: Episodes) -> None:
    path, heard = tmp_path / "live.json", Heard()
    record = LiveRecord(path, heard, every_s=0.01)
    record.stage("sft", 2)
    record.tick()
    record.episode(playing(1))
    record.step("sft", 0, {})
    record.note("hello")
    states = []
    for _ in range(2000):
        if path.exists():
            states.append(json.loads(path.read_text()))  # never half a file
            if states[-1]["stage"] == "sft":
                break
        threading.Event().wait(0.005)
    assert states[-1]["stage"] == "sft"
    record.close()
    assert list(tmp_path.iterdir()) == []
    assert heard.said == [
        ("stage", "sft", 2, 0), "tick", "t1", ("step", "sft", 0), "hello", "closed",
    ]  # fmt: skip


def test_a_folder_that_is_gone_is_no_fault_of_the_run(tmp_path: Path, episodes: Episodes) -> None:
    record = LiveRecord(tmp_path / "gone" / "live.json", Heard(), every_s=0.005)
    threading.Event().wait(0.05)
    record.note("it goes on")
    record.close()
