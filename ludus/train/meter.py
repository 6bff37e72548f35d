"""Tokens computed in a step, model-FLOP utilisation, and memory."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ludus.core.types import Group, Trajectory
from ludus.models.flops import Shape, peak_flops

GB = 1e9


@dataclass(frozen=True, slots=True)
class Away:
    """A model in other processes: its sizes, and the peak rate of their devices together."""

    shape: Shape
    peak_flops: float


class Meter:
    """Computes tokens, model-FLOP utilisation and memory of a step.

    Model FLOPs count the mathematics, not the kernels: a forward pass per token in the rollout,
    three times that in training. A prefix that episodes share counts once. Utilisation is relative
    to the device's peak: the rate of a matrix product, measured once, or a higher rate that a
    step has reached since (the measurement may share the device with other work).

    Args:
        model: the policy, or its sizes and its devices, where it is in other processes.
        sampler: counts its tokens; None: only training is metered.
        half: whether learner or sampler multiply in bfloat16; the peak is that of bfloat16 then.
    """

    def __init__(self, model: Any, sampler: Any = None, *, half: bool = False) -> None:
        self._sampler = sampler
        self._away = model if isinstance(model, Away) else None
        self._device = torch.device("cpu")
        self._dtype = torch.float32
        if isinstance(model, Away):
            self._shape = model.shape
        else:
            self._shape = Shape.of(model)
            parameter = next(model.parameters())
            self._device = parameter.device
            self._dtype = torch.bfloat16 if half else parameter.dtype
        self._fastest = 0.0  # highest rate of a step so far, in operations per second
        self._computed: float | None = None
        self._evicted = 0

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """Count the tokens sampled within the block; a step may have several blocks."""
        before = self._count()
        yield
        after = self._count()
        if before is not None and after is not None:
            self._computed = (self._computed or 0.0) + after - before

    def _count(self) -> int | None:
        """Tokens that the sampler has computed so far; None if it does not count them."""
        try:
            return int(self._sampler.num_prefill_tokens + self._sampler.num_decode_tokens)
        except AttributeError:
            return None

    def metrics(self, groups: Sequence[Group], metrics: Mapping[str, float]) -> dict[str, float]:
        """Returns more metrics of a step, from its groups and its metrics so far."""
        played = [t for group in groups for t in group.trajectories]
        extents = [extent(trajectory) for trajectory in played]
        tokens, context = (sum(part) for part in zip(*extents, strict=True)) if played else (0, 0)
        known: dict[str, float] = {}
        mean_context = context / max(tokens, 1)
        sampled = 0.0
        if self._computed is not None:
            known["rollout/unique_tokens"] = self._computed
            sampled = self._shape.forward(
                self._computed,
                sum(t.num_sampled_tokens for t in played),
                self._computed * mean_context,
            )
            self._computed = None
        steps = metrics.get("train/optimizer_steps", 0.0)
        unique = metrics.get("train/unique_tokens", metrics.get("train/tokens", 0.0)) * steps
        predictions = metrics.get("train/loss_tokens", 0.0) * steps
        trained = 3 * self._shape.forward(unique, predictions, unique * mean_context)
        work = {
            "time/sample_mfu": (sampled, metrics["time/sample_s"]),
            "time/train_mfu": (trained, metrics["time/train_s"]),
            "time/mfu": (sampled + trained, metrics["time/wall_s"]),
        }
        rates = {name: flops / s for name, (flops, s) in work.items() if flops and s > 0}
        self._fastest = max(self._fastest, *rates.values(), 0.0)
        peak = max(self._peak(), self._fastest)
        known |= {name: rate / peak for name, rate in rates.items()}
        return {
            **known,
            "time/peak_gflops": peak / 1e9,
            **memory(self._device),
            **self._sampler_memory(),
            **getattr(self._sampler, "publication", {}),
            **(self._sampler.pass_times.fit() if hasattr(self._sampler, "pass_times") else {}),
        }

    def _peak(self) -> float:
        if self._away is not None:
            return self._away.peak_flops
        return peak_flops(self._device, self._dtype)

    def _sampler_memory(self) -> dict[str, float]:
        """The sampler's own weights; its KV cache: most memory so far, tokens evicted since the
        last call."""
        if not hasattr(self._sampler, "num_evicted_tokens"):
            return {}
        evicted, self._evicted = self._evicted, self._sampler.num_evicted_tokens
        return {
            "memory/sampler_weights_gb": self._sampler.weight_bytes / GB,
            "memory/kv_cache_peak_gb": self._sampler.cache_peak_bytes / GB,
            "rollout/evicted_tokens": float(self._evicted - evicted),
        }


def extent(trajectory: Trajectory) -> tuple[int, int]:
    """Tokens of a trajectory, and the sum of the positions that they attend to."""
    depths: list[int] = []
    tokens = context = 0
    for segment in trajectory.segments:
        size = len(segment.token_ids)
        before = depths[segment.parent] if segment.parent >= 0 else 0
        depths.append(before + size)
        tokens += size
        context += size * before + size * (size + 1) // 2
    return tokens, context


def memory(device: torch.device) -> dict[str, float]:
    """Gigabytes (1e9 bytes): resident memory and its peak; on CUDA, the peak of allocated memory
    since the last call."""
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux kilobytes
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    known = {"memory/rss_peak_gb": peak / GB}
    statm = Path("/proc/self/statm")
    if statm.exists():
        resident = int(statm.read_text().split()[1]) * resource.getpagesize()
        # The kernel updates the peak with a delay.
        known = {"memory/rss_gb": resident / GB, "memory/rss_peak_gb": max(resident, peak) / GB}
    if device.type == "cuda":
        known["memory/cuda_peak_gb"] = torch.cuda.max_memory_allocated(device) / GB
        torch.cuda.reset_peak_memory_stats(device)
    return known
