"""From logits to tokens: temperature, top-k, top-p, and one uniform number a token.

Shape suffixes: B rows, V vocabulary.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ludus.core.errors import TrainingError
from ludus.models.decoders.native import Unavailable
from ludus.models.decoders.native.bindings import Kernels
from ludus.models.samplers.base import SamplingParams
from ludus.models.samplers.device_sampling import sample_on_device


def distribution(logits_BV: Tensor, params: list[SamplingParams]) -> Tensor:
    """The exact sampling distribution of each row: probabilities [B, V] in float64.

    logits / temperature, cut to the `top_k` likeliest tokens, then to the smallest set whose
    probability reaches `top_p`, renormalised. Rows of temperature 0 keep the model's own
    distribution (temperature 1): greedy choice has no other that could be compared.

    In float64, because rounding must not cut the tail of a large vocabulary.
    """
    logits_BV = logits_BV.double()
    temperatures = [p.temperature or 1.0 for p in params]
    if any(temperature != 1 for temperature in temperatures):
        divisor_B = torch.tensor(temperatures, device=logits_BV.device, dtype=torch.float64)
        # From the maximum down, so that no temperature, however low, makes logits overflow.
        logits_BV = (logits_BV - logits_BV.amax(-1, keepdim=True)) / divisor_B[:, None]
    cut = [i for i, p in enumerate(params) if p.temperature and (p.top_k or p.top_p < 1)]
    if cut:
        index = torch.tensor(cut, device=logits_BV.device)
        logits_BV = logits_BV.index_copy(
            0, index, _truncated(logits_BV[index], [params[i] for i in cut])
        )
    return logits_BV.softmax(-1)


def _truncated(logits_BV: Tensor, params: list[SamplingParams]) -> Tensor:
    """Logits with -inf outside of each row's top-k and top-p sets."""
    ordered_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
    size = logits_BV.shape[-1]
    top_k_B = torch.tensor([p.top_k or size for p in params], device=logits_BV.device)
    top_p_B = torch.tensor(
        [p.top_p if p.top_p < 1 else torch.inf for p in params],
        device=logits_BV.device,
        dtype=torch.float64,
    )
    rank_V = torch.arange(size, device=logits_BV.device)
    ordered_BV = ordered_BV.masked_fill(rank_V >= top_k_B[:, None], -torch.inf)
    before_BV = ordered_BV.softmax(-1).cumsum(-1).roll(1, dims=-1)
    before_BV[:, 0] = 0.0
    # A token stays while the tokens before it have not yet reached top_p; the first always does.
    ordered_BV = ordered_BV.masked_fill(before_BV >= top_p_B[:, None], -torch.inf)
    return torch.empty_like(logits_BV).scatter_(-1, order_BV, ordered_BV)


def sample_tokens(
    logits_BV: Tensor, params: list[SamplingParams], uniforms: list[float]
) -> tuple[list[int], list[float]]:
    """One token a row by inverting the cumulative distribution at the row's uniform number.

    Returns the token ids and their log-probabilities under `distribution`.
    Errors: TrainingError where logits are not finite.
    """
    probabilities_BV = distribution(logits_BV, params)
    cumulative_BV = probabilities_BV.cumsum(-1)
    total_B1 = cumulative_BV[:, -1:]
    uniform_B1 = torch.tensor(uniforms, dtype=torch.float64, device=logits_BV.device)[:, None]
    # right=True: the first token whose cumulative probability exceeds the number, so never one
    # of probability zero.
    token_B1 = torch.searchsorted(cumulative_BV, uniform_B1 * total_B1, right=True)
    token_B1.clamp_(max=logits_BV.shape[-1] - 1)
    greedy = [p.temperature == 0 for p in params]
    if any(greedy):
        greedy_B1 = torch.tensor(greedy, device=logits_BV.device)[:, None]
        token_B1 = torch.where(greedy_B1, logits_BV.argmax(-1, keepdim=True), token_B1)
    logprobs: list[float] = probabilities_BV.gather(-1, token_B1).log().flatten().tolist()
    for row, total in enumerate(total_B1.flatten().tolist()):
        if not math.isfinite(total):
            raise _not_finite(row, len(params))
    return token_B1.flatten().tolist(), logprobs


def _not_finite(row: int, rows: int) -> TrainingError:
    return TrainingError(
        f"the model's logits are not finite (row {row} of {rows}): the weights have diverged; "
        "lower the learning rate and resume from the last checkpoint"
    )


class TokenSampler:
    """`sample_tokens` on arrays, where the logits are, in native code where that can be had.

    Elsewhere than on the CPU see `device_choice`. Native code takes rows in float32 on the CPU from
    which nothing is cut. Its exponentials are in float32, its sums in float64: log-probabilities
    agree with `sample_tokens` to 1e-6.

    Args:
        vocab_size: ids from here on are never chosen.
    """

    def __init__(self, vocab_size: int | None = None) -> None:
        self._vocab_size = vocab_size
        try:
            self._kernels: Kernels | None = Kernels()
        except Unavailable:
            self._kernels = None

    def __call__(
        self, logits_BV: Tensor, params: list[SamplingParams], uniforms_B: NDArray[np.float64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """One token id and its log-probability a row. Errors: as `sample_tokens`."""
        logits_BV = logits_BV[:, : self._vocab_size]
        temperatures_B = np.array([p.temperature for p in params], np.float64)
        if logits_BV.device.type != "cpu":
            token_ids_B, logprobs_B = sample_on_device(logits_BV, temperatures_B, uniforms_B)
            wrong = np.flatnonzero(~np.isfinite(logprobs_B))
            bad = int(wrong[0]) if len(wrong) else -1
        elif self._kernels and logits_BV.dtype == torch.float32 and logits_BV.stride(1) == 1:
            token_ids_B, logprobs_B, bad = self._kernels.sample(
                logits_BV, temperatures_B, uniforms_B
            )
        else:
            token_ids, logprobs = sample_tokens(logits_BV, params, uniforms_B.tolist())
            return np.array(token_ids), np.array(logprobs)
        if bad >= 0:
            raise _not_finite(bad, len(params))
        cut = [i for i, p in enumerate(params) if p.temperature and (p.top_k or p.top_p < 1)]
        if cut:
            token_ids_B[cut], logprobs_B[cut] = sample_tokens(
                logits_BV[cut], [params[i] for i in cut], uniforms_B[cut].tolist()
            )
        return token_ids_B, logprobs_B
