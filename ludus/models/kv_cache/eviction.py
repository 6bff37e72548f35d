"""KV-cache eviction and preemption."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ludus.core.errors import ConfigError
from ludus.models.kv_cache.paging import BLOCK, Block, BlockTree

BlockRequest = tuple[list[Block], int]
"""The blocks that a turn's session holds, and the most blocks that the step may add to them."""


def evict(
    tree: BlockTree,
    idle: Iterable[list[Block]],
    decode: Sequence[BlockRequest],
    prefill: Sequence[BlockRequest],
) -> tuple[int, int]:
    """Free blocks for a step; returns how many decode turns and prefill turns fit.

    Blocks are evicted first from idle sessions, in the given order, then from prefill turns, then
    from the last decode turns, which are thereby preempted. Evicted tokens are recomputed when they
    are needed again. At least one turn fits, now or in the next step.

    Errors: ConfigError where the cache is too small for a single turn.
    """
    if tree.max_blocks is None:
        return len(decode), len(prefill)
    limit = tree.max_blocks

    def num_free() -> int:
        return limit - tree.num_used

    def release_until(evictable: Iterable[list[Block]], needed: int) -> None:
        for blocks in evictable:
            if num_free() >= needed:
                return
            tree.release(blocks)

    num_decode = len(decode)
    needed = sum(more for _, more in decode)
    release_until(idle, needed + sum(more for _, more in prefill))
    release_until([blocks for blocks, _ in reversed(prefill)], needed)
    while num_decode and num_free() < needed:
        num_decode -= 1
        needed -= decode[num_decode][1]
        tree.release(decode[num_decode][0])
    if num_decode < len(decode):
        return num_decode, 0
    num_prefill, budget = 0, num_free() - needed - num_decode  # reserve a block per decode turn
    while num_prefill < len(prefill) and prefill[num_prefill][1] <= budget:
        budget -= prefill[num_prefill][1]
        num_prefill += 1
    if num_prefill or num_decode or not prefill:
        return num_decode, num_prefill
    needed = prefill[0][1]
    release_until([blocks for blocks, _ in reversed(prefill)], needed)
    if num_free() < needed:
        raise ConfigError(
            f"the sampler's KV cache holds {BLOCK * limit:,} tokens, too few for one conversation "
            f"of up to {BLOCK * needed:,}: raise sampler.args.cache_gib, or lower "
            "model.context_length"
        )
    return 0, 1
