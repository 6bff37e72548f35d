"""Scheduler of the in-process engine: sessions, waiting and running turns, slots, KV-cache blocks.

    add -> waiting -> running, not prefilled -> prefilled, a token per step -> finished
                              ^---- preempted: its blocks were evicted ---'

Turns are ordered by session name. Hence the composition of a batch, and what its rows share, do not
depend on the order in which turns arrived.

Shape suffixes: R rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ludus.core.versions import several
from ludus.models.decoders.base import Decoder
from ludus.models.grammars import Matcher
from ludus.models.kv_cache.eviction import evict
from ludus.models.kv_cache.paging import BLOCK, Block, BlockTree
from ludus.models.kv_cache.step_inputs import StepInputs, StepInputsBuilder
from ludus.models.samplers.base import Completion, SamplingParams
from ludus.models.samplers.slots import DecodeSlots, Index


@dataclass(slots=True, eq=False)
class EngineSession:
    """Cached state of one conversation: its KV-cache blocks, and the turn being sampled."""

    name: str
    blocks: list[Block] = field(default_factory=list)
    turn: Turn | None = None
    last_step: int = 0
    """The last step that used the blocks."""


@dataclass(slots=True, eq=False)
class Turn:
    """A turn that waits or runs."""

    session: EngineSession
    prompt: list[int]
    params: SamplingParams
    future: asyncio.Future[Completion]
    slot: int
    matcher: Matcher | None = None
    """The state of its grammar."""
    prefilled: bool = False
    """The session's blocks hold all tokens but the newest."""


@dataclass(slots=True, frozen=True)
class DecodeBatch:
    """The turns of one step, a row each, and the inputs of the decoder.

    `policy_version` is the version of the weights that sample the step's tokens.
    """

    turns: list[Turn]
    policy_version: int
    slots_R: Index
    uniforms_R: NDArray[np.float64]
    """Random numbers that choose the next tokens."""
    inputs: StepInputs
    num_prefill_tokens: int
    num_prompt_tokens: int
    """Prompt tokens of the turns that begin, computed or cached."""
    num_context: int
    """Tokens to which the newest ones of all turns attend."""


class Scheduler:
    """Selects the turns of each step; owns their decode slots and KV-cache blocks.

    Args:
        decoder: its storage holds the blocks.
        decode: ids to text, for stop strings.
    """

    def __init__(self, decoder: Decoder, decode: Callable[[list[int]], str] | None) -> None:
        self.sessions: dict[str, EngineSession] = {}
        self._decoder = decoder
        self._decode = decode
        self._waiting: list[Turn] = []
        self._running: list[Turn] = []
        self._slots = DecodeSlots.empty()
        self._tree = BlockTree(self._copy_block, decoder.max_blocks)
        self._num_steps = 0
        self.peak_blocks = 0
        """The most blocks that sessions held at a time."""
        self.num_evicted = 0
        """Blocks evicted because the cache was full."""

    @property
    def num_turns(self) -> int:
        """Turns that wait or run."""
        return len(self._waiting) + len(self._running)

    @property
    def num_blocks(self) -> int:
        """KV-cache blocks that sessions hold; a shared block counts once."""
        return self._tree.num_used

    def open(self, name: str) -> None:
        if name in self.sessions:
            raise ValueError(f"session {name!r} is open already")
        self.sessions[name] = EngineSession(name)

    def close(self, name: str) -> None:
        """Cancel the session's turn and release its blocks. Idempotent."""
        session = self.sessions.pop(name, None)
        if session is None:
            return
        if session.turn is not None:
            session.turn.future.cancel()
            self.drop(session.turn)
        self._tree.release(session.blocks)

    def add(
        self,
        name: str,
        prompt: list[int],
        params: SamplingParams,
        future: asyncio.Future[Completion],
        matcher: Matcher | None = None,
    ) -> Turn:
        """Queue a turn of a session, which has one turn at a time."""
        session = self.sessions.get(name)
        if session is None:
            raise ValueError(f"session {name!r} is not open")
        if session.turn is not None:
            raise ValueError(f"session {name!r} is sampling a turn already")
        slot = self._slots.acquire(params)
        turn = Turn(session, list(prompt), params, future, slot, matcher)
        session.turn = turn
        self._waiting.append(turn)
        return turn

    def drop(self, turn: Turn) -> None:
        """Remove a turn from the queues, if it is still there."""
        if turn.session.turn is turn:
            self._end(turn)
            self._waiting = [other for other in self._waiting if other is not turn]
            self._running = [other for other in self._running if other is not turn]

    def clear_cache(self) -> None:
        """Release all blocks; running turns are prefilled again in the next step."""
        for session in self.sessions.values():
            self._tree.release(session.blocks)
        for turn in self._running:
            turn.prefilled = False

    def fail(self, error: Exception) -> None:
        """End all turns with an error."""
        turns, self._waiting, self._running = [*self._waiting, *self._running], [], []
        for turn in turns:
            turn.prefilled = False
            self._end(turn)
            if not turn.future.done():
                turn.future.set_exception(error)

    def schedule(self, policy_version: int) -> DecodeBatch | None:
        """Select the turns of the next step and plan what the decoder computes for them.

        Decode rows come before prefill rows. A decoder without `mixed_batches` gets rows of one
        kind; new turns then wait until they are as many as the running ones. Returns None where
        every running turn was preempted.
        """
        self._num_steps += 1
        mixed = self._decoder.mixed_batches
        if self._waiting and (mixed or len(self._waiting) >= len(self._running)):
            self._running = sorted([*self._running, *self._waiting], key=lambda t: t.session.name)
            self._waiting = []
        prefill = [turn for turn in self._running if not turn.prefilled]
        decode = [turn for turn in self._running if turn.prefilled]
        decode, prefill = self._fit_to_cache(decode, prefill)
        if prefill and not mixed:
            decode = []
        turns = decode + prefill
        if not turns:
            return None
        decode_inputs = self._plan_decode(decode) if decode else None
        prefill_inputs, num_prompt_tokens = None, 0
        if prefill:
            prefill_inputs, num_prompt_tokens = self._plan_prefill(prefill)
        self._decoder.reserve(self._tree.num_blocks)
        self.peak_blocks = max(self.peak_blocks, self._tree.num_used)
        slots_R = _slot_index(turns)
        return DecodeBatch(
            turns,
            policy_version,
            slots_R,
            self._slots.uniforms[slots_R, self._slots.num_sampled[slots_R]],
            StepInputs.concat(decode_inputs, prefill_inputs),
            0 if prefill_inputs is None else len(prefill_inputs.ids),
            num_prompt_tokens,
            int(self._slots.positions[slots_R].sum()),
        )

    def postprocess(
        self, batch: DecodeBatch, token_ids_R: NDArray[np.int64], logprobs_R: NDArray[np.float64]
    ) -> None:
        """Append the sampled tokens to their turns and complete the turns that end."""
        stopped_R, full_R = self._slots.record(
            batch.slots_R, token_ids_R, logprobs_R, batch.policy_version
        )
        for row in np.flatnonzero(self._slots.has_grammar[batch.slots_R]):
            matcher = batch.turns[row].matcher
            assert matcher is not None
            matcher.advance(int(token_ids_R[row]))
        for row in np.flatnonzero(self._slots.has_stop_strings[batch.slots_R] & ~stopped_R):
            stopped_R[row] = self._has_stop_string(batch.turns[row])
        ended = np.flatnonzero(stopped_R | full_R)
        for row in ended:
            turn = batch.turns[row]
            runs = self._slots.sampled_runs(turn.slot)
            completion = Completion(
                self._slots.sampled_ids(turn.slot),
                self._slots.sampled_logprobs(turn.slot),
                "stop" if stopped_R[row] and not _failed(turn) else "length",
                min(version for version, _ in runs),
                several(runs),
            )
            self._end(turn)
            if not turn.future.done():
                turn.future.set_result(completion)
        if len(ended):
            self._running = [turn for turn in self._running if turn.session.turn is turn]

    def _fit_to_cache(
        self, decode: list[Turn], prefill: list[Turn]
    ) -> tuple[list[Turn], list[Turn]]:
        """Evict blocks where the cache is full; returns the turns that fit."""
        limit = self._tree.max_blocks
        if limit is None or (not prefill and self._tree.num_used + len(decode) <= limit):
            return decode, prefill
        used = self._tree.num_used
        idle = [session for session in self.sessions.values() if session.turn is None]
        idle.sort(key=lambda session: (session.last_step, session.name))
        positions, num_sampled = self._slots.positions, self._slots.num_sampled
        num_decode, num_prefill = evict(
            self._tree,
            [session.blocks for session in [*idle, *[turn.session for turn in self._waiting]]],
            [(t.session.blocks, int(positions[t.slot] % BLOCK == 0)) for t in decode],
            [
                (t.session.blocks, (len(t.prompt) + num_sampled[t.slot]) // BLOCK + 1)
                for t in prefill
            ],
        )
        self.num_evicted += used - self._tree.num_used
        for turn in decode[num_decode:]:
            turn.prefilled = False
        return decode[:num_decode], prefill[:num_prefill]

    def _plan_decode(self, turns: list[Turn]) -> StepInputs:
        """The newest token of each turn; a turn at a block boundary gets a new block."""
        slots = _slot_index(turns)
        for row in np.flatnonzero(self._slots.positions[slots] % BLOCK == 0):
            turn = turns[row]
            position = int(self._slots.positions[turn.slot])
            self._tree.extend(turn.session.blocks, self._ids(turn, position - BLOCK, position))
            self._slots.set_table(turn.slot, turn.session.blocks, position)
        return self._slots.step_inputs(slots)

    def _plan_prefill(self, turns: list[Turn]) -> tuple[StepInputs, int]:
        """All tokens missing from the cache, and the number of prompt tokens of new turns."""
        builder = StepInputsBuilder()
        num_prompt_tokens = 0
        for turn in turns:
            sampled = self._slots.sampled_ids(turn.slot)
            ids = turn.prompt + sampled
            turn.session.blocks = self._tree.admit(turn.session.blocks, ids, builder)
            turn.prefilled = True
            self._slots.set_table(turn.slot, turn.session.blocks, len(ids) - 1)
            if not sampled:
                num_prompt_tokens += len(ids)
        return builder.build(), num_prompt_tokens

    def _end(self, turn: Turn) -> None:
        """Free the turn's slot; its session keeps the blocks for the next turn."""
        turn.session.turn = None
        turn.session.last_step = self._num_steps
        if turn.prefilled:
            length = int(self._slots.positions[turn.slot])
            start = BLOCK * (len(turn.session.blocks) - 1)
            turn.session.blocks[-1].set_tokens(self._ids(turn, start, length))
        self._slots.free.append(turn.slot)

    def _ids(self, turn: Turn, start: int, stop: int) -> list[int]:
        """The conversation's ids from `start` to `stop`, sampled tokens included."""
        size = len(turn.prompt)
        sampled = self._slots.token_ids[turn.slot, max(0, start - size) : max(0, stop - size)]
        return [*turn.prompt[start:stop], *sampled.tolist()]

    def _has_stop_string(self, turn: Turn) -> bool:
        assert self._decode is not None
        # A character is at most four byte-level tokens, so this tail holds any stop string.
        size = 4 * max(map(len, turn.params.stop)) + 8
        tail = self._decode(self._slots.sampled_ids(turn.slot)[-size:])
        return any(stop in tail for stop in turn.params.stop)

    def _copy_block(self, source: int, target: int, count: int) -> None:
        self._decoder.reserve(self._tree.num_blocks)
        self._decoder.copy(source, target, count)


def _failed(turn: Turn) -> bool:
    """True if the turn ended because its grammar could not be completed."""
    return turn.matcher is not None and turn.matcher.failed


def _slot_index(turns: list[Turn]) -> Index:
    return np.fromiter((turn.slot for turn in turns), np.intp, len(turns))
