"""The in-process sampler: batched decoding over concurrent episodes, on the learner's own weights.

It works with any Hugging Face causal LM whose layers all use full attention. The engine computes
with the very module that the learner trains, so publishing weights copies nothing.

Time is cut into rounds. A round admits the turns that wait (one prefill of the tokens that their
caches lack), then adds one token to each running turn. In deterministic mode a round starts only
when every open session waits for the model or is being decoded; since rows are ordered by session
name, what is computed together does not depend on how long an environment took.

Shape suffixes: R rows, L new tokens, V vocabulary.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ludus.core.errors import ConfigError, ContextOverflow
from ludus.models.sampler import Completion, SamplingParams
from ludus.models.sampling import choose
from ludus.models.slots import SlotCache


@dataclass(slots=True)
class _Session:
    """An open episode: its slot, and the ids whose keys and values the slot holds."""

    slot: int | None = None
    cached: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Turn:
    """A turn that waits for the model or is being decoded."""

    session: str
    prompt: list[int]
    params: SamplingParams
    future: asyncio.Future[Completion]
    uniforms: np.random.Generator
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class InProcessSampler:
    """A `Sampler` over a model in this process.

    Args:
        model: a Hugging Face causal LM, shared with the learner.
        context_length: the most tokens of a prompt and its completion together.
        decode: ids to text; needed only where stop strings are used.
        deterministic: wait for all open sessions before each round.
    """

    def __init__(
        self,
        model: Any,
        *,
        context_length: int,
        decode: Callable[[list[int]], str] | None = None,
        deterministic: bool = True,
    ) -> None:
        _require_full_attention(model)
        self.model = model
        self.deterministic = deterministic
        self.policy_version = 0
        self.num_prefill_tokens = 0
        self.num_decode_tokens = 0
        self._context_length = context_length
        self._decode = decode
        self._device = next(model.parameters()).device
        self._cache = SlotCache(model.config.get_text_config().num_hidden_layers)
        self._sessions: dict[str, _Session] = {}
        self._free: list[int] = []
        self._num_slots = 0
        self._waiting: list[_Turn] = []
        self._running: list[_Turn] = []
        self._changed = asyncio.Event()
        self._rounds: asyncio.Task[None] | None = None

    @property
    def context_length(self) -> int:
        return self._context_length

    def open(self, session: str) -> None:
        """Announce an episode."""
        self._sessions[session] = _Session()
        self._changed.set()

    def close(self, session: str) -> None:
        """Forget an episode: free its slot, drop a turn of it that is still running."""
        state = self._sessions.pop(session, None)
        if state is None:
            return
        if state.slot is not None:
            self._free.append(state.slot)
        for turn in [*self._waiting, *self._running]:
            if turn.session == session:
                turn.future.cancel()
        self._waiting = [turn for turn in self._waiting if turn.session != session]
        self._running = [turn for turn in self._running if turn.session != session]
        self._changed.set()

    async def sample(
        self, prompt_ids: list[int], params: SamplingParams, *, session: str
    ) -> Completion:
        """Sample one turn after `prompt_ids`.

        Errors: ContextOverflow where prompt and max_tokens do not fit the context.
        """
        if len(prompt_ids) + params.max_tokens > self._context_length:
            raise ContextOverflow(
                f"{len(prompt_ids)} tokens of prompt and {params.max_tokens} to sample exceed "
                f"model.context_length = {self._context_length}"
            )
        if params.stop and self._decode is None:
            raise ConfigError("stop strings need a tokenizer, and this sampler was given none")
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        uniforms = np.random.Generator(np.random.Philox(params.seed))
        self._waiting.append(_Turn(session, list(prompt_ids), params, future, uniforms))
        if self._rounds is None or self._rounds.done():
            self._changed = asyncio.Event()  # events belong to a loop; each call may bring its own
            self._rounds = asyncio.create_task(self._run_rounds())
        self._changed.set()
        return await future

    def forget(self) -> None:
        """Drop all cached keys and values: the weights have changed."""
        for state in self._sessions.values():
            state.cached = []

    async def _run_rounds(self) -> None:
        """Consumes waiting turns, is unblocked by sample, open and close, produces completions."""
        try:
            while self._waiting or self._running:
                await self._settled()
                if self._waiting and len(self._waiting) >= len(self._running):
                    self._admit()
                elif self._running:
                    self._advance(self._running, [[t.token_ids[-1]] for t in self._running])
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

    def _admit(self) -> None:
        """Start the waiting turns: give each a slot, compute what its cache lacks."""
        self.model.eval()
        turns = sorted(self._waiting, key=lambda turn: turn.session)
        self._waiting = []
        self._free.sort(reverse=True)
        new_tokens: list[list[int]] = []
        for turn in turns:
            state = self._sessions[turn.session]
            if state.slot is None:
                state.slot = self._free.pop() if self._free else self._num_slots
                self._num_slots = max(self._num_slots, state.slot + 1)
            known = _common_prefix(state.cached, turn.prompt)
            # The last prompt token is always computed: its logits choose the first new token.
            state.cached = turn.prompt[: min(known, len(turn.prompt) - 1)]
            new_tokens.append(turn.prompt[len(state.cached) :])
        self.num_prefill_tokens += sum(map(len, new_tokens))
        already_running, self._running = self._running, []
        self._advance(turns, new_tokens)
        self._running = sorted([*already_running, *self._running], key=lambda turn: turn.session)

    def _advance(self, turns: list[_Turn], new_tokens: list[list[int]]) -> None:
        """One forward pass and one sampled token for each turn; finish those that stop."""
        logits_RV = self._forward([self._sessions[t.session] for t in turns], new_tokens)
        token_ids, logprobs = choose(
            logits_RV, [t.params for t in turns], [float(t.uniforms.random()) for t in turns]
        )
        self.num_decode_tokens += len(turns)
        running: list[_Turn] = []
        for turn, token_id, logprob in zip(turns, token_ids, logprobs, strict=True):
            turn.token_ids.append(token_id)
            turn.logprobs.append(logprob)
            reason = self._finish_reason(turn)
            if reason is None:
                running.append(turn)
            elif not turn.future.done():
                turn.future.set_result(
                    Completion(turn.token_ids, turn.logprobs, reason, self.policy_version)
                )
        self._running = running

    @torch.inference_mode()
    def _forward(self, sessions: list[_Session], new_tokens: list[list[int]]) -> Tensor:
        """Logits [R, V] after the last new token of each session."""
        order = sorted(range(len(sessions)), key=lambda row: sessions[row].slot or 0)
        rows = [sessions[row] for row in order]
        tokens = [new_tokens[row] for row in order]
        counts = [len(ids) for ids in tokens]
        width = max(counts)
        positions_RL, mask_R1LT = self._cache.prepare(
            [state.slot or 0 for state in rows],
            [len(state.cached) for state in rows],
            counts,
            self._device,
        )
        ids_RL = torch.tensor(
            [[0] * (width - len(ids)) + ids for ids in tokens], device=self._device
        )
        output = self.model(
            input_ids=ids_RL,
            attention_mask=mask_R1LT,
            position_ids=positions_RL,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        for state, ids in zip(rows, tokens, strict=True):
            state.cached.extend(ids)
        inverse = torch.empty(len(order), dtype=torch.long)
        inverse[torch.tensor(order)] = torch.arange(len(order))
        logits_RV: Tensor = output.logits[:, -1][inverse.to(self._device)]
        return logits_RV

    def _finish_reason(self, turn: _Turn) -> Any:
        """ "stop", "length", or None while the turn goes on."""
        if turn.token_ids[-1] in turn.params.stop_token_ids:
            return "stop"
        if turn.params.stop and self._decode is not None:
            # A character is at most four byte-level tokens, so this tail holds any stop string.
            tail = self._decode(turn.token_ids[-4 * max(map(len, turn.params.stop)) - 8 :])
            if any(stop in tail for stop in turn.params.stop):
                return "stop"
        return "length" if len(turn.token_ids) >= turn.params.max_tokens else None


def _common_prefix(a: list[int], b: list[int]) -> int:
    """Length of the longest common prefix."""
    if len(a) <= len(b) and b[: len(a)] == a:
        return len(a)
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def _require_full_attention(model: Any) -> None:
    """Refuse models whose layers keep another state than keys and values of every position."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ConfigError(
            f"the in-process sampler supports full attention only; {type(model).__name__} has "
            f"layers of type {', '.join(sorted(kinds - {'full_attention'}))}"
        )
