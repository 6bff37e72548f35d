"""Base of the samplers that run an engine's server, vLLM's or SGLang's, as a child process.

    learner's weights -> folder/next -> refused, or loaded -> probed -> turns carry the new version

The server starts at the first turn and stops with ludus. If it dies, running turns fail with
SamplerError (an infrastructure error, so they are retried), and the next turn restarts it with the
weights published last.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import httpx

from ludus.core.errors import ConfigError, LudusError, SamplerError, TrainingError
from ludus.models.build import merge_lora
from ludus.models.samplers.base import Completion, SamplingParams, check_turn, num_embeddings
from ludus.models.samplers.server_process import ServerProcess, require_package
from ludus.models.samplers.weights import WEIGHTS, probe_logprobs, write_model
from ludus.models.vocabulary import Vocabulary
from ludus.telemetry.logs import get_logger
from ludus.telemetry.occupancy import busy

log = get_logger(__name__)

NUM_PROBE_TOKENS = 32
NEVER = -1e9
"""Added to a logit, it makes the probability 0 in float32. JSON has no infinity."""

TOLERANCE = {"float32": 2e-3, "bfloat16": 0.25}
"""Allowed difference of the probe's log-probabilities between the engine and the learner."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Options of every served sampler, as `sampler.args` of a configuration has them.

    `python` None: ludus' own; `dtype` None: the model's; `threads` 0: the engine's default.
    """

    python: str | None
    dtype: str | None
    threads: int
    startup_deadline_s: float
    max_restarts: int
    flags: Sequence[str]


class ServedSampler(ABC):
    """A `PolicySampler` over an engine's server, with the weights of `model` as published last.

    Turns are batched in order of arrival, so batches depend on timing. Sessions hold no state here:
    the engine caches common prefixes itself. Subclasses speak the engine's protocol.

    Errors: ConfigError where `python` has no such engine, or `rollout.deterministic` is on.
    """

    process: ClassVar[type[ServerProcess]]
    shares_weights = False

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        folder: Path,
        context_length: int,
        deterministic: bool,
        options: ServerOptions,
    ) -> None:
        self.engine = self.process.engine
        self.check_available(options.python, deterministic)
        self._python = options.python or sys.executable
        self._model, self._tokenizer = model, tokenizer
        self._vocabulary = Vocabulary.of(tokenizer)
        self._never: Sequence[int] = self._vocabulary.absent(num_embeddings(model))
        self._folder = folder
        self.context_length = context_length
        self._dtype = options.dtype or str(model.dtype).removeprefix("torch.")
        self._options = options
        self._restarts_left = options.max_restarts
        self.policy_version = 0
        self.server: Any = None
        """The server, a `ServerProcess`; None before the first turn."""
        self._lock = threading.Lock()  # serialises starts and publications
        self._starting: asyncio.Task[None] | None = None
        self._cancelled = threading.Event()
        self._turns: dict[str, set[asyncio.Task[Completion]]] = {}

    @classmethod
    def check_available(cls, python: str | None, deterministic: bool) -> None:
        """Errors: ConfigError where `python` has no such engine, or batches must not depend on
        timing."""
        package = cls.process.engine.lower()
        if deterministic:
            raise ConfigError(
                f"rollout.deterministic: true is not possible with the {package} sampler, whose "
                "batches depend on timing; set it to false, or use sampler: in_process"
            )
        require_package(python or sys.executable, package, cls.process.engine)

    def open(self, session: str) -> None:
        """Register an episode."""
        if session in self._turns:
            raise ValueError(f"session {session!r} is open already")
        self._turns[session] = set()

    def close(self, session: str) -> None:
        """Remove an episode and cancel its running turn."""
        for turn in self._turns.pop(session, ()):
            turn.cancel()

    async def sample(
        self, prompt_ids: list[int], params: SamplingParams, *, session: str
    ) -> Completion:
        """Sample one turn after `prompt_ids`.

        Errors: ContextOverflow; ValueError for an id that the model does not have; SamplerError
        where the server dies during the turn or answers nonsense; LudusError where it does not
        start or has no restart left.
        """
        check_turn(prompt_ids, params, self.context_length, num_embeddings(self._model))
        if session not in self._turns:
            raise ValueError(f"session {session!r} is not open")
        turn = asyncio.create_task(self._sample(prompt_ids, params))
        self._turns[session].add(turn)
        try:
            with busy("sample"):
                return await turn
        finally:
            turn.cancel()  # no effect unless the caller cancelled
            self._turns.get(session, set()).discard(turn)

    def publish(self, version: int) -> None:
        """Sample with the model's current weights, under this version.

        Blocks until they are served. Before the first turn only the version is set, since the
        server starts with the weights of that time.

        Errors: TrainingError where the engine refuses the weights or does not compute with them.
        """
        with self._lock:
            if self.server is not None:
                self._update_weights(self.server, version)
            self.policy_version = version

    def pause(self) -> None:  # noqa: B027 - nothing to do, for every engine
        """Does nothing: the server has its own copy of the weights."""

    def resume(self) -> None:  # noqa: B027
        """Does nothing, see `pause`."""

    def shutdown(self) -> None:
        """Stop the server."""
        with self._lock:
            if self.server is not None:
                self.server.stop()
            self.server = None

    # The engine's protocol

    @abstractmethod
    def _flags(self) -> list[str]:
        """Flags of the server; those of `options` follow them."""

    @abstractmethod
    async def _turn(
        self, client: httpx.AsyncClient, prompt_ids: list[int], params: SamplingParams
    ) -> Completion:
        """Ask the server for a turn. Errors: as `sample`, and httpx.TransportError where the server
        is gone."""

    @abstractmethod
    def _prompt_logprobs(self, server: Any, token_ids: list[int]) -> list[float]:
        """Returns the server's log-probabilities of `token_ids[1:]`, blocking."""

    @abstractmethod
    def _load(self, server: Any, folder: Path, content_hash: str, version: int) -> None:
        """Make the server load a model's folder, and label tokens with the version.

        Running turns wait. Errors: TrainingError where it refuses, with the old weights still in
        use; httpx.TransportError where the server is gone.
        """

    async def _post(self, client: httpx.AsyncClient, route: str, body: Any) -> Any:
        """Send a turn; returns its JSON.

        Errors: SamplerError where the server failed; LudusError where it refused the turn;
        httpx.TransportError where it is gone.
        """
        response = await client.post(route, json=body)
        if response.is_server_error:
            if not (await client.get(self.process.ready_route)).is_success:
                raise httpx.RemoteProtocolError("the server is not healthy")
            raise SamplerError(f"{self.engine} failed during a turn: {_error_text(response)}")
        if not response.is_success:
            raise LudusError(f"{self.engine} refused a turn: {_error_text(response)}")
        try:
            return response.json()
        except ValueError:
            raise self._nonsense(response.text) from None

    def _nonsense(self, answer: object) -> SamplerError:
        return SamplerError(f"{self.engine} answered a turn with {str(answer)[:200]!r}")

    # Turns

    async def _sample(self, prompt_ids: list[int], params: SamplingParams) -> Completion:
        server = await self._running_server()
        try:
            async with server.client() as client:
                completion = await self._turn(client, prompt_ids, params)
        except httpx.TransportError:
            server.stop()  # end its remaining processes; the next turn starts a new server
            message = f"{self.engine} died during a turn"
            raise SamplerError(server.explain(message)) from None
        self._check(completion, params)
        return completion

    def _check(self, completion: Completion, params: SamplingParams) -> None:
        """Errors: SamplerError for tokens that the turn cannot have."""
        ids, logprobs, size = completion.token_ids, completion.logprobs, num_embeddings(self._model)
        if not all(type(id) is int and 0 <= id < size for id in ids):
            raise SamplerError(f"{self.engine} sampled ids that the model does not have")
        if not all(map(math.isfinite, logprobs)):
            raise SamplerError(f"{self.engine} sampled tokens with log-probabilities not finite")
        if not 0 < len(ids) == len(logprobs) <= params.max_tokens:
            raise SamplerError(
                f"{self.engine} answered a turn of at most {params.max_tokens} tokens with "
                f"{len(ids)}, and {len(logprobs)} log-probabilities"
            )

    async def _running_server(self) -> Any:
        """Returns the server; starts it if necessary, once for all waiting turns."""
        if self.server is None or not self.server.alive:
            if self._starting is None or self._starting.done():
                self._starting = asyncio.create_task(self._start_in_thread())
            await asyncio.shield(self._starting)
        assert self.server is not None
        return self.server

    # The server

    async def _start_in_thread(self) -> None:
        """Start the server; give up where the event loop ends, which waits for its threads."""
        self._cancelled.clear()
        try:
            await asyncio.to_thread(self._start)
        except asyncio.CancelledError:
            self._cancelled.set()
            raise

    def _start(self) -> None:
        """Start the server, initially or after it died; runs in a thread."""
        with self._lock:
            died, self.server = self.server, None
            if died is not None:
                died.stop()
                if not self._restarts_left:
                    limit = "sampler.args.max_restarts is reached"
                    raise LudusError(died.explain(f"{self.engine} died again; {limit}"))
                self._restarts_left -= 1
                log.warning(f"{self.engine} died; restarting it", log=str(died.log))
            else:
                self._write_first_model()
            flags = [*self._flags(), *self._options.flags]
            output = self._folder / "server.log"
            server = self.process(self._python, flags, self._environment(), output)
            try:
                server.wait_until_up(self._options.startup_deadline_s, self._cancelled)
                self._set_version(server, self.policy_version)
                self._require_probe(server)
            except httpx.TransportError:
                server.stop()
                raise LudusError(server.explain(f"{self.engine} died after its startup")) from None
            except BaseException:
                server.stop()
                raise
            self.server = server

    def _environment(self) -> dict[str, str]:
        """Environment variables of the server beside its class's."""
        threads = self._options.threads
        return {"OMP_NUM_THREADS": str(threads)} if threads else {}

    def _write_first_model(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        policy = merge_lora(self._model)
        write_model(policy, self._folder / "model")
        self._tokenizer.save_pretrained(self._folder / "model")
        self._probe = probe_logprobs(policy, self._probe_ids())

    def _set_version(self, server: ServerProcess, version: int) -> None:
        server.post("/update_weight_version", {"new_version": str(version)})

    def _update_weights(self, server: ServerProcess, version: int) -> None:
        """Load the model's weights into the server; if it died, it loads them at its restart."""
        policy = merge_lora(self._model)
        probe = probe_logprobs(policy, self._probe_ids())
        content_hash = write_model(policy, self._folder / "next")
        weights = self._folder / "next" / WEIGHTS
        with contextlib.suppress(httpx.TransportError):
            self._load(server, self._folder / "next", content_hash, version)
        self._probe = probe
        weights.replace(self._folder / "model" / WEIGHTS)
        with contextlib.suppress(httpx.TransportError):
            self._require_probe(server)

    def _probe_ids(self) -> list[int]:
        vocabulary = self._model.config.get_text_config().vocab_size
        length = min(NUM_PROBE_TOKENS, self.context_length - 1)
        return [(7919 * i + 3) % vocabulary for i in range(length)]

    def _require_probe(self, server: ServerProcess) -> None:
        """Compare the log-probabilities of a probe sequence with the learner's.

        Errors: TrainingError where they differ by more than rounding.
        """
        try:
            served = self._prompt_logprobs(server, self._probe_ids())
            pairs = list(zip(served, self._probe, strict=True))
        except (LookupError, TypeError, ValueError) as error:
            raise LudusError(f"{self.engine} did not answer the probe: {error!r:.200}") from None
        deviation = max(abs(a - b) for a, b in pairs)
        if not deviation <= TOLERANCE[self._dtype]:
            raise TrainingError(
                f"{self.engine} does not compute with the published weights: log-probabilities of "
                f"a probe differ from the learner's by up to {deviation:.3g} (allowed: "
                f"{TOLERANCE[self._dtype]:g} in {self._dtype})"
            )


def _error_text(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200]
