"""The sampler of a model service: in a thread of its own, its tokens told as they come.

The engine computes between two awaits, a round at a time; in the thread of the HTTP server it would
keep everybody waiting, `/health` too. Requests reach it as coroutines, and give up by cancelling.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ludus.models.samplers.base import Completion, PolicySampler, SamplingParams
from ludus.models.samplers.engine import InProcessSampler
from ludus.models.samplers.sampling import distribution
from ludus.models.samplers.scheduler import Turn

T = TypeVar("T")

SCORED_TOKENS = 128
"""Tokens of a prompt whose logits are held at the same time."""

Alternatives = list[tuple[int, float]]
"""The likeliest tokens of a position and their log-probabilities, best first."""

STREAMING = "ludus.services.model.engine:StreamingSampler"
"""What serves where the user asks for `in_process`: the same engine, which can also be watched."""


@dataclass(frozen=True, slots=True)
class Token:
    """A sampled token; `alternatives` are those of the distribution that it was sampled from."""

    id: int
    logprob: float
    policy_version: int
    alternatives: Alternatives


Told = Callable[[Token], object]


class StreamingSampler(InProcessSampler):
    """The in-process engine, whose turns can be watched while they are sampled."""

    @cached_property
    def _watchers(self) -> dict[str, tuple[Told, int, int]]:
        return {}

    def watch(self, session: str, told: Told, num_alternatives: int, num_ids: int) -> None:
        """Call `told` with each token of a session, until it closes.

        Each comes with that many alternatives among the first `num_ids` ids.
        """
        self._watchers[session] = (told, num_alternatives, num_ids)

    def close(self, session: str) -> None:
        """Forget an episode, and who watches it."""
        self._watchers.pop(session, None)
        super().close(session)

    def _sample_tokens(
        self, turns: list[Turn], logits_RV: Tensor, uniforms_R: NDArray[np.float64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        watched = [
            (row, turn, *self._watchers[turn.session.name])
            for row, turn in enumerate(turns)
            if turn.session.name in self._watchers
        ]
        alternatives = [
            likeliest(logits_RV[row, :num_ids], number, turn.params)
            for row, turn, _, number, num_ids in watched
        ]
        token_ids_R, logprobs_R = super()._sample_tokens(turns, logits_RV, uniforms_R)
        for (row, turn, told, *_), best in zip(watched, alternatives, strict=True):
            id, logprob = int(token_ids_R[row]), float(logprobs_R[row])
            # The engine's own number for the token itself: its arithmetic rounds otherwise.
            same = [(other, logprob if other == id else value) for other, value in best]
            told(Token(id, logprob, turn.policy_version, same))
        return token_ids_R, logprobs_R


def likeliest(logits_V: Tensor, number: int, params: SamplingParams) -> Alternatives:
    """The `number` likeliest tokens, under the distribution that is sampled from."""
    if not number:
        return []
    probabilities_V = distribution(logits_V[None], [params])[0]
    values, ids = probabilities_V.topk(min(number, len(probabilities_V)))
    return list(zip(ids.tolist(), values.log().tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class Scored:
    """Log-probabilities of a prompt's tokens, the first of which has none."""

    logprobs: list[float | None]
    alternatives: list[Alternatives]


class EngineThread:
    """A sampler and the thread that it runs in; made and called from another."""

    def __init__(self, sampler: PolicySampler, model: Any, num_ids: int) -> None:
        self._sampler, self._model, self._num_ids = sampler, model, num_ids
        self._numbers = itertools.count()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ludus-engine")
        self._thread.daemon = True
        self._thread.start()

    @property
    def streams(self) -> bool:
        """Whether tokens are told as they come, with alternatives, and prompts can be scored."""
        return isinstance(self._sampler, StreamingSampler)

    @property
    def policy_version(self) -> int:
        return self._sampler.policy_version

    async def sample(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        told: Told | None = None,
        num_alternatives: int = 0,
    ) -> Completion:
        """Sample a turn; cancelled, it ends there. `told` is called in the engine's thread.

        A sampler that cannot be watched tells all tokens at the end, without alternatives.
        Errors: those of `Sampler.sample`.
        """
        return await self._call(self._turn(prompt_ids, params, told, num_alternatives))

    async def score(self, token_ids: list[int], num_alternatives: int) -> Scored:
        """Log-probabilities of `token_ids` under the model's own distribution (temperature 1)."""
        return await self._call(self._score(token_ids, num_alternatives))

    async def swap(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Sample with these weights from the next token on; turns under way go on with them.

        Errors: TrainingError where the sampler refuses them.
        """
        await self._call(self._swap(weights, version))

    def set_version(self, version: int) -> None:
        """Say which version the weights are that the sampler began with."""
        asyncio.run_coroutine_threadsafe(self._swap({}, version), self._loop).result()

    def close(self) -> None:
        """End turns, sampler and thread."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def _turn(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        told: Told | None,
        num_alternatives: int,
    ) -> Completion:
        session = f"{next(self._numbers):012d}"
        self._sampler.open(session)
        try:
            if told and isinstance(self._sampler, StreamingSampler):
                self._sampler.watch(session, told, num_alternatives, self._num_ids)
            done = await self._sampler.sample(prompt_ids, params, session=session)
        finally:
            self._sampler.close(session)
        if told and not self.streams:
            for id, logprob in zip(done.token_ids, done.logprobs, strict=True):
                told(Token(id, logprob, done.policy_version, []))
        return done

    async def _score(self, token_ids: list[int], num_alternatives: int) -> Scored:
        """In pieces, behind which the keys and values stay: logits of all rows would not fit."""
        logprobs: list[float | None] = [None]
        best: list[Alternatives] = [[]]
        cache, version = None, self.policy_version
        ids_1L = torch.tensor([token_ids], device=next(self._model.parameters()).device)
        for start in range(0, len(token_ids) - 1, SCORED_TOKENS):
            stop = min(start + SCORED_TOKENS, len(token_ids) - 1)
            with torch.inference_mode():
                piece = ids_1L[:, start:stop]
                out = self._model(piece, past_key_values=cache, use_cache=True)
                logprobs_LV = out.logits[0, :, : self._num_ids].float().log_softmax(-1)
                chosen_L = logprobs_LV.gather(-1, ids_1L[0, start + 1 : stop + 1, None])[:, 0]
                values, ids = logprobs_LV.topk(min(num_alternatives, self._num_ids))
            cache = out.past_key_values
            logprobs += chosen_L.tolist()
            pairs = zip(ids.tolist(), values.tolist(), strict=True)
            best += [list(zip(*pair, strict=True)) for pair in pairs]
            await asyncio.sleep(0)  # turns go on between the pieces
            if self.policy_version != version:
                return await self._score(token_ids, num_alternatives)
        return Scored(logprobs, best)

    async def _swap(self, weights: Mapping[str, Tensor], version: int) -> None:
        """No round runs meanwhile: rounds have no await in them, and nor has this.

        A sampler with weights of its own may refuse the new ones; the old ones are then put back.
        """
        held = self._model.state_dict()
        before = {} if self.streams else {name: held[name].clone() for name in weights}
        try:
            _copy(weights, held)
            self._sampler.publish(version)
        except Exception:
            _copy(before, held)
            raise

    async def _end(self) -> None:
        own = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not own]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        self._sampler.shutdown()


def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in source.items():
            target[name].copy_(tensor)
