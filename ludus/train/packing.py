"""Packing: samples of many lengths -> few rectangles with little padding.

Samples 5 6 7 8 9 2 and 1 2 3 and 4 5, in two rows:

    token_ids    5 6 7 8 9 2      1 2 3 4 5 0
    positions    0 1 2 3 4 5      0 1 2 0 1 0
    segments     1 1 1 1 1 1      1 1 1 2 2 0      0 is padding

A token attends to its own segment only, so a packed sample computes what it computes alone. Shape
suffixes: R rows of a micro-batch, T positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ludus.core.errors import ConfigError, TrainingError
from ludus.core.types import Sample

NEW_ROW = 0.5
"""A sample opens a row when it fills at least this share of it, else it waits for shorter rows:
attention costs T for each token of a row, however short the samples in it are."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The rows of one forward pass, on the CPU. Entries speak of the token at their position.

    Args:
        token_ids_RT: int64, padded with the pad id.
        positions_RT: int64, from 0 in each sample.
        segments_RT: int64, 1, 2, ... for the samples of a row; 0 is padding.
        loss_mask_RT: bool; never set at a sample's first token, which nothing predicts.
        old_logprobs_RT: float32, recorded when the token was sampled.
        advantages_RT: float32.
        weights_RT: float32, each token's share in the step's loss.
        trajectory_RT: int64, number of the trajectory within the batch; -1 for padding.
        ref_logprobs_RT: float32, where a reference model is kept.
    """

    token_ids_RT: Tensor
    positions_RT: Tensor
    segments_RT: Tensor
    loss_mask_RT: Tensor
    old_logprobs_RT: Tensor
    advantages_RT: Tensor
    weights_RT: Tensor
    trajectory_RT: Tensor
    ref_logprobs_RT: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """All micro-batches of one optimizer step."""

    micro_batches: list[MicroBatch]
    num_samples: int
    num_loss_tokens: int
    num_tokens: int

    @property
    def padding(self) -> float:
        """Share of the positions that hold no token."""
        positions = sum(m.token_ids_RT.numel() for m in self.micro_batches)
        return 1 - self.num_tokens / positions if positions else 0.0


def pack(
    samples: Sequence[Sample],
    weights: Sequence[Sequence[float]],
    *,
    tokens_per_batch: int,
    pad_id: int,
) -> Batch:
    """Pack samples into micro-batches of at most `tokens_per_batch` positions, padding included.

    The result depends on the samples and their order alone. `weights` are an aggregate's.

    Errors: ConfigError for a sample that is longer than `tokens_per_batch`; TrainingError for one
    that contradicts itself.
    """
    for sample, weight in zip(samples, weights, strict=True):
        _check(sample, weight, tokens_per_batch)
    references = {sample.ref_logprobs is not None for sample in samples}
    if len(references) > 1:
        raise TrainingError("some samples have reference log-probabilities and others have none")
    names = dict.fromkeys(sample.trajectory_id for sample in samples)
    numbers = {name: number for number, name in enumerate(names)}
    plan = arrange([len(sample.token_ids) for sample in samples], tokens_per_batch)
    return Batch(
        [_fill(rows, samples, weights, numbers, pad_id) for rows in plan],
        num_samples=len(samples),
        num_loss_tokens=sum(sample.num_loss_tokens for sample in samples),
        num_tokens=sum(len(sample.token_ids) for sample in samples),
    )


def attention_mask(micro_batch: MicroBatch) -> Tensor:
    """Bool [R, 1, T, T], True where the query (third axis) may look at the key (fourth).

    That is: in its own segment, at itself and before. Padding looks at padding, so that no row of
    the mask is empty (a softmax over nothing is NaN). This is the meaning that
    `scaled_dot_product_attention` gives to a boolean mask: use it with transformers' "sdpa".
    """
    segments_RT = micro_batch.segments_RT
    same_RTT = segments_RT[:, :, None] == segments_RT[:, None, :]
    return same_RTT.tril()[:, None]


def arrange(lengths: Sequence[int], tokens_per_batch: int) -> list[list[list[int]]]:
    """Which samples go where: micro-batches of rows of sample indices.

    First-fit decreasing. The longest sample left sets a micro-batch's row length T; samples that
    fill at least half of it open rows while R * T stays in the budget, shorter ones only fill what
    room is left. So rows have similar lengths, and R * T * T, the cost of attention, stays small.
    """
    left = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    plan: list[list[list[int]]] = []
    while left:
        longest = lengths[left[0]]
        max_rows = max(tokens_per_batch // max(longest, 1), 1)
        rows, left = _first_fit(left, lengths, longest, max_rows)
        plan.append(rows)
    return plan


def _first_fit(
    order: Sequence[int], lengths: Sequence[int], row_length: int, max_rows: int
) -> tuple[list[list[int]], list[int]]:
    """Fill at most `max_rows` rows; returns them, and the samples that found no place."""
    rows: list[list[int]] = []
    room: list[int] = []
    widest = 0  # the most room of any row, so that what fits nowhere costs no search
    left: list[int] = []
    for index in order:
        length = lengths[index]
        if length <= widest:
            row = next(r for r, free in enumerate(room) if free >= length)
        elif len(rows) < max_rows and length >= NEW_ROW * row_length:
            row = len(rows)
            rows.append([])
            room.append(row_length)
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
            f"which do not fit {tokens_per_batch}; give at least model.context_length"
        )
    parts: list[Sequence[float]] = [
        sample.loss_mask,
        sample.logprobs,
        sample.advantages,
        weights,
    ]
    parts += [] if sample.ref_logprobs is None else [sample.ref_logprobs]
    if length == 0 or any(len(part) != length for part in parts):
        raise TrainingError(
            f"{where} needs one entry a token in each of its lists: {length} tokens, "
            f"{', '.join(str(len(part)) for part in parts)} entries"
        )
    if sample.loss_mask[0]:
        raise TrainingError(f"{where} has a loss on its first token, which nothing predicts")


def _fill(
    rows: Sequence[Sequence[int]],
    samples: Sequence[Sample],
    weights: Sequence[Sequence[float]],
    numbers: dict[str, int],
    pad_id: int,
) -> MicroBatch:
    """Write samples into tensors, row by row."""
    shape = len(rows), max(sum(len(samples[i].token_ids) for i in row) for row in rows)
    has_reference = samples[rows[0][0]].ref_logprobs is not None
    batch = MicroBatch(
        token_ids_RT=torch.full(shape, pad_id),
        positions_RT=torch.zeros(shape, dtype=torch.int64),
        segments_RT=torch.zeros(shape, dtype=torch.int64),
        loss_mask_RT=torch.zeros(shape, dtype=torch.bool),
        old_logprobs_RT=torch.zeros(shape),
        advantages_RT=torch.zeros(shape),
        weights_RT=torch.zeros(shape),
        trajectory_RT=torch.full(shape, -1),
        ref_logprobs_RT=torch.zeros(shape) if has_reference else None,
    )
    for r, row in enumerate(rows):
        start = 0
        for segment, index in enumerate(row, 1):
            sample = samples[index]
            length = len(sample.token_ids)
            span = r, slice(start, start + length)
            batch.token_ids_RT[span] = torch.tensor(sample.token_ids)
            batch.positions_RT[span] = torch.arange(length)
            batch.segments_RT[span] = segment
            batch.loss_mask_RT[span] = torch.tensor(sample.loss_mask)
            batch.old_logprobs_RT[span] = torch.tensor(sample.logprobs)
            batch.advantages_RT[span] = torch.tensor(sample.advantages)
            batch.weights_RT[span] = torch.tensor(weights[index])
            batch.trajectory_RT[span] = numbers[sample.trajectory_id]
            if batch.ref_logprobs_RT is not None and sample.ref_logprobs is not None:
                batch.ref_logprobs_RT[span] = torch.tensor(sample.ref_logprobs)
            start += length
    return batch
