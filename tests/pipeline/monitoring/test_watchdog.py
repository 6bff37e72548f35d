"""Warnings of steps that train nothing, or whose episodes have no score."""

from __future__ import annotations

from ludus.core.types import Group, Status, Task, Trajectory
from ludus.pipeline.monitoring.watchdog import IdleWatchdog


def group(*ends: tuple[Status, str | None]) -> Group:
    trajectories = [
        Trajectory(id=str(index), task_id="t", group_id="g", status=status, error=error)
        for index, (status, error) in enumerate(ends)
    ]
    return Group(id="g", task=Task(id="t"), trajectories=trajectories)


def test_episodes_without_a_score_are_told_once_in_a_stage() -> None:
    notes: list[str] = []
    watchdog = IdleWatchdog(notes.append)
    scored = (Status.COMPLETED, None)
    unscored = (Status.UNSCORABLE, "task t has no answer")
    watchdog.step("rl", [group(scored, scored)], trained=True, num_steps=9)
    assert notes == []
    for _ in range(2):
        watchdog.step("rl", [group(scored), group(unscored, unscored)], True, num_steps=9)
    text = "2 of the step's 3 episodes have no score and are left out: task t has no answer"
    assert notes == [f"rl: {text}"]
    watchdog.step("rl2", [group(scored), group(unscored, unscored)], True, num_steps=9)
    assert notes[1:] == [f"rl2: {text}"]
