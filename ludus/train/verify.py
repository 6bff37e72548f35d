"""Verify that sampler and learner agree bit by bit; find the first operation whose results differ.

The sampler computes a token in a batch of other episodes, from a KV cache, turn by turn; the
learner computes it in a packed batch. Under `exact` both give the same float32 log-probability. A
difference means that an operation depends on more than its token's context, or that the two sides
differ in an operation. The token is then computed again on both sides, operation by operation.

Shape suffixes: P places that predict a loss token, N loss tokens, E hidden size, V vocabulary.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ludus.core.errors import TrainingError
from ludus.core.types import Sample, Trajectory
from ludus.models.exact.forward import exact, log_softmax
from ludus.models.exact.sampler import ExactSampler
from ludus.models.exact.trace import Record, Tracer, first_difference
from ludus.models.samplers.base import SamplingParams
from ludus.train.batches.packing import Batch, Layout, MicroBatch, pack
from ludus.train.batches.samples import rows
from ludus.train.constrained import rescore
from ludus.train.forward import Attention, Forward


class ExactForward(Forward):
    """Batch-invariant forward passes; ordinary backward passes.

    The logits come from the model's own last layer, which the sampler calls too.
    """

    def __init__(self, model: Any, **settings: Any) -> None:
        super().__init__(model, **settings)
        self.head = None

    @property
    def layout(self) -> Layout:
        """One sample a row: attention is dense, so long rows cost too much memory."""
        return "single"

    def _shaped(self, micro_batch: MicroBatch) -> MicroBatch:
        """Unchanged: the sampler's operations are compared with those on the same shapes."""
        return micro_batch

    def hidden_states(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor | None]:
        """As in `Forward`, with the logits [P, V]."""
        with exact():
            return super().hidden_states(micro_batch)

    def score(
        self, hidden_PE: Tensor, logits_PV: Tensor | None, micro_batch: MicroBatch
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies [N] in float32, as the sampler computes them."""
        assert logits_PV is not None
        place_N = micro_batch.place_N.to(self.device)
        target_N = micro_batch.target_N.to(self.device)
        if self.vocabulary is not None:
            logits_PS = self.vocabulary.select(logits_PV)
            target_N = self.vocabulary.places(target_N)
        else:
            logits_PS = logits_PV
        logprobs_PS = log_softmax(logits_PS, [self.temperature])
        entropy_P = -(logprobs_PS.exp() * logprobs_PS).sum(-1)
        scores = logprobs_PS[place_N, target_N].float(), entropy_P[place_N].float()
        return rescore(
            scores,
            micro_batch,
            logits_PV.__getitem__,
            lambda logits_LS: log_softmax(logits_LS, [self.temperature]),
            self.vocabulary,
        )

    def _find_attention(self) -> Attention:
        found = super()._find_attention()
        return "dense" if found == "tiles" else found  # tiles sum in another order


def unscored(
    trajectories: Iterable[Trajectory], tokens_per_batch: int, pad_id: int, layout: Layout
) -> Batch:
    """Returns a batch of all sampled tokens, those of failed trajectories included."""
    samples = [row for trajectory in trajectories for row in rows(trajectory, 0.0)]
    longest = max((len(sample.token_ids) for sample in samples), default=0)
    return pack(
        samples,
        [sample.advantages for sample in samples],
        tokens_per_batch=max(tokens_per_batch, longest),
        pad_id=pad_id,
        layout=layout,
    )


async def verify(forward: Forward, batch: Batch, version: int) -> int:
    """Compare the sampler's log-probabilities of a batch with the learner's, bit by bit.

    Args:
        version: of the weights; tokens of other versions and demonstrations are skipped.

    Returns the number of compared tokens.
    Errors: TrainingError that names the first different token and operation.
    """
    num_tokens = 0
    forward.model.train()
    for micro_batch in batch.micro_batches:
        places = zip(micro_batch.sample_N.tolist(), micro_batch.index_N.tolist(), strict=True)
        own = [batch.samples[s].version_of(i) == version for s, i in places]
        own_N = torch.tensor(own, dtype=torch.bool)
        with torch.no_grad(), forward.passes(micro_batch):
            logprobs_N, _ = forward.logprobs(micro_batch)
        logprobs_N = logprobs_N.cpu()
        differs_N = own_N & (logprobs_N != micro_batch.old_logprobs_N)
        if differs_N.any():
            first = int(differs_N.nonzero()[0])
            sample = batch.samples[int(micro_batch.sample_N[first])]
            index = int(micro_batch.index_N[first])
            count = f"{int(differs_N.sum())} of {int(own_N.sum())} tokens of a micro-batch differ"
            raise await _mismatch(forward, sample, index, float(logprobs_N[first]), count)
        num_tokens += int(own_N.sum())
    return num_tokens


async def _mismatch(
    forward: Forward, sample: Sample, index: int, logprob: float, count: str
) -> TrainingError:
    """Returns the error for a token on which sampler and learner disagree."""
    sampled = sample.logprobs[index]
    message = (
        f"sampler and learner disagree ({count}): token {index} of trajectory "
        f"{sample.trajectory_id}: log-probability {_spell(sampled)} in the sampler, "
        f"{_spell(logprob)} in the learner"
    )
    sampler = await _as_sampled(forward.model, sample, index)
    learner = _as_trained(forward, sample, index)
    difference = first_difference(sampler, learner)
    if difference is None:
        return TrainingError(
            f"{message}. Computed alone, both sides agree: an operation depends on the rest of its "
            "batch"
        )
    ours, other = difference
    at = int((ours.value != other.value).flatten().nonzero()[0])
    values = [float(record.value.flatten()[at]) for record in difference]
    return TrainingError(
        f"{message}. The first operation that differs is {ours}, at position {index - 1}, entry "
        f"{at}: {_spell(values[0])} in the sampler, {_spell(values[1])} in the learner"
    )


def _spell(value: float) -> str:
    """Format a float32 with its bits."""
    return f"{value:.9g} (0x{struct.pack('>f', value).hex()})"


async def _as_sampled(model: Any, sample: Sample, index: int) -> list[Record]:
    """The sampler's operations on the token before `index`: prefill of the turn's prompt, then
    decoding token by token, in a session of its own."""
    ids = sample.token_ids
    start = index
    while start > 0 and sample.loss_mask[start - 1]:
        start -= 1
    sampler = ExactSampler(model, context_length=index + 1)
    params = SamplingParams(max_tokens=1)
    sampler.open("again")
    try:
        for length in range(start, index + 1):
            sampler.exact_decoder.tracing = length == index
            await sampler.sample(ids[:length], params, session="again")
    finally:
        sampler.close("again")
    return sampler.exact_decoder.records


@torch.inference_mode()
def _as_trained(forward: Forward, sample: Sample, index: int) -> list[Record]:
    """The learner's operations on the token before `index`, in the whole sample."""
    batch = pack([sample], [sample.logprobs], tokens_per_batch=len(sample.token_ids), pad_id=0)
    [micro_batch] = batch.micro_batches
    forward.model.train()
    tracer = Tracer(forward.model, (1, len(sample.token_ids)), (0, index - 1))
    with forward.passes(micro_batch), exact(), tracer.recording():
        Forward.hidden_states(forward, micro_batch)
    return tracer.records
