"""The learner of one rank: its micro-batches, the gradient of all ranks, its part of the optimizer.

All ranks make the same number of passes, for a layer's weights are gathered from all of them. A
rank without a micro-batch computes two tokens without a loss. Before each backward pass the ranks
agree that all losses are finite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from ludus.config.schema import OptimizerConfig
from ludus.core.errors import ConfigError, TrainingError
from ludus.models.memory import is_out_of_memory
from ludus.train.algorithms.losses import LossFn, trajectory_means, unit_of
from ludus.train.batches.packing import Batch, MicroBatch
from ludus.train.distributed.group import Group
from ludus.train.distributed.sharding import Parts, ShardedForward
from ludus.train.learner import LOWER_RATE, SMALLER_STATE, Learner, _cut, _Pending, save_batch


class ShardedLearner(Learner):
    """Trains this rank's part of a model. All ranks call the same methods.

    Args:
        group: the ranks.
        forward: passes of the sharded model.
        parts: this rank's parts of the trained parameters.
        dump_dir: receives the batches of a failed step, in a folder a rank.
    """

    def __init__(
        self,
        group: Group,
        forward: ShardedForward,
        parts: Parts,
        config: OptimizerConfig,
        num_steps: int,
        *,
        temperature: float = 1.0,
        dump_dir: Path | None = None,
        critic_lr: float | None = None,
    ) -> None:
        super().__init__(
            forward.model,
            config,
            num_steps,
            temperature=temperature,
            dump_dir=dump_dir,
            critic_lr=critic_lr,
            forward=forward,
            parameters=parts.parameters,
        )
        self.group, self.parts = group, parts
        self.passes = forward.with_temperature(self.temperature)
        self.forward = self.passes

    def forward_backward(self, batch: Batch, loss: LossFn) -> dict[str, float]:
        """Add the gradient of all ranks' batches; returns metrics of all of them.

        Errors: those of `Learner.forward_backward`, on all ranks. Micro-batches are not split where
        memory runs out: the rank leaves the group.
        """
        self.model.train()
        if not self._pending:
            self._zero_grad()
        self._pending.append(_Pending(batch, loss, list(batch.micro_batches)))
        try:
            sums = self._rounds(batch, loss)
        except BaseException:
            self._zero_grad()
            raise
        num_loss_tokens = max(sums.pop("loss_tokens"), 1)
        return {n: value if n == "loss" else value / num_loss_tokens for n, value in sums.items()}

    def _rounds(self, batch: Batch, loss: LossFn) -> dict[str, float]:
        """Run the passes of all micro-batches; returns sums over the ranks."""
        own: list[MicroBatch] = batch.micro_batches
        facts = self.group.share((len(own), _cut(own)))
        num_rounds = max(count for count, _ in facts)
        is_cut = any(cut for _, cut in facts)
        if is_cut and unit_of(loss) == "trajectory":
            raise self.group.agree(
                ConfigError(
                    "the loss depends on whole trajectories, but the batch has a trajectory in two "
                    "micro-batches: pack it with whole=True, or declare the loss's unit"
                )
            )
        rounds = [*own, *[None] * (num_rounds - len(own))]
        ratios = self._ratios(rounds) if is_cut and unit_of(loss) == "log_ratio" else None
        sums: dict[str, float] = {"loss_tokens": float(batch.num_loss_tokens)}
        for micro_batch in rounds:
            for name, value in self._round(micro_batch, loss, ratios).items():
                sums[name] = sums.get(name, 0.0) + value
        return _sum(self.group.share(sums if self.group.is_first else {}))

    def _round(
        self, micro_batch: MicroBatch | None, loss: LossFn, ratios: Tensor | None
    ) -> dict[str, float]:
        """Add the gradient of one pass; returns this rank's sums."""
        metrics: dict[str, float] = {}
        chosen = micro_batch or self.passes.idle
        with self.forward.passes(chosen):
            if micro_batch is None:
                total = self._zero()
            else:
                total, metrics = self._loss(micro_batch, loss, ratios)
                metrics["loss"] = float(total.detach())
            values = self.group.numbers(float(total.detach()))
            bad = [r for r, value in enumerate(values) if not math.isfinite(value)]
            if bad:
                self._refuse(f"the loss of rank {bad[0]} is {values[bad[0]]}")
            total.backward()  # type: ignore[no-untyped-call]
        self.parts.collect()
        return metrics

    def _zero(self) -> Tensor:
        """A loss of 0 that depends on all weights."""
        hidden_PE, logprobs_N, entropy_N = self.forward.compute(self.passes.idle)
        total = logprobs_N.sum() + entropy_N.sum()
        if self.critic is not None:
            total = total + self.critic(hidden_PE).sum()
        return total * 0

    @torch.no_grad()
    def _ratios(self, rounds: Sequence[MicroBatch | None]) -> Tensor:
        """Mean log-ratio of each of this rank's trajectories, which no other rank has."""
        gaps, trajectories = [], []
        with self.passes.released():
            for micro_batch in rounds:
                logprobs_N, _ = self.logprobs(micro_batch or self.passes.idle)
                if micro_batch is not None:
                    gaps.append(logprobs_N - micro_batch.old_logprobs_N.to(logprobs_N.device))
                    trajectories.append(micro_batch.trajectory_N)
        if not gaps:
            return torch.zeros(0, device=self.forward.device)
        return trajectory_means(torch.cat(gaps), torch.cat(trajectories).to(self.forward.device))

    def _clip(self) -> float:
        """Clip the gradient of all ranks and create the optimizer's state; returns the norm."""
        self._sum_over_heads()
        grads = [p.grad for p in self.parameters if p.grad is not None]
        others = set() if self.group.is_first else set(map(id, self.parts.shared))
        squares = sum((_square(p.grad) for p in self.parameters if id(p) not in others), 0.0)
        square = sum(self.group.numbers(squares))
        if self.critic is not None:
            own = [p.grad for p in self.critic.parameters if p.grad is not None]
            if not self.group.is_first:
                for grad in own:
                    grad.zero_()
            self.group.sum_(own)
            square += sum(map(_square, own))
            grads += own
        norm = math.sqrt(square) if math.isfinite(square) else square
        factor = min(self.config.max_grad_norm / (norm + 1e-6), 1.0) if norm == norm else norm
        for grad in grads:
            grad.mul_(factor)
        self.group.jointly(self._prepare)
        return norm

    def _sum_over_heads(self) -> None:
        if "tp" in (self.group.mesh.mesh_dim_names or ()):
            for part in self.parts.of_heads:
                if part.grad is not None:
                    dist.all_reduce(part.grad, group=self.group.mesh.get_group("tp"))

    def _prepare(self) -> None:
        try:
            self.optimizer.prepare()
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise TrainingError(
                f"optimizer step {self.step}: memory does not suffice for the optimizer's state; "
                f"{SMALLER_STATE}"
            ) from error

    def _zero_grad(self) -> None:
        super()._zero_grad()
        self.model.zero_grad(set_to_none=True)

    def _refuse(self, what: str, remedy: str = LOWER_RATE) -> NoReturn:
        """Save the pending batches of each rank, discard the gradients, and raise TrainingError on
        all ranks."""
        failures = self.group.share(self._dump())
        where = ""
        if self.dump_dir is not None:
            where = f"; its batches are saved in {self._failed}"
            if fault := next(filter(None, failures), None):
                where = f"; its batches could not be saved in {self._failed} ({fault})"
        self._zero_grad()
        raise self.group.agree(
            TrainingError(
                f"optimizer step {self.step}: {what}{where}. The weights are as they were before "
                f"the step; {remedy}"
            )
        )

    @property
    def _failed(self) -> Path:
        return (self.dump_dir or Path()) / f"failed-batch-{self.step:06d}"

    def _dump(self) -> str | None:
        """Save this rank's pending batches; returns why that failed."""
        if self.dump_dir is None:
            return None
        folder = self._failed / f"rank-{self.group.rank}"
        try:
            for number, pending in enumerate(self._pending):
                save_batch(pending.batch, folder / f"{number}" if number else folder)
        except (OSError, SafetensorError) as error:
            return str(error)
        return None


def _square(grad: Tensor | None) -> float:
    return 0.0 if grad is None else float(grad.float().square().sum(dtype=torch.float64))


def _sum(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Sums by name, in the order of the ranks."""
    names: dict[str, Any] = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part.get(name, 0.0) for part in parts) for name in names}
