"""The learner: forward, loss, backward over micro-batches; clip, optimizer step.

Shape suffix: N, the loss tokens of a micro-batch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from ludus.config.schema import LearnerConfig, OptimizerConfig
from ludus.config.training import RLOptimizerConfig
from ludus.core.errors import ConfigError, TrainingError
from ludus.models.memory import is_out_of_memory
from ludus.models.vocabulary import Vocabulary
from ludus.telemetry.logs import get_logger
from ludus.train.algorithms.losses import (
    LossFn,
    LossInputs,
    computed,
    require_unit,
    trajectory_means,
    unit_of,
)
from ludus.train.batches.packing import Batch, MicroBatch
from ludus.train.critic import Critic
from ludus.train.forward import Forward
from ludus.train.optimizers.muon import make_optimizer
from ludus.train.optimizers.trust_region import NOT_MEASURED, RateScale, moved

log = get_logger(__name__)

SMALLER = (
    "lower rl.tokens_per_batch (in SFT, sft.tokens_per_batch) or model.context_length, or set "
    "learner.gradient_checkpointing to true, and resume"
)
LOWER_RATE = "lower optimizer.lr and resume"
SMALLER_STATE = (
    "train adapters (model.lora), or start with model.dtype: bfloat16 and learner.master_weights: "
    "stochastic_rounding, which need less"
)


class OutOfMemory(TrainingError):
    """Memory does not suffice for an optimizer step."""


class Learner:
    """Trains a Hugging Face causal LM in place.

    Args:
        model: the policy; the in-process sampler shares its weights.
        config: the optimizer and the learning-rate schedule.
        num_steps: optimizer steps of the stage; the schedule ends with them.
        temperature: that of the rollouts. Logits are divided by it, so the learner's
            log-probabilities are of the distribution that was sampled from.
        context_length: most tokens of a sample; None: unknown.
        settings: precision, compilation, gradient checkpointing.
        vocabulary: the ids that are sampled; None: all.
        dump_dir: receives the batches of a failed step.
        critic_lr: learning rate of a critic on the policy's hidden states; None: no critic.
        forward: the model's forward passes; None: made from the other arguments.
        parameters: what the optimizer changes; None: the model's trained parameters.
    """

    def __init__(
        self,
        model: Any,
        config: OptimizerConfig,
        num_steps: int,
        *,
        temperature: float = 1.0,
        context_length: int | None = None,
        settings: LearnerConfig | None = None,
        vocabulary: Vocabulary | None = None,
        dump_dir: Path | None = None,
        critic_lr: float | None = None,
        forward: Forward | None = None,
        parameters: Sequence[nn.Parameter] | None = None,
    ) -> None:
        self.model = model
        self.config = config
        self.num_steps = num_steps
        self.temperature = temperature or 1.0
        self.forward = forward or Forward(
            model,
            temperature=self.temperature,
            context_length=context_length,
            settings=settings,
            vocabulary=vocabulary,
        )
        self.dump_dir = dump_dir
        self.step = 0
        target_kl = config.target_kl if isinstance(config, RLOptimizerConfig) else None
        self.rate_scale = None if target_kl is None else RateScale(target_kl)
        self._pending: list[_Pending] = []
        self._declared: LossFn | None = None  # the loss whose unit was checked
        self.parameters = list(parameters or (p for p in model.parameters() if p.requires_grad))
        self.optimizer = make_optimizer(
            model, self.parameters, config, self.forward.settings.master_weights
        )
        self.critic: Critic | None = None
        if critic_lr is not None:
            hidden_size = model.config.get_text_config().hidden_size
            self.critic = Critic(hidden_size, critic_lr, self.forward.device)

    def train_step(self, batch: Batch, loss: LossFn) -> dict[str, float]:
        """One optimizer step on one batch. Errors: those of its two halves."""
        metrics = self.forward_backward(batch, loss)
        return {**metrics, **self.optim_step()}

    def forward_backward(self, batch: Batch, loss: LossFn) -> dict[str, float]:
        """Add the gradient of a batch to those since the last `optim_step`; returns its metrics.

        The loss is the sum over loss tokens of loss x weight, so cutting a batch into micro-batches
        does not change the gradient. A micro-batch that exceeds memory is split, and everything
        since the last `optim_step` is computed again, once.

        Errors: TrainingError where the loss is not finite or memory is exhausted. The gradients are
        discarded, the weights are unchanged, the batches are saved in `dump_dir`. ConfigError where
        the loss depends on more than it declares, or needs whole trajectories and the batch cuts
        them.
        """
        if unit_of(loss) == "trajectory" and _cut(batch.micro_batches):
            raise ConfigError(
                "the loss depends on whole trajectories, but the batch has a trajectory in two "
                "micro-batches: pack it with whole=True, or declare the loss's unit (depends_on)"
            )
        self.model.train()
        if not self._pending:
            self._zero_grad()
        current = _Pending(batch, loss, list(batch.micro_batches))
        self._pending.append(current)
        try:
            done, sums = self._accumulate(current)
            if done < len(current.micro_batches):
                sums = self._accumulate_split(current, done)
        except BaseException:
            self._zero_grad()
            raise
        num_loss_tokens = max(batch.num_loss_tokens, 1)
        return {n: value if n == "loss" else value / num_loss_tokens for n, value in sums.items()}

    def optim_step(self) -> dict[str, float]:
        """Clip the gradient, and step the optimizer and the critic; returns norm and learning rate.

        Errors: TrainingError where the gradient is not finite or memory does not hold the
        optimizer's state, as in `forward_backward`.
        """
        norm = self._clip()
        if not math.isfinite(norm):
            self._refuse(f"the gradient's norm is {norm}")
        lr = learning_rate(self.config, self.step, self.num_steps)
        if self.rate_scale is not None:
            lr *= self.rate_scale.scale
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        if self.critic is not None:
            self.critic.optimizer.step()
        self._zero_grad()
        self.step += 1
        return {"grad_norm": norm, "lr": lr}

    @property
    def saved_scale(self) -> dict[str, float] | None:
        """Of a checkpoint: the state of the scale, or None where no `target_kl` sets it."""
        return None if self.rate_scale is None else self.rate_scale.state()

    def restore_scale(self, saved: Mapping[str, float] | None) -> None:
        """Take `saved_scale` of a checkpoint, unless this run or that one has no `target_kl`: then
        the rate begins as in a new run, for nothing would bring it back, or had brought it down."""
        if saved is not None and self.rate_scale is not None:
            self.rate_scale = RateScale(self.rate_scale.target, **saved)

    def adapt(self, steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Scale the learning rate by how far an iteration's optimizer steps moved the policy.

        Returns the KL, its target and the new scale as `train/NAME`; nothing without a target.
        Errors: ConfigError where the loss does not measure it.
        """
        config, rate_scale = self.config, self.rate_scale
        if rate_scale is None:
            return {}
        if steps and "kl" not in steps[0]:
            raise ConfigError(NOT_MEASURED)
        share = learning_rate(config, self.step, self.num_steps) / config.lr
        kl = moved(steps)
        rate_scale.update(kl, share)
        found = {"target_kl": rate_scale.target * share**2, "rate_scale": rate_scale.scale}
        if kl is not None:
            found["moved_kl"] = kl
        return {f"train/{name}": value for name, value in found.items()}

    def _clip(self) -> float:
        """Clip the gradient and create the optimizer's state; returns the gradient's norm."""
        clipped = self.parameters + (self.critic.parameters if self.critic else [])
        try:
            norm = torch.nn.utils.clip_grad_norm_(clipped, self.config.max_grad_norm)
            self.optimizer.prepare()
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self._refuse("memory does not suffice for the optimizer's state", SMALLER_STATE)
        return float(norm)

    def logprobs(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """The policy's log-probabilities and entropies [N] of the loss tokens, with gradient."""
        with self.forward.passes(micro_batch):
            return self.forward.logprobs(micro_batch)

    def _zero_grad(self) -> None:
        self._pending.clear()
        self.optimizer.zero_grad(set_to_none=True)
        if self.critic is not None:
            self.critic.optimizer.zero_grad(set_to_none=True)

    def _accumulate(self, pending: _Pending) -> tuple[int, dict[str, float]]:
        """Add the gradients of all micro-batches. Returns the number done before memory ran out (or
        all), and the sums of their metrics."""
        sums: dict[str, float] = {}
        done = 0
        try:
            by_ratio = unit_of(pending.loss) == "log_ratio"
            ratios = self._trajectory_log_ratios(pending.micro_batches) if by_ratio else None
            for micro_batch in pending.micro_batches:
                value, metrics = self._backward(micro_batch, pending.loss, ratios)
                if not math.isfinite(value):
                    self._refuse(f"the loss is {value}")
                metrics["loss"] = value
                for name, item in metrics.items():
                    sums[name] = sums.get(name, 0.0) + item
                done += 1
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        return done, sums

    def _accumulate_split(self, current: _Pending, failed: int) -> dict[str, float]:
        """Split the micro-batch that exceeded memory, and compute all pending batches again."""
        parts = current.batch.halves(current.micro_batches[failed])
        log.warning("out of memory: a micro-batch is split", step=self.step, parts=len(parts))
        current.micro_batches[failed : failed + 1] = parts
        all_pending = list(self._pending)
        self._zero_grad()
        self._pending += all_pending
        results = [(pending, *self._accumulate(pending)) for pending in all_pending if parts]
        if not parts or any(done < len(pending.micro_batches) for pending, done, _ in results):
            self._refuse("memory does not suffice, also with half a forward pass", SMALLER)
        return results[-1][2]

    @torch.no_grad()
    def _trajectory_log_ratios(self, micro_batches: Sequence[MicroBatch]) -> Tensor | None:
        """Mean log-ratio of each trajectory [number of trajectories]; None where none is in
        two micro-batches, for the loss computes the ratios itself then."""
        if not _cut(micro_batches):
            return None
        gaps: list[Tensor] = []
        for micro_batch in micro_batches:
            logprobs_N, _ = self.logprobs(micro_batch)
            gaps.append(logprobs_N - micro_batch.old_logprobs_N.to(logprobs_N.device))
        trajectory_N = torch.cat([m.trajectory_N for m in micro_batches])
        return trajectory_means(torch.cat(gaps), trajectory_N.to(self.forward.device))

    def _backward(
        self, micro_batch: MicroBatch, loss: LossFn, ratios: Tensor | None = None
    ) -> tuple[float, dict[str, float]]:
        """Add a micro-batch's gradient; returns its loss and the sums of its per-token metrics."""
        with self.forward.passes(micro_batch):
            total, sums = self._loss(micro_batch, loss, ratios)
            if torch.isfinite(total):
                total.backward()  # type: ignore[no-untyped-call]
        return float(total.detach()), sums

    def _loss(
        self, micro_batch: MicroBatch, loss: LossFn, ratios: Tensor | None
    ) -> tuple[Tensor, dict[str, float]]:
        """Returns a micro-batch's loss, with its graph, and the sums of its per-token metrics."""
        device = self.forward.device

        def moved(values_N: Tensor | None) -> Tensor | None:
            return None if values_N is None else values_N.to(device)

        hidden_PE, logprobs_N, entropy_N = self.forward.compute(micro_batch)
        values_P = self.critic(hidden_PE) if self.critic else None
        inputs = LossInputs(
            logprobs_N=logprobs_N,
            old_logprobs_N=micro_batch.old_logprobs_N.to(device),
            advantages_N=micro_batch.advantages_N.to(device),
            trajectory_N=micro_batch.trajectory_N.to(device),
            ref_logprobs_N=moved(micro_batch.ref_logprobs_N),
            entropy_N=entropy_N,
            values_N=None if values_P is None else values_P[micro_batch.place_N.to(device)],
            old_values_N=moved(micro_batch.values_N),
            returns_N=moved(micro_batch.returns_N),
            consistency_N=moved(micro_batch.consistency_N),
            trajectory_log_ratio_N=None
            if ratios is None
            else ratios[micro_batch.trajectory_N.to(device)],
        )
        if self._declared is not loss:
            require_unit(loss, inputs)
            self._declared = loss
        output = computed(loss, inputs)
        total = (output.loss_N * micro_batch.weights_N.to(device)).sum()
        sums = {name: float(value.detach().sum()) for name, value in output.metrics.items()}
        return total, {**sums, "entropy": float(entropy_N.detach().sum())}

    def _refuse(self, what: str, remedy: str = LOWER_RATE) -> NoReturn:
        """Save the pending batches, discard their gradients, and raise TrainingError."""
        where = ""
        if self.dump_dir is not None:
            folder = self.dump_dir / f"failed-batch-{self.step:06d}"
            try:
                for number, pending in enumerate(self._pending):
                    save_batch(pending.batch, folder / f"{number}" if number else folder)
                where = f"; its batch is saved in {folder}"
            except (OSError, SafetensorError) as error:
                where = f"; its batch could not be saved in {folder} ({error})"
        self._zero_grad()
        kind = TrainingError if remedy == LOWER_RATE else OutOfMemory
        raise kind(
            f"optimizer step {self.step}: {what}{where}. The weights are as they were before the "
            f"step; {remedy}"
        )


@dataclass(slots=True)
class _Pending:
    """A batch whose gradient is accumulated; its micro-batches, split where memory ran out."""

    batch: Batch
    loss: LossFn
    micro_batches: list[MicroBatch]


def _cut(micro_batches: Sequence[MicroBatch]) -> bool:
    """True if a trajectory is in two micro-batches."""
    parts = [set(micro_batch.trajectory_N.tolist()) for micro_batch in micro_batches]
    return sum(map(len, parts)) > len(set().union(*parts))


WSD_DECAY = 0.4
"""Share of the steps in which the rate of the schedule `wsd` falls (Hu et al. 2024,
arXiv:2404.06395)."""


def learning_rate(config: OptimizerConfig, step: int, num_steps: int) -> float:
    """Learning rate of optimizer step `step` (from 0): linear warm-up, then the schedule."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    span = max(num_steps - config.warmup_steps, 1)
    progress = min((step - config.warmup_steps) / span, 1.0)
    if config.schedule == "linear":
        return config.lr * (1 - progress)
    if config.schedule == "wsd":
        left = max(num_steps - step, 0)
        return config.lr * min(left / max(WSD_DECAY * num_steps, 1), 1.0)
    if config.schedule == "cosine":
        return config.lr * 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr


def save_batch(batch: Batch, folder: Path) -> None:
    """Write a batch for inspection: counts.json, and one file of tensors a micro-batch.

    `MicroBatch(**safetensors.torch.load_file(path))` reads one back.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for number, micro_batch in enumerate(batch.micro_batches):
        tensors = {
            name: value.contiguous()
            for name in MicroBatch.__slots__
            if isinstance(value := getattr(micro_batch, name), Tensor)
        }
        save_file(tensors, folder / f"micro-batch-{number:03d}.safetensors")
    counts = {
        "num_micro_batches": len(batch.micro_batches),
        "num_samples": batch.num_samples,
        "num_loss_tokens": batch.num_loss_tokens,
        "num_tokens": batch.num_tokens,
        "num_unique_tokens": batch.num_unique_tokens,
    }
    (folder / "counts.json").write_text(json.dumps(counts))
