"""Trinity's explorer and trainer, where their steps must be those of `ludus train`."""

from __future__ import annotations

from typing import Any

from trinity.explorer.explorer import Explorer
from trinity.trainer.trainer import Trainer

from ludus.backends.host_side.player import this_job


class LudusExplorer(Explorer):  # type: ignore[misc]
    """Evaluates the weights after a step. Trinity's own evaluates those before it, and not the
    last ones."""

    _has_explored = False

    async def sync_weight(self) -> None:
        """Take the trainer's weights, and evaluate them where it is time."""
        await super().sync_weight()
        step, every = self.explore_step_num, self.config.explorer.eval_interval
        first = not self._has_explored  # the first call is before any step
        if this_job()["evaluate_first"] if first else step % every == 0:
            await self.eval()
            await self._finish_eval_step(step)

    async def explore_step(self) -> bool:
        """Play the episodes of the next step."""
        self._has_explored = True
        return bool(await super().explore_step())

    async def _finish_explore_step(self, step: int) -> None:
        """Wait for the episodes of a step. Errors: RuntimeError where none can train: then Trinity
        would wait for weights that nothing trains."""
        result = await self.rollout_coordinator.finalize_train_batch.remote(step)
        if not any(name.startswith("experience_pipeline/") for name in result["metrics"]):
            raise RuntimeError(f"no episode of step {step} can train")

    async def end(self) -> None:
        """Close what an error in `explore` left open, so that the trainer waits for no more."""
        if self.rollout_coordinator is not None:
            await self.shutdown()

    def need_eval(self) -> bool:
        """False: `sync_weight` evaluates."""
        return False


class LudusTrainer(Trainer):  # type: ignore[misc]
    """Trains on all experiences of a step at once, whatever their number."""

    async def train_step(self, experiences: list[Any]) -> dict[str, Any]:
        """Train one step: one optimizer step for each epoch."""
        self.engine.config.actor.ppo_mini_batch_size = len(experiences)
        metrics: dict[str, Any] = await super().train_step(experiences)
        return metrics

    async def steps(self) -> int:
        """The number of complete steps."""
        return int(self.train_step_num)
