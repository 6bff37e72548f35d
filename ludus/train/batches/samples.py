"""Training rows: one row for each path of a trajectory's tree.

P0 - A0 - E0 - A1        rows   P0 A0 E0 A1   loss on A0 and A1
       \\- E1 - A2               P0 A0 E1 A2   loss on A2: A0 trains in the row above
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ludus.core.types import Constraint, Sample, Trajectory
from ludus.core.versions import expand
from ludus.train.algorithms.base import Assignment
from ludus.train.algorithms.credit import Advantage, Credit, spread, turns_of


def to_samples(assignment: Assignment, observation_weight: float = 0.0) -> list[Sample]:
    """Returns the training rows of the trajectories that have an advantage, in order.

    Args:
        observation_weight: advantage of the tokens that were not sampled; above 0, they have a loss
            too (`sft.observation_weight`).
    """
    return [
        row
        for trajectory, advantage in assignment.pairs
        for row in rows(trajectory, advantage, observation_weight)
    ]


def rows(
    trajectory: Trajectory, advantage: Advantage, observation_weight: float = 0.0
) -> list[Sample]:
    """Returns the rows of a trajectory. Each sampled token has its loss in exactly one row.

    A row ends with its last sampled token. A path without sampled tokens of its own gives no row.
    `policy_version` is the oldest version that sampled the row's loss tokens; `versions` are those
    of all tokens where they differ.
    """
    found = [(_row(trajectory, path, fresh, advantage), path) for path, fresh in paths(trajectory)]
    if observation_weight > 0:
        known: set[int] = set()
        for row, path in found:
            _train_observations(row, trajectory, path, known, observation_weight)
            known.update(path)
    return [row for row, _ in found]


def _train_observations(
    row: Sample, trajectory: Trajectory, path: Sequence[int], known: set[int], weight: float
) -> None:
    """Give the tokens that were not sampled a loss, but for those of segments that an earlier row
    has (`known`), and for the row's first token, which nothing predicts."""
    start = 0
    for index in path:
        segment = trajectory.segments[index]
        for at in range(start, start + len(segment.token_ids)):
            if not segment.sampled and index not in known and at > 0:
                row.loss_mask[at], row.advantages[at] = True, weight
        start += len(segment.token_ids)


def paths(trajectory: Trajectory) -> list[tuple[list[int], list[int]]]:
    """Returns for each row its segments, and the segments whose loss is in this row."""
    untrained = {i for i, _ in turns_of(trajectory)}
    rows_of: list[tuple[list[int], list[int]]] = []
    for leaf in trajectory.leaves():
        path = trajectory.path(leaf)
        if fresh := [i for i in path if i in untrained]:
            untrained.difference_update(fresh)
            rows_of.append((path[: path.index(fresh[-1]) + 1], fresh))
    return rows_of


def _row(trajectory: Trajectory, path: list[int], fresh: list[int], advantage: Advantage) -> Sample:
    """The old log-probabilities are the learner's where it computed them, else the sampler's."""
    segments = trajectory.segments
    returns = advantage.returns if isinstance(advantage, Credit) else None
    advantages = spread(trajectory, advantage)

    def per_token(of_segment: Callable[[int], Sequence[float] | None]) -> list[float]:
        """One number a token of the row: values of segments with a loss, 0 elsewhere."""
        values: list[float] = []
        for i in path:
            length = len(segments[i].token_ids)
            values += (of_segment(i) if i in fresh else None) or [0.0] * length
        return values

    oldest, versions = _versions(trajectory, path, fresh)
    first = segments[fresh[0]]
    return Sample(
        token_ids=[t for i in path for t in segments[i].token_ids],
        loss_mask=[i in fresh for i in path for _ in segments[i].token_ids],
        logprobs=per_token(lambda i: segments[i].learner_logprobs or segments[i].logprobs),
        advantages=per_token(advantages.__getitem__),
        trajectory_id=trajectory.id,
        group_id=trajectory.group_id,
        role=trajectory.role,
        policy=trajectory.policy,
        policy_version=oldest,
        ref_logprobs=None
        if first.ref_logprobs is None
        else per_token(lambda i: segments[i].ref_logprobs),
        values=None if returns is None else per_token(lambda i: (segments[i].values or [])[:-1]),
        returns=None if returns is None else per_token(returns.__getitem__),
        versions=versions,
        consistency=advantage.consistency if isinstance(advantage, Credit) else None,
        constraints=constraints_of(trajectory, path, fresh),
    )


def constraints_of(
    trajectory: Trajectory, path: list[int], fresh: list[int]
) -> list[tuple[int, int, Constraint]]:
    """Returns `Sample.constraints` of a row."""
    found: list[tuple[int, int, Constraint]] = []
    start = 0
    for index in path:
        segment = trajectory.segments[index]
        stop = start + len(segment.token_ids)
        if index in fresh and segment.constraint is not None:
            found.append((start, stop, segment.constraint))
        start = stop
    return found


def _versions(
    trajectory: Trajectory, path: list[int], fresh: list[int]
) -> tuple[int | None, list[int] | None]:
    """Returns `policy_version` and `versions` of a row."""
    parts = [(i in fresh, trajectory.segments[i]) for i in path]
    known = {v for trained, s in parts if trained for v, _ in s.runs or [(-1, 0)]}
    oldest = min(known - {-1}, default=None)
    if len(known) < 2:
        return oldest, None
    versions = [(trained and expand(s.runs)) or [-1] * len(s.token_ids) for trained, s in parts]
    return oldest, [version for part in versions for version in part]
