"""The course of a roll-out, its outlook, and logs that are followed while they grow."""

from __future__ import annotations

import math
import os
from itertools import pairwise
from pathlib import Path

import pytest
from ab_rollout_logs import SETTINGS, opened, play

from ludus.services.model.rollout.controller import Controller
from ludus.services.model.rollout.course import (
    LEAST_S,
    MAX_DECISIONS,
    MAX_POINTS,
    Course,
    median_of,
    rates,
)
from ludus.services.model.rollout.events import Decision, Ended, Scored, Variant
from ludus.services.model.rollout.outlook import outlook
from ludus.services.model.rollout.replay import Content, LogFollower, Replaced, Replay, replay


def followed(path: Path) -> tuple[LogFollower, Course]:
    course = Course()

    def count(replayed: Replay, line: Content) -> None:
        if isinstance(line, Ended | Scored):
            course.count(replayed.controller, line)
        elif isinstance(line, Decision):
            course.decided(replayed.controller, [line])

    return LogFollower(path, count), course


def test_a_log_is_followed_while_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    rollout = opened(path)
    log, course = followed(path)
    assert not log.read_on(9)
    for seed in range(3):
        play(rollout, 60, seed=seed)
        assert not log.read_on(9)
        assert log.replayed is not None
        assert log.replayed.controller.state() == rollout.controller.state()
        assert log.num_read == log.size == path.stat().st_size
    with path.open("a") as file:
        file.write('{"kind": "scored"')  # in the middle of a line
    assert not log.read_on(9)
    assert (log.problem, log.size - log.num_read) == ("", 17)
    assert course.points[-1].requests == tuple(
        tally.num_requests for tally in rollout.controller.tallies.values()
    )
    rollout.close()


def test_a_large_log_is_read_in_parts(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    rollout = opened(path)
    play(rollout, 200)
    rollout.close()
    log, course = followed(path)
    parts = 1
    while log.read_on(0.0):
        parts += 1
    assert parts > 2
    whole = replay(path)
    assert log.replayed is not None
    assert log.replayed.controller.state() == whole.controller.state()
    assert [one.decision for one in course.decisions] == whole.decisions


@pytest.mark.parametrize("change", ["shorter", "another file"])
def test_a_log_that_was_replaced_is_noticed(tmp_path: Path, change: str) -> None:
    path = tmp_path / "log.jsonl"
    rollout = opened(path)
    play(rollout, 20)
    rollout.close()
    log, _ = followed(path)
    log.read_on(9)
    if change == "shorter":
        os.truncate(path, 400)
    else:
        other = tmp_path / "other"
        other.write_bytes(path.read_bytes())
        other.rename(path)
    with pytest.raises(Replaced):
        log.read_on(9)


def test_damage_is_told_and_what_stands_before_it_stays(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    rollout = opened(path)
    play(rollout, 20)
    rollout.close()
    good = path.stat().st_size
    for foreign, said in (("my notes\n", "not a line"), ("x" * 200_000, "too long")):
        with path.open("a") as file:
            file.write(foreign)
        log, _ = followed(path)
        assert not log.read_on(9)
        assert said in log.problem
        assert log.num_read == good
        os.truncate(path, good)


def test_a_pipe_is_no_log(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log.jsonl")
    with pytest.raises(OSError, match="not a regular file"):
        LogFollower(tmp_path / "log.jsonl").read_on(9)


def test_course_has_a_bounded_number_of_points_and_keeps_all_counts() -> None:
    controller, course = Controller(SETTINGS), Course()
    controller.start(0.0)
    for number in range(1, 1501):
        end = "failed" if number % 10 == 0 else "ok"
        event = Ended(
            t=float(number), id=str(number), variant=Variant.CHAMPION, unit=str(number),
            end=end, seconds=2.0 if number > 750 else 1.0,
        )  # fmt: skip
        controller.apply(event)
        course.count(controller, event)
    points = course.points
    assert MAX_POINTS / 2 <= len(points) < MAX_POINTS
    assert len({b.num_events - a.num_events for a, b in pairwise(points)}) == 1
    first, last = points[len(points) // 4], points[-1]
    told = rates(points[-20], last, 0)
    assert told["failed"] == pytest.approx(0.1, abs=0.02)
    assert told["seconds"] == pytest.approx(2.0, rel=0.03)
    assert rates(None, first, 0)["seconds"] == pytest.approx(1.0, rel=0.03)
    assert rates(first, last, 1) == {"failed": None, "score": None, "seconds": None}
    decision = Decision(t=1.0, action="hold", share=0.1, reason="")
    course.decided(controller, [decision] * (MAX_DECISIONS + 5))
    assert len(course.decisions) == MAX_DECISIONS


@pytest.mark.parametrize("seconds", [0.0, 1e-9, LEAST_S, 1e300, math.ulp(0.0)])
def test_any_time_of_an_answer_has_a_bin(seconds: float) -> None:
    controller, course = Controller(SETTINGS), Course()
    controller.start(0.0)
    event = Ended(t=1.0, id="a", variant=Variant.CHAMPION, unit="a", end="ok", seconds=seconds)
    controller.apply(event)
    course.count(controller, event)
    assert median_of(course.points[-1].seconds[0]) is not None


def test_outlook_tells_what_is_decided_next(tmp_path: Path) -> None:
    rollout = opened(tmp_path / "log.jsonl")
    controller = rollout.controller
    first = outlook(controller)[0]
    assert (first.action, first.share, first.done) == ("increase", 0.25, 0.0)
    assert first.needs == "20 more scored sessions of the challenger and 60 s more at this share"
    for seed in range(1000, 3000):
        before = outlook(controller)[0]
        play(rollout, 1, seed=seed)
        if controller.step:
            break
    assert before.done > 0.9
    assert rollout.decisions[-1].action == "increase"
    play(rollout, 4000, seed=5, good=(0.2, 0.9))
    assert controller.phase == "promoted"
    assert outlook(controller) == []
    rollout.close()


def test_outlook_of_a_roll_back_and_of_a_hold(tmp_path: Path) -> None:
    rollout = opened(tmp_path / "log.jsonl")
    play(rollout, 600)
    play(rollout, 400, seed=2, failing=(0.95, 0.95))
    assert rollout.controller.phase == "holding"
    assert [one.action for one in outlook(rollout.controller)] == ["resume"]
    rollout.close()
    rollout = opened(tmp_path / "other.jsonl")
    largest = 0.0
    for seed in range(1000):
        play(rollout, 1, seed=seed, failing=(0.0, 0.5))
        for one in outlook(rollout.controller):
            if "more failed requests" in one.needs:
                largest = max(largest, one.done)
        if rollout.controller.ended:
            break
    assert rollout.controller.phase == "rolled_back"
    assert 0.5 < largest <= 1.0
    rollout.close()
