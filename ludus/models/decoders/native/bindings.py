"""ctypes bindings of decoder.c: structures, and functions on tensors and arrays."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ludus.models.decoders.native import library

_POINTER = ctypes.c_void_p
_INT = ctypes.c_int32
_LAYER = (
    "attention_norm", "mlp_norm", "query_norm", "key_norm",
    "attention_post_norm", "mlp_post_norm", "cosine", "sine",
    "qkv_bias", "output_bias", "gate_up_bias", "down_bias",
    "qkv", "output", "gate_up", "down", "router", "keys", "values",
)  # fmt: skip
_SIZES = (
    "hidden", "layers", "heads", "kv_heads", "head_dim", "rotary", "inner", "vocab", "activation",
    "separate", "whole_norms", "interleaved", "experts", "top", "expert_inner", "normalised",
)  # fmt: skip
_FLOATS = (
    "eps", "attention_scale", "embedding_scale",
    "residual_scale", "logit_scale", "attention_softcap", "logit_softcap",
)  # fmt: skip
_WEIGHTS = ("embeddings", "final_norm", "head")


class Layer(ctypes.Structure):
    """Pointers to one layer's packed weights, keys and values; its window."""

    _fields_ = [*[(name, _POINTER) for name in _LAYER], ("window", ctypes.c_int64)]


class Model(ctypes.Structure):
    """Sizes and weights of a decoder."""

    _fields_ = [
        *[(name, _INT) for name in _SIZES],
        *[(name, ctypes.c_float) for name in _FLOATS],
        *[(name, _POINTER) for name in _WEIGHTS],
        ("layer", ctypes.POINTER(Layer)),
    ]


_COUNTS = ("tokens", "writes", "outputs", "table_stride", "max_length")
_ARRAYS = ("ids", "positions", "rows", "write_tokens", "write_slots", "tables", "output_tokens")


class NativeInputs(ctypes.Structure):
    """`StepInputs` as a C structure."""

    _fields_ = [*[(name, _INT) for name in _COUNTS], *[(name, _POINTER) for name in _ARRAYS]]


class Kernels:
    """The typed functions of the library.

    Args:
        half: multiply in bfloat16; sums are float32.

    Errors: `ludus.models.decoders.native.Unavailable`.
    """

    def __init__(self, half: bool = False) -> None:
        lib = library(half)
        self.dtype = torch.bfloat16 if half else torch.float32
        long, model, inputs = ctypes.c_long, ctypes.POINTER(Model), ctypes.POINTER(NativeInputs)
        lib.ludus_scratch.argtypes = [model, inputs, ctypes.c_int]
        lib.ludus_scratch.restype = long
        lib.ludus_forward.argtypes = [model, inputs, _POINTER, _POINTER, ctypes.c_int]
        lib.ludus_forward.restype = None
        lib.ludus_copy.argtypes = [model, ctypes.c_int, long, long, ctypes.c_int]
        lib.ludus_copy.restype = None
        lib.ludus_pack.argtypes = [_POINTER, _POINTER, long, long, long, ctypes.c_int]
        lib.ludus_pack.restype = None
        pointers = [_POINTER] * 5
        lib.ludus_sample.argtypes = [_POINTER, long, long, long, *pointers, ctypes.c_int]
        lib.ludus_sample.restype = long
        self.lib = lib
        self.panel = int(lib.ludus_panel())
        self.lanes = int(lib.ludus_lanes())
        self.block = int(lib.ludus_block())
        self.pair = int(lib.ludus_pair())

    def round_up(self, size: int) -> int:
        """Returns `size` rounded up to a multiple of the panel width."""
        return -(-size // self.panel) * self.panel

    def packed_size(self, outputs: int, inputs: int, pair: bool = False) -> int:
        """Returns the numbers of a packed matrix; with `pair`, of two of these sizes."""
        panels = -(-outputs // (self.lanes if pair else self.panel))
        return panels * -(-inputs // self.pair) * self.pair * self.panel

    def pack(
        self, weights: list[Tensor], pair: bool = False, packed: Tensor | None = None
    ) -> Tensor:
        """Pack stacked matrices [outputs, inputs] into panels of `dtype`; a pair side by side.

        `packed` is the result for matrices of these sizes, to overwrite.
        """
        outputs = len(weights[0]) if pair else sum(len(w) for w in weights)
        if packed is None:
            size = self.packed_size(outputs, weights[0].shape[1], pair)
            packed = torch.zeros(size, dtype=self.dtype)
        start = 0
        for number, weight in enumerate(weights):
            weight = weight.float().contiguous()
            half = number if pair else -1
            self.lib.ludus_pack(weight.data_ptr(), packed.data_ptr(), *weight.shape, start, half)
            start += 0 if pair else len(weight)
        return packed

    def sample(
        self,
        logits_RV: Tensor,
        temperatures_R: NDArray[np.float64],
        uniforms_R: NDArray[np.float64],
    ) -> tuple[NDArray[np.int64], NDArray[np.float64], int]:
        """Returns token ids and log-probabilities [R], and the first non-finite row (-1: none)."""
        rows, vocab = logits_RV.shape
        threads = torch.get_num_threads()
        tokens_R = np.zeros(rows, np.int64)
        logprobs_R = np.zeros(rows, np.float64)
        scratch = np.empty(vocab * threads, np.float32)
        start, stride = logits_RV.data_ptr(), logits_RV.stride(0)
        arrays = (temperatures_R, uniforms_R, scratch, tokens_R, logprobs_R)
        addresses = [array.ctypes.data for array in arrays]
        bad = self.lib.ludus_sample(start, stride, rows, vocab, *addresses, threads)
        return tokens_R, logprobs_R, int(bad)
