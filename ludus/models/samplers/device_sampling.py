"""One token a row, chosen where the logits are: nothing is waited for but the tokens.

As `sampling.sample_tokens` without cuts, by the same uniform numbers; exponentials in float32, sums in
float64, over chunks of the vocabulary and then within one.

Shape suffixes: B rows, V vocabulary, C chunks, S size of a chunk.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

CHUNK = 1024


@torch.inference_mode()
def sample_on_device(
    logits_BV: Tensor, temperatures_B: NDArray[np.float64], uniforms_B: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Token ids and their log-probabilities; NaN for rows whose logits are not finite.

    A row of temperature 0 takes the likeliest token, and its log-probability at temperature 1.
    One transfer goes there, one comes back.
    """
    told = torch.from_numpy(np.stack([temperatures_B, uniforms_B]))
    if logits_BV.is_cuda:
        told = told.pin_memory()
    told_2B = told.to(logits_BV.device, non_blocking=True)
    token_B, logprob_B = _chosen(logits_BV.float(), *told_2B)
    found_2B = torch.stack([token_B.double(), logprob_B]).cpu().numpy()
    return found_2B[0].astype(np.int64), found_2B[1]


def _chosen(logits_BV: Tensor, temperatures_B: Tensor, uniforms_B: Tensor) -> tuple[Tensor, Tensor]:
    vocab = logits_BV.shape[1]
    size = min(CHUNK, vocab)
    most_B1, likeliest_B1 = logits_BV.max(-1, keepdim=True)
    divisor_B1 = temperatures_B.where(temperatures_B > 0, 1.0)[:, None]
    # From the maximum down, so that no temperature, however low, makes logits overflow.
    weights_BV = ((logits_BV - most_B1) / divisor_B1.float()).exp()
    weights_BCS = F.pad(weights_BV, (0, -vocab % size)).view(len(logits_BV), -1, size)
    chunks_BC = weights_BCS.sum(-1, dtype=torch.float64)
    reached_BC = chunks_BC.cumsum(-1)
    total_B1 = reached_BC[:, -1:]
    wanted_B1 = uniforms_B[:, None] * total_B1
    chunk_B1 = _first_beyond(reached_BC, wanted_B1)
    before_B1 = (reached_BC - chunks_BC).gather(1, chunk_B1)
    index_B1S = chunk_B1[:, :, None].expand(-1, 1, size)
    within_BS = weights_BCS.gather(1, index_B1S)[:, 0].double().cumsum(-1)
    token_B1 = chunk_B1 * size + _first_beyond(within_BS, (wanted_B1 - before_B1).clamp(min=0))
    token_B1 = torch.where(temperatures_B[:, None] > 0, token_B1, likeliest_B1)
    token_B1 = token_B1.clamp(max=vocab - 1)
    logprob_B1 = (logits_BV.gather(1, token_B1) - most_B1).double() / divisor_B1 - total_B1.log()
    return token_B1[:, 0], logprob_B1[:, 0]


def _first_beyond(cumulative_BN: Tensor, wanted_B1: Tensor) -> Tensor:
    """The first place where the sum exceeds the number, so never one of weight zero; where rounding
    puts the number beyond the whole, the last place of some weight."""
    beyond_B1 = torch.searchsorted(cumulative_BN, wanted_B1, right=True)
    last_B1 = torch.searchsorted(cumulative_BN, cumulative_BN[:, -1:].contiguous())
    # Sums that are not finite lead beyond the end.
    return torch.minimum(beyond_B1, last_B1).clamp(max=cumulative_BN.shape[1] - 1)
