"""`ludus profile`: time of a run's steps by function, as a flame graph.

Profiles a short run in a temporary folder: the requested steps, a few demonstrations, no
evaluation. Stacks are sampled while the last stage trains.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from ludus.config.schema import RunConfig
from ludus.core.errors import ConfigError
from ludus.core.types import Trajectory
from ludus.diagnostics.profiling.flames import flame_page, folded, speedscope
from ludus.diagnostics.profiling.sampling import Stacks, StackSampler, start_sampling
from ludus.pipeline.monitoring.progress import Observer
from ludus.telemetry.occupancy import PARTS

NUM_DEMONSTRATIONS = 64

WRITERS = {".html": flame_page, ".json": speedscope, ".txt": folded}
"""Writers by file suffix: a self-contained page, speedscope.app's format, and folded stacks for
flamegraph.pl."""


def check_out(path: Path) -> None:
    """Refuse an output path that cannot be written. Errors: ConfigError."""
    if path.suffix not in WRITERS:
        raise ConfigError(
            f"--out: {path}: the name must end in .html (a page), .json (for speedscope) or "
            ".txt (folded stacks)"
        )
    if not path.parent.is_dir():
        raise ConfigError(f"--out: {path.parent} is no folder; create it first")


def short_run(config: RunConfig, steps: int, runs_dir: Path) -> RunConfig:
    """Returns the configuration of the run to profile: it evaluates nothing."""
    checkpoint: dict[str, object] = {"every": steps, "metric": None}
    changes: dict[str, object] = {
        "name": "profile",
        "runs_dir": str(runs_dir),
        "store": None,
        "metrics": [],
        "report": False,
        "tasks": config.tasks.model_copy(update={"heldout": None}),
        "checkpoint": config.checkpoint.model_copy(update=checkpoint),
    }
    if config.demonstrations:
        count = min(config.demonstrations.num_episodes, NUM_DEMONSTRATIONS)
        changes["demonstrations"] = config.demonstrations.model_copy(update={"num_episodes": count})
    if config.sft:
        changes["sft"] = config.sft.model_copy(update={"steps": steps, "until": None})
    if config.rl:
        whole = {"steps": steps, "min_success_to_stop": None, "min_signal": None}
        changes["rl"] = config.rl.model_copy(update=whole)
    return config.model_copy(update=changes)


class Listener:
    """Observes a run, and forwards everything to `display`."""

    def __init__(self, display: Observer) -> None:
        self._display = display

    def stage(self, name: str, total: int, start: int = 0) -> None:
        self._display.stage(name, total, start)

    def step(self, stage: str, step: int, metrics: dict[str, float]) -> None:
        self._display.step(stage, step, metrics)

    def tick(self) -> None:
        self._display.tick()

    def episode(self, trajectory: Trajectory) -> None:
        self._display.episode(trajectory)

    def note(self, text: str) -> None:
        self._display.note(text)

    def close(self) -> None:
        self._display.close()


class VerifiedCounter(Listener):
    """Counts the tokens that `verify` mode compared."""

    num_tokens = num_episodes = 0

    def step(self, stage: str, step: int, metrics: dict[str, float]) -> None:
        super().step(stage, step, metrics)
        if stage == "rl":
            self.num_tokens += int(metrics["rollout/verified_tokens"])
            self.num_episodes += int(metrics["rollout/episodes"])

    def __str__(self) -> str:
        if not self.num_tokens:
            return "no token was sampled: nothing was verified"
        return (
            f"sampler and learner agree in every bit on {self.num_tokens:,} sampled tokens of "
            f"{self.num_episodes:,} episodes: the divergence between them is 0"
        )


class Profiler(Listener):
    """Samples a run's stacks during `stage`, and sums the time of its steps."""

    def __init__(self, stage: str, display: Observer) -> None:
        super().__init__(display)
        self.stacks: Stacks = Counter()
        self.how = ""
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.num_steps = 0
        self._stage = stage
        self._sampler: StackSampler | None = None

    def stage(self, name: str, total: int, start: int = 0) -> None:
        super().stage(name, total, start)
        if name == self._stage:
            self._sampler = start_sampling()
            self.how = self._sampler.how

    def step(self, stage: str, step: int, metrics: dict[str, float]) -> None:
        super().step(stage, step, metrics)
        if stage == self._stage:
            self.num_steps += 1
            for part in PARTS:
                self.seconds[part] += metrics[f"time/{part}_s"]

    def close(self) -> None:
        super().close()
        if self._sampler is not None:
            self.stacks += self._sampler.stop()
            self._sampler = None

    def table(self) -> list[tuple[str, float, float]]:
        """Returns part, seconds a step and share, largest first."""
        total = sum(self.seconds.values()) or 1.0
        ordered = sorted(self.seconds.items(), key=lambda item: -item[1])
        steps = max(self.num_steps, 1)
        return [(part, value / steps, value / total) for part, value in ordered if value > 0]

    def write(self, path: Path, title: str) -> None:
        """Write the flame graph in the format of the path's suffix."""
        seconds = sum(self.seconds.values()) / max(self.num_steps, 1)
        subtitle = f"{self.num_steps} steps of {seconds:.2f} s; {self.how}"
        page = WRITERS[path.suffix](self.stacks, title, subtitle)
        path.write_text(page, encoding="utf-8")
