"""Room for keys and values where there is only so much: who gives up blocks, and who waits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ludus.core.errors import ConfigError
from ludus.models.kv_cache.paging import BLOCK, Block, BlockTree

Claim = tuple[list[Block], int]
"""The blocks that a turn's session holds, and the most that the round may add to them."""


def make_room(
    tree: BlockTree, idle: Iterable[list[Block]], old: Sequence[Claim], new: Sequence[Claim]
) -> tuple[int, int]:
    """How many of the turns that run, and of those to be admitted, take part in a round.

    Blocks are taken first from idle sessions, then from turns that wait, then from the last of
    those that run, which then wait; what is needed again is computed anew. At least one turn takes
    part, or will in the next round. Errors: ConfigError where there is no room for a single one.
    """
    if tree.max_blocks is None:
        return len(old), len(new)
    limit = tree.max_blocks

    def free() -> int:
        return limit - tree.num_used

    kept = len(old)
    needed = sum(more for _, more in old)
    _take(tree, idle, needed + sum(more for _, more in new), limit)
    _take(tree, [blocks for blocks, _ in reversed(new)], needed, limit)
    while kept and free() < needed:
        kept -= 1
        needed -= old[kept][1]
        tree.release(old[kept][0])
    if kept < len(old):
        return kept, 0
    chosen, left = 0, free() - needed - kept  # a block each to go on
    while chosen < len(new) and new[chosen][1] <= left:
        left -= new[chosen][1]
        chosen += 1
    if chosen or kept or not new:
        return kept, chosen
    _take(tree, [blocks for blocks, _ in reversed(new)], new[0][1], limit)
    if free() < new[0][1]:
        raise ConfigError(
            f"the sampler has room for {BLOCK * limit:,} tokens of keys and values, too few for "
            f"one conversation of up to {BLOCK * new[0][1]:,}: lower model.context_length"
        )
    return 0, 1


def _take(tree: BlockTree, held: Iterable[list[Block]], wanted: int, limit: int) -> None:
    """Release what is held, one after another, until so many blocks are free."""
    for blocks in held:
        if limit - tree.num_used >= wanted:
            return
        tree.release(blocks)
