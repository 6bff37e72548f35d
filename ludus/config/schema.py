"""A run's configuration: its keys, and the rules between its sections.

The sections are in `sections.py`, `tasks.py` and `training.py`; their names can be imported from
here. These files are the reference; `ludus config` prints it. Loading and errors are in `load.py`.
Plug-ins are not listed: a `Spec` names a plug-in, and its owner validates it.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from ludus.config.policies import Name, PolicyConfig, Roles, check_roles
from ludus.config.secrets import Secret, SecretUrl
from ludus.config.sections import (
    BudgetConfig,
    CheckpointConfig,
    EvaluateConfig,
    LimitConfig,
    LoraConfig,
    MarkersConfig,
    ModelConfig,
    RolloutConfig,
    Section,
    ToolCallsConfig,
    TracesConfig,
)
from ludus.config.tasks import CurriculumConfig, TasksConfig, TierConfig
from ludus.config.training import (
    DemonstrationsConfig,
    LearnerConfig,
    OptimizerConfig,
    RLConfig,
    RLOptimizerConfig,
    SFTConfig,
)
from ludus.core.types import Spec

__all__ = [
    "ALONE",
    "BudgetConfig",
    "CheckpointConfig",
    "CurriculumConfig",
    "DemonstrationsConfig",
    "EvaluateConfig",
    "LearnerConfig",
    "LimitConfig",
    "LoraConfig",
    "MarkersConfig",
    "ModelConfig",
    "OptimizerConfig",
    "RLConfig",
    "RLOptimizerConfig",
    "RolloutConfig",
    "RunConfig",
    "SFTConfig",
    "Section",
    "TasksConfig",
    "TierConfig",
    "ToolCallsConfig",
    "TracesConfig",
]


def _command(value: Any) -> Any:
    """`{command: [...], ...}` is the agent `command` with these arguments."""
    if isinstance(value, dict) and "command" in value and "name" not in value:
        return {"name": "command", "args": value}
    return value


AgentSpec = Annotated[Spec, BeforeValidator(_command)]

ALONE = {"sft", "ppo", "reinforce_pp"}
"""Algorithms that do not compare a group's episodes: a group of one episode is allowed."""


def _names(args: Any) -> bool:
    """True if a reader's arguments may name an environment or a judge for its tasks."""
    if isinstance(args, dict):
        return any(args.get(key) for key in ("env", "judge")) or any(map(_names, args.values()))
    return False


class RunConfig(Section):
    """A training run: demonstrations, SFT, RL, evaluation. A null stage is skipped."""

    name: str = Field(
        "run",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        max_length=100,
        description="The run's name.",
    )
    seed: int = Field(0, ge=0, description="Seed of all random numbers of the run.")
    backend: Spec = Field(
        default_factory=lambda: Spec(name="local"),
        description="Back end: trains in this process (local), on a Ray cluster (ray), in verl's "
        "trainer (verl), in Trinity-RFT's (trinity), or shows N tasks and stops (debug).",
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
    agent: AgentSpec | None = Field(
        None,
        description="Your own agent: `my_agent.py:run` (async def run(task, model)), or "
        "{command: [python, agent.py]}; null: the built-in agent.",
    )
    roles: Roles = Field(
        default_factory=dict,
        description="Roles of the agent's episodes and their policies: {wolf: policy, villager: "
        "old}; `policy` is the run's `model`. Of {wolf: {policy: 0.8, old: 0.2}}, one is drawn for "
        "each group. The first role is the agent's own.",
    )
    policies: dict[Name, PolicyConfig] = Field(
        default_factory=dict,
        description="Policies of roles, besides `policy`: others that train, or fixed ones.",
    )
    judge: Spec | None = Field(
        None, description="Scores episodes that the environment does not score; null: no judge."
    )
    tools: list[Spec] = Field(
        default_factory=list,
        description="Tools that the model may call, with or without an environment.",
    )
    limits: dict[Annotated[str, Field(min_length=1, max_length=150)], LimitConfig] = Field(
        default_factory=dict,
        description="Rate limits by function of `tools`, or by URL of an endpoint that a judge or "
        "an evaluated model asks: {search: {rate_per_s: 2}}. All runs with the same name and "
        "store share them.",
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
    notify: Annotated[list[SecretUrl], Secret()] = Field(
        default_factory=list,
        repr=False,
        description="URLs of apprise that are told of the end or death of the run: "
        "mailto://..., slack://..., json://...; or $NAME: URLs in the environment. The run stores "
        "the scheme of a URL only.",
    )
    traces: TracesConfig | None = Field(
        None, description="OpenTelemetry spans of the rollouts, or null: none."
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
        scored = self.env or self.judge or self.agent or _names(self.tasks.train.args)
        if self.sft and self.sft.until and not scored:
            raise ValueError(
                "`sft.until` needs an `env`, a `judge` or an `agent` to score the episodes that it "
                "measures; leave it out to train all of `sft.steps`"
            )
        if self.rl and self.rl.steps_per_unused_sft_step and not (self.sft and self.sft.until):
            raise ValueError(
                "`rl.steps_per_unused_sft_step` has no effect: without `sft.until`, SFT leaves no "
                "step unused; set that, or this to 0"
            )
        formats = {self.rollout.format, *(part.format for part in self.rollout.parts.values())}
        if "code" in formats:
            self._code()
        elif self.demonstrations and self.demonstrations.code_share < 1:
            raise ValueError("`demonstrations.code_share` needs `rollout.format: code`")
        if self.rl and not scored:
            raise ValueError("`rl` needs an `env`, a `judge` or an `agent` to score episodes")
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
        tokens = {"rollout": self.rollout.max_tokens_per_turn}
        for name, part in self.rollout.parts.items():
            tokens[f"rollout.parts.{name}"] = part.max_tokens_per_turn or 0
        for place, most in tokens.items():
            if most >= self.model.context_length:
                raise ValueError(
                    f"`{place}.max_tokens_per_turn` must be below `model.context_length`"
                )
        half = self.model.dtype == "bfloat16" and self.model.lora is None
        if self.learner.master_weights == "stochastic_rounding" and not half:
            raise ValueError(
                "`learner.master_weights: stochastic_rounding` needs `model.dtype: bfloat16` and "
                "no `model.lora`: other weights are trained in float32"
            )
        return self

    def _code(self) -> None:
        """Errors: ValueError where `rollout.format: code` is not possible."""
        if not self.tools:
            raise ValueError("`rollout.format: code` needs `tools` to run the code")
        if self.model.thinking == "strip":
            raise ValueError(
                "`rollout.format: code` needs `model.thinking: keep` or `forbid`: results stand "
                "inside the turn, so its beginning cannot be stripped"
            )

    @model_validator(mode="after")
    def _own_agent(self) -> RunConfig:
        """An agent of the user decides itself when and with what it calls the model."""
        if self.agent is None:
            return self
        rollout = self.rollout
        wrong = {
            "`rollout.deterministic: false` (its calls come at any time)": rollout.deterministic,
            "`verify: false`": self.verify,
            "no `rollout.format`": rollout.format != "plain",
            "no `rollout.system_prompt` (the agent writes its own)": bool(rollout.system_prompt),
            "no `rollout.parts`": bool(rollout.parts),
            "a number as `rollout.max_turns`, the most calls": isinstance(rollout.max_turns, dict),
        }
        if needed := [setting for setting, bad in wrong.items() if bad]:
            raise ValueError(f"`agent` needs {' and '.join(needed)}")
        return self

    @model_validator(mode="after")
    def _roles(self) -> RunConfig:
        check_roles(
            self.roles,
            self.policies,
            self.evaluate,
            has_agent=self.agent is not None,
            max_staleness=self.rl.max_staleness if self.rl else 0,
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
