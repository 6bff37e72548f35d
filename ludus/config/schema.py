"""Every key of a run's configuration: the sections, their defaults, their limits.

This file is the reference; `ludus config` prints it. Loading and errors are in `load.py`. Plug-ins
are not listed here: a `Spec` names a plug-in, and its owner validates it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ludus.core.types import Spec

ALONE = {"sft", "ppo", "reinforce_pp"}
"""Algorithms that do not compare a group's episodes: a group of one episode is allowed."""


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

    @model_validator(mode="after")
    def _one_origin(self) -> ModelConfig:
        if (self.path is None) == (self.architecture is None):
            raise ValueError("set exactly one of `path` and `architecture`")
        if self.architecture is not None and self.tokenizer is None:
            raise ValueError("a model from scratch needs a `tokenizer`, e.g. {name: words}")
        if self.tf32 and not self.device.startswith("cuda"):
            raise ValueError(f"`tf32` needs `device: cuda`; products on {self.device} are exact")
        return self


class TasksConfig(Section):
    """The readers of tasks. The two splits must not share a task."""

    train: Spec = Field(description="Reader of the training tasks.")
    heldout: Spec | None = Field(None, description="Reader of the tasks for evaluation.")
    on_bad_line: Literal["refuse", "skip"] = Field(
        "refuse", description="On a malformed line: refuse the run, or skip and report the line."
    )
    allow_overlap: bool = Field(
        False,
        description="Allow held-out tasks that equal training tasks. By default they are replaced "
        "where the environment makes the tasks, and refused where they come from files.",
    )
    shuffle: bool = Field(
        True, description="Visit training tasks in a new random order in each epoch."
    )


Turns = Annotated[int, Field(ge=1)]
Horizon = list[tuple[int, int]]


class RolloutConfig(Section):
    """Playing episodes."""

    format: Literal["plain", "react", "tools"] = Field(
        "plain",
        description="The action of a turn: the whole text (plain), the text after `Action:` "
        "(react), or a tool call (tools).",
    )
    system_prompt: str | None = Field(
        None, description="System message before the environment's messages."
    )
    max_turns: Turns | dict[str, Turns] | None = Field(
        None,
        description="Maximum turns of an episode; for a `mixture` also by environment: "
        "{babyai: 20}. Default: the environment's limit.",
    )
    max_tokens_per_turn: int = Field(64, ge=1, description="Maximum tokens of a sampled turn.")
    temperature: float = Field(1.0, ge=0, description="0 is greedy.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling; 1 is off.")
    top_k: int = Field(0, ge=0, description="Sample among the k likeliest tokens; 0 is off.")
    stop: list[str] = Field(default_factory=list, description="Strings that end a turn.")
    concurrency: int = Field(64, ge=1, description="Episodes played at the same time.")
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

    @model_validator(mode="after")
    def _stops(self) -> RolloutConfig:
        if "" in self.stop:
            raise ValueError("`stop` must not hold an empty string: remove it")
        return self


Moment = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    lr: float = Field(1e-3, gt=0, le=1e30, description="Peak learning rate.")
    betas: tuple[Moment, Moment] = Field((0.9, 0.95), description="AdamW's beta1 and beta2.")
    eps: float = Field(1e-8, gt=0, description="AdamW's epsilon.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's weight decay, on matrices only.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are clipped to this norm.")
    warmup_steps: int = Field(0, ge=0, description="Steps of linear warm-up to the peak.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Schedule after the warm-up, until the stage's last step."
    )


class LearnerConfig(Section):
    """Computation of a training step. The results are the same up to rounding."""

    dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="Data type of matrix products; weights keep model.dtype (bfloat16: autocast).",
    )
    share_prefixes: bool = Field(
        True, description="Compute a prefix that samples share once, as a tree of tokens."
    )
    gradient_checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass: slower, less memory."
    )
    compile: bool = Field(
        False,
        description="torch.compile the layers. Needs a C++ compiler; little gain on a CPU.",
    )
    master_weights: Literal["float32", "stochastic_rounding"] = Field(
        "float32",
        description="For weights in bfloat16 (model.dtype): `float32` updates a float32 copy of "
        "them (18 bytes a weight in all); `stochastic_rounding` keeps no copy and rounds updates "
        "at random (8 bytes a weight).",
    )


class RLOptimizerConfig(OptimizerConfig):
    """AdamW and its schedule, with a lower peak learning rate."""

    lr: float = Field(3e-4, gt=0, le=1e30, description="Peak learning rate.")


class DemonstrationsConfig(Section):
    """Episodes of the environment's expert, on the first training tasks."""

    num_episodes: int = Field(1000, ge=1, description="Episodes that the expert plays.")
    num_workers: int = Field(2, ge=1, description="Worker processes.")
    timeout_s: float = Field(20.0, gt=0, description="Time limit of an episode, in seconds.")
    only_successful: bool = Field(True, description="Exclude episodes that the expert lost.")


class SFTConfig(Section):
    """Supervised fine-tuning on demonstrations, or on a file of them."""

    data: str | None = Field(
        None, description="A JSON-lines file of conversations; null: the demonstrations."
    )
    steps: int = Field(300, ge=1, description="Optimizer steps.")
    episodes_per_step: int = Field(32, ge=1, description="Demonstrations per optimizer step.")
    tokens_per_batch: int = Field(8192, ge=1, description="Maximum tokens of a forward pass.")
    optimizer: OptimizerConfig = Field(
        default_factory=OptimizerConfig, description="The optimizer of this stage."
    )


class RLConfig(Section):
    """Reinforcement learning: sample groups, score, assign advantages, train."""

    algorithm: Spec = Field(
        default_factory=lambda: Spec(name="grpo"), description="A row of the algorithm table."
    )
    steps: int = Field(100, ge=1, description="Policy iterations: rollouts, then training.")
    groups_per_step: int = Field(16, ge=1, description="Tasks sampled per step.")
    group_size: int = Field(8, ge=1, description="Episodes per task, compared with one another.")
    horizon: Horizon | dict[str, Horizon] | None = Field(
        None,
        description="Maximum turns by step: [[0, 5], [100, 10]] is 5 turns, and 10 from step 100 "
        "on; for a `mixture` also by environment. Null: rollout.max_turns in all steps.",
    )
    epochs: int = Field(1, ge=1, description="Passes over a step's samples.")
    minibatches: int = Field(1, ge=1, description="Optimizer steps per pass.")
    tokens_per_batch: int = Field(8192, ge=1, description="Maximum tokens of a forward pass.")
    optimizer: RLOptimizerConfig = Field(
        default_factory=RLOptimizerConfig, description="The optimizer of this stage."
    )
    max_staleness: int = Field(
        0,
        ge=0,
        description="Play episodes ahead while the policy trains: the maximum number of weight "
        "versions published between the start of an episode and the step that trains on it. "
        "0: play and train alternately, reproducibly.",
    )
    min_success_to_stop: float | None = Field(
        None,
        gt=0,
        le=1,
        description="End the stage when a periodic evaluation reaches this success rate.",
    )

    @model_validator(mode="after")
    def _ordered(self) -> RLConfig:
        if self.horizon is None:
            return self
        schedules = self.horizon.values() if isinstance(self.horizon, dict) else [self.horizon]
        for schedule in schedules:
            steps = [step for step, _ in schedule]
            if steps[:1] != [0] or steps != sorted(set(steps)) or min(t for _, t in schedule) < 1:
                raise ValueError(
                    "`horizon` must be a list of [first step, turns] that begins with step 0, with "
                    "ascending steps and at least 1 turn: [[0, 5], [100, 10]]"
                )
        return self


class EvaluateConfig(Section):
    """Held-out evaluation: before RL, at the end of the run, and periodically during RL."""

    num_tasks: int | None = Field(None, ge=1, description="Number of held-out tasks; null: all.")
    num_tasks_between: int | None = Field(
        None, ge=1, description="Tasks of the periodic evaluations; null: `num_tasks`."
    )
    samples_per_task: int = Field(1, ge=1, description="Episodes per task; the k of pass@k.")
    temperature: float = Field(0.0, ge=0, description="0 is greedy.")
    every: int = Field(
        0, ge=0, description="RL steps between evaluations; 0: before and after only."
    )
    confidence: float = Field(0.95, gt=0, lt=1, description="Level of the confidence intervals.")


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


class RunConfig(Section):
    """A training run: demonstrations, SFT, RL, evaluation. A null stage is skipped."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="The run's name.")
    seed: int = Field(0, ge=0, description="Seed of all random numbers of the run.")
    backend: Spec = Field(
        default_factory=lambda: Spec(name="local"),
        description="Back end: trains in this process, or shows N tasks and stops (debug).",
    )
    runs_dir: str = Field("runs", description="Folder of the runs and of the default store.")
    store: str | None = Field(
        None, description="URL of the run store (postgresql://...); null: SQLite in `runs_dir`."
    )
    mirror: str | None = Field(
        None,
        pattern=r"^[a-z][a-z0-9]*://.+",
        description="URL of the run's copy in object storage, updated after each checkpoint: "
        "s3://BUCKET/FOLDER, gs://..., file:///FOLDER. `ludus train` continues from the copy.",
    )
    model: ModelConfig = Field(description="The policy.")
    sampler: Spec = Field(
        default_factory=lambda: Spec(name="in_process"),
        description="Sampler of the turns: the learner's weights in this process, or a server.",
    )
    learner: LearnerConfig = Field(default_factory=LearnerConfig, description="Training steps.")
    env: Spec | None = Field(None, description="The environment.")
    judge: Spec | None = Field(
        None, description="Scores episodes that the environment does not score; null: no judge."
    )
    tasks: TasksConfig = Field(description="Training and held-out tasks.")
    rollout: RolloutConfig = Field(default_factory=RolloutConfig, description="Playing episodes.")
    demonstrations: DemonstrationsConfig | None = Field(
        None, description="Expert demonstrations, or null."
    )
    sft: SFTConfig | None = Field(None, description="Supervised fine-tuning, or null.")
    rl: RLConfig | None = Field(None, description="Reinforcement learning, or null.")
    evaluate: EvaluateConfig = Field(default_factory=EvaluateConfig, description="Evaluation.")
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="Saving.")
    metrics: list[Spec] = Field(
        default_factory=list, description="Metric sinks besides JSON lines: tensorboard, wandb, ..."
    )
    budget: BudgetConfig = Field(
        default_factory=BudgetConfig, description="Price, and limits of cost, hours or tokens."
    )
    threads: int = Field(0, ge=0, le=1024, description="Threads of torch; 0: one per core.")
    verify: bool = Field(
        False,
        description="Sample and train batch-invariantly; stop at the first token whose "
        "log-probability differs between sampler and learner in any bit. Slow.",
    )
    report: bool = Field(True, description="Write report.html at the end.")

    @property
    def best_by(self) -> str | None:
        """The metric of the best checkpoint; None where nothing measures the policy."""
        heldout = self.tasks.heldout is not None
        return self.checkpoint.metric or ("evaluate/success" if heldout else None)

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        if self.sft and not self.sft.data and not self.demonstrations:
            raise ValueError("`sft` needs `demonstrations` or `sft.data`")
        if self.demonstrations and not self.env:
            raise ValueError("`demonstrations` needs an `env`")
        if self.rl and not (self.env or self.judge):
            raise ValueError("`rl` needs an `env` or a `judge` to score episodes")
        for name, stage in {"sft": self.sft, "rl": self.rl}.items():
            if stage and stage.tokens_per_batch < self.model.context_length:
                raise ValueError(
                    f"`{name}.tokens_per_batch` must be at least `model.context_length`: an "
                    "episode has to fit into one forward pass"
                )
        if self.rl and self.rl.group_size < 2 and self.rl.algorithm.name not in ALONE:
            raise ValueError(
                "`rl.group_size` must be at least 2: episodes are compared within their group"
            )
        if self.rollout.max_tokens_per_turn >= self.model.context_length:
            raise ValueError("`rollout.max_tokens_per_turn` must be below `model.context_length`")
        half = self.model.dtype == "bfloat16" and self.model.lora is None
        if self.learner.master_weights == "stochastic_rounding" and not half:
            raise ValueError(
                "`learner.master_weights: stochastic_rounding` needs `model.dtype: bfloat16` and "
                "no `model.lora`: other weights are trained in float32"
            )
        return self

    @model_validator(mode="after")
    def _ahead(self) -> RunConfig:
        """Prefetched episodes arrive in any order, and older weights sampled them."""
        if not (self.rl and self.rl.max_staleness):
            return self
        reasons = {
            "`rollout.deterministic: false`": self.rollout.deterministic,
            "`verify: false`": self.verify,
            "`importance_cap` in `rl.algorithm.args`, e.g. 2.0 (older weights sampled the "
            "episodes)": not self.rl.algorithm.args.get("importance_cap"),
        }
        if wrong := [setting for setting, bad in reasons.items() if bad]:
            raise ValueError(f"`rl.max_staleness` above 0 needs {' and '.join(wrong)}")
        return self

    @model_validator(mode="after")
    def _exact(self) -> RunConfig:
        """`verify` compares float32 with float32, computed in this process."""
        wrong = {
            "model.dtype: float32": self.model.dtype != "float32",
            "learner.dtype: float32": self.learner.dtype != "float32",
            "model.tf32: false": self.model.tf32,
            "learner.compile: false": self.learner.compile,
            "learner.gradient_checkpointing: false": self.learner.gradient_checkpointing,
            "sampler: in_process": self.sampler.name not in ("in_process", "exact"),
            "sampler.args.dtype: float32": self.sampler.args.get("dtype") == "bfloat16",
            "model.lora.dropout: 0": bool(self.model.lora and self.model.lora.dropout),
        }
        if self.verify and any(wrong.values()):
            needed = ", ".join(f"`{setting}`" for setting, bad in wrong.items() if bad)
            raise ValueError(f"`verify` needs {needed}: it compares bits, its tolerance is 0")
        return self
