"""SGLang sampler: a server with token ids in and out, and weight updates while it serves.

    turn      prompt -> A0 A1 | update: aborted with its tokens | prompt A0 A1 -> A2 A3
    versions             3  3                                                      4  4

SGLang aborts the running requests before it loads weights. The sampler then asks for the rest of
the turn: a turn is one or more *pieces*, each of one version of the weights. SGLang holds back
requests that arrive during the update.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import json
import socket
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import httpx
import torch
from pydantic import Field

from ludus.core.errors import ConfigError, LudusError, SamplerError, TrainingError
from ludus.core.versions import runs_of, several
from ludus.models.samplers.base import Completion, SamplingParams
from ludus.models.samplers.served import NEVER, ServedSampler, ServerOptions
from ludus.models.samplers.server_process import ServerProcess
from ludus.models.samplers.weights import layout_difference

SGLANG_SIDE = Path(__file__).parent / "sglang_side" / "ludus_sglang_side.py"
NUM_SPARE = 8
"""Context beyond ours: SGLang cuts turns that would fill its own to the last token."""
MAX_EMPTY_PIECES = 100


class SglangServer(ServerProcess):
    """A process of `sglang.launch_server`."""

    engine = "SGLang"
    program = SGLANG_SIDE
    variables: ClassVar = {
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # see NUM_SPARE
        "PYTHONWARNINGS": "ignore",  # pages of them would hide the reason of a fault
    }
    ready_route = "/v1/models"  # /health fails until a warm-up, which needs a TCP port


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of one request, sampled by one version of the weights. `ended`: SGLang's reason."""

    token_ids: list[int]
    logprobs: list[float]
    version: int
    ended: str


class SglangSampler(ServedSampler):
    """A sampler over an SGLang server. Seeds are not passed on: SGLang's turns do not repeat.

    Errors: ConfigError also where the KV cache cannot hold one conversation.
    """

    process = SglangServer

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        folder: Path,
        context_length: int,
        deterministic: bool = False,
        python: Annotated[
            str | None, Field(description="Python interpreter with SGLang; null: ludus' own.")
        ] = None,
        device: Annotated[
            Literal["cpu", "cuda"] | None,
            Field(description="Device of SGLang; null: a GPU if ludus sees one, else the CPU."),
        ] = None,
        dtype: Annotated[
            Literal["float32", "bfloat16"] | None,
            Field(description="Data type of SGLang; null: the model's."),
        ] = None,
        max_batch: Annotated[int, Field(ge=1, description="Turns sampled concurrently.")] = 64,
        cache_gib: Annotated[
            float, Field(gt=0, description="Maximum memory of the KV cache in GiB.")
        ] = 1.0,
        eager: Annotated[
            bool, Field(description="Run SGLang without CUDA graphs: it starts faster.")
        ] = False,
        threads: Annotated[
            int, Field(ge=0, description="OpenMP threads of SGLang on a CPU; 0: its default.")
        ] = 0,
        startup_deadline_s: Annotated[
            float, Field(gt=0, description="Startup timeout of the server, in seconds.")
        ] = 600.0,
        max_restarts: Annotated[
            int, Field(ge=0, description="Maximum restarts after the server dies.")
        ] = 2,
        flags: Annotated[
            list[str] | None,
            Field(description="More flags of `sglang.launch_server`; they take precedence."),
        ] = None,
    ) -> None:
        options = ServerOptions(
            python, dtype, threads, startup_deadline_s, max_restarts, tuple(flags or ())
        )
        super().__init__(model, tokenizer, folder, context_length, deterministic, options)
        self._on_cpu = (device or ("cuda" if torch.cuda.is_available() else "cpu")) == "cpu"
        self._max_batch, self._eager = max_batch, eager
        self._cache_tokens = self._num_cache_tokens(cache_gib)

    def check_params(self, params: SamplingParams) -> None:
        """Errors: ConfigError for parameters that SGLang does not follow as ludus needs it."""
        for name, off in (("top_p", 1.0), ("top_k", 0)):
            if (given := getattr(params, name)) != off:
                raise ConfigError(
                    f"{name} is {given}: SGLang's log-probabilities are of the distribution "
                    f"without it; set it to {off:g}, or use another sampler"
                )
        if params.grammar is not None:
            raise ConfigError("the sampler sglang does not constrain answers to a grammar")

    # Turns

    async def _turn(
        self, client: httpx.AsyncClient, prompt_ids: list[int], params: SamplingParams
    ) -> Completion:
        self.check_params(params)
        ids: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        num_empty = 0
        while True:
            rest = replace(params, max_tokens=params.max_tokens - len(ids))
            piece = await self._piece(client, [*prompt_ids, *ids], rest)
            ids += piece.token_ids
            logprobs += piece.logprobs
            versions += [piece.version] * len(piece.token_ids)
            size = self._length_to_stop(ids, params.stop)
            if size is not None or (ids and ids[-1] in params.stop_token_ids):
                break
            if len(ids) >= params.max_tokens:
                break
            # Else an update of the weights, or an end of the model's own, which is none of ours.
            num_empty = 0 if piece.token_ids else num_empty + 1
            if piece.ended == "length" or num_empty > MAX_EMPTY_PIECES:
                raise SamplerError(
                    f"SGLang ended a turn after {len(ids)} of {params.max_tokens} tokens "
                    f"({piece.ended})"
                )
        stopped = size is not None or ids[-1] in params.stop_token_ids
        size = len(ids) if size is None else size
        runs = runs_of(versions[:size])
        oldest = min(version for version, _ in runs)
        reason: Literal["stop", "length"] = "stop" if stopped else "length"
        return Completion(ids[:size], logprobs[:size], reason, oldest, several(runs))

    async def _piece(
        self, client: httpx.AsyncClient, prompt_ids: list[int], params: SamplingParams
    ) -> Piece:
        rid = uuid.uuid4().hex
        body = {
            "rid": rid,
            "input_ids": prompt_ids,
            "sampling_params": _sampling_params(params, self._never),
            "return_logprob": True,
        }
        try:
            answer = await self._post(client, "/generate", body)
        except asyncio.CancelledError:
            await _abort(client, rid)
            raise
        try:
            return _parsed(answer)
        except (LookupError, TypeError, ValueError):
            raise self._nonsense(answer) from None

    def _length_to_stop(self, ids: list[int], stop: Sequence[str]) -> int | None:
        """Returns the number of tokens up to the end of the first stop string, None without one.

        SGLang looks for them too, in the last tokens of a piece: it misses one that is spelled in
        smaller tokens than usual, or that begins in another piece.
        """

        def has_stop(size: int) -> bool:
            text = self._tokenizer.decode(ids[:size])
            return any(string in text for string in stop)

        if not stop or not has_stop(len(ids)):
            return None
        return bisect.bisect_left(range(len(ids)), True, key=has_stop)

    # The server

    def _prompt_logprobs(self, server: ServerProcess, token_ids: list[int]) -> list[float]:
        body = {
            "input_ids": token_ids,
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        rows = server.post("/generate", body)["meta_info"]["input_token_logprobs"]
        return [float(logprob) for logprob, *_ in rows[1:]]

    def _load(self, server: ServerProcess, folder: Path, content_hash: str, version: int) -> None:
        """SGLang ignores absent weights and dies of unknown ones, so they are compared here."""
        mismatch = layout_difference(self._folder / "model", folder)
        if mismatch:
            raise TrainingError(f"SGLang refuses weights {version}: {mismatch}")
        _pause(server)
        body = {"model_path": str(folder.resolve()), "weight_version": str(version)}
        response = server.send("/update_weights_from_disk", body)
        if response.is_success:
            self._set_version(server, version)
        server.post("/continue_generation", {})
        if not response.is_success:
            raise TrainingError(f"SGLang refuses weights {version}: {response.text[:500]}")

    def _set_version(self, server: ServerProcess, version: int) -> None:
        body = {"new_version": str(version), "abort_all_requests": False}
        server.post("/update_weight_version", body)

    def _write_first_model(self) -> None:
        super()._write_first_model()
        add_older_names(self._folder / "model")

    def _num_cache_tokens(self, cache_gib: float) -> int:
        """Tokens of the KV cache: of `cache_gib`, at most two conversations a turn."""
        config = self._model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        num_bytes = {"float32": 4}.get(self._dtype, 2)
        size: int = 2 * config.num_hidden_layers * heads * width * num_bytes
        length = self.context_length + NUM_SPARE
        num_tokens = int(cache_gib * 2**30) // size
        if num_tokens < length:
            raise ConfigError(
                f"sampler.args.cache_gib: {cache_gib:g} GiB hold {num_tokens} tokens, fewer than "
                f"one conversation of model.context_length = {self.context_length} needs; set it "
                f"to {length * size / 2**30:.2g} or more"
            )
        return min(num_tokens, 2 * self._max_batch * length)

    def _environment(self) -> dict[str, str]:
        """On a CPU, compilation would cost seconds for each small function."""
        own = {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"} if self._on_cpu else {}
        return super()._environment() | own

    def _flags(self) -> list[str]:
        """Flags of `sglang.launch_server`. It listens on a socket; the port is for processes of
        its own."""
        return [
            *("--model-path", str((self._folder / "model").resolve())),
            *("--context-length", str(self.context_length + NUM_SPARE)),
            *("--max-running-requests", str(self._max_batch)),
            *("--max-total-tokens", str(self._cache_tokens)),
            *("--dtype", self._dtype),
            *("--port", str(_free_port())),
            *("--log-level", "warning"),
            "--skip-server-warmup",
            *(["--disable-cuda-graph"] if self._eager or self._on_cpu else []),
            *(CPU_FLAGS if self._on_cpu else []),
        ]


CPU_FLAGS = (
    *("--device", "cpu"),
    *("--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch"),
    *("--mem-fraction-static", "0.5"),
    "--disable-overlap-schedule",
)


def add_older_names(folder: Path) -> None:
    """Make a model's folder readable with transformers 4, as SGLang 0.4 has it.

    Without `rope_theta`, transformers 4 takes a default. It does not know the class of ludus' own
    tokenizers, nor a list of special tokens, which the tokenizer's file has anyway.
    """
    config = _read(folder / "config.json")
    rope = config.get("rope_parameters") or {}
    if "rope_theta" in rope:
        config["rope_theta"] = rope["rope_theta"]
        if rope.get("rope_type", "default") != "default":
            config["rope_scaling"] = rope
    config.setdefault("torch_dtype", config.get("dtype"))
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer = _read(folder / "tokenizer_config.json")
    if isinstance(tokenizer.get("extra_special_tokens"), list):
        del tokenizer["extra_special_tokens"]
    if tokenizer.get("tokenizer_class") == "TokenizersBackend":
        tokenizer["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer), encoding="utf-8")


def _read(path: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return read


def _free_port() -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port: int = unused.getsockname()[1]
        return port


def _pause(server: ServerProcess) -> None:
    """Abort the running requests, hold back new ones, and drop the KV cache of the old weights."""
    while True:
        server.post("/pause_generation", {"mode": "abort"})
        if server.send("/flush_cache").is_success:  # not while a request runs
            return
        time.sleep(0.02)


async def _abort(client: httpx.AsyncClient, rid: str) -> None:
    """End a request that nobody waits for; SGLang itself notices after seconds."""
    with contextlib.suppress(httpx.HTTPError, TimeoutError):
        async with asyncio.timeout(2):
            await client.post("/abort_request", json={"rid": rid})


def _sampling_params(params: SamplingParams, never: Sequence[int]) -> dict[str, Any]:
    """Sampling parameters under SGLang's names.

    SGLang takes `ignore_eos` for the stop ids as well, so it is set only where there are none: a
    turn that ends at an id of the model's own goes on with another piece.
    `never`: ids without a token, as for vLLM.
    """
    fields: dict[str, Any] = {
        "max_new_tokens": params.max_tokens,
        "temperature": params.temperature,
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": not params.stop_token_ids,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    if never:
        fields["logit_bias"] = {str(id): NEVER for id in never}
    if params.stop:
        fields["stop"] = list(params.stop)
    return fields


def _parsed(answer: Any) -> Piece:
    """Parse SGLang's answer. Errors: SamplerError for a request that SGLang failed; LudusError for
    tokens without a version; LookupError, TypeError and ValueError for another answer."""
    facts = answer["meta_info"]
    end = facts["finish_reason"]
    if end["type"] == "abort" and end.get("status_code"):
        raise SamplerError(f"SGLang aborted a turn: {str(end.get('message'))[:200]}")
    rows = facts.get("output_token_logprobs") or []
    label = str(facts.get("weight_version"))
    if not label.isdecimal():
        raise LudusError(
            f"SGLang labels an answer with the version {label!r} of the weights: it must label it "
            "with the one that was set"
        )
    ids, logprobs = [row[1] for row in rows], [float(row[0]) for row in rows]
    return Piece(ids, logprobs, int(label), str(end["type"]))
