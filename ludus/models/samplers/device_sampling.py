"""Token sampling on the device of the logits: only the sampled tokens are transferred back.

Same algorithm and uniform numbers as `sampling.sample_tokens`, without top-k and top-p.
Exponentials are float32, sums float64: first over chunks of the vocabulary, then within one chunk.

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
    """Returns token ids and their log-probabilities; NaN for rows whose logits are not finite.

    A row of temperature 0 gets the likeliest token, with its log-probability at temperature 1.
    There is one transfer in each direction.
    """
    arguments = torch.from_numpy(np.stack([temperatures_B, uniforms_B]))
    if logits_BV.is_cuda:
        arguments = arguments.pin_memory()
    arguments_2B = arguments.to(logits_BV.device, non_blocking=True)
    token_B, logprob_B = _sample(logits_BV.float(), *arguments_2B)
    results_2B = torch.stack([token_B.double(), logprob_B]).cpu().numpy()
    return results_2B[0].astype(np.int64), results_2B[1]


def _sample(logits_BV: Tensor, temperatures_B: Tensor, uniforms_B: Tensor) -> tuple[Tensor, Tensor]:
    vocab = logits_BV.shape[1]
    size = min(CHUNK, vocab)
    max_B1, likeliest_B1 = logits_BV.max(-1, keepdim=True)
    divisor_B1 = temperatures_B.where(temperatures_B > 0, 1.0)[:, None]
    # Subtract the maximum first: a low temperature must not make logits overflow.
    weights_BV = ((logits_BV - max_B1) / divisor_B1.float()).exp()
    weights_BCS = F.pad(weights_BV, (0, -vocab % size)).view(len(logits_BV), -1, size)
    chunk_sums_BC = weights_BCS.sum(-1, dtype=torch.float64)
    cumulative_BC = chunk_sums_BC.cumsum(-1)
    total_B1 = cumulative_BC[:, -1:]
    target_B1 = uniforms_B[:, None] * total_B1
    chunk_B1 = _first_exceeding(cumulative_BC, target_B1)
    preceding_B1 = (cumulative_BC - chunk_sums_BC).gather(1, chunk_B1)
    index_B1S = chunk_B1[:, :, None].expand(-1, 1, size)
    within_BS = weights_BCS.gather(1, index_B1S)[:, 0].double().cumsum(-1)
    rest_B1 = (target_B1 - preceding_B1).clamp(min=0)
    token_B1 = chunk_B1 * size + _first_exceeding(within_BS, rest_B1)
    token_B1 = torch.where(temperatures_B[:, None] > 0, token_B1, likeliest_B1)
    token_B1 = token_B1.clamp(max=vocab - 1)
    logprob_B1 = (logits_BV.gather(1, token_B1) - max_B1).double() / divisor_B1 - total_B1.log()
    return token_B1[:, 0], logprob_B1[:, 0]


def _first_exceeding(cumulative_BN: Tensor, target_B1: Tensor) -> Tensor:
    """Returns the first index whose cumulative sum exceeds the target; its weight is never zero.

    Where rounding puts the target above the total, the last index of nonzero weight.
    """
    first_B1 = torch.searchsorted(cumulative_BN, target_B1, right=True)
    last_B1 = torch.searchsorted(cumulative_BN, cumulative_BN[:, -1:].contiguous())
    # Sums that are not finite give an index beyond the end.
    return torch.minimum(first_B1, last_B1).clamp(max=cumulative_BN.shape[1] - 1)
