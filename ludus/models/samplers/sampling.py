"""Token sampling: temperature, top-k, top-p, one uniform random number per token.

Shape suffixes: B rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ludus.core.errors import TrainingError
from ludus.models.decoders.native import Unavailable
from ludus.models.decoders.native.bindings import Kernels
from ludus.models.samplers.base import SamplingParams
from ludus.models.samplers.device_sampling import sample_on_device
from ludus.models.vocabulary import Vocabulary


def distribution(logits_BV: Tensor, params: list[SamplingParams]) -> Tensor:
    """Returns the exact sampling distribution of each row: probabilities [B, V] in float64.

    logits / temperature, truncated to the `top_k` likeliest tokens, then to the smallest set whose
    probability reaches `top_p`, renormalised. Rows of temperature 0 keep the model's distribution
    (temperature 1), since greedy decoding has no distribution to compare with.

    float64, because rounding must not cut the tail of a large vocabulary.
    """
    logits_BV = logits_BV.double()
    temperatures = [p.temperature or 1.0 for p in params]
    if any(temperature != 1 for temperature in temperatures):
        divisor_B = torch.tensor(temperatures, device=logits_BV.device, dtype=torch.float64)
        # Subtract the maximum first: a low temperature must not make logits overflow.
        logits_BV = (logits_BV - logits_BV.amax(-1, keepdim=True)) / divisor_B[:, None]
    rows = _truncated_rows(params)
    if rows:
        index = torch.tensor(rows, device=logits_BV.device)
        truncated = _truncate(logits_BV[index], [params[i] for i in rows])
        logits_BV = logits_BV.index_copy(0, index, truncated)
    return logits_BV.softmax(-1)


def _truncated_rows(params: list[SamplingParams]) -> list[int]:
    return [i for i, p in enumerate(params) if p.temperature and (p.top_k or p.top_p < 1)]


def _truncate(logits_BV: Tensor, params: list[SamplingParams]) -> Tensor:
    """Returns the logits, with -inf outside each row's top-k and top-p sets."""
    ordered_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
    size = logits_BV.shape[-1]
    top_k_B = torch.tensor([p.top_k or size for p in params], device=logits_BV.device)
    top_p = [p.top_p if p.top_p < 1 else torch.inf for p in params]
    top_p_B = torch.tensor(top_p, device=logits_BV.device, dtype=torch.float64)
    rank_V = torch.arange(size, device=logits_BV.device)
    ordered_BV = ordered_BV.masked_fill(rank_V >= top_k_B[:, None], -torch.inf)
    preceding_BV = ordered_BV.softmax(-1).cumsum(-1).roll(1, dims=-1)
    preceding_BV[:, 0] = 0.0
    # Keep a token if the probability of the preceding tokens is below top_p; so the first is kept.
    ordered_BV = ordered_BV.masked_fill(preceding_BV >= top_p_B[:, None], -torch.inf)
    return torch.empty_like(logits_BV).scatter_(-1, order_BV, ordered_BV)


def sample_tokens(
    logits_BV: Tensor, params: list[SamplingParams], uniforms: list[float]
) -> tuple[list[int], list[float]]:
    """Sample one token per row: invert the cumulative distribution at the row's uniform number.

    Returns the token ids and their log-probabilities under `distribution`.
    Errors: TrainingError where logits are not finite.
    """
    probabilities_BV = distribution(logits_BV, params)
    cumulative_BV = probabilities_BV.cumsum(-1)
    total_B1 = cumulative_BV[:, -1:]
    uniform_B1 = torch.tensor(uniforms, dtype=torch.float64, device=logits_BV.device)[:, None]
    # right=True: the first token whose cumulative probability exceeds the number. It never has
    # probability zero.
    token_B1 = torch.searchsorted(cumulative_BV, uniform_B1 * total_B1, right=True)
    token_B1.clamp_(max=logits_BV.shape[-1] - 1)
    greedy = [p.temperature == 0 for p in params]
    if any(greedy):
        greedy_B1 = torch.tensor(greedy, device=logits_BV.device)[:, None]
        token_B1 = torch.where(greedy_B1, logits_BV.argmax(-1, keepdim=True), token_B1)
    logprobs: list[float] = probabilities_BV.gather(-1, token_B1).log().flatten().tolist()
    for row, total in enumerate(total_B1.flatten().tolist()):
        if not math.isfinite(total):
            raise _not_finite_error(row, len(params))
    return token_B1.flatten().tolist(), logprobs


def _not_finite_error(row: int, rows: int) -> TrainingError:
    return TrainingError(
        f"the model's logits are not finite (row {row} of {rows}): the weights have diverged; "
        "lower the learning rate and resume from the last checkpoint"
    )


FORBIDDEN = -1e30
"""Logit of an id that is not allowed: its probability is exactly 0."""


@torch.inference_mode()
def forbid_(
    logits_BS: Tensor, allowed: Mapping[int, NDArray[np.bool_]], vocabulary: Vocabulary
) -> None:
    """Set the logits of what is not allowed, in place.

    Args:
        allowed: of some rows, the ids that may be sampled [size].
    """
    lowest = max(FORBIDDEN, torch.finfo(logits_BS.dtype).min)
    for row, allowed_V in allowed.items():
        forbidden_S = ~vocabulary.select(torch.from_numpy(allowed_V))
        logits_BS[row].masked_fill_(forbidden_S.to(logits_BS.device), lowest)


class TokenSampler:
    """Samples one token per row on the device of the logits; `sample_tokens` is the reference.

    On a GPU it uses `device_sampling`. On a CPU, native code handles float32 rows without top-k and
    top-p. Its exponentials are float32, its sums float64; log-probabilities agree with
    `sample_tokens` to 1e-6.

    Args:
        vocabulary: the ids that are sampled; None: all.
    """

    def __init__(self, vocabulary: Vocabulary | None = None) -> None:
        self._vocabulary = vocabulary
        try:
            self._kernels: Kernels | None = Kernels()
        except Unavailable:
            self._kernels = None

    def __call__(
        self,
        logits_BV: Tensor,
        params: list[SamplingParams],
        uniforms_B: NDArray[np.float64],
        allowed: Mapping[int, NDArray[np.bool_]] | None = None,
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Returns a token id and its log-probability per row. Errors: as `sample_tokens`.

        Args:
            allowed: of constrained rows, the ids that may be sampled [size]. The logits of the
                others are overwritten.
        """
        vocabulary = self._vocabulary
        if vocabulary is None:
            return self._sample(logits_BV, params, uniforms_B)
        logits_BV = vocabulary.select(logits_BV)
        if allowed:
            forbid_(logits_BV, allowed, vocabulary)
        places_B, logprobs_B = self._sample(logits_BV, params, uniforms_B)
        return vocabulary.ids(torch.from_numpy(places_B)).numpy(), logprobs_B

    def _sample(
        self, logits_BV: Tensor, params: list[SamplingParams], uniforms_B: NDArray[np.float64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        temperatures_B = np.array([p.temperature for p in params], np.float64)
        if logits_BV.device.type != "cpu":
            token_ids_B, logprobs_B = sample_on_device(logits_BV, temperatures_B, uniforms_B)
            not_finite = np.flatnonzero(~np.isfinite(logprobs_B))
            bad_row = int(not_finite[0]) if len(not_finite) else -1
        elif self._kernels and logits_BV.dtype == torch.float32 and logits_BV.stride(1) == 1:
            token_ids_B, logprobs_B, bad_row = self._kernels.sample(
                logits_BV, temperatures_B, uniforms_B
            )
        else:
            token_ids, logprobs = sample_tokens(logits_BV, params, uniforms_B.tolist())
            return np.array(token_ids), np.array(logprobs)
        if bad_row >= 0:
            raise _not_finite_error(bad_row, len(params))
        rows = _truncated_rows(params)
        if rows:
            token_ids_B[rows], logprobs_B[rows] = sample_tokens(
                logits_BV[rows], [params[i] for i in rows], uniforms_B[rows].tolist()
            )
        return token_ids_B, logprobs_B
