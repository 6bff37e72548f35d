"""Python bindings of kernels.c: the operations of a training pass besides matrix products.

Without a C compiler, or with LUDUS_NATIVE=0, torch's operations replace the kernels.
Shape suffixes as in kernels.c, and N for T tokens times heads.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ludus.models.decoders.native import Unavailable, library
from ludus.train.kernels.tiles import Plan

SOURCE = Path(__file__).with_name("kernels.c")
_NUMBERS = (
    *("num_tiles", "K", "G", "D", "q_head", "q_token", "k_head", "k_token", "v_head", "v_token"),
    *("o_token", "dq_token", "dk_token", "dv_token", "tokens", "scratch"),
)
_POINTERS = (
    *("tiles", "spans", "q", "k", "v", "keys", "values", "o", "total", "grad", "dq", "dk", "dv"),
    "work",
)


class _Attention(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_int64) for name in _NUMBERS],
        *[(name, ctypes.c_void_p) for name in _POINTERS],
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    ]


class Scores(NamedTuple):
    """Attention scores: cap * tanh(scale * q k / cap); cap 0: scale * q k."""

    scale: float
    cap: float = 0.0


class Kernels:
    """The library's functions on tensors, with activations in one type.

    Errors: `ludus.models.decoders.native.Unavailable`.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._lib = library(dtype == torch.bfloat16, SOURCE)
        self._lib.ludus_attention_scratch.restype = ctypes.c_long
        self.blocks = int(self._lib.ludus_blocks())
        self.widest = int(self._lib.ludus_widest())

    def _call(self, name: str, *args: Tensor | float | None) -> None:
        """Call with the tensors' addresses; the number of threads is the last argument."""
        getattr(self._lib, name)(*map(_argument, args), ctypes.c_long(torch.get_num_threads()))

    def norm(self, x_TE: Tensor, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Returns x / rms(x) * weight in `dtype`, and 1 / rms(x) [T]."""
        y_TE = torch.empty_like(x_TE, dtype=self.dtype)
        factor_T = x_TE.new_empty(len(x_TE))
        self._call("ludus_norm", *x_TE.shape, x_TE, weight_E, eps, y_TE, factor_T)
        return y_TE, factor_T

    def norm_back(
        self, x_TE: Tensor, weight_E: Tensor, factor_T: Tensor, grad_TE: Tensor, add_TE: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the gradient of x, plus `add`, and of the weight."""
        dx_TE = torch.empty_like(x_TE)
        parts = x_TE.new_zeros(self.blocks, x_TE.shape[1])
        self._call(
            "ludus_norm_back", *x_TE.shape, x_TE, weight_E, factor_T, grad_TE, add_TE, dx_TE, parts
        )
        return dx_TE, parts.sum(0)

    def rotate(
        self,
        qkv: Tensor,
        sizes: tuple[int, int, int],
        norms: tuple[Tensor | None, Tensor | None],
        eps: float,
        cosine_TR: Tensor,
        sine_TR: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Returns queries and keys [T, (H + K) D] of qkv [T, (H + 2 K) D], normalised and rotated
        by halves, and the norms' factors. `sizes`: H, K and D."""
        num, (heads, kv_heads, dim) = len(qkv), sizes
        out = qkv.new_empty(num, (heads + kv_heads) * dim)
        factors = qkv.new_empty(num, heads + kv_heads, dtype=torch.float32)
        rotary = cosine_TR.shape[1]
        self._call(
            "ludus_rotate", num, *sizes, rotary, qkv, *norms, eps, cosine_TR, sine_TR, out, factors
        )
        return out, factors

    def rotate_back(
        self,
        qkv: Tensor,
        sizes: tuple[int, int, int],
        norms: tuple[Tensor | None, Tensor | None],
        cosine_TR: Tensor,
        sine_TR: Tensor,
        factors: Tensor,
        grad: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Returns the gradients of qkv and of both norms [2, D]."""
        dqkv = torch.empty_like(qkv)
        parts = factors.new_zeros(self.blocks, 2, sizes[2])
        self._call(
            "ludus_rotate_back", len(qkv), *sizes, cosine_TR.shape[1], qkv, *norms, cosine_TR,
            sine_TR, factors, grad, dqkv, parts,
        )  # fmt: skip
        return dqkv, parts.sum(0)

    def gate(self, gate_up: Tensor, gelu: bool) -> Tensor:
        """Returns act(gate) * up [T, I] of [T, 2 I]."""
        num, inner = len(gate_up), gate_up.shape[1] // 2
        out_TI = gate_up.new_empty(num, inner)
        self._call("ludus_gate", num, inner, gate_up, out_TI, int(gelu))
        return out_TI

    def gate_back(self, gate_up: Tensor, grad_TI: Tensor, gelu: bool) -> Tensor:
        """Returns the gradient of gate and up."""
        grad = torch.empty_like(gate_up)
        self._call("ludus_gate_back", *grad_TI.shape, gate_up, grad_TI, grad, int(gelu))
        return grad

    def scores(self, logits_TV: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Returns the log-sum-exp of scale * logits, and the entropy, float32 [T]."""
        total_T = logits_TV.new_empty(len(logits_TV), dtype=torch.float32)
        entropy_T = torch.empty_like(total_T)
        self._call("ludus_scores", *logits_TV.shape, logits_TV, scale, total_T, entropy_T)
        return total_T, entropy_T

    def scores_back(
        self,
        logits_TV: Tensor,
        scale: float,
        total_T: Tensor,
        entropy_T: Tensor,
        share_T: Tensor,
        heat_T: Tensor,
    ) -> Tensor:
        """Returns -p (share + heat (log p + H)), with p = softmax(scale * logits), float32."""
        grad_TV = torch.empty_like(logits_TV, dtype=torch.float32)
        self._call(
            "ludus_scores_back", *logits_TV.shape, logits_TV, scale, total_T, entropy_T, share_T,
            heat_T, grad_TV,
        )  # fmt: skip
        return grad_TV

    def attention(
        self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, plan: Plan, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        """Returns attention by tiles [T, H, D] and log-sum-exp [T, H]; heads and tokens may have
        any stride."""
        out_THD = q_THD.new_empty(q_THD.shape)
        total_TH = q_THD.new_empty(q_THD.shape[:2], dtype=torch.float32)
        self._attend(
            "ludus_attention", q_THD, k_TKD, v_TKD, plan, scores, o=out_THD, total=total_TH
        )
        return out_THD, total_TH

    def attention_back(
        self,
        qkv: tuple[Tensor, Tensor, Tensor],
        plan: Plan,
        scores: Scores,
        out_THD: Tensor,
        total_TH: Tensor,
        grad_THD: Tensor,
        into: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """Write the gradient of queries, add those of keys and values; heads are contiguous."""
        names = ("dq", "dk", "dv")
        self._attend(
            "ludus_attention_back", *qkv, plan, scores, o=out_THD, total=total_TH, grad=grad_THD,
            **dict(zip(names, into, strict=True)),
        )  # fmt: skip

    def _turned(self, x_TKD: Tensor) -> Tensor:
        """Returns keys or values as [K, D, T], in half of the time of torch's copy."""
        num, heads, dim = x_TKD.shape
        out_KDT = x_TKD.new_empty(heads, dim, num)
        self._call("ludus_turn", num, heads, dim, x_TKD, *x_TKD.stride()[:2], out_KDT)
        return out_KDT

    def _attend(
        self,
        name: str,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        plan: Plan,
        scores: Scores,
        **tensors: Tensor,
    ) -> None:
        table, spans = plan.table
        heads, kv_heads, dim = q_THD.shape[1], k_TKD.shape[1], q_THD.shape[2]
        group = heads // kv_heads
        rows = max(tile.stop - tile.start for tile in plan.tiles) * group
        keys = max(tile.num_keys for tile in plan.tiles)
        scratch = self._lib.ludus_attention_scratch(*map(ctypes.c_long, (rows, keys, dim)))
        work = torch.empty(torch.get_num_threads(), scratch)
        a = _Attention(num_tiles=len(table), K=kv_heads, G=group, D=dim, scratch=scratch)
        a.tokens, tensors["keys"] = len(k_TKD), self._turned(k_TKD)
        if "grad" in tensors:
            tensors["values"] = self._turned(v_TKD)
        a.softcap = scores.cap
        a.scale, a.tiles, a.spans, a.work = (
            scores.scale,
            table.ctypes.data,
            spans.ctypes.data,
            work.data_ptr(),
        )
        for key, tensor in {"q": q_THD, "k": k_TKD, "v": v_TKD, **tensors}.items():
            setattr(a, key, tensor.data_ptr())
            if key in ("q", "k", "v"):
                setattr(a, f"{key}_head", tensor.stride(1))
            if f"{key}_token" in _NUMBERS:
                setattr(a, f"{key}_token", tensor.stride(0))
        getattr(self._lib, name)(ctypes.byref(a), ctypes.c_long(torch.get_num_threads()))


@functools.cache
def kernels(dtype: torch.dtype) -> Kernels | None:
    """Returns the kernels for activations of this type, or None."""
    if dtype not in (torch.float32, torch.bfloat16):
        return None
    try:
        return Kernels(dtype)
    except Unavailable:
        return None


def _argument(value: Tensor | float | None) -> Any:
    if isinstance(value, Tensor):
        return ctypes.c_void_p(value.data_ptr())
    if value is None:
        return ctypes.c_void_p(None)
    return ctypes.c_long(value) if isinstance(value, int) else ctypes.c_float(value)
