"""What a model's computation costs, from its shape, and what the machine could do at most.

A token's forward pass takes 2 floating-point operations for each weight of its linear layers, and
4 * layers * heads * head size for each position that it attends to (Kaplan et al. 2020,
arXiv:2001.08361, table 1); the backward pass takes twice the forward's. A mixture of experts counts
with the layers that every token passes.
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
    """Sizes that decide the cost of a token.

    Args:
        body: weights of the linear layers that each token passes.
        head: weights of the output layer, which only predictions pass.
        width: layers * heads * head size, what one attended position costs a quarter of.
    """

    body: int
    head: int
    width: int

    @classmethod
    def of(cls, model: Any) -> Shape:
        """The shape of a Hugging Face causal LM, LoRA adapters included."""
        head = model.get_output_embeddings()
        linear = [
            module.weight.numel()
            for module in model.modules()
            if isinstance(module, torch.nn.Linear | Conv1D) and module is not head
        ]
        config = model.config.get_text_config()
        size = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        return cls(
            body=sum(linear),
            head=0 if head is None else head.weight.numel(),
            width=config.num_hidden_layers * config.num_attention_heads * size,
        )

    def forward(self, tokens: float, predictions: float, context: float) -> float:
        """Floating-point operations of a forward pass.

        Args:
            tokens: how many pass the layers.
            predictions: how many of them predict another.
            context: positions attended to, summed over the tokens.
        """
        return 2 * self.body * tokens + 2 * self.head * predictions + 4 * self.width * context


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second of torch's matrix product here, as measured: the best of
    several square products of 512 (on CUDA 8,192) rows, on as many threads as torch has now."""
    return _peak(str(device), dtype, torch.get_num_threads())


@lru_cache
def _peak(device: str, dtype: torch.dtype, num_threads: int) -> float:
    cuda = device.startswith("cuda")
    size = 8192 if cuda else 512
    # Random numbers: a GPU multiplies constants faster than data.
    a = torch.empty(size, size, device=device, dtype=dtype)
    a.uniform_(-1, 1, generator=torch.Generator(device).manual_seed(0))
    best = float("inf")
    for _ in range(8):
        started = time.perf_counter()
        a @ a
        if cuda:
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best
