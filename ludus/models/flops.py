"""Counts a model's floating-point operations, and measures the machine's peak rate.

A token's forward pass takes 2 operations per weight of its linear layers, and 4 * layers * heads *
head size per attended position (Kaplan et al. 2020, arXiv:2001.08361, table 1). The backward pass
takes twice as many. For a mixture of experts, only layers that every token passes are counted.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes that determine the cost of a token.

    Args:
        body: weights of the linear layers that every token passes.
        head: weights of the output layer, applied to predictions only.
        width: layers * heads * head size; an attended position costs 4 times that.
    """

    body: int
    head: int
    width: int

    @classmethod
    def of(cls, model: Any) -> Shape:
        """Returns the shape of a Hugging Face causal LM, LoRA adapters included."""
        head = model.get_output_embeddings()
        linear = [
            module.weight.numel()
            for module in model.modules()
            if isinstance(module, torch.nn.Linear | Conv1D) and module is not head
        ]
        config = model.config.get_text_config()
        heads = config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(
            body=sum(linear),
            head=0 if head is None else head.weight.numel(),
            width=config.num_hidden_layers * heads * size,
        )

    def forward(self, tokens: float, predictions: float, context: float) -> float:
        """Returns the floating-point operations of a forward pass.

        Args:
            tokens: tokens that pass the layers.
            predictions: tokens whose logits are computed.
            context: attended positions, summed over the tokens.
        """
        return 2 * self.body * tokens + 2 * self.head * predictions + 4 * self.width * context


NUM_PRODUCTS, PEAK_S = 8, 0.1
"""Products that are timed at least, and seconds. On a busy machine, each of eight products in 10 ms
waited for its second thread, and the peak came out at a ninth."""


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Returns the measured floating-point operations per second of torch's matrix product: the best
    of the square products of 512 rows (8,192 on CUDA) in PEAK_S, with torch's current threads."""
    tf32 = torch.backends.cuda.matmul.allow_tf32
    return _peak(str(device), dtype, torch.get_num_threads(), tf32)


@lru_cache
def _peak(device: str, dtype: torch.dtype, num_threads: int, tf32: bool) -> float:
    cuda = device.startswith("cuda")
    size = 8192 if cuda else 512
    # Random numbers: a GPU multiplies constants faster than data.
    a = torch.empty(size, size, device=device, dtype=dtype)
    a.uniform_(-1, 1, generator=torch.Generator(device).manual_seed(0))
    best, products, begun = float("inf"), 0, time.perf_counter()
    while products < NUM_PRODUCTS or time.perf_counter() - begun < PEAK_S:
        started = time.perf_counter()
        a @ a
        if cuda:
            torch.cuda.synchronize(device)
        best, products = min(best, time.perf_counter() - started), products + 1
    return 2 * size**3 / best
