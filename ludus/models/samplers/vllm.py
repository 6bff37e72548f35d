"""vLLM sampler: a server with token ids in and out, and weight updates while it serves.

    learner's weights -> folder/next -> refused, or loaded -> probed -> turns carry the new version

The server starts at the first turn and stops with ludus. If it dies, running turns fail with
SamplerError (an infrastructure error, so they are retried), and the next turn restarts it with the
weights published last.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
from pydantic import Field

from ludus.core.errors import ConfigError, LudusError, SamplerError, TrainingError
from ludus.core.versions import several
from ludus.models.build import merge_lora
from ludus.models.samplers.base import Completion, SamplingParams, check_turn, num_embeddings
from ludus.models.samplers.vllm_server import VllmServer, require_vllm
from ludus.models.samplers.weights import WEIGHTS, probe_logprobs, write_model
from ludus.models.vocabulary import Vocabulary
from ludus.telemetry.logs import get_logger
from ludus.telemetry.occupancy import busy

log = get_logger(__name__)

NUM_PROBE_TOKENS = 32
NEVER = -1e9
"""Added to a logit, it makes the probability 0 in float32. JSON has no infinity."""

TOLERANCE = {"float32": 2e-3, "bfloat16": 0.25}
"""Allowed difference of the probe's log-probabilities between vLLM and the learner."""


class VllmSampler:
    """A `PolicySampler` over a vLLM server, with the weights of `model` as published last.

    Turns are batched in order of arrival, so batches depend on timing and a seed reproduces a turn
    up to rounding. Sessions hold no state here: vLLM caches common prefixes itself.

    Errors: ConfigError where `python` has no vLLM, or `rollout.deterministic` is on.
    """

    shares_weights = False

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        folder: Path,
        context_length: int,
        deterministic: bool = False,
        python: Annotated[
            str | None, Field(description="Python interpreter with vLLM; null: ludus' own.")
        ] = None,
        dtype: Annotated[
            Literal["float32", "bfloat16"] | None,
            Field(description="Data type of vLLM; null: the model's."),
        ] = None,
        max_batch: Annotated[int, Field(ge=1, description="Turns sampled concurrently.")] = 64,
        cache_gib: Annotated[float, Field(gt=0, description="KV-cache memory in GiB.")] = 1.0,
        eager: Annotated[
            bool,
            Field(description="Run vLLM without compilation and CUDA graphs: it starts faster."),
        ] = False,
        threads: Annotated[
            int, Field(ge=0, description="OpenMP threads of vLLM on a CPU; 0: its default.")
        ] = 0,
        startup_deadline_s: Annotated[
            float, Field(gt=0, description="Startup timeout of the server, in seconds.")
        ] = 600.0,
        max_restarts: Annotated[
            int, Field(ge=0, description="Maximum restarts after the server dies.")
        ] = 2,
        flags: Annotated[
            list[str] | None, Field(description="More flags of `vllm serve`; they take precedence.")
        ] = None,
    ) -> None:
        if deterministic:
            raise ConfigError(
                "rollout.deterministic: true is not possible with the vllm sampler, whose batches "
                "depend on timing; set it to false, or use sampler: in_process"
            )
        self._python = python or sys.executable
        require_vllm(self._python)
        self._model, self._tokenizer = model, tokenizer
        self._never: Sequence[int] = Vocabulary.of(tokenizer).absent(num_embeddings(model))
        self._folder = folder
        self.context_length = context_length
        self._dtype = dtype or str(model.dtype).removeprefix("torch.")
        self._threads = threads
        self._deadline_s = startup_deadline_s
        self._restarts_left = max_restarts
        self._flags = [*self._default_flags(max_batch, cache_gib, eager), *(flags or [])]
        self.policy_version = 0
        self.server: VllmServer | None = None
        """The server; None before the first turn."""
        self._lock = threading.Lock()  # serialises starts and publications
        self._starting: asyncio.Task[None] | None = None
        self._cancelled = threading.Event()
        self._turns: dict[str, set[asyncio.Task[Completion]]] = {}

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
        where the server dies during the turn; LudusError where it does not start or has no restart
        left.
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

        Errors: TrainingError where vLLM refuses the weights or does not compute with them.
        """
        with self._lock:
            if self.server is not None:
                self._update_weights(self.server, version)
            self.policy_version = version

    def pause(self) -> None:
        """Does nothing: the server has its own copy of the weights."""

    def resume(self) -> None:
        """Does nothing, see `pause`."""

    def shutdown(self) -> None:
        """Stop the server."""
        with self._lock:
            if self.server is not None:
                self.server.stop()
            self.server = None

    # Turns

    async def _sample(self, prompt_ids: list[int], params: SamplingParams) -> Completion:
        server = await self._running_server()
        body = {"token_ids": prompt_ids, "sampling_params": _sampling_params(params, self._never)}
        try:
            async with _client_of(server) as client:
                response = await client.post("/inference/v1/generate", json=body)
                died = response.is_server_error and not (await client.get("/health")).is_success
        except httpx.TransportError:
            died = True
        if died:
            server.stop()  # end its remaining processes; the next turn starts a new server
            raise SamplerError(server.explain("vLLM died during a turn"))
        if response.is_server_error:
            raise SamplerError(f"vLLM failed during a turn: {_error_text(response)}")
        if not response.is_success:
            raise LudusError(f"vLLM refused a turn: {_error_text(response)}")
        return _completion(response.json()["choices"][0])

    async def _running_server(self) -> VllmServer:
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
                    raise LudusError(
                        died.explain("vLLM died again; sampler.args.max_restarts is reached")
                    )
                self._restarts_left -= 1
                log.warning("vLLM died; restarting it", log=str(died.log))
            else:
                self._folder.mkdir(parents=True, exist_ok=True)
                policy = merge_lora(self._model)
                write_model(policy, self._folder / "model")
                self._tokenizer.save_pretrained(self._folder / "model")
                self._probe = probe_logprobs(policy, self._probe_ids())
            environment = {"OMP_NUM_THREADS": str(self._threads)} if self._threads else {}
            server = VllmServer(self._python, self._flags, environment, self._folder / "server.log")
            try:
                server.wait_until_up(self._deadline_s, self._cancelled)
                server.post("/update_weight_version", {"new_version": str(self.policy_version)})
                self._require_probe(server)
            except BaseException:
                server.stop()
                raise
            self.server = server

    def _update_weights(self, server: VllmServer, version: int) -> None:
        """Load the model's weights into the server; if it died, it loads them at its restart."""
        policy = merge_lora(self._model)
        self._probe = probe_logprobs(policy, self._probe_ids())
        expected = write_model(policy, self._folder / "next")
        weights = self._folder / "next" / WEIGHTS
        with contextlib.suppress(httpx.TransportError):
            server.post("/pause?mode=keep")
            call = {"path": str(weights.resolve()), "expected_hash": expected}
            answer = server.post("/collective_rpc", {"method": "ludus_load", "kwargs": call})
            for result in answer["results"]:
                if "refused" in result:
                    server.post("/resume")
                    raise TrainingError(f"vLLM refuses weights {version}: {result['refused']}")
            # Drop the KV cache of the old weights; running turns recompute theirs.
            server.post("/reset_prefix_cache?reset_running_requests=true")
            server.post("/update_weight_version", {"new_version": str(version)})
            server.post("/resume")
            self._require_probe(server)
        weights.replace(self._folder / "model" / WEIGHTS)

    def _probe_ids(self) -> list[int]:
        vocabulary = self._model.config.get_text_config().vocab_size
        length = min(NUM_PROBE_TOKENS, self.context_length - 1)
        return [(7919 * i + 3) % vocabulary for i in range(length)]

    def _require_probe(self, server: VllmServer) -> None:
        """Compare the log-probabilities of a probe sequence with the learner's.

        Errors: TrainingError where they differ by more than rounding.
        """
        body = {
            "token_ids": self._probe_ids(),
            "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0, "detokenize": False},
        }
        rows = server.post("/inference/v1/generate", body)["prompt_logprobs"][1:]
        served = [next(iter(row.values()))["logprob"] for row in rows]
        deviation = max(abs(a - b) for a, b in zip(served, self._probe, strict=True))
        if not deviation <= TOLERANCE[self._dtype]:
            raise TrainingError(
                f"vLLM does not compute with the published weights: log-probabilities of a probe "
                f"differ from the learner's by up to {deviation:.3g} (allowed: "
                f"{TOLERANCE[self._dtype]:g} in {self._dtype})"
            )

    def _default_flags(self, max_batch: int, cache_gib: float, eager: bool) -> list[str]:
        """Flags of `vllm serve`.

        Chunked prefill is off: for a seeded turn with a chunked prompt vLLM rewinds its random
        generator, which CPU generators do not support, and crashes.
        """
        return [
            *("--model", str((self._folder / "model").resolve())),
            *("--max-model-len", str(self.context_length)),
            *("--max-num-seqs", str(max_batch)),
            *("--max-num-batched-tokens", str(max(8192, self.context_length))),
            "--no-enable-chunked-prefill",
            *("--kv-cache-memory-bytes", str(int(cache_gib * 2**30))),
            *("--dtype", self._dtype),
            *("--logprobs-mode", "processed_logprobs"),
            *("--generation-config", "vllm"),  # ignore the model's sampling defaults
            *("--worker-extension-cls", "ludus_vllm_side.Worker"),
            "--enable-scale-out",  # the route with token ids in and out
            "--enable-prefix-caching",
            *(["--enforce-eager"] if eager else []),
            *("--distributed-executor-backend", "uni"),
            "--disable-uvicorn-access-log",
            *("--uvicorn-log-level", "warning"),
        ]


def _client_of(server: VllmServer) -> httpx.AsyncClient:
    """Returns a client for one turn: its connections are closed in the event loop that made them,
    and several loops may use the sampler."""
    transport = httpx.AsyncHTTPTransport(uds=server.socket, verify=False)  # a Unix socket: no TLS
    return httpx.AsyncClient(
        transport=transport, base_url="http://vllm", timeout=None, trust_env=False
    )


def _sampling_params(params: SamplingParams, never: Sequence[int]) -> dict[str, Any]:
    """Sampling parameters under vLLM's names. Only `stop_token_ids` and `stop` end a turn.

    `never`: ids without a token (Qwen3 has 267). vLLM would sample them, and the learner normalises
    over the ids of tokens only. `logit_bias` is short; `allowed_token_ids` would list all others.
    """
    fields: dict[str, Any] = {
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "seed": params.seed % 2**63,
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": True,
        "logprobs": 0,  # of the sampled token only
        "detokenize": bool(params.stop),
    }
    if never:
        fields["logit_bias"] = dict.fromkeys(never, NEVER)
    if params.stop:
        fields |= {"stop": list(params.stop), "skip_special_tokens": False}
    return fields


def _completion(choice: dict[str, Any]) -> Completion:
    """Parse vLLM's response.

    vLLM labels output tokens [start, end) with the version that sampled them. Its labels change
    while generation is paused, so they are exact. Errors: LudusError for tokens without a label.
    """
    logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
    if choice["finish_reason"] not in ("stop", "length") or not all(map(math.isfinite, logprobs)):
        raise SamplerError(f"vLLM aborted a turn ({choice['finish_reason']})")
    spans = choice.get("weight_versions") or []
    bounds = [(span["start"], span["end"]) for span in spans]
    starts = [0, *(end for _, end in bounds)]
    labelled = [start for start, _ in bounds] == starts[:-1] and len(bounds) > 0
    if not labelled or starts[-1] != len(choice["token_ids"]):
        raise LudusError(
            f"vLLM labels the tokens {bounds} of {len(choice['token_ids'])} with a version of the "
            "weights: it must label each, as vLLM 0.32 does"
        )
    runs = [(int(span["version"]), span["end"] - span["start"]) for span in spans]
    oldest = min(version for version, _ in runs)
    return Completion(choice["token_ids"], logprobs, choice["finish_reason"], oldest, several(runs))


def _error_text(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (json.JSONDecodeError, KeyError, TypeError):
        return response.text[:200]
