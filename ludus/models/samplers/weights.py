"""Transfers weights to another process: write, content hash, probe."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from ludus.core.errors import TrainingError
from ludus.models.progress_bars import no_progress_bars
from ludus.models.samplers.vllm_side.ludus_vllm_side import (
    content_hash,
    difference,
    layout,
)

WEIGHTS = "model.safetensors"


def write_model(model: Any, folder: Path) -> str:
    """Write a Hugging Face folder with all weights in one file; returns their content hash.

    `model` must not have adapters (see `merge_lora`). Existing content of the folder is replaced.
    """
    shutil.rmtree(folder, ignore_errors=True)
    with no_progress_bars():
        model.save_pretrained(folder, max_shard_size="1000TB")
    return content_hash(folder / WEIGHTS)


def layout_difference(expected: Path, given: Path) -> str | None:
    """Returns the first difference of two models' weights by name, type or shape; None if equal."""
    return difference(layout(expected / WEIGHTS), layout(given / WEIGHTS))


@torch.inference_mode()
def probe_logprobs(model: Any, token_ids: list[int]) -> list[float]:
    """Returns log-probabilities of `token_ids[1:]`, each given its prefix, in float32.

    Errors: TrainingError where they are not finite.
    """
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    try:
        logits_LV = model(torch.tensor([token_ids], device=device), use_cache=False).logits[0]
    finally:
        model.train(was_training)
    logprobs_LV = logits_LV[:-1].float().log_softmax(-1)
    chosen_L = logprobs_LV.gather(-1, torch.tensor(token_ids[1:], device=device)[:, None])[:, 0]
    if not bool(chosen_L.isfinite().all()):
        raise TrainingError(
            "the model's logits are not finite: the weights have diverged; lower the learning rate "
            "and resume from the last checkpoint"
        )
    logprobs: list[float] = chosen_L.tolist()
    return logprobs
