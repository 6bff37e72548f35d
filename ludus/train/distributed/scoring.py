"""Scores of sampled tokens: each rank computes those of its trajectories, rank 0 gets all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ludus.core.types import Sample
from ludus.train.batches.packing import MicroBatch, pack
from ludus.train.distributed.group import Group
from ludus.train.distributed.sharding import ShardedForward
from ludus.train.distributed.split import assign
from ludus.train.scoring import Scorer

Scores = list[list[list[float]]]


@dataclass(frozen=True, slots=True)
class ShardedScorer(Scorer):
    """Scores trajectories on all ranks. All ranks get the same groups; the result of rank 0 is
    complete."""

    group: Group | None = None

    @torch.no_grad()
    def _scores(self, samples: Sequence[Sample]) -> Scores:
        group, forward = self.group, self.forward
        assert group is not None
        assert isinstance(forward, ShardedForward)
        scores: Scores = [[[0.0] * len(s.token_ids) for _ in range(3)] for s in samples]
        if not samples:
            return scores
        mine = assign(samples, group.num_parts, forward.layout)[group.part]
        passes = group.jointly(lambda: self._plan([samples[i] for i in mine]))
        num_passes = max(group.share(len(passes)))
        model = forward.model
        training = model.training
        model.eval()
        try:
            with forward.released():
                for number in range(num_passes):
                    if number < len(passes):
                        self._fill(scores, mine, passes[number])
                    else:
                        self._pass(forward.idle)
        finally:
            model.train(training)
        for found in group.gather({i: scores[i] for i in mine if group.is_first}):
            for index, score in found.items():
                scores[index] = score
        return scores

    def _plan(self, samples: Sequence[Sample]) -> list[MicroBatch]:
        longest = max((len(s.token_ids) for s in samples), default=0)
        return pack(
            samples,
            [sample.logprobs for sample in samples],
            tokens_per_batch=max(self.tokens_per_batch, longest),
            pad_id=self.pad_id,
            layout=self.forward.layout,
        ).micro_batches

    def _fill(self, scores: Scores, mine: Sequence[int], micro_batch: MicroBatch) -> None:
        columns = [column_N.cpu().tolist() for column_N in self._pass(micro_batch)]
        places = zip(micro_batch.sample_N.tolist(), micro_batch.index_N.tolist(), strict=True)
        for n, (sample, index) in enumerate(places):
            for place, column in enumerate(columns):
                scores[mine[sample]][place][index] = column[n]
