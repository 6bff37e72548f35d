"""Log-probabilities and entropies of loss tokens, by chunks of logits.

A forward pass has two parts: the hidden states at the positions that predict a loss token, and the
output layer. The second part never holds the logits of a whole batch:

    forward     logits of a chunk -> logsumexp, the targets' logits, entropy
    backward    the same logits, kept or recomputed -> gradients of hidden states and weights

Shape suffixes: N loss tokens, P the positions that predict them (one position may predict
several, where trajectories share a prefix), C positions of a chunk, E hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ludus.models.vocabulary import Vocabulary
from ludus.train.kernels.bindings import Kernels, kernels

CHUNK = 1 << 20
"""Logits of a chunk on a CPU: 4 MB in float32, about the size of a core's cache."""
WIDE_CHUNK = 1 << 26
"""Logits of a chunk on a GPU: 256 MB; products of few rows leave a GPU idle (151,936 tokens: 441
rows instead of 6)."""
KEEP = 1 << 24
"""Logits kept for the backward pass (64 MB); further logits are recomputed. A constant, so memory
does not grow with vocabulary times length."""
TINY = torch.finfo(torch.float32).tiny
TOLERANCE = 1e-4
"""Relative to the largest logit; rounding errors in float32 are about 1e-6."""


@dataclass(frozen=True, slots=True)
class Head:
    """Logits from hidden states: cap * tanh(scale * (W h + b) / cap).

    Args:
        linear: W [V, E] and b [V].
        scale: Cohere's `logit_scale`, the inverse of Granite's `logits_scaling`.
        cap: Gemma 2's `final_logit_softcapping`; None: no cap.
    """

    linear: nn.Linear
    scale: float = 1.0
    cap: float | None = None

    def logits(self, hidden_PE: Tensor) -> Tensor:
        """Returns all logits [P, V]."""
        linear = nn.functional.linear(hidden_PE, self.linear.weight, self.linear.bias)
        logits_PV = linear * self.scale
        return logits_PV if self.cap is None else torch.tanh(logits_PV / self.cap) * self.cap

    def score(
        self,
        hidden_PE: Tensor,
        place_N: Tensor,
        target_N: Tensor,
        temperature: float = 1.0,
        vocabulary: Vocabulary | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns log-probabilities of the targets and entropies, both float32 [N].

        Args:
            hidden_PE: the last hidden states, after the final norm.
            place_N: index of the state that predicts each token.
            target_N: the token ids.
            temperature: divides the logits.
            vocabulary: the ids that can be sampled; None: all.
        """
        weight: Tensor = self.linear.weight
        bias: Tensor | None = self.linear.bias
        if vocabulary is not None:
            weight = vocabulary.select(weight, 0)
            bias = None if bias is None else vocabulary.select(bias)
            target_N = vocabulary.places(target_N)
        device = hidden_PE.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            hidden_PE, weight = hidden_PE.to(dtype), weight.to(dtype)
        logprobs_N, entropy_N = _Scores.apply(  # type: ignore[no-untyped-call]
            hidden_PE, weight, bias, place_N, target_N, self.scale, self.cap, temperature
        )
        return logprobs_N, entropy_N


def backbone(model: Any) -> Any:
    """Returns the model without its output layer, with adapters."""
    plain = model.get_base_model() if hasattr(model, "get_base_model") else model
    return getattr(plain, plain.base_model_prefix, None)


def find_head(model: Any) -> Head | None:
    """Returns the model's head if `Head` reproduces its logits on a few tokens.

    None for other heads and heads with adapters: the caller then uses the model's own logits.
    """
    linear, body = model.get_output_embeddings(), backbone(model)
    if type(linear) is not nn.Linear or body is None:
        return None
    config = model.config.get_text_config()
    divisor = getattr(config, "logits_scaling", None) or 1.0
    head = Head(
        linear,
        scale=float(getattr(config, "logit_scale", None) or 1.0) / float(divisor),
        cap=getattr(config, "final_logit_softcapping", None),
    )
    return head if _agrees(model, body, head) else None


@torch.no_grad()
def _agrees(model: Any, body: Any, head: Head) -> bool:
    """True if the head reproduces the model's logits on a trial."""
    vocab_size, device = head.linear.weight.shape[0], head.linear.weight.device
    ids = torch.tensor([[(7 * i + 3) % vocab_size for i in range(5)]], device=device)
    training = model.training
    model.eval()
    try:
        expected = model(input_ids=ids, use_cache=False).logits.float()
        found = head.logits(body(input_ids=ids, use_cache=False).last_hidden_state).float()
    except (TypeError, ValueError, AttributeError, RuntimeError):
        return False
    finally:
        model.train(training)
    if expected.shape != found.shape:
        return False
    largest = expected.abs().max()
    bound = TOLERANCE if head.linear.weight.dtype.itemsize >= 4 else 0.02
    return bool((expected - found).abs().max() <= bound * largest)


def score_logits(
    logits_PV: Tensor,
    place_N: Tensor,
    target_N: Tensor,
    temperature: float = 1.0,
    vocabulary: Vocabulary | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the result of `Head.score` from given logits, for other heads."""
    if vocabulary is not None:
        logits_PV, target_N = vocabulary.select(logits_PV), vocabulary.places(target_N)
    logprobs_PV = (logits_PV.float() / temperature).log_softmax(-1)
    entropy_P = -torch.linalg.vecdot(logprobs_PV.exp(), logprobs_PV)
    return logprobs_PV[place_N, target_N], entropy_P[place_N]


def chunk_rows(vocab_size: int, device: torch.device) -> int:
    """Returns the number of positions per chunk."""
    return max((CHUNK if device.type == "cpu" else WIDE_CHUNK) // vocab_size, 1)


class _Scores(torch.autograd.Function):
    """Log-probability and entropy, with z the logits, p = softmax(z) and H = -sum p log p:

    d log p_t / dz = onehot(t) - p
    dH / dz        = -p (log p + H)
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_PE: Tensor,
        weight_VE: Tensor,
        bias_V: Tensor | None,
        place_N: Tensor,
        target_N: Tensor,
        scale: float,
        cap: float | None,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        num, vocab_size = hidden_PE.shape[0], weight_VE.shape[0]
        order_N = place_N.argsort(stable=True)
        places_N, targets_N = place_N[order_N], target_N[order_N]
        step = chunk_rows(vocab_size, hidden_PE.device)
        starts = range(0, num, step)
        ends = torch.tensor([start + step for start in starts], device=places_N.device)
        bounds = [0, *torch.searchsorted(places_N, ends).tolist()]
        picked_N = hidden_PE.new_empty(len(target_N), dtype=torch.float32)
        total_P = hidden_PE.new_empty(num, dtype=torch.float32)
        entropy_P = torch.empty_like(total_P)
        kept: list[Tensor] = []
        needs_gradient = any(ctx.needs_input_grad)
        by = _kernels(weight_VE, cap)
        for number, start in enumerate(starts):
            chunk = slice(start, start + step)
            mine = slice(bounds[number], bounds[number + 1])
            at = places_N[mine] - start, targets_N[mine]
            if by is not None:
                keep = _linear(hidden_PE[chunk], weight_VE, bias_V)
                total_P[chunk], entropy_P[chunk] = by.scores(keep, scale / temperature)
                picked_N[mine] = keep[at].float().mul_(scale / temperature)
            else:
                z_CV = _logits(hidden_PE[chunk], weight_VE, bias_V, scale, cap, temperature)
                keep = z_CV.softmax(-1)
                # The likeliest token's probability gives the sum without another pass of exp.
                top_C, top_at_C = z_CV.max(-1, keepdim=True)
                total_P[chunk] = (top_C - keep.gather(-1, top_at_C).log_()).squeeze(-1)
                entropy_P[chunk] = total_P[chunk] - torch.linalg.vecdot(keep, z_CV)
                picked_N[mine] = z_CV[at]
            if (number + 1) * step * vocab_size <= KEEP and cap is None and needs_gradient:
                kept.append(keep)
        ctx.save_for_backward(
            hidden_PE, weight_VE, bias_V, order_N, places_N, targets_N, entropy_P, total_P, *kept
        )
        ctx.layout = step, bounds, scale, cap, temperature, by
        logprobs_N = torch.empty_like(picked_N)
        logprobs_N[order_N] = picked_N - total_P[places_N]
        return logprobs_N, entropy_P[place_N]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs_N: Tensor, grad_entropy_N: Tensor) -> tuple[Any, ...]:
        hidden_PE, weight_VE, bias_V, order_N, places_N, targets_N, *rest = ctx.saved_tensors
        entropy_P, total_P, *kept = rest
        step, bounds, scale, cap, temperature, by = ctx.layout
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grads_N = grad_logprobs_N[order_N]
        sum_P = torch.zeros_like(entropy_P).index_add_(0, places_N, grads_N)
        heat_P = torch.zeros_like(entropy_P).index_add_(0, places_N, grad_entropy_N[order_N])
        grad_hidden_PE = torch.empty_like(hidden_PE) if needs_hidden else None
        grad_weight_VE = torch.zeros_like(weight_VE, dtype=torch.float32) if needs_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=torch.float32) if needs_bias else None
        for number, start in enumerate(range(0, hidden_PE.shape[0], step)):
            chunk = slice(start, start + step)
            mine = slice(bounds[number], bounds[number + 1])
            at = places_N[mine] - start, targets_N[mine]
            has, slope = number < len(kept), 1.0
            parts = entropy_P[chunk], sum_P[chunk], heat_P[chunk]
            if by is not None:
                z_CV = kept[number] if has else _linear(hidden_PE[chunk], weight_VE, bias_V)
                grad_CV = by.scores_back(z_CV, scale / temperature, total_P[chunk], *parts)
            elif has:
                grad_CV = _softmax_back(kept[number], *parts)
            else:
                z_CV = _logits(hidden_PE[chunk], weight_VE, bias_V, scale, cap, temperature)
                grad_CV = _softmax_back(z_CV.softmax(-1), *parts)
                slope = 1.0 if cap is None else 1 - (z_CV * (temperature / cap)).square_()
            # The targets' own share: one token each.
            grad_CV.index_put_(at, grads_N[mine], accumulate=True)
            if cap is not None:
                grad_CV.mul_(slope)
            grad_CV = _scaled(grad_CV, scale / temperature).to(weight_VE.dtype)
            if grad_hidden_PE is not None:
                grad_hidden_PE[chunk] = grad_CV @ weight_VE
            if grad_weight_VE is not None:
                if grad_CV.dtype == torch.float32:
                    grad_weight_VE.addmm_(grad_CV.T, hidden_PE[chunk])
                else:
                    grad_weight_VE += grad_CV.T @ hidden_PE[chunk]
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.sum(0)
        weight = None if grad_weight_VE is None else grad_weight_VE.to(weight_VE.dtype)
        bias = None if grad_bias_V is None else grad_bias_V.to(bias_V.dtype)
        return grad_hidden_PE, weight, bias, None, None, None, None, None


def _kernels(weight_VE: Tensor, cap: float | None) -> Kernels | None:
    """Returns the kernels that compute the softmax in one pass, or None."""
    return kernels(weight_VE.dtype) if weight_VE.device.type == "cpu" and cap is None else None


def _softmax_back(p_CV: Tensor, entropy_C: Tensor, share_C: Tensor, heat_C: Tensor) -> Tensor:
    """Returns -p (share + heat (log p + H)) [C, V]."""
    factor = share_C[:, None]
    if not heat_C.any():
        return p_CV * -factor
    logp_CV = p_CV.clamp_min(TINY).log_().add_(entropy_C[:, None])
    return (p_CV * logp_CV.mul_(heat_C[:, None]).add_(factor)).neg_()


def _linear(hidden_CE: Tensor, weight_VE: Tensor, bias_V: Tensor | None) -> Tensor:
    bias = None if bias_V is None else bias_V.to(weight_VE.dtype)
    return nn.functional.linear(hidden_CE, weight_VE, bias)


def _logits(
    hidden_CE: Tensor,
    weight_VE: Tensor,
    bias_V: Tensor | None,
    scale: float,
    cap: float | None,
    temperature: float,
) -> Tensor:
    """Returns a chunk's logits in float32, divided by the temperature."""
    z_CV = _linear(hidden_CE, weight_VE, bias_V).float()
    if cap is None:
        return _scaled(z_CV, scale / temperature)
    return z_CV.mul_(scale / cap).tanh_().mul_(cap / temperature)


def _scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else x.mul_(factor)
