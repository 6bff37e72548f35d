"""From groups to training rows: one row a path of a trajectory's tree.

P0 - A0 - E0 - A1        rows   P0 A0 E0 A1   loss on A0 and A1
       \\- E1 - A2               P0 A0 E1 A2   loss on A2: A0 has trained above
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from ludus.core.types import Group, Sample, Trajectory
from ludus.train.algorithms.base import Algorithm
from ludus.train.algorithms.credit import Advantage, Credit, spread


def to_samples(groups: Sequence[Group], algorithm: Algorithm) -> list[Sample]:
    """The training rows of all groups, in order.

    Whatever does not train gets the reason in its trajectory's `dropped`.
    """
    return [
        row
        for trajectory, advantage in algorithm.assign(groups)
        for row in rows(trajectory, advantage)
    ]


def rows(trajectory: Trajectory, advantage: Advantage) -> list[Sample]:
    """The rows of one trajectory: each sampled token has its loss in exactly one of them.

    A row ends with its last loss token, for nothing is learned from what follows. A path without a
    loss of its own gives no row. `policy_version` is the oldest that sampled a row's loss tokens.
    """
    return [_row(trajectory, path, fresh, advantage) for path, fresh in paths(trajectory)]


def paths(trajectory: Trajectory) -> list[tuple[list[int], list[int]]]:
    """The segments of each row, and those of them whose loss is in this row."""
    trained: set[int] = set()
    found: list[tuple[list[int], list[int]]] = []
    for leaf in trajectory.leaves():
        path = trajectory.path(leaf)
        fresh = [i for i in path if i not in trained and _trains(trajectory, i)]
        if fresh:
            trained.update(fresh)
            found.append((path[: path.index(fresh[-1]) + 1], fresh))
    return found


def _trains(trajectory: Trajectory, index: int) -> bool:
    segment = trajectory.segments[index]
    return segment.sampled and bool(segment.token_ids)


def _row(trajectory: Trajectory, path: list[int], fresh: list[int], advantage: Advantage) -> Sample:
    """The learner's own log-probabilities are the old ones, where it computed them."""
    segments = trajectory.segments
    returns = advantage.returns if isinstance(advantage, Credit) else None
    advantages = spread(trajectory, advantage)

    def laid(of_segment: Callable[[int], Sequence[float] | None]) -> list[float]:
        """One number a token of the row: those of the segments with a loss, 0 elsewhere."""
        found: list[float] = []
        for i in path:
            length = len(segments[i].token_ids)
            found += (of_segment(i) if i in fresh else None) or [0.0] * length
        return found

    versions = [v for i in fresh if (v := segments[i].policy_version) is not None]
    first = segments[fresh[0]]
    return Sample(
        token_ids=[t for i in path for t in segments[i].token_ids],
        loss_mask=[i in fresh for i in path for _ in segments[i].token_ids],
        logprobs=laid(lambda i: segments[i].learner_logprobs or segments[i].logprobs),
        advantages=laid(advantages.__getitem__),
        trajectory_id=trajectory.id,
        group_id=trajectory.group_id,
        role=trajectory.role,
        policy_version=min(versions, default=None),
        ref_logprobs=None
        if first.ref_logprobs is None
        else laid(lambda i: segments[i].ref_logprobs),
        values=None if returns is None else laid(lambda i: (segments[i].values or [])[:-1]),
        returns=None if returns is None else laid(returns.__getitem__),
    )


def staleness(samples: Sequence[Sample], version: int) -> float:
    """How many versions of the weights the samples are behind, on the mean; demonstrations, which
    carry no version, aside."""
    behind = [version - s.policy_version for s in samples if s.policy_version is not None]
    return sum(behind) / len(behind) if behind else 0.0


def split(samples: Sequence[Sample], num_minibatches: int, seed: int) -> list[list[Sample]]:
    """Deal the trajectories into parts for as many optimizer steps; no part is empty.

    The rollout is the unit: its rows stay together. A group may be dealt out, for its advantages
    are settled. Parts differ by one trajectory at most, and keep the samples' order; which
    trajectories meet depends on `seed` alone.
    """
    names = list(dict.fromkeys(sample.trajectory_id for sample in samples))
    if num_minibatches > 1:
        Random(seed).shuffle(names)
    part_of = {name: number % num_minibatches for number, name in enumerate(names)}
    parts: list[list[Sample]] = [[] for _ in range(num_minibatches)]
    for sample in samples:
        parts[part_of[sample.trajectory_id]].append(sample)
    return [part for part in parts if part]
