"""Inputs of one decoder forward pass: tokens, block tables, cache writes, requested logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class StepInputs:
    """Tokens that a decoder computes in one forward pass: N tokens, W cache writes, R rows.

    A token attends to all positions up to its own in the blocks of its row. Its keys and values are
    written to the cache slots (BLOCK * block + offset) of its writes before any token attends.
    `outputs[r]` is the token whose logits row r gets. Rows with the same prompt may share a token.
    """

    ids: NDArray[np.int64]  # [N], in the order of rows and positions
    positions: NDArray[np.int32]  # [N]
    rows: NDArray[np.int32]  # [N]
    write_tokens: NDArray[np.int32]  # [W]
    write_slots: NDArray[np.int32]  # [W]
    tables: NDArray[np.int32]  # [R, blocks of the longest row]
    outputs: NDArray[np.int32]  # [R]

    @classmethod
    def concat(cls, first: StepInputs | None, second: StepInputs | None) -> StepInputs:
        """Both as one; the rows of the first come before those of the second."""
        if first is None or second is None:
            present = first or second
            assert present is not None
            return present
        tokens, rows = np.int32(len(first.ids)), np.int32(len(first.tables))
        width = max(first.tables.shape[1], second.tables.shape[1])
        tables = np.zeros((len(first.tables) + len(second.tables), width), np.int32)
        tables[: int(rows), : first.tables.shape[1]] = first.tables
        tables[int(rows) :, : second.tables.shape[1]] = second.tables
        return cls(
            np.concatenate([first.ids, second.ids]),
            np.concatenate([first.positions, second.positions]),
            np.concatenate([first.rows, second.rows + rows]),
            np.concatenate([first.write_tokens, second.write_tokens + tokens]),
            np.concatenate([first.write_slots, second.write_slots]),
            tables,
            np.concatenate([first.outputs, second.outputs + tokens]),
        )

    def chunks(self, size: int) -> list[tuple[StepInputs, NDArray[np.intp]]]:
        """Chunks of at most `size` tokens, each with the rows whose logits it computes."""
        if len(self.ids) <= size:
            return [(self, np.arange(len(self.outputs)))]
        chunks = []
        for start in range(0, len(self.ids), size):
            stop = start + size
            writes = (self.write_tokens >= start) & (self.write_tokens < stop)
            output_rows = np.flatnonzero((self.outputs >= start) & (self.outputs < stop))
            chunk = StepInputs(
                self.ids[start:stop],
                self.positions[start:stop],
                self.rows[start:stop],
                self.write_tokens[writes] - np.int32(start),
                self.write_slots[writes],
                self.tables,
                self.outputs[output_rows] - np.int32(start),
            )
            chunks.append((chunk, output_rows))
        return chunks


@dataclass(slots=True)
class StepInputsBuilder:
    """Builds `StepInputs` row by row."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    write_tokens: list[int] = field(default_factory=list)
    write_slots: list[int] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    token_of_slot: dict[int, int] = field(default_factory=dict)
    """Cache slot to the token of this pass that is written there."""

    def add_tokens(self, token_ids: Sequence[int], start: int, slots: Sequence[int]) -> None:
        """Compute tokens of the current row from position `start` on, and write them to `slots`.

        With no slots, nothing is written: the cache has their keys and values already.
        """
        tokens = range(len(self.ids), len(self.ids) + len(slots))
        self.token_of_slot.update(zip(slots, tokens, strict=True))
        self.write_tokens.extend(tokens)
        self.write_slots.extend(slots)
        self.ids.extend(token_ids)
        self.positions.extend(range(start, start + len(token_ids)))
        self.rows.extend([len(self.tables)] * len(token_ids))

    def add_write(self, token: int, slot: int) -> None:
        """Write a token's keys and values to one more slot."""
        self.token_of_slot[slot] = token
        self.write_tokens.append(token)
        self.write_slots.append(slot)

    def finish_row(self, table: list[int], output: int) -> None:
        """End the current row, which reads the blocks of `table`."""
        self.tables.append(table)
        self.outputs.append(output)

    def build(self) -> StepInputs:
        tables = np.zeros((len(self.tables), max(map(len, self.tables))), np.int32)
        for row, table in enumerate(self.tables):
            tables[row, : len(table)] = table
        return StepInputs(
            np.array(self.ids, np.int64),
            np.array(self.positions, np.int32),
            np.array(self.rows, np.int32),
            np.array(self.write_tokens, np.int32),
            np.array(self.write_slots, np.int32),
            tables,
            np.array(self.outputs, np.int32),
        )
