"""Batch-invariant in-process sampler, used by `verify`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ludus.models.decoders.generic import GenericDecoder
from ludus.models.exact.forward import exact, log_softmax
from ludus.models.exact.trace import Record, Tracer
from ludus.models.kv_cache.step_inputs import StepInputs
from ludus.models.samplers.base import SamplingParams
from ludus.models.samplers.engine import InProcessSampler
from ludus.models.samplers.sampling import sample_tokens


class ExactSampler(InProcessSampler):
    """Computes each token with the model's own module, bit-identical in any batch or chunking.

    A token's log-probability is `forward.log_softmax` of its logits, in float32, as in the learner.
    Many times slower than `InProcessSampler`.

    Args: as for `InProcessSampler`.
    """

    def __init__(
        self,
        model: Any,
        *,
        context_length: int,
        decode: Callable[[list[int]], str] | None = None,
        deterministic: bool = True,
        tokenizer: Any = None,
    ) -> None:
        super().__init__(
            model,
            context_length=context_length,
            decode=decode,
            deterministic=deterministic,
            path="generic",
        )
        self.decoder = self.exact_decoder = ExactDecoder(model)
        self._reset()
        self._token_sampler = ExactTokenSampler(None if tokenizer is None else len(tokenizer))  # type: ignore[assignment]


class ExactDecoder(GenericDecoder):
    """The generic decoder with batch-invariant forward passes.

    With `tracing` set, `records` holds each operation's result for the last token of the latest
    single-row pass.
    """

    name = "exact"

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.tracing = False
        self.records: list[Record] = []

    def forward(self, inputs: StepInputs) -> Tensor:
        if not self.tracing:
            with exact():
                return super().forward(inputs)
        width = len(inputs.ids)
        tracer = Tracer(self._model, (1, width), (0, width - 1))
        with exact(), tracer.recording():
            logits_RV = super().forward(inputs)
        self.records = tracer.records
        return logits_RV


class ExactTokenSampler:
    """Samples as `sample_tokens` does; log-probabilities are exact.

    Log-probabilities are normalised over all logits, ids beyond the vocabulary included, as in the
    learner.

    Args:
        vocab_size: ids from `vocab_size` on are never sampled.
    """

    def __init__(self, vocab_size: int | None = None) -> None:
        self._vocab_size = vocab_size

    def __call__(
        self, logits_RV: Tensor, params: list[SamplingParams], uniforms_R: NDArray[np.float64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Returns a token id and its log-probability per row. Errors: as `sample_tokens`."""
        token_ids, _ = sample_tokens(logits_RV[:, : self._vocab_size], params, uniforms_R.tolist())
        with torch.inference_mode():
            logprobs_RV = log_softmax(logits_RV, [p.temperature for p in params])
        logprobs_R = logprobs_RV[range(len(token_ids)), token_ids].float()
        return np.array(token_ids), logprobs_R.double().cpu().numpy()
