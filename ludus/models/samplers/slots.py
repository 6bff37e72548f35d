"""The state of the turns that are being decoded, in arrays: one seat a turn.

Bookkeeping of a decode step is a handful of array operations, however many turns there are.

Shape suffixes: S seats, W the most tokens a turn may sample, B blocks of the longest row, K stop
ids.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from ludus.models.kv_cache.paging import BLOCK, Pass
from ludus.models.samplers.base import SamplingParams

Index = NDArray[np.intp]


@dataclass(slots=True)
class Seats:
    """Arrays by seat; they grow where a turn needs it."""

    last_ids: NDArray[np.int64]
    """The newest token of the turn: sampled, its keys and values not yet computed."""
    positions: NDArray[np.int32]
    """Where that token stands in the conversation."""
    num_sampled: NDArray[np.int32]
    max_tokens: NDArray[np.int32]
    watched: NDArray[np.bool_]
    """Whether the turn has stop strings."""
    tables: NDArray[np.int32]  # [S, B]
    uniforms: NDArray[np.float64]  # [S, W]
    token_ids: NDArray[np.int64]  # [S, W]
    logprobs: NDArray[np.float64]  # [S, W]
    stop_ids: NDArray[np.int64]  # [S, K], -1: none

    @classmethod
    def empty(cls) -> Seats:
        """No seats."""
        return cls(
            np.zeros(0, np.int64),
            np.zeros(0, np.int32),
            np.zeros(0, np.int32),
            np.zeros(0, np.int32),
            np.zeros(0, np.bool_),
            np.zeros((0, 0), np.int32),
            np.zeros((0, 0)),
            np.zeros((0, 0), np.int64),
            np.zeros((0, 0)),
            np.full((0, 0), -1, np.int64),
        )

    def sit(self, seat: int, params: SamplingParams) -> None:
        """Prepare a seat for a turn. Its random numbers are a function of the seed alone."""
        width, stops = params.max_tokens, params.stop_token_ids
        self._grow(seat + 1, width, len(stops))
        self.num_sampled[seat] = 0
        self.max_tokens[seat] = width
        self.watched[seat] = bool(params.stop)
        self.uniforms[seat, :width] = np.random.Generator(np.random.Philox(params.seed)).random(
            width
        )
        self.stop_ids[seat] = -1
        self.stop_ids[seat, : len(stops)] = stops

    def set_table(self, seat: int, blocks: list[int], position: int) -> None:
        """Say which blocks the turn reads, and where its newest token will stand."""
        if len(blocks) > self.tables.shape[1]:
            self.tables = _grown(self.tables, (len(self.tables), 2 * len(blocks)), 0)
        self.tables[seat, : len(blocks)] = blocks
        self.positions[seat] = position

    def next_pass(self, seats: Index) -> Pass:
        """One more token for each of these seats."""
        positions = self.positions[seats]
        rows = np.arange(len(seats), dtype=np.int32)
        tables = self.tables[seats, : int(positions.max()) // BLOCK + 1]
        slots = tables[rows, positions // BLOCK] * np.int32(BLOCK) + positions % np.int32(BLOCK)
        return Pass(self.last_ids[seats], positions, rows, rows, slots, tables, rows)

    def uniforms_of(self, seats: Index) -> NDArray[np.float64]:
        """The random numbers that choose the next tokens."""
        return self.uniforms[seats, self.num_sampled[seats]]

    def record(
        self, seats: Index, token_ids: NDArray[np.int64], logprobs: NDArray[np.float64]
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Add a token to each turn; returns which hit a stop id, and which their length."""
        number = self.num_sampled[seats]
        self.token_ids[seats, number] = token_ids
        self.logprobs[seats, number] = logprobs
        self.last_ids[seats] = token_ids
        self.positions[seats] += 1
        self.num_sampled[seats] = number + 1
        stopped = (self.stop_ids[seats] == token_ids[:, None]).any(axis=1)
        return stopped, number + 1 >= self.max_tokens[seats]

    def sampled(self, seat: int) -> list[int]:
        """The tokens of the turn so far."""
        ids: list[int] = self.token_ids[seat, : self.num_sampled[seat]].tolist()
        return ids

    def _grow(self, seats: int, width: int, stops: int) -> None:
        size = max(len(self.positions), 2 * seats if seats > len(self.positions) else 0)
        widths = {
            "tables": self.tables.shape[1],
            "stop_ids": max(stops, self.stop_ids.shape[1]),
            **dict.fromkeys(
                ("uniforms", "token_ids", "logprobs"), max(width, self.uniforms.shape[1])
            ),
        }
        for part in fields(self):
            array = getattr(self, part.name)
            shape = (size, widths[part.name]) if part.name in widths else (size,)
            if shape != array.shape:
                filler = -1 if part.name == "stop_ids" else 0
                setattr(self, part.name, _grown(array, shape, filler))


def joined(first: Pass | None, second: Pass | None) -> Pass:
    """Two passes as one, the rows of the first before those of the second."""
    if first is None or second is None:
        only = first or second
        assert only is not None
        return only
    width = max(first.tables.shape[1], second.tables.shape[1])
    tokens, rows = np.int32(len(first.ids)), np.int32(len(first.tables))
    return Pass(
        np.concatenate([first.ids, second.ids]),
        np.concatenate([first.positions, second.positions]),
        np.concatenate([first.rows, second.rows + rows]),
        np.concatenate([first.write_tokens, second.write_tokens + tokens]),
        np.concatenate([first.write_slots, second.write_slots]),
        np.concatenate([_grown(p.tables, (len(p.tables), width), 0) for p in (first, second)]),
        np.concatenate([first.outputs, second.outputs + tokens]),
    )


def _grown(array: NDArray, shape: tuple[int, ...], filler: int) -> NDArray:  # type: ignore[type-arg]
    grown = np.full(shape, filler, array.dtype)
    grown[tuple(slice(size) for size in array.shape)] = array
    return grown
