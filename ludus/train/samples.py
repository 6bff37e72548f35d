"""From groups to training rows: one row a path of a trajectory's tree.

P0 - A0 - E0 - A1        rows   P0 A0 E0 A1   loss on A0 and A1
       \\- E1 - A2               P0 A0 E1 A2   loss on A2: A0 has trained above
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from ludus.core.types import Group, Sample, Trajectory
from ludus.train.algorithms import Algorithm


def to_samples(groups: Sequence[Group], algorithm: Algorithm) -> list[Sample]:
    """The training rows of all groups, in order.

    Whatever does not train gets the reason in its trajectory's `dropped`.
    """
    return [
        row
        for trajectory, advantage in algorithm.assign(groups)
        for row in rows(trajectory, advantage)
    ]


def rows(trajectory: Trajectory, advantage: float) -> list[Sample]:
    """The rows of one trajectory: each sampled token has its loss in exactly one of them.

    A row ends with its last loss token, for nothing is learned from what follows. A path without a
    loss of its own gives no row. `policy_version` is the oldest that sampled a row's loss tokens.
    """
    trained: set[int] = set()
    found: list[Sample] = []
    for leaf in trajectory.leaves():
        path = trajectory.path(leaf)
        fresh = [i for i in path if i not in trained and _trains(trajectory, i)]
        if fresh:
            trained.update(fresh)
            path = path[: path.index(fresh[-1]) + 1]
            found.append(_row(trajectory, path, set(fresh), advantage))
    return found


def _trains(trajectory: Trajectory, index: int) -> bool:
    segment = trajectory.segments[index]
    return segment.sampled and bool(segment.token_ids)


def _row(trajectory: Trajectory, path: list[int], fresh: set[int], advantage: float) -> Sample:
    row = Sample([], [], [], [], trajectory.id, trajectory.group_id, trajectory.role)
    versions: list[int] = []
    for index in path:
        segment = trajectory.segments[index]
        length, has_loss = len(segment.token_ids), index in fresh
        row.token_ids += segment.token_ids
        row.loss_mask += [has_loss] * length
        row.advantages += [advantage if has_loss else 0.0] * length
        if has_loss and segment.logprobs is not None:
            row.logprobs += segment.logprobs
            versions += [] if segment.policy_version is None else [segment.policy_version]
        else:
            row.logprobs += [0.0] * length
    row.policy_version = min(versions, default=None)
    return row


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
