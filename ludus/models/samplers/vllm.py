"""vLLM sampler: a server with token ids in and out, and weight updates while it serves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import httpx
from pydantic import Field

from ludus.core.errors import LudusError, SamplerError, SchemaError, TrainingError
from ludus.core.versions import several
from ludus.models.samplers.base import Completion, SamplingParams
from ludus.models.samplers.served import NEVER, ServedSampler, ServerOptions
from ludus.models.samplers.server_process import ServerProcess
from ludus.models.samplers.weights import WEIGHTS

GENERATE = "/inference/v1/generate"
VLLM_SIDE = Path(__file__).parent / "vllm_side" / "ludus_vllm_side.py"


class VllmServer(ServerProcess):
    """A process of `vllm serve`."""

    engine = "vLLM"
    program = VLLM_SIDE
    variables: ClassVar = {
        "VLLM_SERVER_DEV_MODE": "1",  # enables the routes to pause, load weights and resume
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }


class VllmSampler(ServedSampler):
    """A sampler over a vLLM server. A seed reproduces a turn up to rounding."""

    process = VllmServer

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
        options = ServerOptions(
            python, dtype, threads, startup_deadline_s, max_restarts, tuple(flags or ())
        )
        super().__init__(model, tokenizer, folder, context_length, deterministic, options)
        self._max_batch, self._cache_gib, self._eager = max_batch, cache_gib, eager

    def check_grammar(self, grammar: str) -> None:
        """Errors: SchemaError for a grammar that cannot be followed, or a tokenizer with which vLLM
        follows none; MissingDependency."""
        grammars = self._vocabulary.grammars
        if not grammars.byte_level:
            raise SchemaError("vLLM constrains answers of byte-level tokenizers only")
        grammars.check(grammar)

    async def _turn(
        self, client: httpx.AsyncClient, prompt_ids: list[int], params: SamplingParams
    ) -> Completion:
        fields = _sampling_params(params, self._never)
        if params.grammar is not None:
            grammar = self._vocabulary.grammars.expanded(params.grammar)
            fields |= {"structured_outputs": {"grammar": grammar}}
        body = {"token_ids": prompt_ids, "sampling_params": fields}
        answer = await self._post(client, GENERATE, body)
        try:
            return _completion(answer["choices"][0])
        except (LookupError, TypeError, ValueError):
            raise self._nonsense(answer) from None

    def _prompt_logprobs(self, server: ServerProcess, token_ids: list[int]) -> list[float]:
        fields = {"max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
        body = {"token_ids": token_ids, "sampling_params": fields}
        rows = server.post(GENERATE, body)["prompt_logprobs"][1:]
        return [[*row.values()][0]["logprob"] for row in rows]  # noqa: RUF015 - an empty row raises

    def _load(self, server: ServerProcess, folder: Path, content_hash: str, version: int) -> None:
        server.post("/pause?mode=keep")
        call = {"path": str((folder / WEIGHTS).resolve()), "expected_hash": content_hash}
        answer = server.post("/collective_rpc", {"method": "ludus_load", "kwargs": call})
        for result in answer["results"]:
            if "refused" in result:
                server.post("/resume")
                raise TrainingError(f"vLLM refuses weights {version}: {result['refused']}")
        # Drop the KV cache of the old weights; running turns recompute theirs.
        server.post("/reset_prefix_cache?reset_running_requests=true")
        self._set_version(server, version)
        server.post("/resume")

    def _flags(self) -> list[str]:
        """Flags of `vllm serve`.

        Chunked prefill is off: for a seeded turn with a chunked prompt vLLM rewinds its random
        generator, which CPU generators do not support, and crashes.
        """
        return [
            *("--model", str((self._folder / "model").resolve())),
            *("--max-model-len", str(self.context_length)),
            *("--max-num-seqs", str(self._max_batch)),
            *("--max-num-batched-tokens", str(max(8192, self.context_length))),
            "--no-enable-chunked-prefill",
            *("--kv-cache-memory-bytes", str(int(self._cache_gib * 2**30))),
            *("--dtype", self._dtype),
            *("--logprobs-mode", "processed_logprobs"),
            *("--structured-outputs-config.backend", "guidance"),
            *("--generation-config", "vllm"),  # ignore the model's sampling defaults
            *("--worker-extension-cls", "ludus_vllm_side.Worker"),
            "--enable-scale-out",  # the route with token ids in and out
            "--enable-prefix-caching",
            *(["--enforce-eager"] if self._eager else []),
            *("--distributed-executor-backend", "uni"),
            "--disable-uvicorn-access-log",
            *("--uvicorn-log-level", "warning"),
        ]


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
