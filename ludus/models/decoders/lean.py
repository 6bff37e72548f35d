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
from ludus.models.decoders.llama import Llama, LlamaLayer, Norm
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
        self._limits = len(llama.embedding.weight), len(llama.cosine_TD)
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
        cosine_N1D = llama.cosine_TD[positions_N, None].to(dtype)
        sine_N1D = llama.sine_TD[positions_N, None].to(dtype)
        x_NE = llama.embedding.weight[ids_N].to(dtype)
        if llama.embedding_scale != 1:
            x_NE = x_NE * torch.tensor(llama.embedding_scale, dtype=dtype)
        for number, layer in enumerate(llama.layers):
            h_NE = self._norm(x_NE, layer.attention_norm).to(self._factor_dtype)
            heads = self._heads(layer, h_NE, cosine_N1D, sine_N1D)
            x_NE = x_NE + layer.output.module(attend(number, *heads))
            h_NE = self._norm(x_NE, layer.mlp_norm).to(self._factor_dtype)
            gate = _ACTIVATIONS[llama.activation](layer.gate.module(h_NE))
            x_NE = x_NE + layer.down.module(gate * layer.up.module(h_NE))
        return x_NE

    def _logits(self, x_RE: Tensor) -> Tensor:
        h_RE = self._norm(x_RE, self._llama.final_norm).to(self._factor_dtype)
        logits_RV: Tensor = self._llama.head.module(h_RE)
        return logits_RV

    def _norm(self, x: Tensor, norm: Norm) -> Tensor:
        scale = norm.scale()
        return F.rms_norm(x.to(scale.dtype), x.shape[-1:], scale, self._llama.eps)

    def _heads(
        self, layer: LlamaLayer, h_NE: Tensor, cosine_N1D: Tensor, sine_N1D: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries [N, H, D] and keys [N, K, D], both rotated, and values [N, K, D]."""
        heads = (h_NE.shape[0], -1, self._llama.head_dim)
        q_NHD = layer.query.module(h_NE).view(heads)
        k_NKD = layer.key.module(h_NE).view(heads)
        v_NKD = layer.value.module(h_NE).view(heads)
        if layer.query_norm is not None and layer.key_norm is not None:
            q_NHD = self._norm(q_NHD, layer.query_norm)
            k_NKD = self._norm(k_NKD, layer.key_norm)
        q_NHD, k_NKD = (_rotate(x, cosine_N1D, sine_N1D) for x in (q_NHD, k_NKD))
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
        result_RHLD = F.scaled_dot_product_attention(
            q_XHD.view(rows, width, *q_NHD.shape[1:]).transpose(1, 2),
            keys.read(padded.slots_RT),
            values.read(padded.slots_RT),
            attn_mask=padded.mask_R1LT,
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
