"""What a run tells its user while it goes on."""

from __future__ import annotations

import time
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

from ludus.core.types import Trajectory
from ludus.telemetry.occupancy import PARTS

WIDE = 132
"""Columns from which a terminal has room for the parts of a step's time."""


class Observer(Protocol):
    """Told of a run's progress, in its thread."""

    def stage(self, name: str, total: int, start: int = 0) -> None:
        """A stage of `total` steps begins at step `start`."""

    def tick(self) -> None:
        """One step of a stage without metrics is done."""

    def episode(self, trajectory: Trajectory) -> None:
        """An episode has ended."""

    def step(self, stage: str, step: int, metrics: dict[str, float]) -> None:
        """A training step (counted from 0) has been recorded."""

    def note(self, text: str) -> None:
        """Something that the user should read."""

    def close(self) -> None:
        """The run is over."""


class Display:
    """Live progress on a terminal; elsewhere one line every few seconds.

    Shows the stage, the step, success, reward, loss, tokens a second, where there is room the parts
    of the step's time, and the time left in the stage, extrapolated from its steps so far.
    """

    def __init__(self, console: Console | None = None, *, every_s: float = 10.0) -> None:
        self.console = console or Console(stderr=True)
        self._every_s = every_s
        self._name = ""
        self._total = self._done = self._start = self._episodes = 0
        self._began = self._spoke = time.monotonic()
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def stage(self, name: str, total: int, start: int = 0) -> None:
        """Begin a bar of its own for the stage."""
        self._name, self._total, self._start = name, total, start
        self._done, self._episodes = start, 0
        self._began = time.monotonic()
        if self.console.is_terminal:
            if self._bar is None:  # not before a stage begins: a prompt may come first
                self._bar = _bar(self.console)
                self._bar.start()
            if self._task is not None:
                self._bar.update(self._task, left="")
            self._task = self._bar.add_task(name, total=total, completed=start, info="", left="")
        else:
            self._say(f"{name}: {total} steps" + (f", from step {start}" if start else ""))

    def tick(self) -> None:
        """Advance by one."""
        self._advance(self._done + 1, "")

    def episode(self, trajectory: Trajectory) -> None:
        """Count an episode of the step under way."""
        self._episodes += 1
        if self._bar is not None and self._task is not None and self._episodes % 16 == 0:
            self._bar.update(self._task, left=f"[dim]{self._episodes} episodes in this step")

    def step(self, stage: str, step: int, metrics: dict[str, float]) -> None:
        """Show the step's numbers."""
        self._episodes = 0
        wide = not self.console.is_terminal or self.console.width >= WIDE
        split = time_split(metrics) if wide else ""
        self._advance(step + 1, f"{summary(stage, metrics)}  {split}".rstrip())

    def note(self, text: str) -> None:
        """Print a line above the bars."""
        self._print(text)

    def close(self) -> None:
        """Leave the bars as they are."""
        if self._bar is not None:
            self._bar.stop()
        self._bar = self._task = None

    def _advance(self, done: int, info: str) -> None:
        self._done = done
        left = self._left()
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, info=info, left=left)
        elif time.monotonic() - self._spoke > self._every_s or done == self._total:
            self._say(f"{self._name} {done}/{self._total} {info} {left}".rstrip())

    def _left(self) -> str:
        gone = self._done - self._start
        if gone <= 0 or self._done >= self._total:
            return ""
        seconds = round((time.monotonic() - self._began) / gone * (self._total - self._done))
        minutes, seconds = divmod(seconds, 60)
        if minutes >= 60:
            return f"{minutes // 60} h {minutes % 60:02d} min left"
        return f"{minutes}:{seconds:02d} left"

    def _say(self, text: str) -> None:
        self._spoke = time.monotonic()
        self._print(text)

    def _print(self, text: str) -> None:
        """As it is: nothing in it is mark-up, and no line of a log is broken in two."""
        wrap = self.console.is_terminal
        self.console.print(Text(text), highlight=False, soft_wrap=not wrap)


def _bar(console: Console) -> Progress:
    """One line a stage; where the terminal is narrow, the bar gives way to the numbers."""
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
    """A step's most telling numbers in one short line."""
    loss = [("loss", "train/loss", "{:.3f}")]
    outcome = [("success", "rollout/success", "{:.0%}"), ("reward", "rollout/reward", "{:.2f}")]
    shown = [*(loss if stage == "sft" else outcome), ("tok/s", "time/tokens_per_s", "{:,.0f}")]
    parts = [
        f"{label} {form.format(metrics[name])}" for label, name, form in shown if name in metrics
    ]
    if "budget/cost" in metrics:
        cost, to_come = metrics["budget/cost"], metrics["budget/projected_cost"]
        parts.append(f"cost {cost:.2f} of about {to_come:.2f}")
    return "  ".join(parts)


def time_split(metrics: dict[str, float]) -> str:
    """`sample 55% train 38% env 3%`: parts of the step's wall time, the largest first, from 1 %."""
    wall = metrics.get("time/wall_s", 0.0)
    if wall <= 0:
        return ""
    shares = {part: metrics.get(f"time/{part}_s", 0.0) / wall for part in PARTS}
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    return " ".join(
        f"{part.removesuffix('_wait')} {share:.0%}" for part, share in ordered if share >= 0.01
    )
