"""Attention over a packed row of token trees, by tiles (`ludus.train.kernels.tiles`).

A shared prefix is computed once, packed samples cost the same as separate ones, and there is no
T x T mask. Beyond a constant, scores are recomputed in the backward pass, as in FlashAttention (Dao
et al. 2022, arXiv:2205.14135), so memory does not grow with T x T.

Shape suffixes: T positions, H query heads, K key heads, G = H / K, D head size, Q queries of a
tile, S keys of a tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface

from ludus.train.kernels.bindings import Kernels, Scores, kernels
from ludus.train.kernels.tiles import Plan, Tile

NAME = "ludus_tiles"


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_KTGD: Tensor, k_KTD: Tensor, v_KTD: Tensor, plan: Plan, cap: float
    ) -> Tensor:
        out_KTGD = torch.empty_like(q_KTGD)
        keeps = not cap and any(ctx.needs_input_grad) and plan.keeps(q_KTGD)
        kept: list[Tensor] = []
        for tile in plan.tiles:
            queries = slice(tile.start, tile.stop)
            q = q_KTGD[:, queries].flatten(1, 2)
            weights, _ = _weights(q, tile.gather(k_KTD), tile, cap)
            out_KTGD[:, queries] = torch.bmm(weights, tile.gather(v_KTD)).view_as(
                q_KTGD[:, queries]
            )
            if keeps:
                kept.append(weights)
        ctx.save_for_backward(q_KTGD, k_KTD, v_KTD, out_KTGD, *kept)
        ctx.rest = plan.tiles, cap
        return out_KTGD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_KTGD: Tensor) -> tuple[Any, ...]:
        q_KTGD, k_KTD, v_KTD, out_KTGD, *kept = ctx.saved_tensors
        grad_KTGD = grad_KTGD.contiguous()
        delta_KTG = (grad_KTGD * out_KTGD).sum(-1)
        dq_KTGD = torch.empty_like(q_KTGD)
        dk_KTD = torch.zeros_like(k_KTD, dtype=torch.float32)
        dv_KTD = torch.zeros_like(dk_KTD)
        all_tiles, cap = ctx.rest
        for number, tile in enumerate(all_tiles):
            queries = slice(tile.start, tile.stop)
            q, grad = q_KTGD[:, queries].flatten(1, 2), grad_KTGD[:, queries].flatten(1, 2)
            keys = tile.gather(k_KTD)
            weights, slope = (kept[number], None) if kept else _weights(q, keys, tile, cap)
            tile.scatter(torch.bmm(weights.mT, grad), dv_KTD)
            inner = torch.bmm(grad, tile.gather(v_KTD).mT)
            inner = inner.sub_(delta_KTG[:, queries].flatten(1)[..., None]).mul_(weights)
            if slope is not None:
                inner.mul_(slope)
            dq_KTGD[:, queries] = torch.bmm(inner, keys).view_as(q_KTGD[:, queries])
            tile.scatter(torch.bmm(inner.mT, q), dk_KTD)
        return dq_KTGD, dk_KTD.to(k_KTD.dtype), dv_KTD.to(v_KTD.dtype), None, None


class _Native(torch.autograd.Function):
    """Tiled attention by kernels.c: queries [T, H, D], keys and values [T, K, D], any strides."""

    @staticmethod
    def forward(
        ctx: Any,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        plan: Plan,
        scores: Scores,
        by: Kernels,
    ) -> Tensor:
        q_THD, k_TKD, v_TKD = (
            x if x.stride(-1) == 1 else x.contiguous() for x in (q_THD, k_TKD, v_TKD)
        )
        out_THD, total_TH = by.attention(q_THD, k_TKD, v_TKD, plan, scores)
        ctx.save_for_backward(q_THD, k_TKD, v_TKD, out_THD, total_TH)
        ctx.rest = plan, scores, by
        return out_THD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Any, ...]:
        *qkv, out_THD, total_TH = ctx.saved_tensors
        plan, scores, by = ctx.rest
        into = [torch.zeros(x.shape, dtype=torch.float32) for x in qkv]
        by.attention_back(qkv, plan, scores, out_THD, total_TH, grad_THD.contiguous(), into)
        return *(x.to(by.dtype) for x in into), None, None, None


def _weights(q: Tensor, keys: Tensor, tile: Tile, cap: float) -> tuple[Tensor, Tensor | None]:
    """Returns the softmax of the tile's scores [K, Q * G, S], and with a soft cap its slope."""
    scores, slope = torch.bmm(q, keys.mT), None
    if cap:
        capped = torch.tanh(scores.float() / cap)
        slope = (1 - capped.square()).to(q.dtype)
        scores = capped * cap
    num_queries = tile.stop - tile.start
    shape = scores.shape[0], num_queries, -1, scores.shape[2]
    scores.view(shape)[..., tile.num_full :].masked_fill_(tile.hidden_QS[None, :, None], -torch.inf)
    return scores.softmax(-1, dtype=torch.float32).to(q.dtype), slope


_active: list[Plan] = []
"""The plan of the current pass. Not a context variable: autograd may recompute a checkpointed layer
on another thread."""


def active_plan() -> Plan | None:
    """Returns the plan of the current pass, or None."""
    return _active[-1] if _active else None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def tiled_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """An attention function of transformers: [1, H, T, D] to [1, T, H, D].

    Errors: TypeError for unsupported options: dropout, sinks, biases, and windows where the plan
    does not know them.
    """
    extras = ("s_aux", "position_bias", "dropout")
    if any(isinstance(x, Tensor) or x for x in map(options.get, extras)):
        raise TypeError("tiled attention supports no dropout, sinks or biases")
    plan = _active[-1].of(module, options.get("sliding_window"), query.shape[2])
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    cap = float(options.get("softcap") or 0)
    dtype, device = value.dtype, query.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    native = kernels(dtype)
    if native is not None:
        q_THD, k_TKD, v_TKD = (x[0].to(dtype).transpose(0, 1) for x in (query, key, value))
        out_THD = _Native.apply(q_THD, k_TKD, v_TKD, plan, Scores(scale, cap), native)  # type: ignore[no-untyped-call]
        return out_THD[None], None
    q_KTGD = (query[0] * scale).unflatten(0, (key.shape[1], -1)).transpose(1, 2).to(dtype)
    with torch.autocast(device, enabled=False):
        out_KTGD = _Tiled.apply(  # type: ignore[no-untyped-call]
            q_KTGD.contiguous(),
            key[0].to(dtype).contiguous(),
            value[0].to(dtype).contiguous(),
            plan,
            cap,
        )
    return out_KTGD.transpose(0, 1).flatten(1, 2)[None], None


AttentionInterface.register(NAME, tiled_attention)


@contextmanager
def attending(model: Any, plan: Plan) -> Iterator[None]:
    """Use tiled attention in the model's layers, for single-row passes and their backward.

    The setting is restored afterwards, because the in-process sampler uses the same modules.
    """
    config = model.config.get_text_config()
    before = config._attn_implementation
    config._attn_implementation = NAME
    _active.append(plan)
    try:
        yield
    finally:
        _active.pop()
        config._attn_implementation = before
