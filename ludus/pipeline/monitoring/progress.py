"""Progress display of a run, and of benchmarks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from ludus.core.errors import counted, printable
from ludus.core.types import Trajectory
from ludus.evaluate import Evaluation
from ludus.telemetry.occupancy import PARTS

WIDE = 132
"""Least columns of a terminal that shows a step's time by part."""


class Observer(Protocol):
    """Receives a run's progress, in the run's thread."""

    def stage(self, name: str, total: int, start: int = 0) -> None:
        """Start a stage of `total` steps at step `start`."""

    def tick(self) -> None:
        """Count a step of a stage without metrics."""

    def episode(self, trajectory: Trajectory) -> None:
        """Count a finished episode."""

    def step(self, stage: str, step: int, metrics: dict[str, float]) -> None:
        """Show the metrics of a recorded training step, counted from 0."""

    def note(self, text: str) -> None:
        """Show a message to the user."""

    def close(self) -> None:
        """End the display."""


class Display:
    """Live progress bars on a terminal; elsewhere one line every few seconds.

    Shows stage, step, success, reward, loss, tokens a second, and the time left in the stage,
    extrapolated from its steps so far. A wide terminal also shows the step's time by part.
    """

    def __init__(self, console: Console | None = None, *, every_s: float = 10.0) -> None:
        self.console = console or Console(stderr=True)
        self._every_s = every_s
        self._name = ""
        self._total = self._done = self._start = self._episodes = 0
        self._started = self._printed = time.monotonic()
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def stage(self, name: str, total: int, start: int = 0) -> None:
        self._name, self._total, self._start = name, total, start
        self._done, self._episodes = start, 0
        self._started = time.monotonic()
        if self.console.is_terminal:
            if self._bar is None:  # not before a stage starts: a prompt may come first
                self._bar = _bar(self.console)
                self._bar.start()
            if self._task is not None:
                self._bar.update(self._task, left="")
            self._task = self._bar.add_task(name, total=total, completed=start, info="", left="")
        else:
            unit = "episodes" if name == "demonstrations" else "steps"
            self._print_line(f"{name}: {total} {unit}" + (f", from step {start}" if start else ""))

    def tick(self) -> None:
        self._advance(self._done + 1, "")

    def episode(self, trajectory: Trajectory) -> None:
        self._episodes += 1
        if self._bar is not None and self._task is not None and self._episodes % 16 == 0:
            self._bar.update(self._task, left=f"[dim]{self._episodes} episodes in this step")

    def step(self, stage: str, step: int, metrics: dict[str, float]) -> None:
        self._episodes = 0
        wide = not self.console.is_terminal or self.console.width >= WIDE
        split = time_split(metrics) if wide else ""
        self._advance(step + 1, f"{summary(stage, metrics)}  {split}".rstrip())

    def note(self, text: str) -> None:
        self._print(text)

    def close(self) -> None:
        """Stop the bars; they stay on screen."""
        if self._bar is not None:
            self._bar.stop()
        self._bar = self._task = None

    def _advance(self, done: int, info: str) -> None:
        if not self._name:  # a step of an earlier process, recorded before a stage starts
            return
        self._done = done
        left = self._left()
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, info=info, left=left)
        elif time.monotonic() - self._printed > self._every_s or done == self._total:
            self._print_line(f"{self._name} {done}/{self._total} {info} {left}".rstrip())

    def _left(self) -> str:
        num_steps = self._done - self._start
        if num_steps <= 0 or self._done >= self._total:
            return ""
        elapsed = time.monotonic() - self._started
        seconds = round(elapsed / num_steps * (self._total - self._done))
        minutes, seconds = divmod(seconds, 60)
        if minutes >= 60:
            return f"{minutes // 60} h {minutes % 60:02d} min left"
        return f"{minutes}:{seconds:02d} left"

    def _print_line(self, text: str) -> None:
        self._printed = time.monotonic()
        self._print(text)

    def _print(self, text: str) -> None:
        """Print verbatim: no mark-up, and no wrapped lines in a log."""
        wrap = self.console.is_terminal
        self.console.print(Text(printable(text)), highlight=False, soft_wrap=not wrap)


def _bar(console: Console) -> Progress:
    """Returns progress with one line a stage; a narrow terminal shows numbers without a bar."""
    wide = console.width >= 100
    return Progress(
        TextColumn("[bold]{task.description}"),
        *([BarColumn(bar_width=24)] if wide else []),
        MofNCompleteColumn(),
        TextColumn("{task.fields[info]}"),
        *([TimeElapsedColumn()] if wide else []),
        TextColumn("{task.fields[left]}"),
        console=console,
    )


def summary(stage: str, metrics: dict[str, float]) -> str:
    """Returns a step's main metrics in one line."""
    loss = [("loss", "train/loss", "{:.3f}")]
    outcome = [("success", "rollout/success", "{:.0%}"), ("reward", "rollout/reward", "{:.2f}")]
    columns = [*(loss if stage == "sft" else outcome), ("tok/s", "time/tokens_per_s", "{:,.0f}")]
    if "tasks/tier" in metrics:
        columns.insert(0, ("tier", "tasks/tier", "{:.0f}"))
    parts = [
        f"{label} {form.format(metrics[name])}" for label, name, form in columns if name in metrics
    ]
    if "budget/cost" in metrics:
        cost, projected = metrics["budget/cost"], metrics["budget/projected_cost"]
        parts.append(f"cost {cost:.2f} of about {projected:.2f}")
    return "  ".join(parts)


def evaluation_line(label: str, step: int, result: Evaluation, last_stage: str) -> str:
    """Returns an evaluation in one line, which begins with its tasks and its time.

    Args:
        label: `start`, `before`, `rl` or `after`, of held-out tasks; `sft`, of training tasks.
        last_stage: of the run: `sft` or `rl`.
    """
    if label == "sft":
        tasks = f"{result.tasks('training ')}{result.remarks}"
        return f"sft.until, step {step}: {result.success} of sampled episodes succeed ({tasks})"
    when = {
        "start": "before SFT",
        "before": "before RL",
        "after": f"after {last_stage.upper()}",
    }.get(label, f"step {step}")
    return f"held-out, {when}, {result.sampling}: {result}{_lowest(result)}"


def _lowest(result: Evaluation) -> str:
    """The tier with the least success; empty where there are no two with different ones."""
    values = {name: tier.success.value for name, tier in result.tiers.items()}
    if len(set(values.values())) < 2:
        return ""
    lowest = min(values, key=values.__getitem__)
    return f"; lowest of {len(values)} tiers: {lowest} {100 * values[lowest]:.1f} %"


def stop_line(kept: tuple[str, int] | None, complete: tuple[str, int] | None, command: str) -> str:
    """Returns what a stop within a step loses, and how the run goes on.

    Args:
        kept, complete: stage and number of steps of the newest checkpoint, and of the newest
            complete step; None: there is none yet.
        command: resumes the run.
    """
    lost = "the running step"
    if complete is not None and complete != kept:
        stage, steps = complete
        number = steps - (kept[1] if kept and kept[0] == stage else 0)
        lost += f" and {counted(number, 'complete step')} of {stage} without a checkpoint"
    start = f"after step {kept[1]} of {kept[0]}" if kept else "from its start"
    return f"stopping at once; lost: {lost}; `{command}` goes on {start}"


def time_split(metrics: dict[str, float]) -> str:
    """Returns a step's wall time by part from 1 %, largest first: `sample 55% train 38%`."""
    wall = metrics.get("time/wall_s", 0.0)
    if wall <= 0:
        return ""
    shares = {part: metrics.get(f"time/{part}_s", 0.0) / wall for part in PARTS}
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    return " ".join(
        f"{part.removesuffix('_wait')} {share:.0%}" for part, share in ordered if share >= 0.01
    )


class BenchmarkBar:
    """Progress on a terminal: answers of a benchmark; elsewhere a line a benchmark."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )

    def __enter__(self) -> BenchmarkBar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def start(self, name: str, total: int) -> None:
        for task in self._progress.task_ids:
            self._progress.remove_task(task)
        self._progress.add_task(f"{self._model}: {name}", total=total)

    def say(self, text: str) -> None:
        self._console.print(printable(text), markup=False, soft_wrap=True)

    def counting(
        self, recorder: Callable[[Trajectory], None] | None
    ) -> Callable[[Trajectory], None]:
        """Returns a function that counts a trajectory, and hands it to `recorder`."""

        def count(trajectory: Trajectory) -> None:
            for task in self._progress.task_ids:
                self._progress.advance(task)
            if recorder is not None:
                recorder(trajectory)

        return count
