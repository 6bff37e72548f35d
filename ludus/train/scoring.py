"""What models say of tokens that were sampled already: no gradient, in packed batches.

Fills in `learner_logprobs`, `ref_logprobs` and `values` of a trajectory's sampled segments.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ludus.core.types import Sample, Trajectory
from ludus.train.critic import Critic
from ludus.train.forward import Forward
from ludus.train.packing import MicroBatch, pack
from ludus.train.samples import paths

Field = Literal["learner_logprobs", "ref_logprobs"]


@dataclass(frozen=True, slots=True)
class Scorer:
    """Scores trajectories with one model.

    Args:
        forward: the model's passes.
        tokens_per_batch: most positions of a pass.
        critic: gives values from the model's hidden states.
    """

    forward: Forward
    tokens_per_batch: int
    pad_id: int
    critic: Critic | None = None

    @torch.no_grad()
    def __call__(self, trajectories: Sequence[Trajectory], logprobs: Field | None) -> None:
        """Write log-probabilities into the segments' field `logprobs`, and values where there is a
        critic.

        A critic is asked for the state after each turn, too: behind a row's last turn stands one
        more token, which nothing sees.
        """
        rows = [(t, path, fresh) for t in trajectories for path, fresh in paths(t)]
        if not rows:
            return
        samples = [self._sample(*row) for row in rows]
        longest = max(len(sample.token_ids) for sample in samples)
        batch = pack(
            samples,
            [sample.logprobs for sample in samples],
            tokens_per_batch=max(self.tokens_per_batch, longest),
            pad_id=self.pad_id,
            layout=self.forward.layout,
        )
        scores = [[0.0] * len(sample.token_ids) for sample in samples]
        values = [[0.0] * len(sample.token_ids) for sample in samples]
        model = self.forward.model
        training = model.training
        model.eval()
        try:
            for micro_batch in batch.micro_batches:
                logprobs_N, values_N = self._pass(micro_batch)
                _put(micro_batch, logprobs_N, scores)
                if values_N is not None:
                    _put(micro_batch, values_N, values)
        finally:
            model.train(training)
        for row, of_row, values_of_row in zip(rows, scores, values, strict=True):
            self._write(*row, logprobs, of_row, values_of_row)

    def _write(
        self,
        trajectory: Trajectory,
        path: list[int],
        fresh: list[int],
        logprobs: Field | None,
        scores: list[float],
        values: list[float],
    ) -> None:
        """Hand a row's numbers to the segments whose loss is in it."""
        start = 0
        for index in path:
            segment = trajectory.segments[index]
            stop = start + len(segment.token_ids)
            if index in fresh and logprobs is not None:
                setattr(segment, logprobs, scores[start:stop])
            if index in fresh and self.critic is not None:
                segment.values = values[start : stop + 1]
            start = stop

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
        return Sample(ids, mask, nothing, nothing, trajectory.id)

    def _pass(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor | None]:
        config = self.forward.model.config.get_text_config()
        limit = getattr(config, "max_position_embeddings", None)
        if self.critic is not None and limit:  # the token behind a full context has no position
            micro_batch.positions_RT.clamp_(max=limit - 1)
        with self.forward.passes(micro_batch):
            hidden_PE, logits_PV = self.forward.hidden_states(micro_batch)
            logprobs_N, _ = self.forward.score(hidden_PE, logits_PV, micro_batch)
            if self.critic is None:
                return logprobs_N, None
            return logprobs_N, self.critic(hidden_PE)[micro_batch.place_N.to(self.forward.device)]


def assume_start(trajectories: Iterable[Trajectory]) -> None:
    """Fill in what the models of a stage say before its first update, without asking them: learner
    and reference are the policy that sampled, a critic expects 0."""
    for trajectory in trajectories:
        for segment in trajectory.segments:
            if segment.logprobs is not None:
                segment.learner_logprobs = segment.ref_logprobs = segment.logprobs
                segment.values = [0.0] * (len(segment.token_ids) + 1)


def _put(micro_batch: MicroBatch, values_N: Tensor, into: list[list[float]]) -> None:
    for sample, index, value in zip(
        micro_batch.sample_N.tolist(), micro_batch.index_N.tolist(), values_N.tolist(), strict=True
    ):
        into[sample][index] = value
