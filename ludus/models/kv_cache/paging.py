"""Paged KV cache: blocks in a prefix tree that all sessions share.

The cache consists of blocks of BLOCK positions. A block is a node of a tree whose parent holds the
preceding positions. Conversations with a common beginning share its nodes, so common tokens are
computed and stored once. Where two conversations diverge inside a block, the common positions are
copied to a new block. A block is freed when no session refers to it.

    ids of session a    0 1 2 ... 15 | 16 17 18              two blocks
    ids of session b    0 1 2 ... 15 | 16 17 99              shares the first, copies 16 and 17

A token whose keys and values are needed in several blocks is computed once and written to each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ludus.models.kv_cache.step_inputs import StepInputsBuilder

BLOCK = 16
"""Positions per block; ludus/models/decoders/native/decoder.c defines the same number."""


class Block:
    """A tree node: `token_ids` of up to BLOCK positions, preceded by those of its ancestors."""

    __slots__ = ("by_ids", "children", "index", "parent", "refs", "token_ids")

    def __init__(self, index: int, parent: Block | None) -> None:
        self.index = index
        self.parent = parent
        self.token_ids: tuple[int, ...] = ()
        self.refs = 1
        self.children: dict[Block, None] = {}  # in creation order
        self.by_ids: dict[tuple[int, ...], dict[Block, None]] = {}  # children; twins in order

    def set_tokens(self, token_ids: Sequence[int]) -> None:
        """Set the block's tokens. Siblings with the same ids are twins: two sessions sampled the
        same tokens."""
        self.clear_tokens()
        self.token_ids = tuple(token_ids)
        if self.parent is not None and self.token_ids:
            self.parent.by_ids.setdefault(self.token_ids, {})[self] = None

    def clear_tokens(self) -> None:
        if self.parent is not None and self.token_ids:
            twins = self.parent.by_ids[self.token_ids]
            del twins[self]
            if not twins:
                del self.parent.by_ids[self.token_ids]
        self.token_ids = ()

    def path(self) -> list[Block]:
        """The blocks from the first position to this one."""
        block, blocks = self, []
        while block.parent is not None:
            blocks.append(block)
            block = block.parent
        return blocks[::-1]


class BlockTree:
    """The blocks of all sessions. A session is represented by the list of its blocks.

    Args:
        copy: copy(source, target, count) copies the first `count` positions of a block to another.
        max_blocks: capacity of the storage; callers evict before they exceed it.
    """

    def __init__(
        self, copy: Callable[[int, int, int], None], max_blocks: int | None = None
    ) -> None:
        self._copy = copy
        self.max_blocks = max_blocks
        self._root = Block(-1, None)
        self._free: list[int] = []
        self.num_blocks = 0
        """Blocks that the storage must hold."""

    @property
    def num_used(self) -> int:
        """Blocks that sessions hold; a shared block counts once."""
        return self.num_blocks - len(self._free)

    def admit(
        self, blocks: list[Block], prompt: list[int], builder: StepInputsBuilder
    ) -> list[Block]:
        """Add the prefill of `prompt` to `builder` as one row; returns the session's new blocks.

        Only tokens that no session holds are computed. The last token is always computed, unless
        another row of this pass computes it, since its logits give the first new token.

        Args:
            blocks: the session's blocks so far; those not needed are released.
        """
        path, own, source, count = self._match(prompt, blocks)
        start = BLOCK * len(path)
        rest = tuple(prompt[start : start + BLOCK])
        for block in path:
            block.refs += 1
        if source is not None and count:
            if source is own and own.refs == 1 and not own.children:
                own.refs += 1
                own.set_tokens(rest)
                path.append(own)
            else:
                parent = path[-1] if path else self._root
                path.append(self._copy_block(source, count, rest, parent, builder))
            start += count
        for block in reversed(blocks):
            self._release_block(block)
        last, cached = len(prompt) - 1, start == len(prompt)
        while start < len(prompt):
            number, offset = divmod(start, BLOCK)
            ids = prompt[BLOCK * number : BLOCK * (number + 1)]
            if number == len(path):
                path.append(self._new_block(path[-1] if path else self._root, ids))
            first_slot = BLOCK * path[number].index
            builder.add_tokens(
                ids[offset:], start, range(first_slot + offset, first_slot + len(ids))
            )
            start += len(ids) - offset
        output = len(builder.ids) - 1
        if cached:
            slot = BLOCK * path[last // BLOCK].index + last % BLOCK
            token = builder.token_of_slot.get(slot)
            if token is None:  # keys and values are cached, logits are not
                builder.add_tokens(prompt[last:], last, ())
                token = len(builder.ids) - 1
            output = token
        builder.finish_row([block.index for block in path], output)
        return path

    def extend(self, blocks: list[Block], token_ids: Sequence[int]) -> Block:
        """Append an empty block; `token_ids` fill the last block before it."""
        if blocks:
            blocks[-1].set_tokens(token_ids)
        blocks.append(self._new_block(blocks[-1] if blocks else self._root, ()))
        return blocks[-1]

    def release(self, blocks: list[Block]) -> None:
        """Release a session's blocks and empty the list."""
        for block in reversed(blocks):
            self._release_block(block)
        blocks.clear()

    def _match(
        self, prompt: list[int], blocks: list[Block]
    ) -> tuple[list[Block], Block | None, Block | None, int]:
        """Returns the full blocks that match the prompt; the session's own block after them; the
        block that matches best there, and its number of matching tokens.

        Twins have different descendants, so all are followed; the first of the best is taken.
        """
        nodes, depth = [self._root], 0
        while BLOCK * (depth + 1) <= len(prompt):
            ids = tuple(prompt[BLOCK * depth : BLOCK * (depth + 1)])
            found = [child for node in nodes for child in node.by_ids.get(ids, ())]
            if not found:
                break
            nodes, depth = found, depth + 1
        own = blocks[depth] if depth < len(blocks) else None
        rest = tuple(prompt[BLOCK * depth : BLOCK * (depth + 1)])
        best: tuple[Block, Block | None, Block | None, int] | None = None
        for node in nodes:
            mine = own if own is not None and own.parent is node else None
            source, count = _longest_match(node, rest, mine)
            if best is None or count > best[3]:
                best = node, mine, source, count
        assert best is not None
        return best[0].path(), *best[1:]

    def _copy_block(
        self,
        source: Block,
        count: int,
        ids: tuple[int, ...],
        parent: Block,
        builder: StepInputsBuilder,
    ) -> Block:
        """Returns a new block whose first `count` positions are those of `source`."""
        block = self._new_block(parent, ids)
        tokens = [builder.token_of_slot.get(BLOCK * source.index + i) for i in range(count)]
        if any(token is None for token in tokens):
            self._copy(source.index, block.index, count)
        for offset, token in enumerate(tokens):
            if token is not None:  # computed in this pass
                builder.add_write(token, BLOCK * block.index + offset)
        return block

    def _new_block(self, parent: Block, token_ids: Sequence[int]) -> Block:
        if not self._free:
            size = max(16, self.num_blocks * 3 // 2)
            if self.max_blocks is not None:
                size = min(size, self.max_blocks)
                assert size > self.num_blocks, "no free block"
            self._free = list(range(size - 1, self.num_blocks - 1, -1))
            self.num_blocks = size
        block = Block(self._free.pop(), parent)
        parent.children[block] = None
        block.set_tokens(token_ids)
        return block

    def _release_block(self, block: Block) -> None:
        block.refs -= 1
        if not block.refs and block.parent is not None:
            block.clear_tokens()
            del block.parent.children[block]
            self._free.append(block.index)


def _longest_match(
    parent: Block, ids: tuple[int, ...], own: Block | None
) -> tuple[Block | None, int]:
    """Returns the child of `parent` with the longest common prefix with `ids`, and its length."""
    if not ids:
        return None, 0
    exact = parent.by_ids.get(ids)
    if exact and (own is None or own.token_ids != ids):
        return next(iter(exact)), len(ids)
    best, longest = None, 0
    for child in parent.children if own is None else [own, *parent.children]:
        count = 0
        for a, b in zip(child.token_ids, ids, strict=False):
            if a != b:
                break
            count += 1
        if count > longest:
            best, longest = child, count
    return best, longest
