"""The in-process sampler: continuous batching over concurrent episodes, on the learner's weights.

It works with any Hugging Face causal LM whose layers all attend to every position. Llama-shaped
ones (`llama.read`) take a fast path: on a CPU native code, on a GPU steps of fixed shapes; others
go through their own module, which is slower. `probe` chooses, and tries what it chose.

Time is cut into rounds. In a round the turns that wait are admitted (the tokens that no session
holds yet are computed) and each running turn gets one token. Keys and values are kept between an
episode's turns, and what episodes have in common is computed and stored once (`paging`).

In deterministic mode a round starts only when every open session waits for the model or is being
decoded; since turns are taken in the order of session names, what is computed together and what is
shared do not depend on how long an environment took. Nor do they depend on episodes long gone:
without sessions the engine is as new.

Shape suffixes: R rows, V vocabulary.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field
from torch import Tensor

from ludus.core.errors import ConfigError
from ludus.models.decoders.probe import choose_decoder
from ludus.models.decoders.static import StaticDecoder
from ludus.models.kv_cache.eviction import make_room
from ludus.models.kv_cache.paging import BLOCK, Block, BlockTree, Pass, Planner
from ludus.models.samplers.base import Completion, SamplingParams, check_turn
from ludus.models.samplers.sampling import Chooser
from ludus.models.samplers.slots import Index, Seats, joined
from ludus.telemetry.occupancy import busy

PREFILL_TOKENS = 2048
"""The most tokens computed at once, so that memory does not grow with what waits."""


@dataclass(slots=True, eq=False)
class _Session:
    """An open episode, the blocks that hold its keys and values, the turn that it samples."""

    name: str
    blocks: list[Block] = field(default_factory=list)
    turn: _Turn | None = None


@dataclass(slots=True, eq=False)
class _Turn:
    """A turn that waits for the model or is being decoded.

    `policy_version` is that of its first token: if weights change in its midst, the oldest counts.
    """

    session: _Session
    prompt: list[int]
    params: SamplingParams
    future: asyncio.Future[Completion]
    seat: int
    policy_version: int = -1
    admitted: bool = False
    """Its blocks hold all of its tokens but the newest."""


class InProcessSampler:
    """A `Sampler` over a model in this process.

    Args:
        model: a Hugging Face causal LM, shared with the learner.
        context_length: the most tokens of a prompt and its completion together.
        decode: ids to text; needed only where stop strings are used.
        deterministic: wait for all open sessions before each round.
        tokenizer: what it has no token for is never sampled (a model may have more ids).
        path: as in the configuration.
        dtype: as in the configuration. What differs from the learner's own products shows as an
            importance ratio; the log-probabilities are those of the tokens' true distribution.

    Errors: ConfigError for a model that cannot be served.
    """

    def __init__(
        self,
        model: Any,
        *,
        context_length: int,
        decode: Callable[[list[int]], str] | None = None,
        deterministic: bool = True,
        tokenizer: Any = None,
        path: Annotated[
            Literal["auto", "fast", "static", "generic"],
            Field(
                description="`fast` refuses a model that is not Llama-shaped, `generic` calls the "
                "model's own module, `auto` is fast where it can. `static` is what `fast` is on a "
                "GPU, and serves to try that on a CPU."
            ),
        ] = "auto",
        dtype: Annotated[
            Literal["auto", "float32", "bfloat16"],
            Field(
                description="Type of the products, keys and values; `auto` is that of the weights. "
                "`bfloat16` is about twice as fast where the processor multiplies it."
            ),
        ] = "auto",
    ) -> None:
        self.decoder = choose_decoder(model, context_length, path, dtype)
        self.model = model
        self.deterministic = deterministic
        self.policy_version = 0
        self.num_prefill_tokens = 0
        """Prompt tokens computed: each once, however many sessions share it."""
        self.num_prompt_tokens = 0
        """Tokens of all prompts, computed or not."""
        self.num_decode_tokens = 0
        self._context_length = context_length
        self._decode = decode
        self._chooser = Chooser(None if tokenizer is None else len(tokenizer))
        self._sessions: dict[str, _Session] = {}
        self._waiting: list[_Turn] = []
        self._running: list[_Turn] = []
        self._changed = asyncio.Event()
        self._paused = False
        self._rounds: asyncio.Task[None] | None = None
        self._empty()

    @property
    def context_length(self) -> int:
        return self._context_length

    @property
    def num_blocks(self) -> int:
        """Blocks of keys and values that open sessions hold; a shared one counts once."""
        return self._tree.num_used

    def open(self, session: str) -> None:
        """Announce an episode."""
        if session in self._sessions:
            raise ValueError(f"session {session!r} is open already")
        self._sessions[session] = _Session(session)
        self._changed.set()

    def close(self, session: str) -> None:
        """Forget an episode: give its blocks back, drop a turn of it that is still running."""
        state = self._sessions.pop(session, None)
        if state is None:
            return
        if state.turn is not None:
            state.turn.future.cancel()
            self._drop(state.turn)
        self._tree.release(state.blocks)
        if not self._sessions:
            self._empty()
        self._changed.set()

    async def sample(
        self, prompt_ids: list[int], params: SamplingParams, *, session: str
    ) -> Completion:
        """Sample one turn after `prompt_ids`; a session has one turn at a time.

        Errors: ContextOverflow where prompt and max_tokens do not fit the context; TrainingError
        where the model's logits are not finite.
        """
        state = self._session(session, prompt_ids, params)
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        turn = _Turn(state, list(prompt_ids), params, future, self._free_seat())
        state.turn = turn
        self._seats.sit(turn.seat, params)
        self._waiting.append(turn)
        if self._rounds is None or self._rounds.done():
            self._changed = asyncio.Event()  # events belong to a loop; each call may bring its own
            self._rounds = asyncio.create_task(self._run_rounds())
        self._changed.set()
        try:
            return await future
        except asyncio.CancelledError:  # the caller gave up
            self._drop(turn)
            raise

    def forget(self) -> None:
        """Drop all cached keys and values: the weights have changed."""
        for state in self._sessions.values():
            self._tree.release(state.blocks)
        for turn in self._running:
            turn.admitted = False
        self.decoder.refresh()

    def publish(self, version: int) -> None:
        """The weights have changed: forget what was computed with those before."""
        self.policy_version = version
        self.forget()

    def pause(self) -> None:
        """No round begins until `resume`."""
        self._paused = True

    def resume(self) -> None:
        """Rounds go on."""
        self._paused = False
        self._changed.set()

    def shutdown(self) -> None:
        """Nothing to end: everything is in this process."""

    def _session(self, session: str, prompt_ids: list[int], params: SamplingParams) -> _Session:
        """The session that may sample this turn now."""
        check_turn(prompt_ids, params, self._context_length)
        if params.stop and self._decode is None:
            raise ConfigError("stop strings need a tokenizer, and this sampler was given none")
        state = self._sessions.get(session)
        if state is None:
            raise ValueError(f"session {session!r} is not open")
        if state.turn is not None:
            raise ValueError(f"session {session!r} is sampling a turn already")
        return state

    def _empty(self) -> None:
        """As new: no blocks, no storage."""
        limit = self.decoder.max_blocks if isinstance(self.decoder, StaticDecoder) else None
        self._tree = BlockTree(self._copy_block, limit)
        self._seats = Seats.empty()
        self._free_seats: list[int] = []
        self._num_seats = 0
        self.decoder.clear()

    def _free_seat(self) -> int:
        if self._free_seats:
            return self._free_seats.pop()
        self._num_seats += 1
        return self._num_seats - 1

    def _copy_block(self, source: int, target: int, count: int) -> None:
        self.decoder.reserve(self._tree.num_blocks)
        self.decoder.copy(source, target, count)

    def _drop(self, turn: _Turn) -> None:
        """Take a turn out, if it is still in."""
        if turn.session.turn is turn:
            self._leave(turn)
            self._waiting = [other for other in self._waiting if other is not turn]
            self._running = [other for other in self._running if other is not turn]

    def _leave(self, turn: _Turn) -> None:
        """A turn's session may sample the next one; what was computed is its to go on from."""
        turn.session.turn = None
        if turn.admitted:
            length = int(self._seats.positions[turn.seat])
            start = BLOCK * (len(turn.session.blocks) - 1)
            turn.session.blocks[-1].name(self._ids(turn, start, length))
        self._free_seats.append(turn.seat)

    def _ids(self, turn: _Turn, start: int, stop: int) -> list[int]:
        """The conversation's ids from `start` to `stop`, sampled ones included."""
        size = len(turn.prompt)
        sampled = self._seats.token_ids[turn.seat, max(0, start - size) : max(0, stop - size)]
        return [*turn.prompt[start:stop], *sampled.tolist()]

    async def _run_rounds(self) -> None:
        """Consumes waiting turns, is unblocked by sample, open and close, produces completions."""
        try:
            while self._waiting or self._running:
                await self._settled()
                with busy("sample"):
                    self._round()
        except Exception as error:
            turns, self._waiting, self._running = [*self._waiting, *self._running], [], []
            for turn in turns:
                turn.admitted = False
                self._leave(turn)
                if not turn.future.done():
                    turn.future.set_exception(error)
            self.forget()

    async def _settled(self) -> None:
        """Let others run; in deterministic mode, until no session is away in its environment."""
        await asyncio.sleep(0)
        while self.deterministic or self._paused:
            self._changed.clear()
            present = len(self._waiting) + len(self._running)
            if not self._paused and present >= len(self._sessions):
                return
            await self._changed.wait()

    def _round(self) -> None:
        """Admit turns, add a token to each turn that takes part, finish those that stop.

        A decoder that gains nothing from computing prompts and single tokens together does either;
        turns then wait until they are as many as those that run, and have a round of their own.
        """
        mixes = self.decoder.mixes
        if self._waiting and (mixes or len(self._waiting) >= len(self._running)):
            self._running = sorted([*self._running, *self._waiting], key=_name)
            self._waiting = []
        new = [turn for turn in self._running if not turn.admitted]
        old = [turn for turn in self._running if turn.admitted]
        old, new = self._fitting(old, new)
        if new and not mixes:
            old = []
        if not new and not old:
            return
        step = self._next_tokens(old) if old else None
        prefill = self._admission(new) if new else None
        self.decoder.reserve(self._tree.num_blocks)
        turns = old + new
        finished: list[_Turn] = []
        for part, rows in joined(step, prefill).chunks(PREFILL_TOKENS):
            logits_RV = self.decoder.forward(part)
            if len(rows):
                finished += self._advance([turns[row] for row in rows], logits_RV)
        if finished:
            self._running = [turn for turn in self._running if turn.session.turn is turn]

    def _fitting(self, old: list[_Turn], new: list[_Turn]) -> tuple[list[_Turn], list[_Turn]]:
        """Those for which there is room; others that ran have to be admitted anew."""
        limit = self._tree.max_blocks
        if limit is None or (not new and self._tree.num_used + len(old) <= limit):
            return old, new
        idle = [state.blocks for state in self._sessions.values() if state.turn is None]
        positions, num_sampled = self._seats.positions, self._seats.num_sampled
        kept, chosen = make_room(
            self._tree,
            [*idle, *[turn.session.blocks for turn in self._waiting]],
            [(t.session.blocks, int(positions[t.seat] % BLOCK == 0)) for t in old],
            [(t.session.blocks, (len(t.prompt) + num_sampled[t.seat]) // BLOCK + 1) for t in new],
        )
        for turn in old[kept:]:
            turn.admitted = False
        return old[:kept], new[:chosen]

    def _next_tokens(self, turns: list[_Turn]) -> Pass:
        """One token of each turn: the newest, whose keys and values are not computed yet."""
        seats = _seats(turns)
        for row in np.flatnonzero(self._seats.positions[seats] % BLOCK == 0):
            turn = turns[row]
            position = int(self._seats.positions[turn.seat])
            self._tree.extend(turn.session.blocks, self._ids(turn, position - BLOCK, position))
            self._set_table(turn, position)
        return self._seats.next_pass(seats)

    def _admission(self, turns: list[_Turn]) -> Pass:
        """All tokens that the blocks lack, of turns that wait or whose blocks were dropped."""
        planner = Planner()
        for turn in turns:
            sampled = self._seats.sampled(turn.seat)
            ids = turn.prompt + sampled
            turn.session.blocks = self._tree.admit(turn.session.blocks, ids, planner)
            turn.admitted = True
            self._set_table(turn, len(ids) - 1)
            if not sampled:
                turn.policy_version = self.policy_version
                self.num_prompt_tokens += len(ids)
        self.num_prefill_tokens += len(planner.ids)
        return planner.result()

    def _set_table(self, turn: _Turn, position: int) -> None:
        blocks = [block.index for block in turn.session.blocks]
        self._seats.set_table(turn.seat, blocks, position)

    def _advance(self, turns: list[_Turn], logits_RV: Tensor) -> list[_Turn]:
        """Sample a token for each turn; returns the turns that are finished."""
        seats = _seats(turns)
        token_ids_R, logprobs_R = self._chooser(
            logits_RV, [turn.params for turn in turns], self._seats.uniforms_of(seats)
        )
        self.num_decode_tokens += len(turns)
        stopped_R, full_R = self._seats.record(seats, token_ids_R, logprobs_R)
        for row in np.flatnonzero(self._seats.watched[seats] & ~stopped_R):
            stopped_R[row] = self._has_stop_string(turns[row])
        finished = []
        for row in np.flatnonzero(stopped_R | full_R):
            turn = turns[row]
            completion = Completion(
                self._seats.sampled(turn.seat),
                self._seats.logprobs[turn.seat, : self._seats.num_sampled[turn.seat]].tolist(),
                "stop" if stopped_R[row] else "length",
                turn.policy_version,
            )
            self._leave(turn)
            finished.append(turn)
            if not turn.future.done():
                turn.future.set_result(completion)
        return finished

    def _has_stop_string(self, turn: _Turn) -> bool:
        """Whether the turn's end spells one of its stop strings."""
        assert self._decode is not None
        # A character is at most four byte-level tokens, so this tail holds any stop string.
        size = 4 * max(map(len, turn.params.stop)) + 8
        tail = self._decode(self._seats.sampled(turn.seat)[-size:])
        return any(stop in tail for stop in turn.params.stop)


def _name(turn: _Turn) -> str:
    return turn.session.name


def _seats(turns: list[_Turn]) -> Index:
    return np.fromiter((turn.seat for turn in turns), np.intp, len(turns))
