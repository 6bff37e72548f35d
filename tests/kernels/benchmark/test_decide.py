"""Decisions on recorded times."""

from __future__ import annotations

import pytest

from ludus.core.errors import DataError
from ludus.kernels.benchmark.decide import Device, device_of, judge, moved_bytes, summary

MB = 1 << 20
H100 = Device("NVIDIA H100 80GB HBM3", "sm_90", 50 * MB, 80 << 30, 2.9e12, 3.36e12)
STEADY = [0.100 + 0.0001 * (i % 10) for i in range(100)]
WALLS = [value + 0.02 for value in STEADY]


def test_statistics_are_of_seconds() -> None:
    found = summary([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (found.median, found.number) == (0.003, 5)
    assert found.p10 == pytest.approx(0.0014)
    assert found.p90 == pytest.approx(0.0616)


@pytest.mark.parametrize(
    "times", [[], [1.0], [1.0, float("nan")], [1.0, -1.0], [1.0, float("inf")]]
)
def test_times_that_are_none_are_refused(times: list[float]) -> None:
    with pytest.raises(DataError, match="not complete"):
        summary(times)


def test_a_steady_kernel_within_the_limits_has_no_flags() -> None:
    found = judge(STEADY, WALLS, 100 * MB, 50 * MB, H100, flops=1e9, eager_s=2e-4)
    assert (found.problem, found.flags) == ("", ())
    assert found.bandwidth == pytest.approx(150 * MB / 100.45e-6)
    assert found.bandwidth_share == pytest.approx(found.bandwidth / 3.36e12)
    assert found.throughput == pytest.approx(1e9 / 100.45e-6)


def test_faster_than_the_bytes_allow_is_not_believed() -> None:
    found = judge(STEADY, WALLS, 1000 * MB, 0, H100)
    assert "are not possible" in found.problem
    # 400 MB in 0.1 ms would be 4.2 TB/s; the output alone may stay in the cache
    assert judge(STEADY, WALLS, 400 * MB, 0, H100).problem
    assert not judge(STEADY, WALLS, 300 * MB, 50 * MB, H100).problem


def test_bytes_that_must_move() -> None:
    assert moved_bytes(10, 20, 50) == 10
    assert moved_bytes(10, 80, 50) == 40


def test_work_on_another_stream_shows_at_the_wall() -> None:
    """The events of the timed stream tell 1 us, the device was busy for 5 ms."""
    found = judge([0.001] * 100, [5.0] * 100, 4000, 4000, H100)
    assert "work outside of the timed stream" in found.problem
    # the overhead of launches and of waiting is none
    assert not judge([0.002] * 100, [0.06] * 100, 4000, 4000, H100).problem
    assert not judge([10.0] * 100, [10.2] * 100, 4000, 4000, H100).problem


def test_a_stopped_clock_is_not_believed() -> None:
    found = judge([0.0] * 100, [0.01] * 100, 100 * MB, 100 * MB, H100)
    assert "are not possible" in found.problem


def test_speed_ups_above_ten_are_flagged_at_ten_not() -> None:
    times = [0.1] * 100
    assert not judge(times, WALLS, 4000, 4000, H100, eager_s=1e-3).flags
    [flag] = judge(times, WALLS, 4000, 4000, H100, eager_s=1.01e-3).flags
    assert "10.1 times" in flag


def test_unsteady_times_are_flagged() -> None:
    times = [0.1] * 60 + [0.5] * 40
    [flag] = judge(times, [t + 0.02 for t in times], 4000, 4000, H100).flags
    assert flag.startswith("unsteady")


def test_events_and_walls_belong_together() -> None:
    with pytest.raises(DataError):
        judge(STEADY, WALLS[:-1], 4000, 4000, H100)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 3.36e12), ("NVIDIA H100 PCIe", 2.04e12),
        ("NVIDIA H200", 4.8e12), ("NVIDIA A100-SXM4-80GB", 2.04e12), ("NVIDIA L4", 0.3e12),
        ("NVIDIA L40S", 0.864e12), ("Tesla T4", 0.32e12), ("NVIDIA GeForce RTX 4090", 1.01e12),
        ("NVIDIA A10G", 0.6e12), ("Something", None), ("NVIDIA L400", None),
    ],
)  # fmt: skip
def test_peaks_by_name(name: str, peak: float | None) -> None:
    facts = {"name": name, "architecture": "sm_90", "l2": 1, "memory": 1, "copied": 1e11}
    device = device_of(facts)
    assert device.peak == peak
    assert device.limit == (peak or 1e11)


def test_a_peak_by_clock_and_bus() -> None:
    facts = {"name": "X", "architecture": "sm_90", "l2": 1, "memory": 1, "copied": 1e11}
    assert device_of({**facts, "bus_bits": 384, "memory_khz": 10_000_000}).peak == 9.6e11


@pytest.mark.parametrize("change", [{"copied": 0}, {"copied": "x"}, {"l2": None}, {"name": None}])
def test_facts_that_are_none(change: dict[str, object]) -> None:
    facts = {"name": "X", "architecture": "sm_90", "l2": 1, "memory": 1, "copied": 1e11} | change
    if change == {"name": None}:
        del facts["name"]
    with pytest.raises(DataError, match="facts"):
        device_of(facts)
