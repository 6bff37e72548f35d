"""Decisions on times: what is reported, what is flagged, and what is not believed."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ludus.core.errors import DataError

SUSPICIOUS = 10.0
"""Speed-ups above it are flagged, as KernelBench does."""
MARGIN = 1.15
"""Factor by which a time may lie beyond the limit of a device: clocks and events are not exact."""
OUTSIDE_SHARE, OUTSIDE_MS = 0.5, 0.3
"""Wall time beyond the events' that is no launch overhead: a share of them, and milliseconds."""
TICK_MS = 0.0005
"""The resolution of events."""
PEAK_BYTES = {
    "B200": 8.0e12, "GH200": 4.9e12, "H200": 4.8e12, "H100 PCIe": 2.04e12, "H100 NVL": 3.94e12,
    "H100": 3.36e12, "A100-SXM4-80GB": 2.04e12, "A100 80GB": 1.94e12, "A100": 1.56e12,
    "L40S": 0.864e12, "L40": 0.864e12, "L4": 0.3e12, "A10G": 0.6e12, "A10": 0.6e12,
    "RTX 4090": 1.01e12, "RTX 3090": 0.94e12, "V100": 0.9e12, "T4": 0.32e12,
}  # fmt: skip
"""Bytes/s of the memory, by data sheet; the first name that the device's contains as words."""


@dataclass(frozen=True, slots=True)
class Device:
    """A device: `copied` and `peak` are bytes/s of its memory, by our measurement and by its data
    sheet (None where we have none)."""

    name: str
    architecture: str
    l2_bytes: int
    memory_bytes: int
    copied: float
    peak: float | None

    @property
    def limit(self) -> float:
        """Bytes/s that no kernel exceeds."""
        return max(self.copied, self.peak or 0.0)


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of timed runs: median, and the 10th and 90th percentile."""

    median: float
    p10: float
    p90: float
    number: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """`problem`: why a time is not believed, or empty. `flags` are for a reader to look at."""

    problem: str
    flags: tuple[str, ...]
    bandwidth: float
    bandwidth_share: float
    throughput: float | None


def device_of(facts: Mapping[str, Any]) -> Device:
    """The device that a worker told of. Errors: DataError for facts that are none."""
    try:
        name, copied = str(facts["name"]), float(facts["copied"])
        if not math.isfinite(copied) or copied <= 0:
            raise ValueError("no bandwidth")
        peak = next((rate for key, rate in PEAK_BYTES.items() if _has(name, key)), None)
        bus, clock = int(facts.get("bus_bits", 0)), int(facts.get("memory_khz", 0))
        if peak is None and bus and clock:
            peak = 2.0 * clock * 1e3 * bus / 8
        return Device(
            name, str(facts["architecture"]), int(facts["l2"]), int(facts["memory"]), copied, peak
        )
    except (KeyError, ValueError, TypeError) as error:
        raise DataError(f"the device's facts cannot be read: {error}") from None


def _has(name: str, key: str) -> bool:
    return re.search(rf"(?<![\w]){re.escape(key)}(?![\dA-Za-z])", name) is not None


def summary(milliseconds: Sequence[float]) -> Times:
    """Statistics of times. Errors: DataError for none, or for times that are no times."""
    values = sorted(milliseconds)
    if len(values) < 2 or not all(math.isfinite(v) and v >= 0 for v in values):
        raise DataError("the times are not complete")
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return Times(1e-3 * statistics.median(values), 1e-3 * tenths[0], 1e-3 * tenths[-1], len(values))


def moved_bytes(read: int, written: int, l2_bytes: int) -> int:
    """Bytes that must pass the memory's bus: inputs once (the cache is flushed), and what of the
    output the cache cannot keep."""
    return read + max(written - l2_bytes, 0)


def judge(
    events: Sequence[float],
    walls: Sequence[float],
    read: int,
    written: int,
    device: Device,
    flops: float | None = None,
    eager_s: float | None = None,
) -> Verdict:
    """Judge the times of a kernel.

    Args:
        events: milliseconds of each timed run, between two events of the stream.
        walls: milliseconds of the same runs, from before the first event until the device is idle.
        read: bytes of the inputs that the launches are given.
        written: bytes of the output.
        flops: operations of the problem, where they are known.
        eager_s: seconds of eager PyTorch.

    Errors: DataError for times that are no times.
    """
    times, wall = summary(events), summary(walls)
    if len(events) != len(walls):
        raise DataError("the times are not complete")
    kernel_s = max(times.median, 1e-3 * TICK_MS)
    bandwidth = (read + written) / kernel_s
    throughput = flops / kernel_s if flops else None
    problem, flags = "", []
    least = moved_bytes(read, written, device.l2_bytes) / (MARGIN * device.limit)
    if times.median < least:
        problem = (
            f"{1e6 * times.median:.1f} us are not possible: {read + written:,} bytes take at least "
            f"{1e6 * least:.1f} us on {device.name}"
        )
    beyond = 1e3 * (wall.median - times.median)
    if not problem and beyond > max(OUTSIDE_MS, OUTSIDE_SHARE * 1e3 * times.median):
        problem = (
            f"work outside of the timed stream: the device was busy for {1e3 * wall.median:.3f} ms,"
            f" and the events tell {1e3 * times.median:.3f} ms"
        )
    if eager_s is not None and eager_s / kernel_s > SUSPICIOUS:
        flags.append(f"{eager_s / kernel_s:.1f} times as fast as eager PyTorch: look at the kernel")
    if times.p90 > 2 * times.p10 and times.p90 - times.p10 > 1e-5:
        flags.append(f"unsteady: p10 {1e6 * times.p10:.1f} us, p90 {1e6 * times.p90:.1f} us")
    share = bandwidth / device.limit
    return Verdict(problem, tuple(flags), bandwidth, share, throughput)
