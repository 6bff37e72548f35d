"""Llama-shaped decoder in plain torch: any device and dtype.

It reads the model's own parameters, or those of a `SamplingCopy`: matrices in bfloat16, and norms,
hence the residual stream, in float32.

Shape suffixes as in padded.py, and: E width of the residual stream, K key-value heads, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ludus.models.decoders.base import check_inputs
from ludus.models.decoders.parts import (
    Llama,
    LlamaLayer,
    Norm,
    Rotary,
    limited_windows,
    project,
    soft_cap,
)
from ludus.models.decoders.sampling_copy import SamplingCopy
from ludus.models.kv_cache.padded import PaddedInputs, SlotStore
from ludus.models.kv_cache.paging import BLOCK
from ludus.models.kv_cache.step_inputs import StepInputs

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""attend(layer number, queries [N, H, D], keys and values [N, K, D]) -> attention [N, H * D]."""

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class LeanDecoder:
    """`Decoder` in torch, of a model read by `ludus.models.decoders.llama.read`.

    Args:
        copy: the copy that holds the modules of `llama`; None: they are the model's.
    """

    name = "lean"
    batch_invariant = False
    mixed_batches = False
    max_blocks: int | None = None

    def __init__(self, llama: Llama, *, copy: SamplingCopy | None = None) -> None:
        self._llama = llama
        self._copy = copy
        self._limits = len(llama.embedding.weight), llama.context_length
        self._windows = [layer.window for layer in llama.layers]
        self._factor_dtype = llama.embedding.weight.dtype
        self._residual_dtype = llama.final_norm.scale().dtype
        self._num_slots = 0
        self.clear()

    @property
    def bytes_per_block(self) -> int:
        llama = self._llama
        position = llama.kv_heads * llama.head_dim * self._factor_dtype.itemsize
        return 2 * len(llama.layers) * BLOCK * position

    @property
    def weight_bytes(self) -> int:
        return 0 if self._copy is None else self._copy.num_bytes

    def reserve(self, num_blocks: int) -> None:
        self._num_slots = max(self._num_slots, BLOCK * num_blocks)
        for store in self._stores():
            store.num_slots = self._num_slots

    def copy(self, source: int, target: int, count: int) -> None:
        for store in self._stores():
            store.copy(BLOCK * source, BLOCK * target, count)

    def refresh(self) -> None:
        if self._copy is not None:
            self._copy.refresh()

    def limit_windows(self, most: int | None) -> None:
        self._windows = limited_windows(self._llama, most)

    def clear(self) -> None:
        self._keys = [self._new_store() for _ in self._llama.layers]
        self._values = [self._new_store() for _ in self._llama.layers]
        self.reserve(0)

    def _new_store(self) -> SlotStore:
        """Storage of one layer's keys or values."""
        return SlotStore()

    def _stores(self) -> list[SlotStore]:
        return [*self._keys, *self._values]

    @torch.inference_mode()
    def forward(self, inputs: StepInputs) -> Tensor:
        check_inputs(inputs, *self._limits)
        device = self._llama.embedding.weight.device
        padded = PaddedInputs.of(inputs, device)
        ids_N = padded.ids_RL.flatten()[padded.place_N]
        positions_N = padded.positions_RL.flatten()[padded.place_N]
        outputs_R = torch.from_numpy(inputs.outputs).to(device, torch.long)
        x_NE = self._layers(ids_N, positions_N, partial(self._attention, padded))
        return self._logits(x_NE[outputs_R])

    def _layers(self, ids_N: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        """Returns the residual stream after all layers, [N, E]."""
        llama = self._llama
        if llama.model.training:  # adapters may have dropout
            llama.model.eval()
        dtype = self._residual_dtype
        tables = [
            Rotary(
                table.cosine_TD[positions_N, None].to(dtype),
                table.sine_TD[positions_N, None].to(dtype),
            )
            for table in llama.rotary
        ]
        x_NE = llama.embedding.weight[ids_N].to(dtype)
        if llama.embedding_scale != 1:
            x_NE = x_NE * torch.tensor(llama.embedding_scale, dtype=dtype)
        for number, layer in enumerate(llama.layers):
            h_NE = self._norm(x_NE, layer.attention_norm).to(self._factor_dtype)
            table = None if layer.rotary is None else tables[layer.rotary]
            heads = self._heads(layer, h_NE, table)
            out_NE = layer.output.module(attend(number, *heads))
            x_NE = x_NE + self._scaled(self._norm(out_NE, layer.attention_post_norm))
            h_NE = self._norm(x_NE, layer.mlp_norm).to(self._factor_dtype)
            out_NE = self._mlp(layer, h_NE)
            x_NE = x_NE + self._scaled(self._norm(out_NE, layer.mlp_post_norm))
        return x_NE

    def _mlp(self, layer: LlamaLayer, h_NE: Tensor) -> Tensor:
        if layer.experts is not None:
            mixed_NE: Tensor = layer.experts.module(h_NE[None])[0]
            return mixed_NE
        assert layer.gate is not None
        assert layer.up is not None
        assert layer.down is not None
        gate, up = project([layer.gate, layer.up], h_NE)
        down_NE: Tensor = layer.down.module(_ACTIVATIONS[self._llama.activation](gate) * up)
        return down_NE

    def _scaled(self, x_NE: Tensor) -> Tensor:
        scale = self._llama.residual_scale
        return x_NE if scale == 1 else x_NE * scale

    def _logits(self, x_RE: Tensor) -> Tensor:
        llama = self._llama
        h_RE = self._norm(x_RE, llama.final_norm).to(self._factor_dtype)
        logits_RV: Tensor = llama.head.module(h_RE)
        if llama.logit_scale != 1:
            logits_RV = logits_RV * llama.logit_scale
        return soft_cap(logits_RV, llama.logit_softcap)

    def _norm(self, x: Tensor, norm: Norm | None) -> Tensor:
        if norm is None:
            return x
        scale = norm.scale()
        return F.rms_norm(x.to(scale.dtype), x.shape[-1:], scale, self._llama.eps)

    def _heads(
        self, layer: LlamaLayer, h_NE: Tensor, table: Rotary | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries [N, H, D] and keys [N, K, D], both rotated, and values [N, K, D]."""
        llama = self._llama
        heads = (h_NE.shape[0], -1, llama.head_dim)
        q, k, v = project([layer.query, layer.key, layer.value], h_NE)
        if llama.whole_norms:
            q, k = self._norm(q, layer.query_norm), self._norm(k, layer.key_norm)
        q_NHD, k_NKD, v_NKD = q.view(heads), k.view(heads), v.view(heads)
        if not llama.whole_norms:
            q_NHD, k_NKD = self._norm(q_NHD, layer.query_norm), self._norm(k_NKD, layer.key_norm)
        if table is not None:
            rotate = _rotate_pairs if llama.interleaved else _rotate
            q_NHD, k_NKD = (rotate(x, table.cosine_TD, table.sine_TD) for x in (q_NHD, k_NKD))
        return q_NHD.to(self._factor_dtype), k_NKD.to(self._factor_dtype), v_NKD

    def _attention(
        self, padded: PaddedInputs, number: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor
    ) -> Tensor:
        """Attention of one layer, [N, H * D]; stores its keys and values."""
        llama = self._llama
        keys, values = self._keys[number], self._values[number]
        keys.write(k_NKD[padded.write_tokens_W], padded.write_slots_W)
        values.write(v_NKD[padded.write_tokens_W], padded.write_slots_W)
        rows, width = padded.ids_RL.shape
        q_XHD = q_NHD
        if len(q_NHD) < rows * width:
            q_XHD = q_NHD.new_zeros(rows * width, *q_NHD.shape[1:])
            q_XHD[padded.place_N] = q_NHD
        cap = llama.attention_softcap
        attend = partial(_capped_attention, cap=cap) if cap else F.scaled_dot_product_attention
        result_RHLD = attend(
            q_XHD.view(rows, width, *q_NHD.shape[1:]).transpose(1, 2),
            keys.read(padded.slots_RT),
            values.read(padded.slots_RT),
            attn_mask=padded.mask(self._windows[number]),
            scale=llama.attention_scale,
            enable_gqa=llama.heads != llama.kv_heads,
        )
        return result_RHLD.transpose(1, 2).reshape(rows * width, -1)[padded.place_N]


def _rotate(x_NHD: Tensor, cosine_N1D: Tensor, sine_N1D: Tensor) -> Tensor:
    """Rotary position embedding (half rotation) of the first dimensions."""
    rotary = cosine_N1D.shape[-1]
    rotated, rest = x_NHD[..., :rotary], x_NHD[..., rotary:]
    half = rotary // 2
    swapped = torch.cat((-rotated[..., half:], rotated[..., :half]), -1)
    rotated = rotated * cosine_N1D + swapped * sine_N1D
    return torch.cat((rotated, rest), -1) if rest.shape[-1] else rotated


def _rotate_pairs(x_NHD: Tensor, cosine_N1D: Tensor, sine_N1D: Tensor) -> Tensor:
    """The same of neighbouring dimensions."""
    rotary = cosine_N1D.shape[-1]
    rotated, rest = x_NHD[..., :rotary], x_NHD[..., rotary:]
    cosine, sine = cosine_N1D[..., : rotary // 2], sine_N1D[..., : rotary // 2]
    a, b = rotated[..., 0::2], rotated[..., 1::2]
    rotated = torch.stack((a * cosine - b * sine, b * cosine + a * sine), -1).flatten(-2)
    return torch.cat((rotated, rest), -1)


def _capped_attention(
    q_RHLD: Tensor,
    k_RKTD: Tensor,
    v_RKTD: Tensor,
    *,
    attn_mask: Tensor,
    scale: float,
    enable_gqa: bool,
    cap: float,
) -> Tensor:
    """Attention with a soft cap, which torch's has not; scores are in float32."""
    rows, _, length, size = q_RHLD.shape
    q_RKGLD = q_RHLD.reshape(rows, k_RKTD.shape[1], -1, length, size).float()
    scores_RKGLT = soft_cap(q_RKGLD @ k_RKTD[:, :, None].float().mT * scale, cap)
    shares_RKGLT = scores_RKGLT.masked_fill(~attn_mask[:, :, None], -torch.inf).softmax(-1)
    result_RKGLD = shares_RKGLT @ v_RKTD[:, :, None].float()
    return result_RKGLD.flatten(1, 2).to(v_RKTD.dtype)
