"""Which models the in-process engine can serve: what a model says of itself, then a trial.

Keys and values of every position have to be all that a layer remembers, positions and the attention
mask have to be the caller's to set. Most decoders are such; state-space models, sliding windows and
attention biases of a model's own making are not, and would sample from a wrong distribution without
a word.
"""

from __future__ import annotations

from typing import Any

import torch

from ludus.core.errors import ConfigError
from ludus.models.slots import SlotCache, cached_logits

TOLERANCE = 1e-4
"""Of the largest logit; rounding in float32 leaves about 1e-6."""


def require_servable(model: Any, context_length: int) -> None:
    """Check that cached, padded, batched passes give the logits of a plain one.

    Puts the model into evaluation mode. Errors: ConfigError that says what the model needs and the
    engine lacks.
    """
    model.eval()
    config = model.config.get_text_config()
    if config._attn_implementation != "sdpa":
        raise _refusal(
            model,
            f"its attention is {config._attn_implementation!r}; load it with "
            "attn_implementation='sdpa', if it supports that",
        )
    _require_full_attention(model, config, context_length)
    _require_equal_logits(model, config)


def _require_full_attention(model: Any, config: Any, context_length: int) -> None:
    """Refuse layers that see less than all positions, or keep something else than them."""
    kinds = set(getattr(config, "layer_types", None) or [])
    window = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in kinds if kinds else window is not None
    other = kinds - {"full_attention", "sliding_attention"}
    if other:
        raise _refusal(model, f"it has layers of type {', '.join(sorted(other))}")
    if slides and (window is None or window < context_length):
        raise _refusal(
            model,
            f"it has sliding-window attention over {window} tokens, fewer than "
            f"model.context_length = {context_length}",
        )


@torch.inference_mode()
def _require_equal_logits(model: Any, config: Any) -> None:
    """Two rows of 2 and 5 tokens: prefill, padded; then one more token each, from the cache.

    Logits are compared in full precision only: in half precision a mixture of experts may route a
    token otherwise, and rightly so.
    """
    device = next(model.parameters()).device
    rows = [[(7 * i + 3) % config.vocab_size for i in range(n)] for n in (3, 6)]
    cache = SlotCache(config.num_hidden_layers)
    try:
        plain = [model(torch.tensor([ids], device=device), use_cache=False).logits for ids in rows]
        for start, stop in ((0, -1), (-1, None)):
            new = [ids[start:stop] for ids in rows]
            starts = [0 if start == 0 else len(ids) - 1 for ids in rows]
            logits_RLV = cached_logits(model, cache, [2, 0], starts, new, device)
    except Exception as error:
        raise _refusal(model, f"a trial pass failed: {type(error).__name__}: {error}") from error
    expected = torch.stack([logits[0, -1] for logits in plain])
    scale = expected.abs().max()
    deviation = float((logits_RLV[:, -1] - expected).abs().max() / scale)
    if expected.dtype.itemsize >= 4 and deviation > TOLERANCE:
        raise _refusal(
            model,
            f"with a cache and padding its logits differ from those of a plain pass by "
            f"{deviation:.1%} of their size: it computes positions or attention masks itself",
        )


def _refusal(model: Any, reason: str) -> ConfigError:
    return ConfigError(
        f"the in-process sampler cannot serve {type(model).__name__}: {reason}. It serves causal "
        "LMs whose layers all attend to every position, such as Llama, Qwen2, Qwen3, GPT-2"
    )
