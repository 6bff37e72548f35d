"""Batch-invariant in-process sampler, used by `verify`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ludus.core.errors import ConfigError
from ludus.models.decoders.generic import GenericDecoder
from ludus.models.exact.forward import exact, log_softmax
from ludus.models.exact.trace import Record, Tracer
from ludus.models.kv_cache.step_inputs import StepInputs
from ludus.models.samplers.base import SamplingParams
from ludus.models.samplers.engine import InProcessSampler
from ludus.models.samplers.sampling import forbid_, sample_tokens
from ludus.models.vocabulary import Vocabulary
from ludus.models.windows import layer_windows


class ExactSampler(InProcessSampler):
    """Computes each token with the model's own module, bit-identical in any batch or chunking.

    A token's log-probability is `forward.log_softmax` of its logits, in float32, as in the learner.
    Many times slower than `InProcessSampler`.

    Args: as for `InProcessSampler`.

    Errors: ConfigError for a model whose attention is not torch's.
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
        own = model.config.get_text_config()._attn_implementation
        if own != "sdpa":
            raise ConfigError(
                f"verify: the attention of {type(model).__name__} is {own!r}, and only torch's "
                "(sdpa) is computed batch-invariantly; set verify: false"
            )
        super().__init__(
            model,
            context_length=context_length,
            decode=decode,
            deterministic=deterministic,
            path="generic",
        )
        windows = layer_windows(model.config.get_text_config(), context_length)
        exact_decoder = ExactDecoder(model, windows)
        exact_decoder.max_blocks = self.decoder.max_blocks
        self.decoder = self.exact_decoder = exact_decoder
        self._reset()
        self._vocabulary = None if tokenizer is None else Vocabulary.of(tokenizer)
        self._token_sampler = ExactTokenSampler(self._vocabulary)  # type: ignore[assignment]


class ExactDecoder(GenericDecoder):
    """The generic decoder with batch-invariant forward passes.

    With `tracing` set, `records` holds each operation's result for the last token of the latest
    single-row pass.
    """

    name = "exact"

    def __init__(self, model: Any, windows: Sequence[int]) -> None:
        super().__init__(model, windows=windows)
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
    """Samples as `sample_tokens` does; log-probabilities are computed as in the exact learner.

    Args:
        vocabulary: the ids that are sampled; None: all.
    """

    def __init__(self, vocabulary: Vocabulary | None = None) -> None:
        self._vocabulary = vocabulary

    def __call__(
        self,
        logits_RV: Tensor,
        params: list[SamplingParams],
        uniforms_R: NDArray[np.float64],
        allowed: Mapping[int, NDArray[np.bool_]] | None = None,
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Returns a token id and its log-probability per row. Errors: as `sample_tokens`."""
        vocabulary = self._vocabulary
        if vocabulary is not None:
            logits_RV = vocabulary.select(logits_RV)
            if allowed:
                forbid_(logits_RV, allowed, vocabulary)
        places, _ = sample_tokens(logits_RV, params, uniforms_R.tolist())
        with torch.inference_mode():
            logprobs_RV = log_softmax(logits_RV, [p.temperature for p in params])
        logprobs_R = logprobs_RV[range(len(places)), places].float()
        places_R = torch.tensor(places)
        token_ids_R = places_R if vocabulary is None else vocabulary.ids(places_R)
        return token_ids_R.numpy(), logprobs_R.double().cpu().numpy()
