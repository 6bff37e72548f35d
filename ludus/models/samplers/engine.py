"""In-process engine: continuous batching over concurrent episodes.

It serves any Hugging Face causal LM whose layers all attend to every position. Llama-shaped models
(`llama.read`) take a fast path: native code on a CPU, steps of fixed shapes on a GPU. Other models
run through their own module, which is slower. `probe.choose_decoder` selects and verifies the path.

A step is *schedule, run, postprocess*: `Scheduler` selects turns, the decoder computes logits, and
each turn gets one token. The KV cache persists between the turns of an episode; common prefixes of
episodes are computed and stored once (`paging`).

The decoder reads the learner's parameters in place, or weights of its own (native code: packed;
`dtype: bfloat16`: rounded), which change in `publish` only. A lock keeps steps and publications
apart, so a step computes with the weights of one version.

In deterministic mode a step starts only when every open session has a turn. Turns are ordered by
session name, so neither batches nor shared prefixes depend on the speed of environments. They do
not depend on earlier episodes either: the engine resets when its last session closes.

Shape suffixes: R rows, V vocabulary.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from ludus.core.errors import ConfigError, TrainingError
from ludus.models.decoders.capacity import limit_cache
from ludus.models.decoders.probe import choose_decoder
from ludus.models.grammars import Grammars
from ludus.models.kv_cache.paging import BLOCK
from ludus.models.memory import is_out_of_memory
from ludus.models.samplers.base import Completion, SamplingParams, check_turn, num_embeddings
from ludus.models.samplers.pass_times import PassTimes
from ludus.models.samplers.sampling import TokenSampler
from ludus.models.samplers.scheduler import DecodeBatch, Scheduler, Turn
from ludus.models.vocabulary import Vocabulary
from ludus.telemetry.logs import get_logger
from ludus.telemetry.occupancy import busy

log = get_logger(__name__)

MAX_TOKENS_PER_PASS = 2048
"""Limit of a forward pass; longer prefills are computed in chunks to bound memory."""


class InProcessSampler:
    """A `Sampler` over a model in this process.

    Args:
        model: a Hugging Face causal LM, the learner's.
        context_length: the most tokens of a prompt and its completion together.
        decode: ids to text; required for stop strings only.
        deterministic: wait for all open sessions before each step.
        tokenizer: only ids of its tokens are sampled (a model may have more ids).
        path: as in the configuration.
        cache_gib: as in the configuration.
        dtype: as in the configuration. Where the type differs from the learner's, the difference
            shows in the importance ratio; returned log-probabilities are those of the distribution
            that was sampled from.

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
                description="`auto`: `fast` where possible, else `generic`. `fast`: refuse models "
                "that are not Llama-shaped. `generic`: call the model's own module. `static`: the "
                "GPU variant of `fast`, for tests on a CPU."
            ),
        ] = "auto",
        dtype: Annotated[
            Literal["auto", "float32", "bfloat16"],
            Field(
                description="Type of products, keys and values; `auto`: the weights' type. "
                "`bfloat16`, for weights in float32, samples with a copy of them in bfloat16, "
                "refreshed at each publication: half the bytes to read, and about twice as fast on "
                "processors that multiply it natively."
            ),
        ] = "auto",
        cache_gib: Annotated[
            float | None,
            Field(
                gt=0,
                description="The most memory for keys and values, in GiB; `null`: a quarter of the "
                "machine's memory, on a GPU half of what is free at the start. When it is full, "
                "the least recently used idle sessions are evicted; their tokens are computed "
                "again when needed.",
            ),
        ] = None,
    ) -> None:
        self.decoder = choose_decoder(model, context_length, path, dtype)
        limit_cache(self.decoder, cache_gib, context_length)
        self.model = model
        self.deterministic = deterministic
        self.policy_version = 0
        self.num_prefill_tokens = 0
        """Prompt tokens computed; tokens that sessions share count once."""
        self.num_prompt_tokens = 0
        """Tokens of all prompts, computed or cached."""
        self.num_decode_tokens = 0
        self.pass_times = PassTimes()
        self.context_length = context_length
        self._decode = decode
        self._num_embeddings = num_embeddings(model)
        self._vocabulary = None if tokenizer is None else Vocabulary.of(tokenizer)
        self._token_sampler = TokenSampler(self._vocabulary)
        self._changed = asyncio.Event()
        self._lock = threading.Lock()  # held by a step, and by a publication from any thread
        self._stale = False  # cached keys and values are of an earlier publication
        self._tokens_per_pass = MAX_TOKENS_PER_PASS
        self._paused = False
        self._stepping: asyncio.Task[None] | None = None
        self._num_evicted = self._peak_blocks = 0
        self._scheduler = Scheduler(self.decoder, self._decode)
        own = f"{self.weight_bytes / 1e9:.3g} GB" if self.weight_bytes else "none, the learner's"
        log.debug("sampler", path=self.decoder.name, own_weights=own)

    @property
    def shares_weights(self) -> bool:
        """True if steps read the learner's parameters: none may run while they change."""
        return not self.decoder.weight_bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of the sampler's own weights; 0: it shares the learner's."""
        return self.decoder.weight_bytes

    @property
    def num_blocks(self) -> int:
        """KV-cache blocks that open sessions hold; a shared block counts once."""
        return 0 if self._stale else self._scheduler.num_blocks

    @property
    def num_evicted_tokens(self) -> int:
        """Cached tokens that were evicted so far because the cache was full."""
        return BLOCK * (self._num_evicted + self._scheduler.num_evicted)

    @property
    def cache_peak_bytes(self) -> int:
        """The most memory that keys and values have taken so far."""
        blocks = max(self._peak_blocks, self._scheduler.peak_blocks)
        return blocks * self.decoder.bytes_per_block if blocks else 0  # unknown before a pass

    def open(self, session: str) -> None:
        """Register an episode."""
        self._scheduler.open(session)
        self._changed.set()

    def close(self, session: str) -> None:
        """Remove an episode: release its blocks, cancel its running turn. Idempotent."""
        if session in self._scheduler.sessions:
            self._scheduler.close(session)
            if not self._scheduler.sessions:
                self._reset()
            self._changed.set()

    async def sample(
        self, prompt_ids: list[int], params: SamplingParams, *, session: str
    ) -> Completion:
        """Sample one turn after `prompt_ids`; a session has one turn at a time.

        Errors: ContextOverflow where prompt and max_tokens do not fit the context; ValueError for
        an id that the model does not have; TrainingError where the model's logits are not finite.
        """
        check_turn(prompt_ids, params, self.context_length, self._num_embeddings)
        if params.stop and self._decode is None:
            raise ConfigError("stop strings need a tokenizer; this sampler has none")
        constraint = params.constraint
        matcher = None if constraint is None else self._grammars.matcher(constraint)
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        turn = self._scheduler.add(session, prompt_ids, params, future, matcher)
        if self._stepping is None or self._stepping.done():
            self._changed = asyncio.Event()  # an event belongs to one loop; calls may use several
            self._stepping = asyncio.create_task(self._run_steps())
        self._changed.set()
        try:
            return await future
        except asyncio.CancelledError:  # by the caller
            self._scheduler.drop(turn)
            raise

    def check_grammar(self, grammar: str) -> None:
        """Errors: ConfigError for a grammar that cannot be followed; MissingDependency."""
        self._grammars.check(grammar)

    @property
    def _grammars(self) -> Grammars:
        if self._vocabulary is None:
            raise ConfigError("a grammar needs a tokenizer; this sampler has none")
        return self._vocabulary.grammars

    def publish(self, version: int) -> None:
        """Use the model's current weights, under this version, from the next token on.

        Any thread may call it, while the model does not change: it waits for the running step. The
        version is set after the whole copy. Cached keys and values are computed again.
        """
        with self._lock:
            self.decoder.refresh()
            self.policy_version = version
            self._stale = True

    def pause(self) -> None:
        """Start no step until `resume`."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self._changed.set()

    def shutdown(self) -> None:
        """Does nothing: no process or thread was started."""

    def _reset(self) -> None:
        """Return to the initial state, with an empty cache."""
        self.decoder.clear()
        self._num_evicted += self._scheduler.num_evicted
        self._peak_blocks = max(self._peak_blocks, self._scheduler.peak_blocks)
        self._scheduler = Scheduler(self.decoder, self._decode)

    async def _run_steps(self) -> None:
        """Run steps while there are turns; an error ends all of them."""
        try:
            while self._scheduler.num_turns:
                await self._wait_for_turns()
                # A step adds one token to each scheduled turn.
                with busy("sample"), self._lock:
                    started = time.perf_counter()
                    if self._stale:
                        self._scheduler.clear_cache()
                        self._stale = False
                    batch = self._scheduler.schedule(self.policy_version)
                    if batch is not None:
                        self._scheduler.postprocess(batch, *self._run(batch))
                        spent = time.perf_counter() - started
                        self.pass_times.add(
                            len(batch.turns), batch.num_context, batch.num_prefill_tokens, spent
                        )
        except Exception as error:
            self._scheduler.fail(_explained(error))
            self._scheduler.clear_cache()

    async def _wait_for_turns(self) -> None:
        """Yield to the event loop; in deterministic mode, wait until every session has a turn."""
        await asyncio.sleep(0)
        while self.deterministic or self._paused:
            self._changed.clear()
            if not self._paused and self._scheduler.num_turns >= len(self._scheduler.sessions):
                return
            await self._changed.wait()

    def _run(self, batch: DecodeBatch) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Compute logits and sample a token for each row; returns ids and log-probabilities.

        A step that exceeds memory is computed again, from then on in passes of half the tokens.
        """
        while True:
            size = min(self._tokens_per_pass, len(batch.inputs.ids))
            try:
                sampled = self._run_passes(batch, size)
            except (MemoryError, RuntimeError) as error:
                if size <= 1 or not is_out_of_memory(error):
                    raise
                self._tokens_per_pass = size // 2
                log.warning("out of memory: smaller passes", tokens=self._tokens_per_pass)
                continue
            self.num_prefill_tokens += batch.num_prefill_tokens
            self.num_prompt_tokens += batch.num_prompt_tokens
            self.num_decode_tokens += len(batch.turns)
            return sampled

    def _run_passes(
        self, batch: DecodeBatch, size: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """`_run` in passes of at most `size` tokens."""
        token_ids_R = np.zeros(len(batch.turns), np.int64)
        logprobs_R = np.zeros(len(batch.turns))
        for inputs, rows in batch.inputs.chunks(size):
            logits_RV = self.decoder.forward(inputs)
            if len(rows):
                turns, uniforms_R = [batch.turns[row] for row in rows], batch.uniforms_R[rows]
                sampled = self._sample_tokens(turns, logits_RV, uniforms_R)
                token_ids_R[rows], logprobs_R[rows] = sampled
        return token_ids_R, logprobs_R

    def _sample_tokens(
        self, turns: list[Turn], logits_RV: Tensor, uniforms_R: NDArray[np.float64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Sample the next token of each turn from its logits."""
        allowed = {row: t.matcher.allowed() for row, t in enumerate(turns) if t.matcher}
        params = [turn.params for turn in turns]
        return self._token_sampler(logits_RV, params, uniforms_R, allowed)


def _explained(error: Exception) -> Exception:
    """Returns the error, or for a lack of memory one with the settings to lower."""
    if not is_out_of_memory(error):
        return error
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    return TrainingError(
        f"memory does not suffice to sample ({reason}); lower sampler.args.cache_gib, "
        "rollout.concurrency or model.context_length"
    )
