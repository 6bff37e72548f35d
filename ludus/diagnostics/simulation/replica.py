"""A sampler replica: continuous batching as processor sharing, without an event for each token.

All sequences of a replica get a token a pass. So each has the same progress, the passes so far (the
virtual time V), and a turn of k tokens that begins at V ends at V + k. A pass takes
`PassCost.seconds(sequences, context)`. Its value changes with an arrival or a departure only;
between two events, the context is that of the last one. A prefill stops decoding while it lasts.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from ludus.diagnostics.simulation.clock import Clock

EPSILON = 1e-9
"""Seconds by which a timer must be earlier to replace another."""

TOLERANCE = 1e-6
"""Passes that a turn may lack at its end: rounding."""


@dataclass(frozen=True, slots=True)
class PassCost:
    """Seconds of a decoding pass: the slower of memory and arithmetic, and what is added.

    Args:
        read_s, context_read_s: reading the weights; keys and values of a token of context.
        row_flop_s, context_flop_s: arithmetic of a sequence; of a token of its context.
        fixed_s, row_s: launches of a pass; sampling and bookkeeping of a sequence.
    """

    read_s: float = 0.0
    context_read_s: float = 0.0
    row_flop_s: float = 0.0
    context_flop_s: float = 0.0
    fixed_s: float = 0.0
    row_s: float = 0.0

    def seconds(self, rows: int, context: float) -> float:
        """Of a pass over `rows` sequences with `context` tokens in all."""
        read = self.read_s + context * self.context_read_s
        flop = rows * self.row_flop_s + context * self.context_flop_s
        return (read if read > flop else flop) + self.fixed_s + rows * self.row_s


@dataclass(slots=True, eq=False)
class Turn:
    """A turn to sample: `tokens` after a context, of which `prefill` is new.

    `cached`: context that the replica has computed, unless it was evicted since; `valid`: with the
    present weights.
    """

    tokens: float
    prefill: float
    cached: float
    done: Callable[[], None]
    valid: bool = True

    @property
    def final(self) -> float:
        """Tokens of the context at its end."""
        return self.cached + self.prefill + self.tokens


@dataclass(slots=True, eq=False)
class Replica:
    """One sampler. `capacity`: tokens of its KV cache.

    With `lockstep`, it decodes only while every open episode has a turn (the deterministic mode of
    the in-process sampler).
    """

    clock: Clock
    cost: PassCost
    prefill_s: float
    capacity: float = float("inf")
    lockstep: bool = False
    on_busy: Callable[[], None] | None = None
    speed: float = 1.0
    open: int = 0
    idle_tokens: float = 0.0
    """Cached tokens of open episodes that wait for their environment."""
    busy_s: float = 0.0
    sampled: float = 0.0
    prefilled: float = 0.0
    peak_tokens: float = 0.0
    _passes: float = 0.0
    _context: float = 0.0
    _reserved: float = 0.0
    _last: float = 0.0
    _blocked: float = 0.0
    _paused: int = 0
    _due: float = float("inf")
    _running: list[tuple[float, int, Turn]] = field(default_factory=list)
    _waiting: deque[Turn] = field(default_factory=deque)
    _order: Any = field(default_factory=count)

    @property
    def computing(self) -> bool:
        """True while a pass or a prefill runs."""
        if self._paused:
            return False
        return self._blocked > self.clock.now or self._decodes

    @property
    def _decodes(self) -> bool:
        active = len(self._running)
        return active > 0 and not self._paused and not (self.lockstep and active < self.open)

    def enter(self) -> None:
        """An episode begins."""
        self._advance()
        self.open += 1
        self._schedule()

    def leave(self, cached: float) -> None:
        """An episode ends; its `cached` tokens, valid ones, are free."""
        self._advance()
        self.open -= 1
        self.idle_tokens -= cached
        self._schedule()

    def submit(self, turn: Turn) -> None:
        """Add a turn; it waits while the KV cache is full."""
        self._advance()
        self._waiting.append(turn)
        self._admit()
        self._schedule()

    def drop(self, turn: Turn) -> None:
        """Cancel a turn that has not ended."""
        self._advance()
        for item in self._running:
            if item[2] is turn:
                made = turn.tokens - (item[0] - self._passes)
                self._running.remove(item)
                heapq.heapify(self._running)
                self._context -= turn.cached + turn.prefill + made
                self._reserved -= turn.final
                break
        else:
            self._waiting.remove(turn)
            self.idle_tokens -= turn.cached if turn.valid else 0.0
        self._admit()
        self._schedule()

    def block(self, seconds: float) -> float:
        """Stop decoding for `seconds` more; returns the time at which these are over."""
        self._advance()
        self._block(seconds)
        self._schedule()
        return self._blocked

    def pause(self) -> None:
        """Stop until `resume`."""
        self._advance()
        self._paused += 1
        self._schedule()

    def resume(self) -> None:
        """Go on; with as many calls as of `pause`."""
        self._advance()
        self._paused -= 1
        self._schedule()

    def set_speed(self, speed: float) -> None:
        """Compute at a part of the full speed."""
        self._advance()
        if (rest := self._blocked - self.clock.now) > 0:
            longer = rest * (self.speed / speed - 1)
            self._blocked += longer
            self.busy_s += longer
        self.speed = speed
        self._schedule()

    def clear_cache(self) -> None:
        """New weights: the context of running turns is computed again; idle ones have no cache."""
        self._advance()
        self.idle_tokens = 0.0
        if self._running:
            self._block(self._context * self.prefill_s)
            self.prefilled += self._context
        self._schedule()

    def hits(self) -> float:
        """Part of an idle episode's context that is still cached."""
        if self.idle_tokens < 1.0:  # none; rounding may leave a little, also below 0
            return 1.0
        return min(max(self.capacity - self._reserved, 0.0) / self.idle_tokens, 1.0)

    def _block(self, seconds: float) -> None:
        seconds /= self.speed
        self._blocked = max(self._blocked, self.clock.now) + seconds
        self.busy_s += seconds

    def _admit(self) -> None:
        """Begin waiting turns while their whole context fits."""
        while self._waiting:
            turn = self._waiting[0]
            if self._running and self._reserved + turn.final > self.capacity:
                return
            self._waiting.popleft()
            missing = turn.prefill + turn.cached * (1 - self.hits() if turn.valid else 1)
            self.idle_tokens -= turn.cached if turn.valid else 0.0
            self.prefilled += missing
            self._block(missing * self.prefill_s)
            self._context += turn.cached + turn.prefill
            self._reserved += turn.final
            self.peak_tokens = max(self.peak_tokens, self._reserved)
            heapq.heappush(self._running, (self._passes + turn.tokens, next(self._order), turn))

    def _advance(self) -> None:
        """Progress until now."""
        now, start = self.clock.now, max(self._last, self._blocked)
        if now > start and self._decodes:
            rows = len(self._running)
            passes = (now - start) * self.speed / self.cost.seconds(rows, self._context)
            self._passes += passes
            self._context += passes * rows
            self.sampled += passes * rows
            self.busy_s += now - start
        self._last = now

    def _schedule(self) -> None:
        """Set the timer for the next turn to end. A timer that is too early sets the next."""
        if self._decodes:
            left = max(self._running[0][0] - self._passes, 0.0)
            pass_s = self.cost.seconds(len(self._running), self._context) / self.speed
            due = max(self.clock.now, self._blocked) + left * pass_s
            if due < self._due - EPSILON:
                self._due = due
                self.clock.at(due, self._on_time, due)
        if self.on_busy is not None:
            self.on_busy()

    def _on_time(self, due: float) -> None:
        if due != self._due:
            return  # an earlier timer replaced this one
        self._due = float("inf")
        self._advance()
        ended = []
        pass_s = self.cost.seconds(len(self._running), self._context) / self.speed
        rounding = max(TOLERANCE, 1e-15 * self.clock.now / pass_s)
        while self._running and self._running[0][0] - self._passes <= rounding:
            last, _, turn = heapq.heappop(self._running)
            self._context -= turn.final + self._passes - last
            self._reserved -= turn.final
            self.idle_tokens += turn.final
            ended.append(turn)
        self._admit()
        for turn in ended:
            turn.done()
        self._schedule()
