"""A Llama-shaped decoder in plain torch: any device and precision, on the model's own parameters.

Shape suffixes as in padded.py, and: E width of the residual stream, K key-value heads, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ludus.models.decoders.llama import Llama, LlamaLayer, Norm
from ludus.models.kv_cache.padded import PaddedInputs, SlotStore, Store
from ludus.models.kv_cache.paging import BLOCK
from ludus.models.kv_cache.step_inputs import StepInputs

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Layer, queries [N, H, D], keys and values [N, K, D] to what the heads find, [N, H * D]."""

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class LeanDecoder:
    """A `Decoder` of a model read by `ludus.models.decoders.llama.read`.

    Args:
        autocast: multiply in bfloat16, whatever the weights are.
    """

    name = "lean"
    mixed_batches = False
    max_blocks: int | None = None

    def __init__(self, llama: Llama, *, autocast: bool = False) -> None:
        self._llama = llama
        self._autocast = autocast
        self._num_slots = 0
        self.clear()

    def reserve(self, num_blocks: int) -> None:
        self._num_slots = max(self._num_slots, BLOCK * num_blocks)
        for store in self._stores():
            store.num_slots = self._num_slots

    def copy(self, source: int, target: int, count: int) -> None:
        for store in self._stores():
            store.copy(BLOCK * source, BLOCK * target, count)

    def refresh(self) -> None:
        """Parameters are read where they are."""

    def clear(self) -> None:
        self._keys = [self._store() for _ in self._llama.layers]
        self._values = [self._store() for _ in self._llama.layers]
        self.reserve(0)

    def _store(self) -> Store:
        """Room for the keys or the values of a layer."""
        return SlotStore()

    def _stores(self) -> list[Store]:
        return [*self._keys, *self._values]

    @torch.inference_mode()
    def forward(self, batch: StepInputs) -> Tensor:
        device = self._llama.embedding.weight.device.type
        with torch.autocast(device, torch.bfloat16, enabled=self._autocast):
            return self._forward(batch)

    def _forward(self, batch: StepInputs) -> Tensor:
        llama = self._llama
        device = llama.embedding.weight.device
        plan = PaddedInputs.of(batch, device)

        def attend(number: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> Tensor:
            return self._attention(number, q_NHD, k_NKD, v_NKD, plan)

        ids_N = plan.ids_RL.flatten()[plan.place_N]
        x_NE = self._layers(ids_N, plan.positions_RL.flatten()[plan.place_N], attend)
        return self._logits(x_NE[torch.from_numpy(batch.outputs).to(device, torch.long)])

    def _layers(self, ids_N: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        """The residual stream after all layers, [N, E]."""
        llama = self._llama
        if llama.model.training:  # adapters may have dropout
            llama.model.eval()
        weight = llama.embedding.weight
        cosine_N1D = llama.cosine_TD[positions_N, None].to(weight.dtype)
        sine_N1D = llama.sine_TD[positions_N, None].to(weight.dtype)
        x_NE = weight[ids_N]
        if llama.embedding_scale != 1:
            x_NE = x_NE * torch.tensor(llama.embedding_scale, dtype=weight.dtype)
        for number, layer in enumerate(llama.layers):
            h_NE = self._normed(x_NE, layer.attention_norm)
            heads = self._heads(layer, h_NE, cosine_N1D, sine_N1D)
            x_NE = x_NE + layer.output.module(attend(number, *heads))
            h_NE = self._normed(x_NE, layer.mlp_norm)
            gate = _ACTIVATIONS[llama.activation](layer.gate.module(h_NE))
            x_NE = x_NE + layer.down.module(gate * layer.up.module(h_NE))
        return x_NE

    def _logits(self, x_RE: Tensor) -> Tensor:
        logits_RV: Tensor = self._llama.head.module(self._normed(x_RE, self._llama.final_norm))
        return logits_RV

    def _normed(self, x: Tensor, norm: Norm) -> Tensor:
        scale = norm.scale()
        return F.rms_norm(x.to(scale.dtype), x.shape[-1:], scale, self._llama.eps)

    def _heads(
        self, layer: LlamaLayer, h_NE: Tensor, cosine_N1D: Tensor, sine_N1D: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [N, H, D], keys and values [N, K, D], at their positions."""
        heads = (h_NE.shape[0], -1, self._llama.head_dim)
        q_NHD = layer.query.module(h_NE).view(heads)
        k_NKD = layer.key.module(h_NE).view(heads)
        v_NKD = layer.value.module(h_NE).view(heads)
        if layer.query_norm is not None and layer.key_norm is not None:
            q_NHD = self._normed(q_NHD, layer.query_norm)
            k_NKD = self._normed(k_NKD, layer.key_norm)
        return _rotated(q_NHD, cosine_N1D, sine_N1D), _rotated(k_NKD, cosine_N1D, sine_N1D), v_NKD

    def _attention(
        self, number: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, plan: PaddedInputs
    ) -> Tensor:
        """What a layer's heads find, [N, H * D]; stores the keys and values."""
        llama = self._llama
        keys, values = self._keys[number], self._values[number]
        keys.write(k_NKD[plan.write_tokens_W], plan.write_slots_W)
        values.write(v_NKD[plan.write_tokens_W], plan.write_slots_W)
        rows, width = plan.ids_RL.shape
        padded_XHD = q_NHD
        if len(q_NHD) < rows * width:
            padded_XHD = q_NHD.new_zeros(rows * width, *q_NHD.shape[1:])
            padded_XHD[plan.place_N] = q_NHD
        found_RHLD = F.scaled_dot_product_attention(
            padded_XHD.view(rows, width, *q_NHD.shape[1:]).transpose(1, 2),
            keys.read(plan.slots_RT),
            values.read(plan.slots_RT),
            attn_mask=plan.mask_R1LT,
            scale=llama.attention_scale,
            enable_gqa=llama.heads != llama.kv_heads,
        )
        return found_RHLD.transpose(1, 2).reshape(rows * width, -1)[plan.place_N]


def _rotated(x_NHD: Tensor, cosine_N1D: Tensor, sine_N1D: Tensor) -> Tensor:
    """Rotary positions, halves against halves, on the first dimensions."""
    rotary = cosine_N1D.shape[-1]
    turned, rest = x_NHD[..., :rotary], x_NHD[..., rotary:]
    half = rotary // 2
    swapped = torch.cat((-turned[..., half:], turned[..., :half]), -1)
    turned = turned * cosine_N1D + swapped * sine_N1D
    return torch.cat((turned, rest), -1) if rest.shape[-1] else turned
