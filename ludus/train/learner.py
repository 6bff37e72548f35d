"""One optimizer step: forward, loss, backward over micro-batches, clip, AdamW.

Shape suffix: N, the loss tokens of a micro-batch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ludus.config.schema import LearnerConfig, OptimizerConfig
from ludus.core.errors import TrainingError
from ludus.telemetry.logs import get_logger
from ludus.train.algorithms.losses import (
    LossFn,
    LossInputs,
    needs_whole_trajectories,
    trajectory_means,
)
from ludus.train.critic import Critic
from ludus.train.forward import Forward
from ludus.train.packing import Batch, MicroBatch

log = get_logger(__name__)

SMALLER = (
    "lower rl.tokens_per_batch (in SFT, sft.tokens_per_batch) or model.context_length, or set "
    "learner.gradient_checkpointing to true, and resume"
)


class Learner:
    """Trains a Hugging Face causal LM in place.

    Args:
        model: the policy; its weights are shared with the in-process sampler.
        config: AdamW and its schedule.
        num_steps: optimizer steps of the stage, which the schedule ends with.
        temperature: that of the rollouts; logits are divided by it, so that the learner's
            log-probabilities are those of the distribution that was sampled from.
        context_length: the most tokens of a sample, where that is known.
        settings: how a step computes.
        num_ids: only ids below this can be sampled; None: all of the model's.
        dump_dir: where a batch is saved whose loss is not finite.
        critic_lr: learning rate of a critic on the policy's hidden states; None: no critic.
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
        num_ids: int | None = None,
        dump_dir: Path | None = None,
        critic_lr: float | None = None,
    ) -> None:
        self.model = model
        self.config = config
        self.num_steps = num_steps
        self.temperature = temperature or 1.0
        self.forward = Forward(
            model,
            temperature=self.temperature,
            context_length=context_length,
            settings=settings,
            num_ids=num_ids,
        )
        self.dump_dir = dump_dir
        self.step = 0
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        # Norms' gains and biases are vectors: decaying them only fights the optimizer.
        groups: list[dict[str, Any]] = [
            {"params": [p for p in self.parameters if p.ndim > 1]},
            {"params": [p for p in self.parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.critic: Critic | None = None
        if critic_lr is not None:
            hidden_size = model.config.get_text_config().hidden_size
            self.critic = Critic(hidden_size, critic_lr, self.forward.device)

    def train_step(self, batch: Batch, loss: LossFn) -> dict[str, float]:
        """One optimizer step over all micro-batches of `batch`.

        The loss is the weighted sum over loss tokens, with weights that were set for the whole
        batch: how it is cut into micro-batches does not change the gradient.

        A micro-batch that memory does not hold is split, and all are done again, once.

        Errors: TrainingError where loss or gradient is not finite, or memory does not suffice; the
        weights are untouched, the batch is saved in `dump_dir`.
        """
        self.model.train()
        micro_batches = list(batch.micro_batches)
        done, totals = self._accumulate(batch, micro_batches, loss)
        if done < len(micro_batches):
            parts = batch.halves(micro_batches[done])
            log.warning("out of memory: a micro-batch is split", step=self.step, parts=len(parts))
            micro_batches[done : done + 1] = parts
            if parts:
                done, totals = self._accumulate(batch, micro_batches, loss)
            if not parts or done < len(micro_batches):
                self._refuse(
                    batch, "memory does not suffice, also with half a forward pass", SMALLER
                )
        clipped = self.parameters + (self.critic.parameters if self.critic else [])
        norm = float(torch.nn.utils.clip_grad_norm_(clipped, self.config.max_grad_norm))
        if not math.isfinite(norm):
            self._refuse(batch, f"the gradient's norm is {norm}")
        lr = learning_rate(self.config, self.step, self.num_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.critic is not None:
            self.critic.step()
        self.step += 1
        num_loss_tokens = max(batch.num_loss_tokens, 1)
        metrics = {
            name: value if name == "loss" else value / num_loss_tokens
            for name, value in totals.items()
        }
        return {**metrics, "grad_norm": norm, "lr": lr}

    def logprobs(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """The policy's log-probabilities and entropies [N] of the loss tokens, with gradient."""
        with self.forward.passes(micro_batch):
            return self.forward.logprobs(micro_batch)

    def _accumulate(
        self, batch: Batch, micro_batches: Sequence[MicroBatch], loss: LossFn
    ) -> tuple[int, dict[str, float]]:
        """Gradients of all micro-batches, from zero; returns how many were done before memory ran
        out (all of them, where it did not), and the sums of their metrics."""
        self.optimizer.zero_grad(set_to_none=True)
        if self.critic is not None:
            self.critic.optimizer.zero_grad(set_to_none=True)
        totals: dict[str, float] = {}
        done = 0
        try:
            whole = needs_whole_trajectories(loss)
            ratios = self._trajectory_log_ratios(micro_batches) if whole else None
            for micro_batch in micro_batches:
                value, metrics = self._backward(micro_batch, loss, ratios)
                if not math.isfinite(value):
                    self._refuse(batch, f"the loss is {value}")
                metrics["loss"] = value
                for name, item in metrics.items():
                    totals[name] = totals.get(name, 0.0) + item
                done += 1
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self.optimizer.zero_grad(set_to_none=True)
        return done, totals

    @torch.no_grad()
    def _trajectory_log_ratios(self, micro_batches: Sequence[MicroBatch]) -> Tensor | None:
        """Mean log-ratio of each trajectory [number of trajectories]; None where each lies in one
        micro-batch as a whole, whose loss then finds it by itself."""
        parts = [set(micro_batch.trajectory_N.tolist()) for micro_batch in micro_batches]
        if sum(map(len, parts)) == len(set().union(*parts)):
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
        """Add the micro-batch's gradient; returns its loss and sums of its per-token metrics."""
        device = self.forward.device

        def there(values_N: Tensor | None) -> Tensor | None:
            return None if values_N is None else values_N.to(device)

        with self.forward.passes(micro_batch):
            hidden_PE, logits_PV = self.forward.hidden_states(micro_batch)
            logprobs_N, entropy_N = self.forward.score(hidden_PE, logits_PV, micro_batch)
            values_P = self.critic(hidden_PE) if self.critic else None
            inputs = LossInputs(
                logprobs_N=logprobs_N,
                old_logprobs_N=micro_batch.old_logprobs_N.to(device),
                advantages_N=micro_batch.advantages_N.to(device),
                trajectory_N=micro_batch.trajectory_N.to(device),
                ref_logprobs_N=there(micro_batch.ref_logprobs_N),
                entropy_N=entropy_N,
                values_N=None if values_P is None else values_P[micro_batch.place_N.to(device)],
                old_values_N=there(micro_batch.values_N),
                returns_N=there(micro_batch.returns_N),
                trajectory_log_ratio_N=None
                if ratios is None
                else ratios[micro_batch.trajectory_N.to(device)],
            )
            output = loss(inputs)
            total = (output.loss_N * micro_batch.weights_N.to(device)).sum()
            if torch.isfinite(total):
                total.backward()  # type: ignore[no-untyped-call]
        sums = {name: float(value.detach().sum()) for name, value in output.metrics.items()}
        sums["entropy"] = float(entropy_N.detach().sum())
        return float(total.detach()), sums

    def _refuse(
        self, batch: Batch, what: str, remedy: str = "lower optimizer.lr and resume"
    ) -> NoReturn:
        """Save the batch that broke training, and stop."""
        where = ""
        if self.dump_dir is not None:
            folder = self.dump_dir / f"failed-batch-{self.step:06d}"
            try:
                save_batch(batch, folder)
                where = f"; its batch is saved in {folder}"
            except (OSError, SafetensorError) as error:
                where = f"; its batch could not be saved in {folder} ({error})"
        self.optimizer.zero_grad(set_to_none=True)
        raise TrainingError(
            f"optimizer step {self.step}: {what}{where}. The weights are as they were before the "
            f"step; {remedy}"
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: on a GPU, in torch's allocator on the CPU, or in Python's."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return "not enough memory" in text or "can't allocate memory" in text


def learning_rate(config: OptimizerConfig, step: int, num_steps: int) -> float:
    """The rate of optimizer step `step` (from 0): linear warm-up, then the schedule."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    span = max(num_steps - config.warmup_steps, 1)
    progress = min((step - config.warmup_steps) / span, 1.0)
    if config.schedule == "linear":
        return config.lr * (1 - progress)
    if config.schedule == "cosine":
        return config.lr * 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr


def save_batch(batch: Batch, folder: Path) -> None:
    """Write a batch, to look at what broke: its counts, and a file of tensors a micro-batch.

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
