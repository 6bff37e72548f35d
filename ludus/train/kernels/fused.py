"""A Llama-shaped decoder's layers as two operations each: attention, and the gated MLP.

transformers runs a layer as about forty operations; each one reads memory and is recorded by
autograd. Here norms, rotary positions, gates and attention are kernels (kernels.c), gradients are
explicit, and cheap values are recomputed in the backward pass. Matrix products are torch's.

The modules are unchanged; during a training pass, a fused call replaces a layer's `forward`.
`ludus.models.decoders.llama` detects supported models by their structure; others keep their layers.

Shape suffixes: T tokens, E hidden size, D head size, R rotary dimensions, I inner size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ludus.models.decoders.llama import NotLlama, read
from ludus.models.decoders.parts import Linear, Llama, LlamaLayer
from ludus.train.kernels.attention import active_plan
from ludus.train.kernels.bindings import Kernels, Scores, kernels
from ludus.train.kernels.tiles import Plan


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes and constants shared by a model's layers.

    Args:
        sizes: query heads, key heads, head size.
        offset: added to the norms' weights (Gemma: 1).
    """

    sizes: tuple[int, int, int]
    eps: float
    scores: Scores
    gelu: bool
    offset: float

    @property
    def widths(self) -> tuple[int, int, int]:
        heads, kv_heads, dim = self.sizes
        return heads * dim, kv_heads * dim, kv_heads * dim


class FusedLayers:
    """The fused calls of a model's layers.

    Errors: NotLlama for an unsupported model, or without kernels.
    """

    def __init__(self, model: Any) -> None:
        llama = read(model, 1)
        native = kernels(torch.float32)
        dim = llama.head_dim
        if native is None or dim > native.widest or llama.rotary_dim % 2:
            raise NotLlama("no kernels for it")
        if any(p.dtype != torch.float32 or p.device.type != "cpu" for p in model.parameters()):
            raise NotLlama("weights that are not float32 on the CPU")
        _require_plain(llama)
        offsets = {norm.offset for layer in llama.layers for norm in layer.norms()}
        if len(offsets) > 1:
            raise NotLlama("norms of several kinds")
        shape = Shape(
            (llama.heads, llama.kv_heads, dim),
            llama.eps,
            Scores(llama.attention_scale),
            llama.activation == "gelu_tanh",
            offsets.pop(),
        )
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        for layer in llama.layers:
            _weights(layer)
        self._calls = [
            (module, partial(_call, module, layer, shape))
            for module, layer in zip(base.model.layers, llama.layers, strict=True)
        ]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Run the layers fused where a row has tiles. Hooks on a layer run, hooks on its parts do
        not."""
        for module, call in self._calls:
            module.forward = call
        try:
            yield
        finally:
            for module, _ in self._calls:
                del module.forward


def _require_plain(llama: Llama) -> None:
    """Errors: NotLlama for a model whose layers have parts that the operations do not compute."""
    for layer in llama.layers:
        other = (
            (layer.attention_norm is None or layer.mlp_norm is None, "no norm before a branch"),
            (layer.experts is not None, "experts"),
            (layer.rotary is None, "layers without positions"),
        )
        for found, name in other:
            if found:
                raise NotLlama(name)
    if llama.post_norms or llama.whole_norms:
        raise NotLlama("other norms")
    if llama.residual_scale != 1 or llama.attention_softcap or llama.interleaved:
        raise NotLlama("other constants")


def _weights(layer: LlamaLayer) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Returns the parameters of attention and MLP, in the order of the operations' arguments.

    Errors: NotLlama for a layer with adapters.
    """
    linears = [layer.query, layer.key, layer.value, layer.output]
    mlp = [part for part in (layer.gate, layer.up, layer.down) if part is not None]
    if any(type(linear.module) is not nn.Linear for linear in (*linears, *mlp)):
        raise NotLlama("adapters")
    norms = (layer.attention_norm, layer.query_norm, layer.key_norm, layer.mlp_norm)
    *attention_norms, mlp_norm = (None if n is None else n.module.weight for n in norms)
    return (
        attention_norms
        + [_rows(linear, linear.module.weight) for linear in linears]
        + [_rows(linear, linear.module.bias) for linear in linears],
        [mlp_norm]
        + [_rows(linear, linear.module.weight) for linear in mlp]
        + [_rows(linear, linear.module.bias) for linear in mlp],
    )


def _rows(linear: Linear, parameter: Tensor | None) -> Tensor | None:
    """The layer's part of a joint module's parameter."""
    if parameter is None or linear.rows is None:
        return parameter
    return parameter[slice(*linear.rows)]


def _call(
    module: Any, layer: LlamaLayer, shape: Shape, hidden_states: Tensor, *args: Any, **options: Any
) -> Any:
    """A layer's call: [1, T, E] to [1, T, E]."""
    plan, dtype = active_plan(), torch.float32
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
    by, rotary = kernels(dtype), options.get("position_embeddings")
    if plan is None or by is None or rotary is None or hidden_states.dtype != torch.float32:
        return type(module).forward(module, hidden_states, *args, **options)
    plan = plan.of(module.self_attn)
    run = partial(_layer, rotary=rotary, plan=plan, shape=shape, by=by, parts=_weights(layer))
    if getattr(module, "gradient_checkpointing", False) and module.training:
        return module._gradient_checkpointing_func(run, hidden_states)
    return run(hidden_states)


def _layer(
    hidden_states: Tensor,
    *,
    rotary: tuple[Tensor, Tensor],
    plan: Plan,
    shape: Shape,
    by: Kernels,
    parts: tuple[list[Tensor | None], list[Tensor | None]],
) -> Tensor:
    cosine_TR, sine_TR = (x[0].float().contiguous() for x in rotary)
    x_TE: Tensor = hidden_states[0].contiguous()
    attention, mlp = parts
    with torch.autocast("cpu", enabled=False):
        x_TE = _Attention.apply(x_TE, cosine_TR, sine_TR, shape, plan, by, *attention)  # type: ignore[no-untyped-call]
        x_TE = _Mlp.apply(x_TE, shape, plan, by, *mlp)  # type: ignore[no-untyped-call]
    return x_TE[None]


class _Attention(torch.autograd.Function):
    """x + output(attention(rotated(qkv(norm(x)))))"""

    @staticmethod
    def forward(
        ctx: Any,
        x_TE: Tensor,
        cosine_TR: Tensor,
        sine_TR: Tensor,
        shape: Shape,
        plan: Plan,
        by: Kernels,
        norm_E: Tensor,
        query_norm_D: Tensor | None,
        key_norm_D: Tensor | None,
        *linears: Tensor | None,
    ) -> Tensor:
        matrices, biases = _halves(linears, by.dtype)
        norms = _shifted(query_norm_D, shape.offset), _shifted(key_norm_D, shape.offset)
        scale_E = norm_E + shape.offset
        h_TE, factor_T = by.norm(x_TE, scale_E, shape.eps)
        qkv = _project(h_TE, matrices[:3], biases[:3])
        rotated, factors = by.rotate(qkv, shape.sizes, norms, shape.eps, cosine_TR, sine_TR)
        out_THD, total_TH = by.attention(*_heads(rotated, qkv, shape), plan, shape.scores)
        ctx.save_for_backward(
            x_TE, cosine_TR, sine_TR, scale_E, h_TE, factor_T, qkv, rotated, factors, out_THD,
            total_TH, *norms, *matrices,
        )  # fmt: skip
        ctx.rest = shape, plan, by
        return _residual(x_TE, out_THD.flatten(1), matrices[3], biases[3])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Any, ...]:
        (x_TE, cosine_TR, sine_TR, scale_E, h_TE, factor_T, qkv, rotated, factors, out_THD,
         total_TH, query_norm_D, key_norm_D, *matrices) = ctx.saved_tensors  # fmt: skip
        norms = query_norm_D, key_norm_D
        shape, plan, by = ctx.rest
        needs = ctx.needs_input_grad[9:]
        grad_TE = grad_TE.contiguous()
        back, length = plan.back, len(grad_TE)
        queries, keys, values = _heads(rotated, qkv, shape)
        if back is not None:
            grad_TE = back.take_grad(grad_TE)
            queries, x_TE, cosine_TR, sine_TR, h_TE, factor_T, out_THD, total_TH = back.take(
                queries, x_TE, cosine_TR, sine_TR, h_TE, factor_T, out_THD, total_TH
            )
            qkv, factors = back.take(qkv, factors)
            plan = back.plan
        d_TE = grad_TE.to(by.dtype)
        dout_THD = (d_TE @ matrices[3]).view_as(out_THD)
        into = factors.new_zeros(qkv.shape)
        dqueries, dkeys, dvalues = _heads(into, into, shape)
        of_all = (dkeys, dvalues) if back is None else (_zeros(keys), _zeros(values))
        by.attention_back(
            (queries, keys, values), plan, shape.scores, out_THD, total_TH, dout_THD,
            (dqueries, *of_all),
        )  # fmt: skip
        if back is not None:
            dkeys[:], dvalues[:] = map(back.take_grad, of_all)
        dqkv, dnorms = by.rotate_back(qkv, shape.sizes, norms, cosine_TR, sine_TR, factors, into)
        joint = _linear_grads(dqkv, h_TE, shape.widths, needs[:3], needs[4:7])
        last = _linear_grads(d_TE, out_THD.flatten(1), grad_TE.shape[1:], needs[3:4], needs[7:])
        dweights, dbiases = joint[0] + last[0], joint[1] + last[1]
        dh_TE = _into(dqkv.split(shape.widths, 1), matrices[:3])
        dx_TE, dnorm_E = by.norm_back(x_TE, scale_E, factor_T, dh_TE, grad_TE)
        if back is not None:
            dx_TE = back.spread(dx_TE, length)
        dheads = [d if norm is not None else None for d, norm in zip(dnorms, norms, strict=True)]
        return dx_TE, *[None] * 5, dnorm_E, *dheads, *dweights, *dbiases


class _Mlp(torch.autograd.Function):
    """x + down(act(gate(norm(x))) * up(norm(x)))"""

    @staticmethod
    def forward(
        ctx: Any,
        x_TE: Tensor,
        shape: Shape,
        plan: Plan,
        by: Kernels,
        norm_E: Tensor,
        *linears: Tensor | None,
    ) -> Tensor:
        matrices, biases = _halves(linears, by.dtype)
        scale_E = norm_E + shape.offset
        h_TE, factor_T = by.norm(x_TE, scale_E, shape.eps)
        gate_up = _project(h_TE, matrices[:2], biases[:2])
        ctx.save_for_backward(x_TE, scale_E, h_TE, factor_T, gate_up, *matrices)
        ctx.rest = shape, plan.back, by
        return _residual(x_TE, by.gate(gate_up, shape.gelu), matrices[2], biases[2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Any, ...]:
        x_TE, scale_E, h_TE, factor_T, gate_up, *matrices = ctx.saved_tensors
        shape, back, by = ctx.rest
        needs = ctx.needs_input_grad[5:]
        grad_TE, length = grad_TE.contiguous(), len(grad_TE)
        if back is not None:
            grad_TE = back.take_grad(grad_TE)
            x_TE, h_TE, factor_T, gate_up = back.take(x_TE, h_TE, factor_T, gate_up)
        d_TE = grad_TE.to(by.dtype)
        inner_TI = by.gate(gate_up, shape.gelu)
        dgate_up = by.gate_back(gate_up, d_TE @ matrices[2], shape.gelu)
        joint = _linear_grads(dgate_up, h_TE, [inner_TI.shape[1]] * 2, needs[:2], needs[3:5])
        last = _linear_grads(d_TE, inner_TI, grad_TE.shape[1:], needs[2:3], needs[5:])
        dweights, dbiases = joint[0] + last[0], joint[1] + last[1]
        dh_TE = _into(dgate_up.chunk(2, 1), matrices[:2])
        dx_TE, dnorm_E = by.norm_back(x_TE, scale_E, factor_T, dh_TE, grad_TE)
        if back is not None:
            dx_TE = back.spread(dx_TE, length)
        return dx_TE, None, None, None, dnorm_E, *dweights, *dbiases


def _halves(
    linears: Sequence[Tensor | None], dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Returns matrices and biases in the type of the products."""
    cast = [None if x is None else x.to(dtype) for x in linears]
    middle = len(cast) // 2
    return [x for x in cast[:middle] if x is not None], cast[middle:]


def _shifted(weight: Tensor | None, offset: float) -> Tensor | None:
    return None if weight is None else weight + offset


def _heads(queries_keys: Tensor, qkv: Tensor, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """Returns views of queries [T, H, D], keys and values [T, K, D]; values are last in qkv."""
    queries, keys, values = shape.widths
    first = queries_keys[:, : queries + keys]
    last = qkv[:, -values:]
    heads, kv_heads, dim = shape.sizes
    first, last = first.view(len(qkv), heads + kv_heads, dim), last.view(len(qkv), kv_heads, dim)
    return first[:, :heads], first[:, heads:], last


def _zeros(x_TKD: Tensor) -> Tensor:
    """Returns the float32 zeros to which gradients of keys or values are added."""
    return torch.zeros(x_TKD.shape, dtype=torch.float32)


def _project(x: Tensor, matrices: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor:
    """Returns the outputs of several linear layers of one input, concatenated."""
    offsets = [0]
    for matrix in matrices:
        offsets.append(offsets[-1] + len(matrix))
    out = x.new_empty(len(x), offsets[-1])
    for (start, stop), matrix, bias in zip(pairwise(offsets), matrices, biases, strict=True):
        if bias is None:
            torch.mm(x, matrix.T, out=out[:, start:stop])
        else:
            torch.addmm(bias, x, matrix.T, out=out[:, start:stop])
    return out


def _residual(x_TE: Tensor, inner: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """Returns x + a linear layer of the inner state, in float32."""
    if matrix.dtype == x_TE.dtype and bias is None:
        return torch.addmm(x_TE, inner, matrix.T)
    return x_TE + nn.functional.linear(inner, matrix, bias)


def _into(grads: Sequence[Tensor], matrices: Sequence[Tensor]) -> Tensor:
    """Returns the gradient of the input shared by several linear layers."""
    total = grads[0] @ matrices[0]
    for grad, matrix in zip(grads[1:], matrices[1:], strict=True):
        total.addmm_(grad, matrix)
    return total


def _linear_grads(
    grad: Tensor, x: Tensor, widths: Sequence[int], weights: Sequence[bool], biases: Sequence[bool]
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Returns the required float32 gradients of weights and biases of concatenated linear layers
    with these output widths."""
    none = [None] * len(widths)
    dweights = (grad.T @ x).float().split_with_sizes(list(widths)) if any(weights) else none
    dbiases = grad.float().sum(0).split_with_sizes(list(widths)) if any(biases) else none
    return (
        [d if need else None for d, need in zip(dweights, weights, strict=True)],
        [d if need else None for d, need in zip(dbiases, biases, strict=True)],
    )
