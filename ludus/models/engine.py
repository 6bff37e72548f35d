"""The in-process sampler: batched decoding over concurrent episodes, on the learner's own weights.

It works with any Hugging Face causal LM whose layers all attend to every position (`probe` tells).
The engine computes with the very module that the learner trains, so publishing weights copies
nothing.

Time is cut into rounds. A round either admits the turns that wait (one prefill of the tokens that
their caches lack) or adds one token to each running turn. In deterministic mode a round starts only
when every open session waits for the model or is being decoded; since slots are given out in the
order of session names, and rows are in the order of slots, what is computed together does not
depend on how long an environment took. Nor does it depend on episodes long gone: without sessions
the engine is as new.

Shape suffixes: R rows, V vocabulary.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ludus.core.errors import ConfigError, ContextOverflow
from ludus.core.occupancy import busy
from ludus.models.probe import require_servable
from ludus.models.sampler import Completion, SamplingParams
from ludus.models.sampling import choose
from ludus.models.slots import SlotCache, cached_logits


@dataclass(slots=True)
class _Session:
    """An open episode: its slot (-1: none yet), and the ids whose keys and values it holds."""

    name: str
    slot: int = -1
    cached: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Turn:
    """A turn that waits for the model or is being decoded.

    `policy_version` is that of its first token: if weights change in its midst, the oldest counts.
    """

    session: _Session
    prompt: list[int]
    params: SamplingParams
    future: asyncio.Future[Completion]
    uniforms: np.random.Generator
    policy_version: int = -1
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def new_tokens(self) -> list[int]:
        """The ids that the cache lacks; in the midst of a turn, the last one sampled."""
        known = len(self.session.cached) - len(self.prompt)
        if known >= 0:
            return self.token_ids[known:]
        return self.prompt[known:] + self.token_ids


class InProcessSampler:
    """A `Sampler` over a model in this process.

    Args:
        model: a Hugging Face causal LM, shared with the learner.
        context_length: the most tokens of a prompt and its completion together.
        decode: ids to text; needed only where stop strings are used.
        deterministic: wait for all open sessions before each round.

    Errors: ConfigError for a model that cannot be served.
    """

    def __init__(
        self,
        model: Any,
        *,
        context_length: int,
        decode: Callable[[list[int]], str] | None = None,
        deterministic: bool = True,
    ) -> None:
        require_servable(model, context_length)
        self.model = model
        self.deterministic = deterministic
        self.policy_version = 0
        self.num_prefill_tokens = 0
        self.num_decode_tokens = 0
        self._context_length = context_length
        self._decode = decode
        self._device = next(model.parameters()).device
        self._sessions: dict[str, _Session] = {}
        self._waiting: list[_Turn] = []
        self._running: list[_Turn] = []
        self._changed = asyncio.Event()
        self._rounds: asyncio.Task[None] | None = None
        self._empty()

    @property
    def context_length(self) -> int:
        return self._context_length

    def open(self, session: str) -> None:
        """Announce an episode."""
        if session in self._sessions:
            raise ValueError(f"session {session!r} is open already")
        self._sessions[session] = _Session(session)
        self._changed.set()

    def close(self, session: str) -> None:
        """Forget an episode: free its slot, drop a turn of it that is still running."""
        state = self._sessions.pop(session, None)
        if state is None:
            return
        if state.slot >= 0:
            self._free.append(state.slot)
        for turn in [*self._waiting, *self._running]:
            if turn.session is state:
                turn.future.cancel()
                self._drop(turn)
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
        uniforms = np.random.Generator(np.random.Philox(params.seed))
        turn = _Turn(state, list(prompt_ids), params, future, uniforms)
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
            state.cached = []

    def publish(self, version: int) -> None:
        """The weights have changed: forget what was computed with those before."""
        self.policy_version = version
        self.forget()

    def shutdown(self) -> None:
        """Nothing to end: everything is in this process."""

    def _session(self, session: str, prompt_ids: list[int], params: SamplingParams) -> _Session:
        """The session that may sample this turn now."""
        if len(prompt_ids) + params.max_tokens > self._context_length:
            raise ContextOverflow(
                f"{len(prompt_ids)} tokens of prompt and {params.max_tokens} to sample exceed "
                f"model.context_length = {self._context_length}"
            )
        if not prompt_ids or params.max_tokens < 1:
            raise ValueError("a turn needs at least one token of prompt, and one to sample")
        if params.stop and self._decode is None:
            raise ConfigError("stop strings need a tokenizer, and this sampler was given none")
        state = self._sessions.get(session)
        if state is None:
            raise ValueError(f"session {session!r} is not open")
        if any(turn.session is state for turn in [*self._waiting, *self._running]):
            raise ValueError(f"session {session!r} is sampling a turn already")
        return state

    def _empty(self) -> None:
        """As new: no slots, no storage."""
        self._cache = SlotCache(self.model.config.get_text_config().num_hidden_layers)
        self._free: list[int] = []
        self._num_slots = 0

    def _drop(self, turn: _Turn) -> None:
        self._waiting = [other for other in self._waiting if other is not turn]
        self._running = [other for other in self._running if other is not turn]

    async def _run_rounds(self) -> None:
        """Consumes waiting turns, is unblocked by sample, open and close, produces completions."""
        try:
            while self._waiting or self._running:
                await self._settled()
                if self._waiting and len(self._waiting) >= len(self._running):
                    with busy("sample"):
                        self._advance(self._admitted())
                elif self._running:
                    with busy("sample"):
                        self._advance(self._running)
        except Exception as error:
            turns, self._waiting, self._running = [*self._waiting, *self._running], [], []
            for turn in turns:
                if not turn.future.done():
                    turn.future.set_exception(error)

    async def _settled(self) -> None:
        """Let others run; in deterministic mode, until no session is away in its environment."""
        await asyncio.sleep(0)
        while self.deterministic:
            self._changed.clear()
            if len(self._waiting) + len(self._running) >= len(self._sessions):
                return
            await self._changed.wait()

    def _admitted(self) -> list[_Turn]:
        """Make the waiting turns run: each has a slot, and keeps what its cache knows of it."""
        turns = sorted(self._waiting, key=lambda turn: turn.session.name)
        self._free.sort(reverse=True)
        for turn in turns:
            state = turn.session
            if state.slot < 0:
                state.slot = self._free.pop() if self._free else self._num_slots
                self._num_slots = max(self._num_slots, state.slot + 1)
            known = _common_prefix(state.cached, turn.prompt)
            # The last prompt token is always computed: its logits choose the first new token.
            state.cached = turn.prompt[: min(known, len(turn.prompt) - 1)]
            turn.policy_version = self.policy_version
            self.num_prefill_tokens += len(turn.prompt) - len(state.cached)
        turns.sort(key=_slot)
        self._waiting, self._running = [], sorted([*self._running, *turns], key=_slot)
        return turns

    def _advance(self, turns: list[_Turn]) -> None:
        """One forward pass and one sampled token for each turn; finish those that stop."""
        logits_RV = self._forward(turns)
        token_ids, logprobs = choose(
            logits_RV, [t.params for t in turns], [float(t.uniforms.random()) for t in turns]
        )
        self.num_decode_tokens += len(turns)
        finished: set[int] = set()
        for turn, token_id, logprob in zip(turns, token_ids, logprobs, strict=True):
            turn.token_ids.append(token_id)
            turn.logprobs.append(logprob)
            reason = self._finish_reason(turn)
            if reason is not None:
                finished.add(turn.session.slot)
                if not turn.future.done():
                    turn.future.set_result(
                        Completion(turn.token_ids, turn.logprobs, reason, turn.policy_version)
                    )
        if finished:
            self._running = [t for t in self._running if t.session.slot not in finished]

    @torch.inference_mode()
    def _forward(self, turns: list[_Turn]) -> Tensor:
        """Logits [R, V] after the last token of each turn; turns come in the order of slots."""
        if self.model.training:
            self.model.eval()
        new_tokens = [turn.new_tokens() for turn in turns]
        logits_R1V = cached_logits(
            self.model,
            self._cache,
            [turn.session.slot for turn in turns],
            [len(turn.session.cached) for turn in turns],
            new_tokens,
            self._device,
        )
        for turn, ids in zip(turns, new_tokens, strict=True):
            turn.session.cached.extend(ids)
        return logits_R1V[:, -1]

    def _finish_reason(self, turn: _Turn) -> Literal["stop", "length"] | None:
        """Why the turn ends here; None while it goes on."""
        if turn.token_ids[-1] in turn.params.stop_token_ids:
            return "stop"
        if turn.params.stop and self._decode is not None:
            # A character is at most four byte-level tokens, so this tail holds any stop string.
            tail = self._decode(turn.token_ids[-4 * max(map(len, turn.params.stop)) - 8 :])
            if any(stop in tail for stop in turn.params.stop):
                return "stop"
        return "length" if len(turn.token_ids) >= turn.params.max_tokens else None


def _slot(turn: _Turn) -> int:
    return turn.session.slot


def _common_prefix(a: list[int], b: list[int]) -> int:
    """Length of the longest common prefix."""
    if len(a) <= len(b) and b[: len(a)] == a:
        return len(a)
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
