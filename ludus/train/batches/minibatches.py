"""One policy iteration: the samples of a step -> minibatches -> packed batches -> metrics.

Every back end cuts samples this way, so a seed gives the same optimizer steps on all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from ludus.config.schema import OptimizerConfig
from ludus.core.errors import TrainingError
from ludus.core.seeds import derive_seed
from ludus.core.types import Sample
from ludus.core.versions import mean_age
from ludus.train.algorithms.base import Algorithm
from ludus.train.algorithms.losses import unit_of
from ludus.train.algorithms.own import calling
from ludus.train.batches.packing import Batch, Layout, pack

WHOLE_GROUPS = 2
"""Groups with a gradient in a minibatch, on average, from which on groups are not parted."""


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """Training of one stage: `epochs` x `minibatches` optimizer steps in each of `steps` steps.

    Args:
        temperature: that of the rollouts; logits are divided by it.
        seed: of the run; decides which trajectories share a minibatch.
    """

    stage: str
    steps: int
    optimizer: OptimizerConfig
    tokens_per_batch: int
    epochs: int = 1
    minibatches: int = 1
    temperature: float = 1.0
    seed: int = 0

    @property
    def steps_per_iteration(self) -> int:
        """Optimizer steps in each step."""
        return self.epochs * self.minibatches

    @property
    def optimizer_steps(self) -> int:
        return self.steps * self.steps_per_iteration

    def restored(self, saved: Mapping[str, Any]) -> int:
        """The optimizer step at which a run goes on with these settings, for the learning rate.

        Args:
            saved: state of a checkpoint; epochs and minibatches may have changed since.
        """
        now = self.steps_per_iteration
        then: int = saved.get("steps_per_iteration", now)
        return int(saved["optimizer_step"]) * now // then


def to_minibatches(
    samples: list[Sample], algorithm: Algorithm, settings: TrainSettings, step: int
) -> list[list[Sample]]:
    """Returns the samples of each optimizer step of one policy iteration.

    A minibatch in which all advantages are 0 has no gradient. It is left out, unless the algorithm
    has a term without an advantage.
    """
    parts: list[list[Sample]] = []
    for epoch in range(settings.epochs):
        seed = derive_seed(settings.seed, settings.stage, step, epoch)
        parts += split(samples, settings.minibatches, seed, algorithm.regularised)
    if algorithm.regularised:
        return parts
    return [part for part in parts if any(map(_has_gradient, part))]


def split(
    samples: Sequence[Sample], num_minibatches: int, seed: int, regularised: bool = False
) -> list[list[Sample]]:
    """Distribute the trajectories over minibatches, in an order that depends on `seed` alone.

    Groups stay together, for they share the tokens of their prompts: each minibatch has as many
    groups with different rewards as the next, within one. Where too few groups have a gradient
    (all have, if `regularised`), the trajectories of a group part: their advantages are known. A
    trajectory's rows always stay together. Minibatches keep the order of the samples, and are not
    empty.
    """
    unit_of = {s.trajectory_id: s.group_id or s.trajectory_id for s in samples}
    live = {unit_of[s.trajectory_id] for s in samples if _has_gradient(s)}
    count = len(set(unit_of.values()) if regularised else live)
    if count < WHOLE_GROUPS * num_minibatches:
        unit_of, live = {name: name for name in unit_of}, set()
    units = list(dict.fromkeys(unit_of.values()))
    if num_minibatches > 1:
        Random(seed).shuffle(units)
    units.sort(key=lambda unit: unit not in live)  # stable: the shuffled order among equals
    part_of = {unit: number % num_minibatches for number, unit in enumerate(units)}
    parts: list[list[Sample]] = [[] for _ in range(num_minibatches)]
    for sample in samples:
        parts[part_of[unit_of[sample.trajectory_id]]].append(sample)
    return [part for part in parts if part]


def to_batch(
    samples: list[Sample], algorithm: Algorithm, tokens_per_batch: int, pad_id: int, layout: Layout
) -> Batch:
    """Weigh all samples of a minibatch, and pack those of trajectories that have a gradient."""
    pairs = weighted(samples, algorithm)
    return pack_weighted(pairs, algorithm, tokens_per_batch, pad_id, layout)


def weighted(samples: list[Sample], algorithm: Algorithm) -> list[tuple[Sample, list[float]]]:
    """Returns the samples of trajectories that have a gradient, with the weights of their tokens.

    Errors: TrainingError for an aggregate that returns something else than weights.
    """
    weights = _weights(samples, algorithm)
    live = {s.trajectory_id for s in samples if algorithm.regularised or _has_gradient(s)}
    return [(s, w) for s, w in zip(samples, weights, strict=True) if s.trajectory_id in live]


def pack_weighted(
    pairs: Sequence[tuple[Sample, list[float]]],
    algorithm: Algorithm,
    tokens_per_batch: int,
    pad_id: int,
    layout: Layout,
) -> Batch:
    """Pack samples, as the algorithm's loss needs them. Errors: those of `pack`."""
    return pack(
        [sample for sample, _ in pairs],
        [weight for _, weight in pairs],
        tokens_per_batch=tokens_per_batch,
        pad_id=pad_id,
        layout=layout,
        whole=unit_of(algorithm.loss) == "trajectory",
    )


def _weights(samples: list[Sample], algorithm: Algorithm) -> list[list[float]]:
    """Returns the weight of each token of each sample. Errors: TrainingError for anything else."""
    with calling("`aggregate`"):
        weights: list[list[float]] = algorithm.aggregate(samples)
    given: Any = weights
    rows = given if isinstance(given, Sequence) else []
    lengths = [len(row) if isinstance(row, Sequence) else None for row in rows]
    if lengths != [len(sample.token_ids) for sample in samples]:
        raise TrainingError(
            f"rl.algorithm: `aggregate` returned {weights!r:.80} for {len(samples)} samples; it "
            "has to return a list for each sample, with a weight for each of its tokens"
        )
    return weights


def batch_metrics(batch: Batch) -> dict[str, float]:
    """Sizes of a batch. `tokens` counts those of all samples, `unique_tokens` those computed."""
    return {
        "padding": batch.padding,
        "tokens": float(batch.num_tokens),
        "unique_tokens": float(batch.num_unique_tokens),
        "loss_tokens": float(batch.num_loss_tokens),
    }


def staleness(samples: Sequence[Sample], version: int) -> float:
    """Mean number of versions that loss tokens are behind `version`, without demonstrations."""
    ages: Counter[int] = Counter()
    for sample in samples:
        for sampled_by, num_tokens in sample.version_counts.items():
            ages[version - sampled_by] += num_tokens
    return mean_age(ages)


def train_metrics(optimizer_steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means over the optimizer steps of an iteration, as `train/NAME`, and their number.

    `train/first_kl` is the KL of the first step, whose policy has the weights that sampled unless
    the episodes are stale: how far sampler and learner differ in rounding.
    """
    names = dict.fromkeys(name for metrics in optimizer_steps for name in metrics)
    count = len(optimizer_steps)
    found = {f"train/{name}": sum(m[name] for m in optimizer_steps) / count for name in names}
    if optimizer_steps and "kl" in optimizer_steps[0]:
        found["train/first_kl"] = optimizer_steps[0]["kl"]
    return {**found, "train/optimizer_steps": float(count)}


def _has_gradient(sample: Sample) -> bool:
    return any(sample.advantages)
