"""Selects the decoder of a model and verifies it: config checks, then a trial pass.

The engine requires that a layer's only state is keys and values of all positions, that it attends
to all of them or to the last ones (a sliding window), and that the caller sets positions and
attention mask. Most causal LMs meet this. State-space models, attention in chunks and custom
attention biases do not: they would silently sample from a wrong distribution.

A window is usually much longer than a trial's rows. So model and decoder get a window of
TRIAL_WINDOW tokens for the trial: it shows which layers slide, and where a window begins.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any, Literal

import torch

from ludus.core.errors import ConfigError
from ludus.models.decoders.base import Decoder
from ludus.models.decoders.generic import GenericDecoder
from ludus.models.decoders.lean import LeanDecoder
from ludus.models.decoders.llama import NotLlama, read
from ludus.models.decoders.native import Unavailable
from ludus.models.decoders.native.decoder import NativeDecoder
from ludus.models.decoders.parts import Llama
from ludus.models.decoders.sampling_copy import SamplingCopy
from ludus.models.decoders.static import StaticDecoder
from ludus.models.kv_cache.paging import BLOCK, Block, BlockTree
from ludus.models.kv_cache.step_inputs import StepInputsBuilder
from ludus.models.windows import UnknownAttention, layer_windows, narrowed

logger = logging.getLogger(__name__)

TOLERANCE = 1e-4
"""Allowed deviation relative to the largest logit; float32 rounding causes about 1e-6."""

HALF_TOLERANCE = 0.05
"""The same of products in bfloat16, which has 8 bits of precision."""
ROUNDED_TOLERANCE = 0.5
"""The same where float32 has been compared before, and for mixtures of experts: a rounded score may
choose another expert."""

TRIAL_WINDOW = 5
"""Sliding windows in a trial pass: shorter than its longest row, and across a block's border."""


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
    if config._attn_implementation not in ("sdpa", "eager"):
        raise _refusal(
            model,
            f"its attention is {config._attn_implementation!r}; load it with "
            "attn_implementation='sdpa', or 'eager' if it does not support that",
        )
    try:
        windows = layer_windows(config, context_length)
    except UnknownAttention as reason:
        raise _refusal(model, str(reason)) from None
    if path != "generic":
        try:
            return _fast_decoder(model, context_length, half, windows, static=path == "static")
        except NotLlama as reason:
            if path != "auto":
                raise ConfigError(
                    f"the sampler's {path} path cannot serve {type(model).__name__}: {reason}"
                ) from None
            _log_generic_path(type(model).__name__, str(reason))
    decoder = GenericDecoder(model, windows=windows)
    try:
        deviation = _trial_deviation(model, decoder, context_length, windows)
    except ConfigError:
        raise
    except Exception as error:
        raise _refusal(model, f"a trial pass failed: {type(error).__name__}: {error}") from error
    if deviation > TOLERANCE and next(model.parameters()).dtype.itemsize >= 4:
        raise _refusal(
            model,
            f"with a cache and padding its logits differ from those of a plain pass by "
            f"{deviation:.1%} of their size: it computes positions or attention masks itself",
        )
    if half and stored != torch.bfloat16:  # the check above was of the same module in float32
        decoder = GenericDecoder(model, SamplingCopy(model), windows)
        _trial_deviation(model, decoder, context_length, windows)  # to know the cache's size
    return decoder


def _fast_decoder(
    model: Any, context_length: int, half: bool, windows: Sequence[int], *, static: bool
) -> Decoder:
    """Returns the fastest decoder for the model's device. Errors: NotLlama, also where a trial pass
    shows that the model does not compute what its structure suggests."""
    llama = read(model, context_length)
    weight = llama.embedding.weight
    rounds = half and weight.dtype.itemsize >= 4
    if rounds:  # rounding hides small deviations: what was read is compared in float32
        exact = _trial_deviation(model, LeanDecoder(llama), context_length, windows)
        _require_near(exact, TOLERANCE)
    on_cpu = weight.device.type == "cpu" and not static
    decoder: Decoder | None = _native_decoder(llama, half) if on_cpu else None
    copy = None
    if decoder is None:
        if rounds:
            copy = SamplingCopy(model, keep=[norm.module.weight for norm in llama.norms()])
            llama = read(copy.module, context_length)
        decoder = LeanDecoder(llama, copy=copy) if on_cpu else StaticDecoder(llama, copy=copy)
    try:
        deviation = _trial_deviation(model, decoder, context_length, windows)
    except RuntimeError as error:
        if static or not isinstance(decoder, StaticDecoder):
            raise
        logger.warning("sampling without CUDA graphs, which is slower: %s", error)
        decoder = LeanDecoder(llama, copy=copy)
        deviation = _trial_deviation(model, decoder, context_length, windows)
    tolerance = TOLERANCE
    if half or weight.dtype.itemsize < 4:
        tolerance = ROUNDED_TOLERANCE if rounds or llama.experts else HALF_TOLERANCE
    _require_near(deviation, tolerance)
    return decoder


def _require_near(deviation: float, tolerance: float) -> None:
    if not deviation <= tolerance:
        raise NotLlama(
            f"its logits differ from those of the same weights in Llama's architecture by "
            f"{deviation:.1%} of their size"
        )


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


def _trial_deviation(
    model: Any, decoder: Decoder, context_length: int, windows: Sequence[int]
) -> float:
    """Returns the largest difference from a plain pass's logits, relative to the largest logit;
    with sliding windows, of narrow ones."""
    if not any(windows):
        return _deviation(model, decoder, context_length)
    decoder.limit_windows(TRIAL_WINDOW)
    try:
        with narrowed(model.config.get_text_config(), TRIAL_WINDOW):
            return _deviation(model, decoder, context_length)
    finally:
        decoder.limit_windows(None)


@torch.inference_mode()
def _deviation(model: Any, decoder: Decoder, context_length: int) -> float:
    """Returns the deviation in a trial.

    Trial: three rows, two of which share a full block. First a padded prefill, then a decode step,
    run three times so that a CUDA graph is captured and replayed. In half precision a mixture of
    experts may legitimately route a token differently.
    """
    device = next(model.parameters()).device
    vocab = model.config.get_text_config().vocab_size
    longest = max(6, min(BLOCK + 4, context_length))
    rows = [[(7 * i + n) % vocab for i in range(n)] for n in (3, longest)]
    rows.append([*rows[1][:-2], 1, 2])
    try:
        plain = [model(torch.tensor([ids], device=device), use_cache=False).logits for ids in rows]
    except Exception as error:
        reason = f"a pass of its own module failed: {type(error).__name__}: {error}"
        raise _refusal(model, reason) from error
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
        "LMs whose layers attend to every position or to a sliding window, such as Llama, Qwen3, "
        "Gemma 3, GPT-2"
    )
