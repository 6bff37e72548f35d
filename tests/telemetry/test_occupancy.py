"""Wall time given to parts: each moment to one, in the order of their rank."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import pytest

from ludus.telemetry.occupancy import OCCUPANCY, PARTS, Occupancy, Split, busy


@dataclass
class Hand:
    """A clock that stands where it is put."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_moment_goes_to_the_first_part_that_is_busy() -> None:
    hand = Hand()
    occupancy = Occupancy(hand)
    # at second, who joins or leaves
    for second, part, by in [
        (1, "env_wait", 1),
        (3, "sample", 1),
        (4, "env_wait", 1),
        (8, "sample", -1),
        (9, "env_wait", -1),
        (10, "judge", 1),
        (12, "env_wait", -1),
        (14, "judge", -1),
        (16, "train", 1),
        (20, "train", -1),
    ]:
        hand.now = 100.0 + second
        occupancy.change(part, by)
    hand.now = 121.0
    seconds = occupancy.seconds()
    assert seconds == {
        "train": 4,
        "evaluate": 0,
        "checkpoint": 0,
        "sample": 5,
        "judge": 4,
        "tool": 0,
        "env_wait": 4,  # 1 to 3 and 8 to 10: then somebody waits, and nothing computes
        "idle": 4,
    }
    assert sum(seconds.values()) == 21


def test_a_split_counts_from_the_last_look() -> None:
    hand = Hand()
    occupancy = Occupancy(hand)
    hand.now += 5
    split = Split(occupancy)
    occupancy.change("judge", 1)
    hand.now += 2
    occupancy.change("judge", -1)
    hand.now += 1
    first = split.metrics()
    assert (first["time/judge_s"], first["time/idle_s"], first["time/wall_s"]) == (2, 1, 3)
    assert set(first) == {f"time/{part}_s" for part in PARTS} | {"time/wall_s"}
    hand.now += 4
    assert split.metrics()["time/wall_s"] == 4


def test_an_error_leaves_nobody_busy() -> None:
    before = OCCUPANCY.seconds()
    with pytest.raises(RuntimeError), busy("judge"):
        raise RuntimeError
    during = OCCUPANCY.seconds()
    threading.Event().wait(0.01)
    after = OCCUPANCY.seconds()
    assert during["judge"] > before["judge"]
    assert after["judge"] == during["judge"]


def test_threads_may_report_at_once() -> None:
    def report() -> None:
        for _ in range(2000):
            with busy("env_wait"):
                pass

    threads = [threading.Thread(target=report) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    settled = OCCUPANCY.seconds()["env_wait"]
    threading.Event().wait(0.01)
    assert OCCUPANCY.seconds()["env_wait"] == settled


def test_the_total_of_a_part_counts_whatever_else_is_busy() -> None:
    hand = Hand()
    occupancy = Occupancy(hand)
    for second, part, by in [
        (1, "sample", 1),
        (2, "train", 1),
        (3, "sample", 1),
        (5, "sample", -1),
        (6, "sample", -1),
        (9, "train", -1),
        (10, "sample", 1),
    ]:
        hand.now = 100.0 + second
        occupancy.change(part, by)  # type: ignore[arg-type]
    hand.now = 112.0
    assert occupancy.total("sample") == (6 - 1) + (12 - 10)
    assert occupancy.total("train") == 9 - 2
    assert occupancy.total("judge") == 0
    assert occupancy.seconds()["sample"] == (2 - 1) + (12 - 10)
