"""Runs a model service's sampler in its own thread and streams tokens.

The engine computes a whole step without an await. In the HTTP server's thread it would block all
requests, `/health` too. Requests submit coroutines, and cancel them to stop.
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

from ludus.core.errors import SamplerError, described
from ludus.core.versions import expand
from ludus.models.samplers.base import Completion, PolicySampler, SamplingParams
from ludus.models.samplers.engine import InProcessSampler
from ludus.models.samplers.sampling import distribution
from ludus.models.samplers.scheduler import DecodeBatch, Turn
from ludus.models.vocabulary import Vocabulary
from ludus.telemetry.logs import get_logger

log = get_logger(__name__)

T = TypeVar("T")

SCORED_TOKENS = 128
"""Prompt tokens per forward pass when scoring; bounds the memory for logits."""

ENDS = (SystemExit, KeyboardInterrupt)
"""Would end the thread's event loop, and then no request would ever have an answer."""

CLOSE_S = 10.0
"""Seconds in which the thread has to end."""

Alternatives = list[tuple[int, float]]
"""The most likely tokens of a position with log-probabilities, best first."""

STREAMING = "ludus.services.model.engine:StreamingSampler"
"""Replaces the sampler `in_process`: the same engine, with a callback per token."""


@dataclass(frozen=True, slots=True)
class Token:
    """A sampled token, the version of the weights, and alternatives from its distribution."""

    id: int
    logprob: float
    policy_version: int
    alternatives: Alternatives


OnToken = Callable[[Token], object]


def tokens_of(completion: Completion) -> list[Token]:
    """Returns the tokens of a completion, without alternatives."""
    versions = expand(completion.runs)
    parts = zip(completion.token_ids, completion.logprobs, versions, strict=True)
    return [Token(*part, []) for part in parts]


class StreamingSampler(InProcessSampler):
    """The in-process engine with a callback for each sampled token."""

    @cached_property
    def _watchers(self) -> dict[str, tuple[OnToken, int, Vocabulary]]:
        return {}

    def watch(
        self, session: str, on_token: OnToken, num_alternatives: int, vocabulary: Vocabulary
    ) -> None:
        """Call `on_token` with each token of a session until the session closes."""
        self._watchers[session] = (on_token, num_alternatives, vocabulary)

    def close(self, session: str) -> None:
        """Remove an episode and its callback."""
        self._watchers.pop(session, None)
        super().close(session)

    def _run(self, batch: DecodeBatch) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        try:
            return super()._run(batch)
        except ENDS as error:
            raise _failed(error) from error

    def _sample_tokens(
        self, turns: list[Turn], logits_RV: Tensor, uniforms_R: NDArray[np.float64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        watched = [
            (row, turn, *self._watchers[turn.session.name])
            for row, turn in enumerate(turns)
            if turn.session.name in self._watchers
        ]
        token_ids_R, logprobs_R = super()._sample_tokens(turns, logits_RV, uniforms_R)
        alternatives = [  # after it, for it removes what a grammar forbids
            top_tokens(logits_RV[row], number, turn.params, vocabulary)
            for row, turn, _, number, vocabulary in watched
        ]
        for (row, _, on_token, *_), best in zip(watched, alternatives, strict=True):
            id, logprob = int(token_ids_R[row]), float(logprobs_R[row])
            # The engine's own value for the sampled token; `distribution` may round differently.
            same = [(other, logprob if other == id else value) for other, value in best]
            on_token(Token(id, logprob, self.policy_version, same))
        return token_ids_R, logprobs_R


def top_tokens(
    logits_V: Tensor, number: int, params: SamplingParams, vocabulary: Vocabulary
) -> Alternatives:
    """The `number` most likely tokens of the distribution that is sampled from."""
    if not number:
        return []
    probabilities_S = distribution(vocabulary.select(logits_V)[None], [params])[0]
    values, places = probabilities_S.topk(min(number, len(probabilities_S)))
    ids: list[int] = vocabulary.ids(places).tolist()
    return list(zip(ids, values.log().tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of a prompt's tokens; None for the first."""

    logprobs: list[float | None]
    alternatives: list[Alternatives]


class EngineThread:
    """A sampler and its thread; created and called from another thread."""

    def __init__(self, sampler: PolicySampler, model: Any, vocabulary: Vocabulary) -> None:
        self.sampler, self._model, self._vocabulary = sampler, model, vocabulary
        self._numbers = itertools.count()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ludus-engine")
        self._thread.daemon = True
        self._thread.start()

    @property
    def streams(self) -> bool:
        """True if tokens arrive one by one with alternatives, and prompts can be scored."""
        return isinstance(self.sampler, StreamingSampler)

    @property
    def policy_version(self) -> int:
        return self.sampler.policy_version

    async def sample(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        on_token: OnToken | None = None,
        num_alternatives: int = 0,
    ) -> Completion:
        """Sample a turn; cancellable. `on_token` is called in the engine's thread.

        Without streaming, all tokens arrive at the end and have no alternatives.
        Errors: those of `Sampler.sample`.
        """
        return await self._call(self._turn(prompt_ids, params, on_token, num_alternatives))

    async def score(self, token_ids: list[int], num_alternatives: int) -> PromptScores:
        """Log-probabilities of `token_ids` under the model's own distribution (temperature 1)."""
        return await self._call(self._score(token_ids, num_alternatives))

    async def swap(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Sample all further tokens with these weights, those of running turns too.

        Errors: TrainingError if the sampler refuses them.
        """
        await self._call(self._swap(weights, version))

    def set_version(self, version: int) -> None:
        """Set the version of the initial weights."""
        asyncio.run_coroutine_threadsafe(self._swap({}, version), self._loop).result()

    def close(self) -> None:
        """Stop running turns, the sampler and the thread.

        A thread that hangs in the model is left alone: it ends with the process.
        """
        try:
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(CLOSE_S)
        except TimeoutError:
            log.error("the model hangs: its thread is left to the end of the process")
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _call(self, work: Coroutine[Any, Any, T]) -> T:
        kept = _keep_running(work)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(kept, self._loop))

    async def _turn(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        on_token: OnToken | None,
        num_alternatives: int,
    ) -> Completion:
        session = f"{next(self._numbers):012d}"
        self.sampler.open(session)
        try:
            if on_token and isinstance(self.sampler, StreamingSampler):
                self.sampler.watch(session, on_token, num_alternatives, self._vocabulary)
            done = await self.sampler.sample(prompt_ids, params, session=session)
        finally:
            self.sampler.close(session)
        if on_token and not self.streams:
            for token in tokens_of(done):
                on_token(token)
        return done

    async def _score(self, token_ids: list[int], num_alternatives: int) -> PromptScores:
        """Score in chunks over one KV cache: the logits of all rows would not fit in memory."""
        logprobs: list[float | None] = [None]
        best: list[Alternatives] = [[]]
        cache, version = None, self.policy_version
        ids_1L = torch.tensor([token_ids], device=next(self._model.parameters()).device)
        for start in range(0, len(token_ids) - 1, SCORED_TOKENS):
            stop = min(start + SCORED_TOKENS, len(token_ids) - 1)
            with torch.inference_mode():
                piece = ids_1L[:, start:stop]
                out = self._model(piece, past_key_values=cache, use_cache=True)
                logprobs_LS = self._vocabulary.select(out.logits[0]).float().log_softmax(-1)
                chosen_L = self._chosen(logprobs_LS, ids_1L[0, start + 1 : stop + 1])
                values, places = logprobs_LS.topk(min(num_alternatives, logprobs_LS.shape[1]))
                ids = self._vocabulary.ids(places)
            cache = out.past_key_values
            logprobs += chosen_L.tolist()
            pairs = zip(ids.tolist(), values.tolist(), strict=True)
            best += [list(zip(*pair, strict=True)) for pair in pairs]
            await asyncio.sleep(0)  # let turns run between the chunks
            if self.policy_version != version:
                return await self._score(token_ids, num_alternatives)
        return PromptScores(logprobs, best)

    def _chosen(self, logprobs_LS: Tensor, ids_L: Tensor) -> Tensor:
        """The ids' log-probabilities; -inf for an id that is never sampled."""
        places_L = self._vocabulary.places(ids_L)
        padded_LS = torch.nn.functional.pad(logprobs_LS, (0, 1), value=-torch.inf)
        last = logprobs_LS.shape[1]
        return padded_LS.gather(-1, places_L.clamp(max=last)[:, None])[:, 0]

    async def _swap(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Swap between two steps: neither a step nor this function awaits.

        A sampler with its own copy may refuse the weights; the old weights are then restored.
        """
        held = self._model.state_dict()
        before = {} if self.streams else {name: held[name].clone() for name in weights}
        try:
            _copy(weights, held)
            self.sampler.publish(version)
        except Exception:
            _copy(before, held)
            raise

    async def _end(self) -> None:
        own = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not own]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        self.sampler.shutdown()


async def _keep_running(work: Coroutine[Any, Any, T]) -> T:
    try:
        return await work
    except ENDS as error:
        raise _failed(error) from error


def _failed(error: BaseException) -> SamplerError:
    return SamplerError(f"the model tried to end the process: {described(error)}")


def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in source.items():
            target[name].copy_(tensor)
