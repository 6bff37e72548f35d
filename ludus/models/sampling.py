"""From logits to tokens: temperature, top-k, top-p, and one uniform number a token.

Shape suffixes: B rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ludus.core.errors import TrainingError
from ludus.models.sampler import SamplingParams


def log_distribution(logits_BV: Tensor, params: list[SamplingParams]) -> Tensor:
    """The exact sampling distribution of each row, as log-probabilities [B, V] in float32.

    logits / temperature, cut to the `top_k` likeliest tokens, then to the smallest set whose
    probability reaches `top_p`, renormalised. Rows of temperature 0 keep the model's own
    distribution (temperature 1): greedy choice has no other that could be compared.
    """
    logits_BV = logits_BV.float()
    temperature_B = torch.tensor(
        [p.temperature or 1.0 for p in params], device=logits_BV.device, dtype=torch.float32
    )
    # From the maximum down, so that no temperature, however low, makes logits overflow.
    logits_BV = (logits_BV - logits_BV.amax(-1, keepdim=True)) / temperature_B[:, None]
    cut = [i for i, p in enumerate(params) if p.temperature and (p.top_k or p.top_p < 1)]
    if cut:
        index = torch.tensor(cut, device=logits_BV.device)
        logits_BV = logits_BV.index_copy(
            0, index, _truncated(logits_BV[index], [params[i] for i in cut])
        )
    return logits_BV.log_softmax(-1)


def _truncated(logits_BV: Tensor, params: list[SamplingParams]) -> Tensor:
    """Logits with -inf outside of each row's top-k and top-p sets."""
    ordered_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
    size = logits_BV.shape[-1]
    top_k_B = torch.tensor([p.top_k or size for p in params], device=logits_BV.device)
    # In float64: rounding must not cut the tail of a large vocabulary, least of all at top_p = 1.
    top_p_B = torch.tensor(
        [p.top_p if p.top_p < 1 else torch.inf for p in params],
        device=logits_BV.device,
        dtype=torch.float64,
    )
    rank_V = torch.arange(size, device=logits_BV.device)
    ordered_BV = ordered_BV.masked_fill(rank_V >= top_k_B[:, None], -torch.inf)
    before_BV = ordered_BV.double().softmax(-1).cumsum(-1).roll(1, dims=-1)
    before_BV[:, 0] = 0.0
    # A token stays while the tokens before it have not yet reached top_p; the first always does.
    ordered_BV = ordered_BV.masked_fill(before_BV >= top_p_B[:, None], -torch.inf)
    return torch.empty_like(logits_BV).scatter_(-1, order_BV, ordered_BV)


def choose(
    logits_BV: Tensor, params: list[SamplingParams], uniforms: list[float]
) -> tuple[list[int], list[float]]:
    """One token a row by inverting the cumulative distribution at the row's uniform number.

    Returns the token ids and their log-probabilities under `log_distribution`.
    Errors: TrainingError where logits are not finite.
    """
    logprobs_BV = log_distribution(logits_BV, params)
    cumulative_BV = logprobs_BV.double().exp().cumsum(-1)
    total_B = cumulative_BV[:, -1]
    if not torch.isfinite(total_B).all():
        row = int((~torch.isfinite(total_B)).nonzero()[0])
        raise TrainingError(
            f"the model's logits are not finite (row {row} of {len(params)}): the weights have "
            "diverged; lower the learning rate and resume from the last checkpoint"
        )
    uniform_B = torch.tensor(uniforms, dtype=torch.float64, device=logits_BV.device)
    # right=True: the first token whose cumulative probability exceeds the number, so never one
    # of probability zero.
    sampled_B = torch.searchsorted(
        cumulative_BV, (uniform_B * total_B)[:, None], right=True
    ).squeeze(-1)
    sampled_B = sampled_B.clamp_(max=logits_BV.shape[-1] - 1)
    greedy_B = torch.tensor([p.temperature == 0 for p in params], device=logits_BV.device)
    token_B = torch.where(greedy_B, logits_BV.argmax(-1), sampled_B)
    logprob_B = logprobs_BV.gather(-1, token_B[:, None]).squeeze(-1)
    return token_B.tolist(), logprob_B.tolist()
