"""The sections of the training stages: SFT, RL, their optimizers, the learner."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ludus.config.sections import Horizon, Section
from ludus.core.types import Spec

Moment = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    """The optimizer of a stage and its schedule."""

    name: Literal["adamw", "muon"] = Field(
        "adamw",
        description="`muon`: orthogonal updates for the hidden layers' matrices, AdamW for all "
        "else; a model from scratch learns in fewer steps. Whole matrices on one learner.",
    )
    lr: float = Field(1e-3, gt=0, le=1e30, description="Peak learning rate.")
    betas: tuple[Moment, Moment] = Field((0.9, 0.95), description="AdamW's beta1 and beta2.")
    eps: float = Field(1e-8, gt=0, description="AdamW's epsilon.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's weight decay, on matrices only.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are clipped to this norm.")
    warmup_steps: int = Field(0, ge=0, description="Optimizer steps of linear warm-up.")
    schedule: Literal["constant", "linear", "cosine", "wsd"] = Field(
        "constant",
        description="Schedule after the warm-up, until the stage's last step. `wsd` (warm-up, "
        "stable, decay): constant, then linear to 0 in the last 40 % of the steps.",
    )


class LearnerConfig(Section):
    """Computation of a training step. Except with `detach_observations`, the results are the same
    up to rounding."""

    dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="Data type of matrix products; weights keep model.dtype (bfloat16: autocast).",
    )
    share_prefixes: bool = Field(
        True, description="Compute a prefix that samples share once, as a tree of tokens."
    )
    detach_observations: bool = Field(
        False,
        description="Compute gradients only through the positions that predict trained tokens; the "
        "states of prompts and observations are constants in the backward pass (truncated "
        "backpropagation). The gradient is an approximation, and takes far less time where "
        "observations are long. For models from scratch and others with ludus' training kernels.",
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
    """The optimizer of RL and its schedule, with a lower peak learning rate."""

    lr: float = Field(3e-4, gt=0, le=1e30, description="Peak learning rate.")
    target_kl: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Lower the learning rate so that an RL step moves the policy by at most about "
        "this KL (nats a token) at the peak of the schedule; in warm-up and decay by less. An RL "
        "step needs at least two optimizer steps (`minibatches`, `epochs`). Null: the schedule "
        "alone.",
    )


class DemonstrationsConfig(Section):
    """Episodes of the environment's expert, on the first training tasks."""

    num_episodes: int = Field(1000, ge=1, description="Episodes that the expert plays.")
    num_workers: int = Field(2, ge=1, description="Worker processes.")
    timeout_s: float = Field(20.0, gt=0, description="Time limit of an episode, in seconds.")
    only_successful: bool = Field(True, description="Exclude episodes that the expert lost.")
    mistakes: float = Field(
        0.0,
        ge=0,
        le=0.9,
        description="Probability that a wrong action is played before a turn of the expert. SFT "
        "does not train the wrong action, but the turns after it, so that the policy learns to go "
        "on after a mistake.",
    )
    code_share: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Share of the demonstrations in which the expert runs its code (format "
        "`code`). The others answer at once: RL has to find out when the tool pays.",
    )


RECENT = 2
"""Measurements whose mean is compared with `sft.until.success`: of many single ones, some reach it
by luck alone."""


class SFTUntilConfig(Section):
    """The measured end of SFT: episodes on training tasks that have no demonstration, and no failed
    one (on all where fewer than 8 are left), sampled at `rollout.temperature`, as RL will sample
    them."""

    success: float = Field(
        0.4,
        gt=0,
        le=1,
        description="End SFT where this share of the episodes succeeds, as the mean of the last "
        "two measurements.",
    )
    patience: int = Field(
        5,
        ge=1,
        description="End SFT where this many measurements in a row are not above the best before "
        "them, which is at least 0.1.",
    )
    min_gain: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="End SFT where all the steps that are left are not expected to raise success "
        "by this much at a success p of one half, and by 4p(1 - p) times as much elsewhere, since "
        "RL learns less too where fewer episodes differ. The log-odds of success rise with the "
        "logarithm of the steps, by a line through at least four measurements, and one standard "
        "error is added. Never while less than 0.1 of the episodes succeed. Null: never.",
    )
    min_steps: int = Field(
        0,
        ge=0,
        description="Steps before which `patience` and `min_gain` do not end SFT: success that is "
        "still that of chance has no trend. At most the step of the last measurement before SFT's "
        "end.",
    )
    every: int = Field(
        10, ge=1, description="Steps between measurements; at most the stage's `steps`."
    )
    num_tasks: int = Field(32, ge=1, description="Tasks of a measurement, always the same.")
    samples_per_task: int = Field(4, ge=1, description="Episodes per task.")


def last_measured(steps: int, every: int) -> int:
    """Returns the step after which SFT's last measurement before its end comes; 0: none does."""
    return (steps - 1) // every * every


class SFTConfig(Section):
    """Supervised fine-tuning on demonstrations, or on a file of them."""

    data: str | None = Field(
        None, description="A JSON-lines file of conversations; null: the demonstrations."
    )
    steps: int = Field(300, ge=1, description="Optimizer steps; with `until` at most.")
    until: SFTUntilConfig | None = Field(
        None,
        description="Measure the policy while it learns, and end SFT early: RL learns most from a "
        "policy that succeeds in some episodes and is still undecided. Where no RL follows, the "
        "rate of the schedule `wsd` falls first, over a third more steps. Null: all steps.",
    )
    episodes_per_step: int = Field(32, ge=1, description="Demonstrations per optimizer step.")
    observation_weight: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Weight of the loss of prompts and observations, where a token of the expert "
        "has 1. To predict what the environment says teaches a model from scratch its words: 0.2 "
        "in the recipes of `ludus init`. Values near 1 hurt: with 1 and few steps, the demo lost "
        "half of its success. 0: only the expert's turns train.",
    )
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
    steps_per_unused_sft_step: float = Field(
        0.0,
        ge=0,
        le=1000,
        description="Steps added for each step of SFT that `sft.until` leaves unused: the time "
        "that SFT does not need goes to RL. The sum is rounded down.",
    )
    groups_per_step: int = Field(16, ge=1, le=1_000_000, description="Tasks sampled per step.")
    group_size: int = Field(
        8, ge=1, le=1_000_000, description="Episodes per task, compared with one another."
    )
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
    min_signal: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="End the stage where fewer than this share of the groups of the last 20 steps "
        "have a signal (`train/groups_with_advantage`), after 20 steps had more: a policy that few "
        "samples move may lose what it has learned. Null: never.",
    )

    def steps_after(self, unused: int) -> int:
        """The steps, with those added for `unused` steps of SFT."""
        return self.steps + int(unused * self.steps_per_unused_sft_step)

    def most_steps(self, sft: SFTConfig | None) -> int:
        """The steps where `sft` leaves all of its own."""
        return self.steps_after(sft.steps if sft is not None else 0)

    @model_validator(mode="after")
    def _measures_kl(self) -> RLConfig:
        if self.optimizer.target_kl is not None and self.epochs * self.minibatches < 2:
            raise ValueError(
                "`optimizer.target_kl` has no effect where an RL step has one optimizer step: it "
                "measures how far those before the last moved the policy; set `minibatches: 2` or "
                "more"
            )
        return self

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
