"""Score sampled tokens with a model: no gradient, in packed batches.

A pass that exceeds memory is split. Returns copies of the groups whose sampled segments carry
`learner_logprobs`, `ref_logprobs` or `values`; with the learner's, its `entropies`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ludus.core.errors import TrainingError
from ludus.core.types import Group, Sample, Segment, Trajectory
from ludus.models.memory import is_out_of_memory
from ludus.telemetry.logs import get_logger
from ludus.train.batches.packing import Batch, MicroBatch, pack
from ludus.train.batches.samples import constraints_of, paths
from ludus.train.critic import Critic
from ludus.train.forward import Forward

log = get_logger(__name__)

Field = Literal["learner_logprobs", "ref_logprobs"]


@dataclass(frozen=True, slots=True)
class Scorer:
    """Scores trajectories with one model.

    Args:
        forward: the model's forward passes.
        tokens_per_batch: most positions of a pass.
        critic: computes values from the model's hidden states.
    """

    forward: Forward
    tokens_per_batch: int
    pad_id: int
    critic: Critic | None = None

    def __call__(self, groups: Sequence[Group], logprobs: Field | None) -> list[Group]:
        """Returns the groups with log-probabilities in the segments' field `logprobs`, and with
        values where there is a critic.

        A critic also values the state after each turn. For that, a row ends with one more token,
        which no other token attends to.
        """
        trajectories = [t for group in groups for t in group.trajectories]
        rows = [(n, *row) for n, t in enumerate(trajectories) for row in paths(t)]
        samples = [self._sample(trajectories[n], path, fresh) for n, path, fresh in rows]
        fields: list[dict[int, dict[str, Any]]] = [{} for _ in trajectories]
        for (n, path, fresh), (scores, entropies, values) in zip(
            rows, self._scores(samples), strict=True
        ):
            start = 0
            for index in path:
                stop = start + len(trajectories[n].segments[index].token_ids)
                if index in fresh:
                    scored = fields[n][index] = {}
                    if logprobs is not None:
                        scored[logprobs] = scores[start:stop]
                    if logprobs == "learner_logprobs":
                        scored["entropies"] = entropies[start:stop]
                    if self.critic is not None:
                        scored["values"] = values[start : stop + 1]
                start = stop
        copies = iter([_with_fields(t, f) for t, f in zip(trajectories, fields, strict=True)])
        return [replace(g, trajectories=[next(copies) for _ in g.trajectories]) for g in groups]

    @torch.no_grad()
    def _scores(self, samples: Sequence[Sample]) -> list[list[list[float]]]:
        """Log-probabilities, entropies and values of each sample's tokens; 0 for tokens without a
        loss."""
        scores = [[[0.0] * len(s.token_ids) for _ in range(3)] for s in samples]
        if not samples:
            return scores
        batch = pack(
            samples,
            [sample.logprobs for sample in samples],
            tokens_per_batch=max(self.tokens_per_batch, *(len(s.token_ids) for s in samples)),
            pad_id=self.pad_id,
            layout=self.forward.layout,
        )
        model = self.forward.model
        training = model.training
        model.eval()
        try:
            left = list(batch.micro_batches)
            while left:
                micro_batch = left.pop(0)
                columns = self._try_pass(micro_batch)
                if columns is None:
                    left[:0] = _halves(batch, micro_batch)
                    continue
                for place, column_N in enumerate(columns):
                    samples_N, index_N = micro_batch.sample_N.tolist(), micro_batch.index_N.tolist()
                    for n, i, x in zip(samples_N, index_N, column_N.tolist(), strict=True):
                        scores[n][place][i] = x
        finally:
            model.train(training)
        return scores

    def _sample(self, trajectory: Trajectory, path: list[int], fresh: list[int]) -> Sample:
        ids: list[int] = []
        mask: list[bool] = []
        for index in path:
            segment = trajectory.segments[index]
            mask += [index in fresh] * len(segment.token_ids)
            ids += segment.token_ids
        if self.critic is not None:
            ends = [i for i in range(1, len(mask)) if mask[i - 1] and not mask[i]]
            for end in ends:
                mask[end] = True
            ids, mask = [*ids, self.pad_id], [*mask, True]
        nothing = [0.0] * len(ids)
        constraints = constraints_of(trajectory, path, fresh)
        return Sample(ids, mask, nothing, nothing, trajectory.id, constraints=constraints)

    def _try_pass(self, micro_batch: MicroBatch) -> list[Tensor] | None:
        """The results of `_pass` on the CPU; None where memory does not hold it."""
        try:
            return [column_N.cpu() for column_N in self._pass(micro_batch)]
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return None

    def _pass(self, micro_batch: MicroBatch) -> list[Tensor]:
        """Log-probabilities and entropies [N] of the loss tokens, and values [N] of a critic."""
        config = self.forward.model.config.get_text_config()
        limit = getattr(config, "max_position_embeddings", None)
        if self.critic is not None and limit:  # no position is left after a full context
            micro_batch.positions_RT.clamp_(max=limit - 1)
        with self.forward.passes(micro_batch):
            hidden_PE, logprobs_N, entropy_N = self.forward.compute(micro_batch)
            if self.critic is None:
                return [logprobs_N, entropy_N]
            return [
                logprobs_N,
                entropy_N,
                self.critic(hidden_PE)[micro_batch.place_N.to(self.forward.device)],
            ]


def _halves(batch: Batch, micro_batch: MicroBatch) -> list[MicroBatch]:
    """Split a micro-batch that exceeds memory. Errors: TrainingError for a single sample."""
    if not (parts := batch.halves(micro_batch)):
        raise TrainingError(
            f"memory does not suffice to score a sample of {micro_batch.token_ids_RT.numel()} "
            "tokens. Nothing has changed; lower model.context_length, or rollout.concurrency, "
            "whose KV cache shares the memory"
        )
    log.warning("out of memory: a scoring pass is split", parts=len(parts))
    return parts


def assume_start(groups: Sequence[Group]) -> list[Group]:
    """Returns groups with the scores before the first update, without a forward pass: learner and
    reference equal the policy that sampled, the critic returns 0."""

    def scores(segment: Segment) -> dict[str, Any]:
        own = segment.logprobs
        values = [0.0] * (len(segment.token_ids) + 1)
        return {"learner_logprobs": own, "ref_logprobs": own, "values": values}

    def scored(trajectory: Trajectory) -> Trajectory:
        turns = {i: scores(s) for i, s in enumerate(trajectory.segments) if s.sampled}
        return _with_fields(trajectory, turns)

    return [replace(g, trajectories=[scored(t) for t in g.trajectories]) for g in groups]


def _with_fields(trajectory: Trajectory, fields: dict[int, dict[str, Any]]) -> Trajectory:
    """A copy whose segments have the given fields, by index of the segment."""
    segments = [replace(s, **fields.get(i, {})) for i, s in enumerate(trajectory.segments)]
    return replace(trajectory, segments=segments)
