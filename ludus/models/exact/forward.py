"""Batch-invariant forward pass: a token's results depend on its own context only.

    with exact():
        logits = model(...).logits

Inside the block, operations whose rounding depends on order or layout are computed by `arithmetic`:
matrix products, norms, softmax, attention, elementary functions. A token then has the same bits
when sampled alone from a cache and when trained in a packed batch, with any number of threads.
Other operations move values or round each value correctly. Gradients work as usual.

Works for any model that uses `scaled_dot_product_attention`, in float32.

Shape suffixes: B rows, H query heads, K key-value heads, L queries, T keys, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ludus.models.exact import arithmetic

aten = torch.ops.aten

MAX_SCORES = 2**21  # attention scores held at the same time


@contextmanager
def exact() -> Iterator[None]:
    """Compute batch-invariantly inside the block, in this thread."""
    with _Operations(), _Attention():  # type: ignore[no-untyped-call]
        yield


def log_softmax(logits_NV: Tensor, temperatures: Sequence[float]) -> Tensor:
    """Returns float64 log-probabilities [N, V] of each row at its temperature (0 counts as 1).

    Sampler and learner share this function. A single temperature applies to all rows.
    """
    divisor = torch.tensor([t or 1.0 for t in temperatures], dtype=torch.float64)
    with exact():
        return (logits_NV.double() / divisor.to(logits_NV.device)[:, None]).log_softmax(-1)


class _Attention(TorchFunctionMode):
    """Replaces fused attention kernels, whose sums depend on their key blocks."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is scaled_dot_product_attention:
            return attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention` whose masked keys do not affect a query's bits.

    query [B, H, L, D], key and value [B, K, T, D] -> [B, H, L, D]. Dropout is not applied.
    """
    if enable_gqa or key.shape[1] != query.shape[1]:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    length, size = query.shape[2], key.shape[2]
    if is_causal:
        attn_mask = torch.ones(length, size, dtype=torch.bool, device=query.device).tril()
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    rows = max(MAX_SCORES // max(query.shape[1] * length * size, 1), 1)
    results = []
    for start in range(0, query.shape[0], rows):
        part = slice(start, start + rows)
        scores = (query[part] @ key[part].transpose(-1, -2)) * scale
        if attn_mask is not None:
            mask = attn_mask[part] if attn_mask.ndim == 4 and attn_mask.shape[0] > 1 else attn_mask
            if mask.dtype == torch.bool:
                scores = scores.masked_fill(~mask, -torch.inf)
            else:
                scores = scores + mask
        weights = scores.softmax(-1)
        results.append(_WeightedSum.apply(weights, value[part]))  # type: ignore[no-untyped-call]
    return torch.cat(results)


class _WeightedSum(torch.autograd.Function):
    """weights [..., L, T] @ values [..., T, D]; values of weight 0 do not affect the result."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, values: Tensor) -> Tensor:
        ctx.save_for_backward(weights, values)
        return arithmetic.weighted_sum(weights, values).to(values.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        weights, values = ctx.saved_tensors
        (gradient,) = gradients
        return gradient @ values.transpose(-1, -2), weights.transpose(-1, -2) @ gradient


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces operations below autograd, so gradients are unaffected."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        replacement = REPLACEMENTS.get(func) or BY_NAME.get(func.name())
        if replacement is not None:
            result = replacement(*args, **kwargs)
            if result is not NotImplemented:
                return result
        elif func._can_decompose() and not torch.is_grad_enabled():
            # Without autograd, composite operations arrive undecomposed.
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return func(*args, **kwargs)


def _like(x: Tensor, result: Tensor) -> Tensor:
    return result.to(x.dtype)


def _mm(a: Tensor, b: Tensor) -> Tensor:
    return _like(a, arithmetic.matmul(a, b))


def _addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    if beta != 1 or alpha != 1:
        return NotImplemented
    return _like(a, arithmetic.matmul(a, b) + bias.double())


def _grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Any = None, out_dtype: Any = None
) -> Any:
    """Products of a mixture of experts: rows [N, E] sorted by expert, weights [experts, E, F]; rows
    of expert i end before `offs[i]`. torch's kernel sums in an order that depends on the rows."""
    if a.ndim != 2 or b.ndim != 3 or offs is None or bias is not None:
        return NotImplemented
    result = a.new_zeros(a.shape[0], b.shape[2], dtype=out_dtype or a.dtype)
    start = 0
    for expert, stop in enumerate(offs.tolist()):
        result[start:stop] = arithmetic.matmul(a[start:stop], b[expert])
        start = stop
    return result


def _mean(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    return _reduce(x, dim, keepdim, dtype, lambda total, size: total / size)


def _sum(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    return _reduce(x, dim, keepdim, dtype, lambda total, size: total)


def _reduce(
    x: Tensor, dim: Any, keepdim: bool, dtype: Any, finish: Callable[[Tensor, int], Tensor]
) -> Any:
    if not dim or len(dim) != 1 or not x.is_floating_point():
        return NotImplemented
    result = finish(arithmetic.total(x, dim[0]), x.shape[dim[0]]).to(dtype or x.dtype)
    return result if keepdim else result.squeeze(dim[0])


def _shift_and_exp(x: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns x minus its maximum, the exponentials, and their sum."""
    shifted = x.double() - x.double().amax(dim, keepdim=True)
    terms = arithmetic.exp(shifted)
    return shifted, terms, arithmetic.total(terms, dim)


def _softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    _, terms, total = _shift_and_exp(x, dim)
    return _like(x, terms / total)


def _log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    shifted, _, total = _shift_and_exp(x, dim)
    return _like(x, shifted - arithmetic.log(total))


def _layer_norm(
    x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Any:
    if len(shape) != 1:
        return NotImplemented
    size = shape[0]
    mean = arithmetic.total(x, -1) / size
    centred = x.double() - mean
    scale = 1 / (arithmetic.total(centred * centred, -1) / size + eps).sqrt()
    result = centred * scale
    if weight is not None:
        result = result * weight.double()
    if bias is not None:
        result = result + bias.double()
    return _like(x, result), _like(x, mean), _like(x, scale)


def _gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    value = x.double()
    if approximate == "tanh":
        inner = (value + value * value * value * 0.044715) * math.sqrt(2 / math.pi)
        return _like(x, value * 0.5 * (1 + arithmetic.tanh(inner)))
    return _like(x, value * 0.5 * (1 + arithmetic.erf(value * math.sqrt(0.5))))


def _pow(x: Tensor, exponent: float) -> Any:
    """Integer powers 2 to 4; torch computes the others."""
    if exponent not in (2, 3, 4):
        return NotImplemented
    result = x
    for _ in range(int(exponent) - 1):
        result = result * x
    return result


REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    aten.mm.default: _mm,
    aten.bmm.default: _mm,
    aten.addmm.default: _addmm,
    aten._grouped_mm.default: _grouped_mm,
    aten.mean.dim: _mean,
    aten.sum.dim_IntList: _sum,
    aten._softmax.default: _softmax,
    aten._log_softmax.default: _log_softmax,
    aten.native_layer_norm.default: _layer_norm,
    aten.pow.Tensor_Scalar: _pow,
    aten.rsqrt.default: lambda x: 1 / x.sqrt(),
    aten.gelu.default: _gelu,
    aten.exp.default: lambda x: _like(x, arithmetic.exp(x)),
    aten.log.default: lambda x: _like(x, arithmetic.log(x)),
    aten.sin.default: lambda x: _like(x, arithmetic.sincos(x)[0]),
    aten.cos.default: lambda x: _like(x, arithmetic.sincos(x)[1]),
    aten.tanh.default: lambda x: _like(x, arithmetic.tanh(x)),
    aten.sigmoid.default: lambda x: _like(x, arithmetic.sigmoid(x)),
    aten.silu.default: lambda x: _like(x, x.double() * arithmetic.sigmoid(x)),
    aten.erf.default: lambda x: _like(x, arithmetic.erf(x)),
}
BY_NAME = {"transformers::grouped_mm_fallback": _grouped_mm}
"""Replacements of operations that other libraries register, where torch has no kernel."""
