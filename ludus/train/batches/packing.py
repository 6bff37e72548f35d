"""Packing: samples of different lengths -> few rectangular micro-batches with little padding.

Samples 5 6 7 8 9 2 and 1 2 3 and 4 5, in two rows ("packed"):

    token_ids    5 6 7 8 9 2      1 2 3 4 5 0
    positions    0 1 2 3 4 5      0 1 2 0 1 0
    ends         6 6 6 6 6 6      3 3 3 5 5 6      later tokens before the end attend to it

Samples 5 6 7 8 9 and 5 6 7 1 2 share a prefix; as one tree in one row ("tree"):

    token_ids    5 6 7 8 9 1 2
    positions    0 1 2 3 4 3 4
    ends         7 7 7 5 5 7 7                     1 follows 7: it attends to 5 6 7, not 8 9

A token attends to its own past only, so packing does not change results, and a shared prefix is
computed once, forward and backward. Loss tokens are listed separately, each with the place whose
hidden state predicts it; in a tree, a place may predict several tokens. Shape suffixes: R rows of a
micro-batch, T positions, N loss tokens, P places that predict a loss token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ludus.core.errors import ConfigError, TrainingError
from ludus.core.types import Constraint, Sample
from ludus.train.batches.tree import grow

Layout = Literal["tree", "packed", "single"]
"""Token trees in rows; several samples a row; one sample a row, for models without masks."""

Row = list[tuple[int, int]]
"""Samples of a row: index, and number of tokens shared with the previous sample."""

NEW_ROW = 0.5
"""Smallest share of a row that its first sample fills; shorter samples wait for shorter rows, for
attention costs T per token of a row, whatever the lengths of its samples."""


@dataclass(frozen=True, slots=True)
class ConstrainedTurn:
    """A turn whose tokens a grammar constrained.

    Args:
        token_ids: of the turn, L tokens.
        place_L: int64, where its tokens are among the N loss tokens.
    """

    constraint: Constraint
    token_ids: list[int]
    place_L: Tensor


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The rows of one forward pass, and its loss tokens, on the CPU.

    Args:
        token_ids_RT: int64, padded with the pad id.
        positions_RT: int64, from 0 in each sample; 0 for padding.
        ends_RT: int64; positions from t up to this one, exclusive, attend to the token at t.
            Padding attends to itself alone.
        places_P: int64, ascending indices into the flattened rows: places that predict loss tokens.
        place_N: int64, index into `places_P` of the place that predicts the loss token.
        target_N: int64, id of the loss token.
        sample_N: int64, its sample, as an index into the samples of the batch.
        index_N: int64, its index in the sample.
        trajectory_N: int64, number of its trajectory within the batch.
        old_logprobs_N: float32, recorded at sampling time.
        advantages_N: float32.
        weights_N: float32, its weight in the step's loss.
        ref_logprobs_N: float32, with a reference model.
        values_N: float32, with a critic: its value before the token.
        returns_N: float32, with a critic: the target of its value.
        consistency_N: float32, `Task.consistency` of its trajectory's task.
        constrained: turns whose tokens a grammar constrained.
    """

    token_ids_RT: Tensor
    positions_RT: Tensor
    ends_RT: Tensor
    places_P: Tensor
    place_N: Tensor
    target_N: Tensor
    sample_N: Tensor
    index_N: Tensor
    trajectory_N: Tensor
    old_logprobs_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor
    ref_logprobs_N: Tensor | None = None
    values_N: Tensor | None = None
    returns_N: Tensor | None = None
    consistency_N: Tensor | None = None
    constrained: Sequence[ConstrainedTurn] = ()


@dataclass(frozen=True, slots=True)
class Batch:
    """The micro-batches of one optimizer step, and their samples.

    Args:
        num_unique_tokens: computed tokens; a shared prefix counts once a micro-batch.
        whole: no trajectory is in two micro-batches.
    """

    micro_batches: list[MicroBatch]
    samples: Sequence[Sample]
    weights: Sequence[Sequence[float]]
    num_unique_tokens: int
    layout: Layout = "packed"
    pad_id: int = 0
    whole: bool = False

    @property
    def num_samples(self) -> int:
        return len(self.samples)

    @property
    def num_loss_tokens(self) -> int:
        return sum(len(m.target_N) for m in self.micro_batches)

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples, shared prefixes counted for each sample."""
        return sum(len(sample.token_ids) for sample in self.samples)

    @property
    def padding(self) -> float:
        """Share of positions without a token."""
        positions = sum(m.token_ids_RT.numel() for m in self.micro_batches)
        return 1 - self.num_unique_tokens / positions if positions else 0.0

    def halves(self, micro_batch: MicroBatch) -> list[MicroBatch]:
        """The same loss tokens in parts of about half the memory; [] for a single sample, or for a
        single trajectory if trajectories stay whole."""
        chosen = list(dict.fromkeys(micro_batch.sample_N.tolist()))
        units = _trajectories(chosen, self.samples) if self.whole else [[i] for i in chosen]
        if len(units) < 2:
            return []
        middle, budget = len(units) // 2, micro_batch.token_ids_RT.numel()
        plan = _plan_whole if self.whole else _plan
        return [
            _fill(rows, self.samples, self.weights, self.pad_id)
            for part in (units[:middle], units[middle:])
            for rows in plan(list(chain(*part)), self.samples, budget, self.layout)
        ]


def pack(
    samples: Sequence[Sample],
    weights: Sequence[Sequence[float]],
    *,
    tokens_per_batch: int,
    pad_id: int,
    layout: Layout = "packed",
    whole: bool = False,
) -> Batch:
    """Pack samples into micro-batches of at most `tokens_per_batch` positions, padding included.

    The result depends on the samples and their order alone. `weights` come from an aggregate. A
    tree larger than the budget is cut, and its parts repeat the prefix that they need. With
    `whole`, all samples of a trajectory are in one micro-batch.

    Errors: ConfigError for a sample, or with `whole` a trajectory, longer than `tokens_per_batch`;
    TrainingError for a sample with
    inconsistent lists.
    """
    for sample, weight in zip(samples, weights, strict=True):
        _check(sample, weight, tokens_per_batch)
    for name in _OPTIONAL:
        if len({getattr(sample, name) is not None for sample in samples}) > 1:
            raise TrainingError(f"some samples have {name} and others have none")
    make_plan = _plan_whole if whole else _plan
    plan = make_plan(range(len(samples)), samples, tokens_per_batch, layout)
    return Batch(
        [_fill(rows, samples, weights, pad_id) for rows in plan],
        samples,
        weights,
        num_unique_tokens=sum(
            len(samples[index].token_ids) - shared
            for rows in plan
            for row in rows
            for index, shared in row
        ),
        layout=layout,
        pad_id=pad_id,
        whole=whole,
    )


def rounded(micro_batch: MicroBatch, multiple: int) -> MicroBatch:
    """The same loss tokens, with row lengths and the number of places padded to multiples.

    Padding attends to itself alone; the last place is repeated, and no loss token reads the copies.
    """
    width = micro_batch.token_ids_RT.shape[1]
    more = -width % multiple
    new_width, places_P = width + more, micro_batch.places_P
    alone = torch.arange(width + 1, new_width + 1).expand(len(micro_batch.ends_RT), -1)
    copies = places_P[-1:].expand(-len(places_P) % multiple)
    places_P = torch.cat([places_P, copies])
    return replace(
        micro_batch,
        token_ids_RT=F.pad(micro_batch.token_ids_RT, (0, more)),
        positions_RT=F.pad(micro_batch.positions_RT, (0, more)),
        ends_RT=torch.cat([micro_batch.ends_RT, alone], dim=1),
        places_P=places_P // width * new_width + places_P % width,
    )


def attention_mask(micro_batch: MicroBatch, window: int = 0) -> Tensor:
    """Bool [R, 1, T, T], True where the query (third axis) attends to the key (fourth axis).

    A token attends to itself and its past; with a sliding window, to its last `window` positions,
    its own included. Padding attends to itself, because a softmax over an
    empty row is NaN. The convention is that of `scaled_dot_product_attention` (transformers'
    "sdpa").
    """
    ends_RT = micro_batch.ends_RT
    every_T = torch.arange(ends_RT.shape[1])
    seen_RTT = every_T[:, None] < ends_RT[:, None, :]
    if window:
        at_RT = micro_batch.positions_RT
        seen_RTT = seen_RTT & (at_RT[:, None, :] > at_RT[:, :, None] - window)
    return seen_RTT.tril()[:, None]


def arrange(
    lengths: Sequence[int], tokens_per_batch: int, *, several: bool = True
) -> list[list[list[int]]]:
    """Returns micro-batches of rows of sample indices.

    First-fit decreasing. The longest remaining sample sets the row length T of a micro-batch;
    samples that fill at least half of T open rows while R * T is within the budget, shorter samples
    fill the free space. So rows have similar lengths, and the cost of attention, R * T * T, stays
    small. With `several` off, a row holds one sample.
    """
    left = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    plan: list[list[list[int]]] = []
    while left:
        longest = lengths[left[0]]
        max_rows = max(tokens_per_batch // max(longest, 1), 1)
        rows, left = _first_fit(left, lengths, longest, max_rows, several)
        plan.append(rows)
    return plan


def _first_fit(
    order: Sequence[int], lengths: Sequence[int], row_length: int, max_rows: int, several: bool
) -> tuple[list[list[int]], list[int]]:
    """Fill at most `max_rows` rows; returns the rows and the samples that did not fit."""
    rows: list[list[int]] = []
    room: list[int] = []
    widest = 0  # most free space of any row; a longer sample needs no search
    left: list[int] = []
    for index in order:
        length = lengths[index]
        if length <= widest:
            row = next(r for r, free in enumerate(room) if free >= length)
        elif len(rows) < max_rows and length >= NEW_ROW * row_length:
            row = len(rows)
            rows.append([])
            room.append(row_length if several else length)
        else:
            left.append(index)
            continue
        rows[row].append(index)
        room[row] -= length
        widest = max(room)
    return rows, left


def _check(sample: Sample, weights: Sequence[float], tokens_per_batch: int) -> None:
    length = len(sample.token_ids)
    where = f"a sample of trajectory {sample.trajectory_id!r}"
    if length > tokens_per_batch:
        raise ConfigError(
            f"rl.tokens_per_batch (in SFT, sft.tokens_per_batch): {where} has {length} tokens, "
            f"which exceeds {tokens_per_batch}; set at least model.context_length"
        )
    parts: list[Sequence[float]] = [sample.loss_mask, sample.logprobs, sample.advantages, weights]
    parts += [part for name in _OPTIONAL if (part := getattr(sample, name)) is not None]
    if length == 0 or any(len(part) != length for part in parts):
        raise TrainingError(
            f"{where} needs one entry a token in each of its lists: {length} tokens, "
            f"{', '.join(str(len(part)) for part in parts)} entries"
        )
    if sample.loss_mask[0]:
        raise TrainingError(f"{where} has a loss on its first token, which nothing predicts")


def _plan(
    chosen: Sequence[int], samples: Sequence[Sample], tokens_per_batch: int, layout: Layout
) -> list[list[Row]]:
    """Returns the chosen samples in rows of micro-batches."""
    ids = [samples[index].token_ids for index in chosen]
    if layout == "tree":
        plan = [[row] for row in grow(ids, tokens_per_batch)]
    else:
        places = arrange(list(map(len, ids)), tokens_per_batch, several=layout == "packed")
        plan = [[[(i, 0) for i in row] for row in rows] for rows in places]
    return [[[(chosen[i], shared) for i, shared in row] for row in rows] for rows in plan]


def _trajectories(chosen: Sequence[int], samples: Sequence[Sample]) -> list[list[int]]:
    """Returns the chosen samples by trajectory."""
    found: dict[str, list[int]] = {}
    for index in chosen:
        found.setdefault(samples[index].trajectory_id, []).append(index)
    return list(found.values())


def _plan_whole(
    chosen: Sequence[int], samples: Sequence[Sample], tokens_per_batch: int, layout: Layout
) -> list[list[Row]]:
    """`_plan`, with all samples of a trajectory in one micro-batch.

    Where a trajectory has several samples, a micro-batch holds as many trajectories, in their
    order, as fit without shared prefixes. Errors: ConfigError for one that does not fit.
    """
    units = _trajectories(chosen, samples)
    if all(len(unit) == 1 for unit in units):
        return _plan(chosen, samples, tokens_per_batch, layout)
    plan: list[list[Row]] = []
    while units:
        sizes = accumulate(sum(len(samples[i].token_ids) for i in unit) for unit in units)
        count = max(sum(size <= tokens_per_batch for size in sizes), 1)
        while (rows := _together(units[:count], samples, tokens_per_batch, layout)) is None:
            if count == 1:
                raise ConfigError(
                    "rl.tokens_per_batch: the loss depends on whole trajectories, and trajectory "
                    f"{samples[units[0][0]].trajectory_id!r} with its {len(units[0])} rows does "
                    f"not fit into {tokens_per_batch} tokens; set more"
                )
            count = (count + 1) // 2
        plan.append(rows)
        units = units[count:]
    return plan


def _together(
    units: Sequence[Sequence[int]], samples: Sequence[Sample], tokens_per_batch: int, layout: Layout
) -> list[Row] | None:
    """Returns the rows of one micro-batch with all samples; None if they exceed the budget."""
    plan = _plan(list(chain(*units)), samples, tokens_per_batch, layout)
    rows = list(chain(*plan))
    widths = [sum(len(samples[i].token_ids) - shared for i, shared in row) for row in rows]
    return rows if len(rows) * max(widths) <= tokens_per_batch else None


def _fill(
    rows: Sequence[Row], samples: Sequence[Sample], weights: Sequence[Sequence[float]], pad_id: int
) -> MicroBatch:
    """Write samples into tensors, row by row."""
    names = dict.fromkeys(sample.trajectory_id for sample in samples)
    numbers = {name: number for number, name in enumerate(names)}
    width = max(sum(len(samples[i].token_ids) - shared for i, shared in row) for row in rows)
    ids_RT = np.full((len(rows), width), pad_id)
    positions_RT = np.zeros_like(ids_RT)
    ends_RT = np.tile(np.arange(1, width + 1), (len(rows), 1))
    parts: dict[str, list[Any]] = {name: [] for name in _PER_LOSS_TOKEN}
    constrained: list[ConstrainedTurn] = []
    num_loss_tokens = 0
    for r, row in enumerate(rows):
        path, stop = np.zeros(0, dtype=np.int64), 0
        for number, shared in row:
            sample = samples[number]
            length = len(sample.token_ids)
            start, stop = stop, stop + length - shared
            path = np.concatenate([path[:shared], np.arange(start, stop)])
            ids_RT[r, start:stop] = sample.token_ids[shared:]
            positions_RT[r, start:stop] = np.arange(shared, length)
            ends_RT[r, path] = stop
            index_N = np.flatnonzero(sample.loss_mask)
            count = len(index_N)
            parts["place"].append(r * width + path[index_N - 1])
            parts["target"].append(np.asarray(sample.token_ids)[index_N])
            parts["sample"].append(np.full(count, number))
            parts["index"].append(index_N)
            parts["trajectory"].append(np.full(count, numbers[sample.trajectory_id]))
            parts["old_logprobs"].append(np.asarray(sample.logprobs)[index_N])
            parts["advantages"].append(np.asarray(sample.advantages)[index_N])
            parts["weights"].append(np.asarray(weights[number])[index_N])
            for name in _OPTIONAL:
                if (part := getattr(sample, name)) is not None:
                    parts[name].append(np.asarray(part)[index_N])
            for first, after, constraint in sample.constraints:
                place_L = num_loss_tokens + np.searchsorted(index_N, np.arange(first, after))
                ids = sample.token_ids[first:after]
                constrained.append(ConstrainedTurn(constraint, ids, torch.from_numpy(place_L)))
            num_loss_tokens += count
            if sample.consistency is not None:
                parts["consistency"].append(np.full(count, sample.consistency))
    tensors = {
        f"{name}_N": torch.from_numpy(np.concatenate(found).astype(_PER_LOSS_TOKEN[name]))
        for name, found in parts.items()
        if found
    }
    places_P, tensors["place_N"] = torch.unique(tensors["place_N"], return_inverse=True)
    return MicroBatch(
        token_ids_RT=torch.from_numpy(ids_RT),
        positions_RT=torch.from_numpy(positions_RT),
        ends_RT=torch.from_numpy(ends_RT),
        places_P=places_P,
        constrained=constrained,
        **tensors,
    )


_OPTIONAL = ("ref_logprobs", "values", "returns")
_PER_LOSS_TOKEN: dict[str, Any] = {
    **dict.fromkeys(("place", "target", "sample", "index", "trajectory"), np.int64),
    **dict.fromkeys(
        ("old_logprobs", "advantages", "weights", *_OPTIONAL, "consistency"), np.float32
    ),
}
