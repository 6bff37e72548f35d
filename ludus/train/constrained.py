"""Log-probabilities of tokens that a grammar constrained: among the tokens that it allowed.

The sampler drew them from the model's distribution over those tokens; with the distribution over
all, ratios and gradients would be those of another policy.

Shape suffixes: N loss tokens, L constrained ones, P places that predict loss tokens, V vocabulary,
S sampled ids.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ludus.core.errors import TrainingError
from ludus.models.vocabulary import Vocabulary
from ludus.train.batches.packing import MicroBatch
from ludus.train.kernels.logprobs import chunk_rows

LogSoftmax = Callable[[Tensor], Tensor]


def rescore(
    scores: tuple[Tensor, Tensor],
    micro_batch: MicroBatch,
    logits: Callable[[Tensor], Tensor],
    log_softmax: LogSoftmax,
    vocabulary: Vocabulary | None,
) -> tuple[Tensor, Tensor]:
    """Returns the log-probabilities and entropies [N], those of constrained tokens computed again.

    Args:
        scores: log-probabilities and entropies [N] over all sampled ids.
        logits: gives the logits [L, V] of places [L].
        log_softmax: of logits [L, S], at the rollouts' temperature.

    Errors: TrainingError for tokens that a grammar forbids.
    """
    turns = micro_batch.constrained
    if not turns:
        return scores
    if vocabulary is None:
        raise TrainingError("constrained turns need the tokenizer's vocabulary in the learner")
    select = vocabulary.select

    def part(place_L: Tensor, forbidden_LS: Tensor, target_L: Tensor) -> tuple[Tensor, Tensor]:
        logits_LS = select(logits(place_L)).masked_fill(forbidden_LS, -torch.inf)
        logprobs_LS = log_softmax(logits_LS)
        terms_LS = logprobs_LS.exp() * logprobs_LS.masked_fill(forbidden_LS, 0)
        at_L1 = vocabulary.places(target_L)[:, None]
        return logprobs_LS.gather(1, at_L1)[:, 0].float(), -terms_LS.sum(-1).float()

    device = scores[0].device
    place_L = torch.cat([turn.place_L for turn in turns])
    grammars = vocabulary.grammars
    bits_LW = np.concatenate([grammars.allowed(turn.constraint, turn.token_ids) for turn in turns])
    rows = chunk_rows(vocabulary.size, device)
    found: list[tuple[Tensor, Tensor]] = []
    for start in range(0, len(place_L), rows):
        at_L = place_L[start : start + rows]
        allowed_LV = torch.from_numpy(grammars.unpacked(bits_LW[start : start + rows]))
        given = (micro_batch.place_N[at_L], ~select(allowed_LV), micro_batch.target_N[at_L])
        moved = [tensor.to(device) for tensor in given]
        # Logits are recomputed for the backward pass, as in `Head`: else all would be kept.
        found.append(checkpoint(part, *moved, use_reentrant=False, preserve_rng_state=False))
    place_L = place_L.to(device)
    logprobs_N, entropy_N = (
        whole.index_copy(0, place_L, torch.cat(parts).to(whole.dtype))
        for whole, parts in zip(scores, zip(*found, strict=True), strict=True)
    )
    return logprobs_N, entropy_N
