"""Capacity of the KV cache: what a key allows, or a share of the machine's memory."""

from __future__ import annotations

from ludus.core.errors import ConfigError
from ludus.core.system.machine import machine_memory
from ludus.models.decoders.base import Decoder
from ludus.models.kv_cache.paging import BLOCK

MEMORY_FRACTION = 0.25
"""Share of the machine's memory that the cache may fill by default; the learner has the rest."""


def limit_cache(decoder: Decoder, cache_gib: float | None, context_length: int) -> None:
    """Set `decoder.max_blocks`: `cache_gib`, else the decoder's own limit, else MEMORY_FRACTION.

    By default at least one conversation of `context_length` fits.

    Errors: ConfigError where `cache_gib` holds no conversation of `context_length`.
    """
    needed = context_length // BLOCK + 2  # a branch copies a block before it releases one
    size = decoder.bytes_per_block
    if cache_gib is not None:
        blocks = int(cache_gib * 2**30) // size
        if blocks < needed:
            raise ConfigError(
                f"sampler.args.cache_gib: {cache_gib:g} GiB hold {BLOCK * blocks:,} tokens, too "
                f"few for one conversation of model.context_length = {context_length}; set at "
                f"least {needed * size / 2**30:.3g}"
            )
        decoder.max_blocks = blocks
    elif decoder.max_blocks is None:
        decoder.max_blocks = max(needed, int(MEMORY_FRACTION * machine_memory()) // size)
