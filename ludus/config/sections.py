"""The sections of a run's configuration: their keys, defaults and limits."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from ludus.core.types import Spec


class Section(BaseModel):
    """A part of the configuration: strict and immutable."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )


class LoraConfig(Section):
    """Train low-rank adapters (peft) instead of all parameters."""

    rank: int = Field(8, ge=1, description="Rank of the adapters.")
    alpha: float = Field(16.0, gt=0, description="Scale of the adapters: alpha / rank.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout on the adapters' input.")
    targets: list[str] | Literal["all-linear"] = Field(
        "all-linear", description="Names of the modules that get an adapter."
    )
    quantise: Literal["nf4", "nf4_on_gpu"] | None = Field(
        None,
        description="Pack the frozen weights in 4 bits (QLoRA, by bitsandbytes): nf4; nf4_on_gpu: "
        "on a CPU they stay as they are; null: never.",
    )


class ModelConfig(Section):
    """The policy: the source of its weights and its tokenizer."""

    path: str | None = Field(
        None, description="A Hugging Face folder or hub name. Excludes `architecture`."
    )
    architecture: Spec | None = Field(
        None, description="A model initialised from scratch, e.g. {name: qwen3, args: {...}}."
    )
    tokenizer: str | Spec | None = Field(
        None,
        description="A tokenizer to train on the recipe's texts (words, or {name: words, "
        "args: {...}}), or to load (folder or hub name). Default: the tokenizer in `path`.",
    )
    chat_template: str | None = Field(
        None,
        description="plain, qwen3, or the path of a Jinja file. Default: the tokenizer's own.",
    )
    thinking: Literal["keep", "strip", "forbid"] = Field(
        "keep",
        description="Thinking blocks of earlier turns: keep them in the context; strip them, which "
        "starts a new branch; or forbid them: a turn with a thinking block is malformed.",
    )
    context_length: int = Field(
        1024, ge=16, description="Maximum tokens of a whole episode: prompt, turns, observations."
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Data type of the weights."
    )
    device: str = Field("cpu", description="cpu, cuda, or cuda:N.")
    tf32: bool = Field(
        False,
        description="On CUDA, multiply float32 matrices in TF32: up to 8 times as fast, with 10 "
        "bits of precision in place of 23.",
    )
    lora: LoraConfig | None = Field(None, description="Train adapters only; null: all parameters.")

    @property
    def quantised(self) -> bool:
        """True if the base is packed in 4 bits on this device."""
        return self.lora is not None and self.lora.quantise == "nf4"

    @field_validator("lora")
    @classmethod
    def _packed_where_trained(
        cls, lora: LoraConfig | None, info: ValidationInfo
    ) -> LoraConfig | None:
        """A run that was packed stays so on another device, for its adapters fit that base."""
        on_gpu = str(info.data.get("device")).startswith("cuda")
        if lora is None or lora.quantise != "nf4_on_gpu" or not on_gpu:
            return lora
        return lora.model_copy(update={"quantise": "nf4"})

    @model_validator(mode="after")
    def _one_origin(self) -> ModelConfig:
        if (self.path is None) == (self.architecture is None):
            raise ValueError("set exactly one of `path` and `architecture`")
        if self.architecture is not None and self.tokenizer is None:
            raise ValueError("a model from scratch needs a `tokenizer`, e.g. {name: words}")
        if self.architecture is not None and self.lora is not None and self.lora.quantise:
            raise ValueError("`lora.quantise` needs `path`: weights from scratch are not packed")
        if self.tf32 and not self.device.startswith("cuda"):
            raise ValueError(f"`tf32` needs `device: cuda`; products on {self.device} are exact")
        return self


Format = Literal["plain", "react", "tools", "code"]
Turns = Annotated[int, Field(ge=1)]
Horizon = list[tuple[int, int]]


class ToolCallsConfig(Section):
    """Limits of the calls of `tools`. A call over a limit is not run; its answer says so."""

    max_per_turn: int = Field(8, ge=1, description="Maximum calls in one turn of the model.")
    max_per_episode: int = Field(
        32,
        ge=1,
        description="Maximum calls in an episode. An episode whose model calls on after it was "
        "told of this limit ends, with status truncated_turns.",
    )
    max_result_tokens: int = Field(
        512,
        ge=16,
        description="Maximum tokens of a result; of a longer one the model reads head and tail. "
        "With an endpoint, four characters count as one token.",
    )
    deadline_s: float = Field(30.0, gt=0, description="Time limit of a call, in seconds.")


Marker = Annotated[str, Field(min_length=1)]
Markers = tuple[Marker, Marker]


class MarkersConfig(Section):
    """Start and end of the blocks that `format: code` reads and writes."""

    code: Markers = Field(("<code>", "</code>"), description="Code that a tool runs.")
    answer: Markers = Field(
        ("<answer>", "</answer>"), description="The answer: with an environment, the action."
    )
    result: Markers = Field(
        ("<execution_results>", "</execution_results>"), description="The tool's result."
    )
    tool: str = Field("python", description="The function of `tools` that runs the code.")

    @model_validator(mode="after")
    def _distinct(self) -> MarkersConfig:
        code, answer = self.code[1], self.answer[1]
        if code in answer or answer in code:
            raise ValueError(
                f"the end markers of code and answer must differ, and neither may contain the "
                f"other: {code!r}, {answer!r}"
            )
        return self


class PartRolloutConfig(Section):
    """Settings of one part of a mixture; null: those of `rollout`."""

    format: Format | None = Field(None, description="The action of a turn.")
    system_prompt: str | None = Field(None, description="System message.")
    max_turns: Turns | None = Field(None, description="Maximum turns of an episode.")
    max_tokens_per_turn: int | None = Field(
        None, ge=1, description="Maximum tokens of a sampled turn."
    )
    markers: MarkersConfig | None = Field(
        None, description="Markers of `format: code`, and the function that runs the blocks."
    )


class RolloutConfig(Section):
    """Playing episodes."""

    format: Format = Field(
        "plain",
        description="The action of a turn: the whole text (plain), the text after `Action:` "
        "(react), a tool call (tools), or the answer block (code), before which the model may "
        "write code blocks: a tool runs each at once, and its result stands in the same turn.",
    )
    tool_calls: ToolCallsConfig = Field(
        default_factory=ToolCallsConfig, description="Limits of the calls of `tools`."
    )
    markers: MarkersConfig = Field(
        default_factory=MarkersConfig, description="Markers of `format: code`."
    )
    system_prompt: str | None = Field(
        None, description="System message before the environment's messages."
    )
    max_turns: Turns | dict[str, Turns] | None = Field(
        None,
        description="Maximum turns of an episode; for a `mixture` also by environment: "
        "{babyai: 20}. Default: the environment's limit, and a turn for each tool call that "
        "`tool_calls.max_per_episode` allows.",
    )
    max_tokens_per_turn: int = Field(64, ge=1, description="Maximum tokens of a sampled turn.")
    temperature: float = Field(1.0, ge=0, description="0 is greedy.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling; 1 is off.")
    top_k: int = Field(0, ge=0, description="Sample among the k likeliest tokens; 0 is off.")
    stop: list[str] = Field(default_factory=list, description="Strings that end a turn.")
    concurrency: int = Field(64, ge=1, description="Episodes played at the same time.")
    processes: int | None = Field(
        None,
        ge=1,
        le=256,
        description="Processes that play episodes at the same time, this one included. Results do "
        "not depend on it. null: one per core, at most 4, where RL may play 10,000 turns or "
        "more and the environment declares `several_processes`; else 1.",
    )
    episode_deadline_s: float = Field(
        300.0, gt=0, description="Time limit of an episode, in seconds."
    )
    step_deadline_s: float = Field(
        30.0, gt=0, description="Time limit of a reset or step of the environment, in seconds."
    )
    max_retries: int = Field(
        2, ge=0, description="Retries after an infrastructure failure, before exclusion."
    )
    deterministic: bool = Field(
        True,
        description="Sample only when every open episode waits for the model, so batches do not "
        "depend on timing. Turn off for slow remote environments.",
    )
    parts: dict[str, PartRolloutConfig] = Field(
        default_factory=dict, description="Settings by part of a `mixture`, in place of the above."
    )

    @model_validator(mode="after")
    def _stops(self) -> RolloutConfig:
        if "" in self.stop:
            raise ValueError("`stop` must not hold an empty string: remove it")
        return self


class EvaluateConfig(Section):
    """Held-out evaluation: before SFT if asked, before RL, at the end of the run, and periodically
    during RL."""

    num_tasks: int | None = Field(None, ge=1, description="Number of held-out tasks; null: all.")
    num_tasks_between: int | None = Field(
        None, ge=1, description="Tasks of the periodic evaluations; null: `num_tasks`."
    )
    samples_per_task: int = Field(1, ge=1, description="Episodes per task; the k of pass@k.")
    temperature: float = Field(0.0, ge=0, description="0 is greedy.")
    every: int = Field(
        0, ge=0, description="RL steps between evaluations; 0: before and after only."
    )
    before_sft: bool = Field(
        False,
        description="Evaluate before SFT too, on the same tasks: what SFT adds. Of use for a "
        "pretrained model; random weights solve what chance solves, and play episodes to their "
        "limits.",
    )
    confidence: float = Field(0.95, gt=0, lt=1, description="Level of the confidence intervals.")
    roles: dict[str, Any] | None = Field(
        None,
        description="Policies of the roles in evaluations; null: as in `roles`. The first role of "
        "`roles` is the one that is measured.",
    )


class LimitConfig(Section):
    """A rate limit over all processes that use the same name and store."""

    rate_per_s: float = Field(
        gt=0, le=10_000, description="Calls per second: 0.5 is one in two seconds."
    )
    burst: int = Field(
        1, ge=1, description="Calls that may start at once after a pause; 1: evenly spaced."
    )
    store: str = Field(
        "file",
        pattern=r"^(file|file:///.+|rediss?://.+)$",
        description="Shared state: `file` (the processes of this user on this host), "
        "file:///FOLDER, or redis://HOST:PORT/DB for several hosts.",
    )
    max_wait_s: float = Field(
        300.0, gt=0, description="Longest wait for a call's turn, in seconds; then it fails."
    )

    @model_validator(mode="after")
    def _fills(self) -> LimitConfig:
        if self.burst / self.rate_per_s > 1e9:
            raise ValueError("`burst / rate_per_s` must be at most 1e9 s: the bucket never fills")
        return self


class CheckpointConfig(Section):
    """Times at which checkpoints are saved, and the checkpoints to keep."""

    every: int = Field(10, ge=1, description="Steps between checkpoints, in each stage.")
    keep_last: int = Field(2, ge=1, description="Number of newest checkpoints to keep.")
    keep_best: int = Field(
        1, ge=0, description="Number of checkpoints with the best metric to keep."
    )
    metric: str | None = Field(
        None,
        description="Metric of `keep_best` and of `--checkpoint best`; higher is better. Null: "
        "evaluate/success if there are held-out tasks.",
    )


class BudgetConfig(Section):
    """Limits of a run. It saves a checkpoint and stops before a step that would exceed a limit."""

    price_per_hour: float | None = Field(
        None, gt=0, description="Price of the machine per hour of the run; null: unknown."
    )
    currency: str = Field("USD", description="Currency of `price_per_hour` and `max_cost`.")
    max_cost: float | None = Field(None, gt=0, description="Maximum cost; needs `price_per_hour`.")
    max_hours: float | None = Field(None, gt=0, description="Maximum wall time, in hours.")
    max_tokens: int | None = Field(
        None, ge=1, description="Maximum tokens of all training episodes."
    )

    @model_validator(mode="after")
    def _priced(self) -> BudgetConfig:
        if self.max_cost is not None and self.price_per_hour is None:
            raise ValueError("`max_cost` needs `price_per_hour`")
        return self


class TracesConfig(Section):
    """OpenTelemetry spans of the rollouts: episodes, completions, tool calls."""

    endpoint: str = Field(
        pattern=r"^https?://[^\s/?#]+",
        description="URL of the receiver, OTLP over HTTP: http://127.0.0.1:4318. Without a path, "
        "/v1/traces is added. Headers: OTEL_EXPORTER_OTLP_HEADERS in the environment.",
    )
    share: float = Field(1.0, gt=0, le=1, description="Share of the episodes that are exported.")
    content: bool = Field(
        False, description="Export messages, arguments and results too, not only their sizes."
    )

    @field_validator("endpoint")
    @classmethod
    def _full(cls, endpoint: str) -> str:
        try:
            parts = urlsplit(endpoint)
            secret = "@" in parts.netloc
            if not parts.hostname or parts.port == 0:
                raise ValueError
        except ValueError:
            raise ValueError("it must be http(s)://HOST[:PORT][/PATH]") from None
        if secret:
            raise ValueError(
                "it holds a user or password, which the run would store: give them as headers in "
                "the environment variable OTEL_EXPORTER_OTLP_HEADERS"
            )
        return endpoint if parts.path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"
