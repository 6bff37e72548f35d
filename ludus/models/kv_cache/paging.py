"""Which tokens a pass computes: blocks of keys and values, in a prefix tree over all sessions.

The cache is cut into blocks of BLOCK positions. A block is a node of a tree: its parent holds the
positions before it, so that two conversations that begin alike go through the same nodes, and their
common tokens are computed and stored once. A block that two conversations need to continue
differently is copied up to the fork. A block lives as long as a session needs it.

    ids of session a    0 1 2 ... 15 | 16 17 18              two blocks
    ids of session b    0 1 2 ... 15 | 16 17 99              shares the first, copies 16 and 17

A token whose keys and values are needed in several blocks is computed once and written to each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

BLOCK = 16
"""Positions in a block; ludus/models/decoders/native/decoder.c has the same number."""


class Block:
    """A node of the tree: `token_ids` of up to BLOCK positions, after those of its parents."""

    __slots__ = ("by_ids", "children", "index", "parent", "refs", "token_ids")

    def __init__(self, index: int, parent: Block | None) -> None:
        self.index = index
        self.parent = parent
        self.token_ids: tuple[int, ...] = ()
        self.refs = 1
        self.children: dict[Block, None] = {}  # in the order of their making
        self.by_ids: dict[tuple[int, ...], Block] = {}

    def name(self, token_ids: Sequence[int]) -> None:
        """Say what the block holds; of several with the same ids, the first is found by them."""
        self.unname()
        self.token_ids = tuple(token_ids)
        if self.parent is not None and self.token_ids:
            self.parent.by_ids.setdefault(self.token_ids, self)

    def unname(self) -> None:
        """Forget what the block holds."""
        if self.parent is not None and self.parent.by_ids.get(self.token_ids) is self:
            del self.parent.by_ids[self.token_ids]
        self.token_ids = ()


@dataclass(slots=True)
class Pass:
    """What a decoder computes at once. Sizes: N tokens, W writes, R rows.

    A token sees all positions up to its own in the blocks of its row. Its keys and values go to the
    slots (BLOCK * block + offset) of its writes, before any token looks. `outputs[r]` is the token
    whose logits row r wants; rows whose prompts are the same may want the same one.
    """

    ids: NDArray[np.int64]  # [N], in the order of rows and positions
    positions: NDArray[np.int32]  # [N]
    rows: NDArray[np.int32]  # [N]
    write_tokens: NDArray[np.int32]  # [W]
    write_slots: NDArray[np.int32]  # [W]
    tables: NDArray[np.int32]  # [R, blocks of the longest row]
    outputs: NDArray[np.int32]  # [R]

    def chunks(self, size: int) -> list[tuple[Pass, NDArray[np.intp]]]:
        """The same as passes of at most `size` tokens, each with the rows whose logits it gives."""
        if len(self.ids) <= size:
            return [(self, np.arange(len(self.outputs)))]
        parts = []
        for start in range(0, len(self.ids), size):
            stop = start + size
            written = (self.write_tokens >= start) & (self.write_tokens < stop)
            wanted = np.flatnonzero((self.outputs >= start) & (self.outputs < stop))
            part = Pass(
                self.ids[start:stop],
                self.positions[start:stop],
                self.rows[start:stop],
                self.write_tokens[written] - np.int32(start),
                self.write_slots[written],
                self.tables,
                self.outputs[wanted] - np.int32(start),
            )
            parts.append((part, wanted))
        return parts


@dataclass(slots=True)
class Planner:
    """Collects the rows of a pass."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    write_tokens: list[int] = field(default_factory=list)
    write_slots: list[int] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    computed: dict[int, int] = field(default_factory=dict)  # slot -> the token that goes there

    def add(self, token_ids: Sequence[int], start: int, slots: Sequence[int]) -> None:
        """Compute tokens of the row under way, from position `start` on, and store them.

        Without slots they are computed from what is stored already.
        """
        tokens = range(len(self.ids), len(self.ids) + len(slots))
        self.computed.update(zip(slots, tokens, strict=True))
        self.write_tokens.extend(tokens)
        self.write_slots.extend(slots)
        self.ids.extend(token_ids)
        self.positions.extend(range(start, start + len(token_ids)))
        self.rows.extend([len(self.tables)] * len(token_ids))

    def write(self, token: int, slot: int) -> None:
        """Write a token's keys and values to one more slot."""
        self.computed[slot] = token
        self.write_tokens.append(token)
        self.write_slots.append(slot)

    def finish_row(self, table: list[int], output: int) -> None:
        """End the row under way, which reads the blocks of `table`."""
        self.tables.append(table)
        self.outputs.append(output)

    def result(self) -> Pass:
        """The pass."""
        tables = np.zeros((len(self.tables), max(map(len, self.tables))), np.int32)
        for row, table in enumerate(self.tables):
            tables[row, : len(table)] = table
        return Pass(
            np.array(self.ids, np.int64),
            np.array(self.positions, np.int32),
            np.array(self.rows, np.int32),
            np.array(self.write_tokens, np.int32),
            np.array(self.write_slots, np.int32),
            tables,
            np.array(self.outputs, np.int32),
        )


class BlockTree:
    """The blocks of all sessions; a session is the list of its blocks.

    Args:
        copy: copies the first `count` positions of a block to another: copy(source, target, count).
        max_blocks: the most blocks that storage may have; whoever asks for more has made no room.
    """

    def __init__(
        self, copy: Callable[[int, int, int], None], max_blocks: int | None = None
    ) -> None:
        self._copy = copy
        self.max_blocks = max_blocks
        self._root = Block(-1, None)
        self._free: list[int] = []
        self.num_blocks = 0
        """Blocks that storage must have room for."""

    @property
    def num_used(self) -> int:
        """Blocks that sessions hold."""
        return self.num_blocks - len(self._free)

    def admit(self, blocks: list[Block], prompt: list[int], planner: Planner) -> list[Block]:
        """Plan what a session needs to go on after `prompt`; returns its blocks from now on.

        Of the prompt only what no session holds is computed; the last token always is (unless
        another row of this pass computes it), as its logits choose the first new token.

        Args:
            blocks: those that the session held so far; given back where they are not needed.
            planner: gets one row.
        """
        held, parent, start = self._whole_blocks(prompt)
        own = blocks[len(held)] if len(held) < len(blocks) else None
        rest = tuple(prompt[start : start + BLOCK])
        source, count = _longest(parent, rest, own if own and own.parent is parent else None)
        if source is not None and count:
            if source is own and own.refs == 1 and not own.children:
                own.refs += 1
                own.name(rest)
                held.append(own)
            else:
                held.append(self._copied(source, count, rest, parent, planner))
            start += count
        for block in reversed(blocks):
            self._release(block)
        last, whole = len(prompt) - 1, start == len(prompt)
        while start < len(prompt):
            at, offset = divmod(start, BLOCK)
            ids = prompt[BLOCK * at : BLOCK * (at + 1)]
            if at == len(held):
                held.append(self._new(held[-1] if held else self._root, ids))
            first = BLOCK * held[at].index
            planner.add(ids[offset:], start, range(first + offset, first + len(ids)))
            start += len(ids) - offset
        output = len(planner.ids) - 1
        if whole:
            slot = BLOCK * held[last // BLOCK].index + last % BLOCK
            pending = planner.computed.get(slot)
            if pending is None:  # its keys and values are there, its logits are not
                planner.add(prompt[last:], last, ())
                pending = len(planner.ids) - 1
            output = pending
        planner.finish_row([block.index for block in held], output)
        return held

    def extend(self, blocks: list[Block], token_ids: Sequence[int]) -> Block:
        """Add an empty block after the last, which holds `token_ids` and is full."""
        if blocks:
            blocks[-1].name(token_ids)
        blocks.append(self._new(blocks[-1] if blocks else self._root, ()))
        return blocks[-1]

    def release(self, blocks: list[Block]) -> None:
        """Give a session's blocks back."""
        for block in reversed(blocks):
            self._release(block)
        blocks.clear()

    def _whole_blocks(self, prompt: list[int]) -> tuple[list[Block], Block, int]:
        """The full blocks that hold the beginning of the prompt, the last, and their positions."""
        held: list[Block] = []
        parent = self._root
        while (start := BLOCK * len(held)) + BLOCK <= len(prompt):
            found = parent.by_ids.get(tuple(prompt[start : start + BLOCK]))
            if found is None:
                break
            found.refs += 1
            held.append(found)
            parent = found
        return held, parent, BLOCK * len(held)

    def _copied(
        self, source: Block, count: int, ids: tuple[int, ...], parent: Block, planner: Planner
    ) -> Block:
        """A new block that begins like another."""
        block = self._new(parent, ids)
        pending = [planner.computed.get(BLOCK * source.index + i) for i in range(count)]
        if any(token is None for token in pending):
            self._copy(source.index, block.index, count)
        for offset, token in enumerate(pending):
            if token is not None:
                planner.write(token, BLOCK * block.index + offset)
        return block

    def _new(self, parent: Block, token_ids: Sequence[int]) -> Block:
        if not self._free:
            size = max(16, self.num_blocks * 3 // 2)
            if self.max_blocks is not None:
                size = min(size, self.max_blocks)
                assert size > self.num_blocks, "no block is free"
            self._free = list(range(size - 1, self.num_blocks - 1, -1))
            self.num_blocks = size
        block = Block(self._free.pop(), parent)
        parent.children[block] = None
        block.name(token_ids)
        return block

    def _release(self, block: Block) -> None:
        block.refs -= 1
        if not block.refs and block.parent is not None:
            block.unname()
            del block.parent.children[block]
            self._free.append(block.index)


def _longest(parent: Block, ids: tuple[int, ...], own: Block | None) -> tuple[Block | None, int]:
    """The child of `parent` that shares most of its first positions with `ids`, and how many."""
    if not ids:
        return None, 0
    exact = parent.by_ids.get(ids)
    if exact is not None and (own is None or own.token_ids != ids):
        return exact, len(ids)
    best, most = None, 0
    for child in parent.children if own is None else [own, *parent.children]:
        count = 0
        for a, b in zip(child.token_ids, ids, strict=False):
            if a != b:
                break
            count += 1
        if count > most:
            best, most = child, count
    return best, most
