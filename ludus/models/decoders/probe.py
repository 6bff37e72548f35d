"""Selects the decoder of a model and verifies it: config checks, then a trial pass.

The engine requires that a layer's only state is keys and values of all positions, and that the
caller sets positions and attention mask. Most causal LMs meet this. State-space models, sliding
windows and custom attention biases do not: they would silently sample from a wrong distribution.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, Literal

import torch

from ludus.core.errors import ConfigError
from ludus.models.decoders.base import Decoder
from ludus.models.decoders.generic import GenericDecoder
from ludus.models.decoders.lean import LeanDecoder
from ludus.models.decoders.llama import Llama, NotLlama, read
from ludus.models.decoders.native import Unavailable
from ludus.models.decoders.native.decoder import NativeDecoder
from ludus.models.decoders.sampling_copy import SamplingCopy
from ludus.models.decoders.static import StaticDecoder
from ludus.models.kv_cache.paging import BLOCK, Block, BlockTree
from ludus.models.kv_cache.step_inputs import StepInputsBuilder

logger = logging.getLogger(__name__)

TOLERANCE = 1e-4
"""Allowed deviation relative to the largest logit; float32 rounding causes about 1e-6."""


def choose_decoder(
    model: Any,
    context_length: int,
    path: Literal["auto", "fast", "static", "generic"] = "auto",
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
) -> Decoder:
    """Returns a decoder for the model, verified against a plain pass of the model's own module.

    Puts the model into evaluation mode. Errors: ConfigError with the reason why the engine cannot
    serve the model.
    """
    model.eval()
    stored = next(model.parameters()).dtype
    half = dtype == "bfloat16" or (dtype == "auto" and stored == torch.bfloat16)
    if dtype == "float32" and stored != torch.float32:
        raise ConfigError(
            f"sampler.args.dtype: float32 needs weights in float32, not {_name(stored)}; "
            "set model.dtype: float32"
        )
    if dtype == "bfloat16" and stored == torch.bfloat16:
        raise ConfigError(
            "sampler.args.dtype: bfloat16 has no effect on weights in bfloat16 (model.dtype); "
            "remove it"
        )
    config = model.config.get_text_config()
    if config._attn_implementation != "sdpa":
        raise _refusal(
            model,
            f"its attention is {config._attn_implementation!r}; load it with "
            "attn_implementation='sdpa', if it supports that",
        )
    _require_full_attention(model, config, context_length)
    if path != "generic":
        try:
            return _fast_decoder(model, context_length, half, static=path == "static")
        except NotLlama as reason:
            if path != "auto":
                raise ConfigError(
                    f"the sampler's {path} path cannot serve {type(model).__name__}: {reason}"
                ) from None
            _log_generic_path(type(model).__name__, str(reason))
    decoder = GenericDecoder(model)
    try:
        deviation = _trial_deviation(model, decoder, context_length)
    except Exception as error:
        raise _refusal(model, f"a trial pass failed: {type(error).__name__}: {error}") from error
    if deviation > TOLERANCE and next(model.parameters()).dtype.itemsize >= 4:
        raise _refusal(
            model,
            f"with a cache and padding its logits differ from those of a plain pass by "
            f"{deviation:.1%} of their size: it computes positions or attention masks itself",
        )
    if half and stored != torch.bfloat16:  # the check above was of the same module in float32
        decoder = GenericDecoder(model, SamplingCopy(model))
        _trial_deviation(model, decoder, context_length)  # a first pass, to know the cache's size
    return decoder


def _fast_decoder(model: Any, context_length: int, half: bool, *, static: bool) -> Decoder:
    """Returns the fastest decoder for the model's device. Errors: NotLlama, also where a trial pass
    shows that the model does not compute what its structure suggests."""
    llama = read(model, context_length)
    weight = llama.embedding.weight
    rounds = half and weight.dtype.itemsize >= 4
    on_cpu = weight.device.type == "cpu" and not static
    decoder: Decoder | None = _native_decoder(llama, half) if on_cpu else None
    copy = None
    if decoder is None:
        if rounds:
            copy = SamplingCopy(model, keep=[norm.module.weight for norm in llama.norms()])
            llama = read(copy.module, context_length)
        decoder = LeanDecoder(llama, copy=copy) if on_cpu else StaticDecoder(llama, copy=copy)
    try:
        deviation = _trial_deviation(model, decoder, context_length)
    except RuntimeError as error:
        if static or not isinstance(decoder, StaticDecoder):
            raise
        logger.warning("sampling without CUDA graphs, which is slower: %s", error)
        decoder = LeanDecoder(llama, copy=copy)
        deviation = _trial_deviation(model, decoder, context_length)
    # bfloat16 has 8 bits of precision.
    tolerance = 0.05 if half or weight.dtype.itemsize < 4 else TOLERANCE
    if deviation > tolerance:
        raise NotLlama(
            f"its logits differ from those of the same weights in Llama's architecture by "
            f"{deviation:.1%} of their size"
        )
    return decoder


def _native_decoder(llama: Llama, half: bool) -> Decoder | None:
    """Returns the native decoder; None where it is not available."""
    try:
        return NativeDecoder(llama, torch.bfloat16 if half else torch.float32)
    except (Unavailable, ValueError) as reason:
        logger.info("sampling in plain torch, not in native code: %s", reason)
        return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.cache
def _log_generic_path(name: str, reason: str) -> None:
    """Log once per model class."""
    logger.info("sampling %s on the slower generic path: %s", name, reason)


def _require_full_attention(model: Any, config: Any, context_length: int) -> None:
    """Refuse layers that do not attend to all positions, or that keep another state."""
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
def _trial_deviation(model: Any, decoder: Decoder, context_length: int) -> float:
    """Returns the largest difference from a plain pass's logits, relative to the largest logit.

    Trial: three rows, two of which share a full block. First a padded prefill, then a decode step,
    run three times so that a CUDA graph is captured and replayed. In half precision a mixture of
    experts may legitimately route a token differently.
    """
    device = next(model.parameters()).device
    vocab = model.config.get_text_config().vocab_size
    longest = max(6, min(BLOCK + 4, context_length))
    rows = [[(7 * i + n) % vocab for i in range(n)] for n in (3, longest)]
    rows.append([*rows[1][:-2], 1, 2])
    plain = [model(torch.tensor([ids], device=device), use_cache=False).logits for ids in rows]
    expected_RV = torch.stack([logits[0, -1] for logits in plain])
    tree = BlockTree(decoder.copy)
    blocks: list[list[Block]] = [[] for _ in rows]
    for cut in (1, 0):
        builder = StepInputsBuilder()
        for number, ids in enumerate(rows):
            blocks[number] = tree.admit(blocks[number], ids[: len(ids) - cut], builder)
        decoder.reserve(tree.num_blocks)
        for _ in range(1 if cut else 3):
            logits_RV = decoder.forward(builder.build())
    deviation = float((logits_RV - expected_RV).abs().max() / expected_RV.abs().max())
    decoder.clear()
    return deviation


def _refusal(model: Any, reason: str) -> ConfigError:
    return ConfigError(
        f"the in-process sampler cannot serve {type(model).__name__}: {reason}. It serves causal "
        "LMs whose layers all attend to every position, such as Llama, Qwen2, Qwen3, GPT-2"
    )
