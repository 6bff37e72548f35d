"""Llama-shaped decoder on the CPU: one native call per forward pass.

It computes with weights of its own, packed from the model's in `refresh`: the model may change
meanwhile. A token's results are bit-identical in any batch. In bfloat16, the factors of products
(weights, activations, keys, values) have 8 bits of precision; sums, norms and the residual stream
have 24.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from ludus.models.decoders.base import check_inputs
from ludus.models.decoders.native.bindings import Kernels, Layer, Model, NativeInputs
from ludus.models.decoders.parts import (
    Experts,
    Linear,
    Llama,
    LlamaLayer,
    limited_windows,
    weights_of,
)
from ludus.models.kv_cache.paging import BLOCK
from ludus.models.kv_cache.step_inputs import StepInputs

ALIGNMENT = 64
"""Bytes of a cache line."""

_ACTIVATIONS = {"silu": 2, "gelu_tanh": 3}  # as in decoder.c


class NativeDecoder:
    """Native `Decoder` of a model read by `ludus.models.decoders.llama.read`.

    Args:
        dtype: type of products. float32 requires float32 weights; bfloat16 accepts both.

    Errors: `ludus.models.decoders.native.Unavailable` without kernels; ValueError for a model or
    type that they do not support.
    """

    name = "native"
    batch_invariant = True
    mixed_batches = True
    max_blocks: int | None = None

    def __init__(self, llama: Llama, dtype: torch.dtype = torch.float32) -> None:
        weight, half = llama.embedding.weight, dtype == torch.bfloat16
        supported = {torch.float32, torch.bfloat16} if half else {torch.float32}
        if weight.device.type != "cpu" or dtype not in supported or weight.dtype not in supported:
            raise ValueError("the native decoder requires float32 or bfloat16 on the CPU")
        if llama.head_dim % 2:
            raise ValueError("the native decoder requires an even head size")
        self.kernels, self._exact = Kernels(half), Kernels()
        self._llama = llama
        self._limits = len(llama.embedding.weight), llama.context_length
        self._layers = (Layer * len(llama.layers))()
        self._model = _structure(llama, self._layers)
        self.limit_windows(None)
        self._weights: dict[str, Tensor] = {}  # the structures point to these
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._scratch = torch.empty(0)
        self._logits = torch.empty(0)
        self._num_blocks = 0
        self.refresh()

    @property
    def bytes_per_block(self) -> int:
        return len(self._layers) * sum(self._sizes) * self.kernels.dtype.itemsize

    @property
    def _sizes(self) -> tuple[int, int]:
        """Numbers in a block's keys and in its values, in one layer."""
        llama, unit = self._llama, self.kernels.lanes * 2
        width = -(-llama.head_dim // unit) * unit
        return llama.kv_heads * llama.head_dim * BLOCK, llama.kv_heads * BLOCK * width

    def reserve(self, num_blocks: int) -> None:
        """Reserve addresses for the whole capacity at once: the system provides memory where blocks
        are written, so nothing is copied and only used blocks take memory."""
        if num_blocks <= self._num_blocks:
            return
        num_blocks = max(num_blocks, self.max_blocks or 0)
        for number in range(len(self._layers)):
            for name, stored, size in zip(
                ("keys", "values"), (self._keys, self._values), self._sizes, strict=True
            ):
                grown = _reserved(num_blocks, size, self.kernels.dtype)
                if self._num_blocks:
                    grown[: self._num_blocks] = stored[number]
                    stored[number] = grown
                else:
                    stored.append(grown)
                setattr(self._layers[number], name, grown.data_ptr())
        self._num_blocks = num_blocks

    def clear(self) -> None:
        self._keys, self._values, self._num_blocks = [], [], 0

    def copy(self, source: int, target: int, count: int) -> None:
        for number in range(len(self._layers)):
            self.kernels.lib.ludus_copy(ctypes.byref(self._model), number, source, target, count)

    def limit_windows(self, most: int | None) -> None:
        for layer, window in zip(self._layers, limited_windows(self._llama, most), strict=True):
            layer.window = window

    @property
    def weight_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._weights.values())

    @torch.no_grad()
    def refresh(self) -> None:
        """Pack the model's present weights in place."""
        llama, model = self._llama, self._model
        model.embeddings = self._floats("embeddings", llama.embedding.weight)
        model.final_norm = self._floats("final_norm", llama.final_norm.scale())
        model.head = self._pack("head", [llama.head.weight()])
        for number, (layer, native) in enumerate(zip(llama.layers, self._layers, strict=True)):
            self._pack_layer(f"{number}.", layer, native)

    @torch.inference_mode()
    def forward(self, inputs: StepInputs) -> Tensor:
        check_inputs(inputs, *self._limits)
        threads = torch.get_num_threads()
        tables = np.ascontiguousarray(inputs.tables)
        native = NativeInputs(
            tokens=len(inputs.ids),
            writes=len(inputs.write_tokens),
            outputs=len(inputs.outputs),
            table_stride=tables.shape[1],
            max_length=int(inputs.positions.max()) + 1,
            ids=inputs.ids.ctypes.data,
            positions=inputs.positions.ctypes.data,
            rows=inputs.rows.ctypes.data,
            write_tokens=inputs.write_tokens.ctypes.data,
            write_slots=inputs.write_slots.ctypes.data,
            tables=tables.ctypes.data,
            output_tokens=inputs.outputs.ctypes.data,
        )
        model = ctypes.byref(self._model)
        lib = self.kernels.lib
        size = lib.ludus_scratch(model, ctypes.byref(native), threads)
        if len(self._scratch) < size:
            self._scratch = torch.empty(size)
        rows, width = len(inputs.outputs), self.kernels.round_up(self._llama.vocab)
        if len(self._logits) < rows or self._logits.dim() == 1:
            self._logits = torch.empty(rows, width)
        lib.ludus_forward(
            model, ctypes.byref(native), self._scratch.data_ptr(), self._logits.data_ptr(), threads
        )
        return self._logits[:rows, : self._llama.vocab]

    def _pack_layer(self, prefix: str, layer: LlamaLayer, native: Layer) -> None:
        names = ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")
        for name in (*names, "query_norm", "key_norm"):
            norm = getattr(layer, name)
            if norm is not None:
                setattr(native, name, self._floats(prefix + name, norm.scale()))
        if layer.rotary is not None:
            table = self._llama.rotary[layer.rotary]
            native.cosine, native.sine = table.cosine_TD.data_ptr(), table.sine_TD.data_ptr()
        matrices = [("qkv", [layer.query, layer.key, layer.value]), ("output", [layer.output])]
        if layer.experts is not None:
            self._pack_experts(prefix, layer.experts, native)
        else:
            matrices += [
                ("gate_up", _present(layer.gate, layer.up)),
                ("down", _present(layer.down)),
            ]
        for name, parts in matrices:
            pair = name == "gate_up"
            weights = weights_of(parts)
            biases = [part.bias() for part in parts]
            setattr(native, name, self._pack(prefix + name, weights, pair))
            if any(bias is not None for bias in biases):
                columns = [
                    weight.new_zeros(len(weight), 1) if bias is None else bias[:, None]
                    for weight, bias in zip(weights, biases, strict=True)
                ]
                packed = self._pack(f"{prefix}{name}_bias", columns, pair, self._exact)
                setattr(native, f"{name}_bias", packed)

    def _pack_experts(self, prefix: str, experts: Experts, native: Layer) -> None:
        """Pack the router, and the matrices of all experts one after the other."""
        native.router = self._pack(f"{prefix}router", [experts.router.weight()])
        gate_up, down = experts.gate_up.weight(), experts.down.weight()
        for name, size in (
            ("gate_up", self.kernels.packed_size(experts.inner, self._llama.hidden, True)),
            ("down", self.kernels.packed_size(self._llama.hidden, experts.inner)),
        ):
            packed = self._weights.get(prefix + name)
            if packed is None:
                packed = torch.zeros(experts.count, size, dtype=self.kernels.dtype)
                self._weights[prefix + name] = packed
            for number in range(experts.count):
                if name == "gate_up":
                    self.kernels.pack(list(gate_up[number].chunk(2)), True, packed[number])
                else:
                    self.kernels.pack([down[number]], False, packed[number])
            setattr(native, name, packed.data_ptr())

    def _pack(
        self, name: str, weights: list[Tensor], pair: bool = False, kernels: Kernels | None = None
    ) -> int:
        """Pack into the tensor of this name; returns its address."""
        packed = (kernels or self.kernels).pack(weights, pair, self._weights.get(name))
        self._weights[name] = packed
        return packed.data_ptr()

    def _floats(self, name: str, source: Tensor) -> int:
        """Copy into the float32 tensor of this name; returns its address."""
        own = self._weights.get(name)
        if own is None:
            own = self._weights[name] = torch.empty(source.shape)
        own.copy_(source)
        return own.data_ptr()


def _structure(llama: Llama, layers: ctypes.Array[Layer]) -> Model:
    """Returns the model as a C structure, without its weights."""
    experts = llama.experts
    return Model(
        hidden=llama.hidden,
        layers=len(layers),
        heads=llama.heads,
        kv_heads=llama.kv_heads,
        head_dim=llama.head_dim,
        rotary=llama.rotary_dim,
        inner=llama.inner,
        vocab=llama.vocab,
        activation=_ACTIVATIONS[llama.activation],
        separate=llama.post_norms or llama.residual_scale != 1 or experts is not None,
        whole_norms=llama.whole_norms,
        interleaved=llama.interleaved,
        experts=0 if experts is None else experts.count,
        top=0 if experts is None else experts.top,
        expert_inner=0 if experts is None else experts.inner,
        normalised=experts is not None and experts.normalised,
        eps=llama.eps,
        attention_scale=llama.attention_scale,
        embedding_scale=llama.embedding_scale,
        residual_scale=llama.residual_scale,
        logit_scale=llama.logit_scale,
        attention_softcap=llama.attention_softcap,
        logit_softcap=llama.logit_softcap,
        layer=layers,
    )


def _present(*parts: Linear | None) -> list[Linear]:
    return [part for part in parts if part is not None]


def _reserved(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Returns a tensor whose pages take memory once they are written, aligned to cache lines.

    torch.empty would write them all in deterministic mode.
    """
    size = rows * columns * dtype.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return torch.from_numpy(raw[start : start + size]).view(dtype).view(rows, columns)
