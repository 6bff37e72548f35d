"""Progress display, on a terminal and in a log."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable

import pytest
from rich.console import Console

from ludus.core.types import Group, Task, Trajectory
from ludus.evaluate import summarise
from ludus.pipeline.monitoring import progress
from ludus.pipeline.monitoring.progress import (
    Display,
    evaluation_line,
    stop_line,
    summary,
    time_split,
)

METRICS = {
    "rollout/success": 0.456,
    "rollout/reward": 0.5,
    "train/loss": 1.25,
    "time/tokens_per_s": 12345.6,
}


class Clock:
    """`time.monotonic`, set by hand."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress.time, "monotonic", clock)
    return clock


def output_of(run: Callable[[Display], None], terminal: bool = False, width: int = 80) -> str:
    """Returns the output of a display."""
    written = io.StringIO()
    console = Console(
        file=written, force_terminal=terminal, width=width, color_system=None, _environ={}
    )
    display = Display(console)
    run(display)
    display.close()
    display.close()
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.getvalue())


def test_a_log_has_one_line_every_ten_seconds(clock: Clock):
    def run(display: Display) -> None:
        display.note("run demo-1 in runs/demo-1")
        display.stage("rl", 60)
        for step in range(60):
            clock.now += 4.0
            for _ in range(16):
                display.episode(Trajectory("", "", ""))
            display.step("rl", step, METRICS)

    lines = output_of(run).splitlines()
    assert lines[:3] == [
        "run demo-1 in runs/demo-1",
        "rl: 60 steps",
        "rl 3/60 success 46%  reward 0.50  tok/s 12,346 3:48 left",
    ]
    assert lines[-1] == "rl 60/60 success 46%  reward 0.50  tok/s 12,346"
    assert len(lines) == 2 + 20, "one line every ten seconds or more, and the last"


def test_sft_shows_the_loss(clock: Clock):
    def run(display: Display) -> None:
        display.stage("sft", 2)
        clock.now += 11
        display.step("sft", 0, METRICS)

    assert output_of(run).splitlines()[-1] == "sft 1/2 loss 1.250  tok/s 12,346 0:11 left"


def test_missing_metrics_are_omitted():
    assert summary("rl", {}) == ""
    assert summary("rl", {"time/tokens_per_s": 0.0}) == "tok/s 0"
    assert summary("sft", METRICS) == "loss 1.250  tok/s 12,346"


def test_time_left_of_a_resumed_stage_counts_new_steps_only(clock: Clock):
    def run(display: Display) -> None:
        display.stage("rl", 100, 90)
        clock.now += 20
        display.step("rl", 90, {})

    assert output_of(run).splitlines() == ["rl: 100 steps, from step 90", "rl 91/100  3:00 left"]


def test_a_step_of_an_earlier_process_is_not_shown(clock: Clock):
    def run(display: Display) -> None:
        clock.now += 20
        display.step("rl", 1, METRICS)

    assert output_of(run) == ""


@pytest.mark.parametrize("terminal", [True, False])
def test_stages_without_steps(terminal: bool, clock: Clock):
    def run(display: Display) -> None:
        display.tick()
        display.episode(Trajectory("", "", ""))
        for total, start in ((0, 0), (5, 5), (1, 0), (3, 7)):
            display.stage("rl", total, start)
            display.step("rl", start, METRICS)
            display.tick()

    assert "rl" in output_of(run, terminal)


def test_demonstrations_tick(clock: Clock):
    def run(display: Display) -> None:
        display.stage("demonstrations", 3)
        for _ in range(3):
            clock.now += 3700
            display.tick()

    assert output_of(run).splitlines() == [
        "demonstrations: 3 episodes",
        "demonstrations 1/3  2 h 03 min left",
        "demonstrations 2/3  1 h 01 min left",
        "demonstrations 3/3",
    ]


@pytest.mark.parametrize("terminal", [True, False])
def test_notes_are_printed_verbatim(terminal: bool):
    text = "changed: env.args from [bold]x[/bold] :smile: to [/] " + 60 * "long "

    def run(display: Display) -> None:
        display.stage("rl", 1)
        display.note(text)

    out = output_of(run, terminal)
    assert text.strip() in (" ".join(out.split()) if terminal else out)


@pytest.mark.parametrize("width", [80, 140])
def test_a_terminal_shows_one_line_a_stage(width: int):
    def run(display: Display) -> None:
        display.stage("demonstrations", 2400)
        for _ in range(2400):
            display.tick()
        display.stage("rl", 1000, 100)
        time.sleep(0.01)
        for step in range(100, 160):
            for _ in range(16):
                display.episode(Trajectory("", "", ""))
            display.step("rl", step, METRICS)

    lines = output_of(run, terminal=True, width=width).replace("\r", "\n").splitlines()
    last = [line.strip() for line in lines if line.startswith("rl ")][-1]
    for part in ("160/1000", "success 46%", "reward 0.50", "tok/s 12,346", "left"):
        assert part in last
    assert re.search(r"\d:\d\d left", last)
    done = [line for line in lines if line.startswith("demonstrations")][-1]
    assert "2400/2400" in done
    assert "left" not in done


def test_episodes_of_a_long_step_are_counted():
    def run(display: Display) -> None:
        display.stage("rl", 10)
        for _ in range(32):
            display.episode(Trajectory("", "", ""))

    assert "32 episodes in this step" in output_of(run, terminal=True, width=120)


def test_no_bar_before_a_stage_starts():
    assert output_of(lambda display: None, terminal=True) == ""
    assert output_of(lambda display: display.note("hello"), terminal=True) == "hello\n"


SPLIT = {"time/wall_s": 2.0, "time/sample_s": 1.1, "time/train_s": 0.8, "time/env_wait_s": 0.09}


@pytest.mark.parametrize(("terminal", "width"), [(True, 80), (True, 140), (False, 80)])
def test_time_by_part_is_shown_on_wide_terminals_and_in_logs(
    terminal: bool, width: int, clock: Clock
) -> None:
    def run(display: Display) -> None:
        display.stage("rl", 2)
        clock.now += 20
        display.step("rl", 0, METRICS | SPLIT)

    shown = "sample 55% train 40% env 4%" in output_of(run, terminal, width)
    assert shown is (width == 140 or not terminal)


def test_parts_below_one_percent_are_omitted() -> None:
    assert time_split({"time/wall_s": 10.0, "time/sample_s": 9.97, "time/judge_s": 0.03}) == (
        "sample 100%"
    )
    assert time_split({}) == ""


def test_the_line_of_an_evaluation_begins_with_its_tasks_and_its_time() -> None:
    played = [
        Group(str(i), Task(id=str(i)), [Trajectory("", "", "", reward=i % 2)]) for i in (0, 1)
    ]
    result = summarise(played)
    assert evaluation_line("sft", 20, result, "rl") == (
        "sft.until, step 20: 50.0 % (9.5 to 90.5) of sampled episodes succeed (2 training tasks)"
    )
    held_out = "success 50.0 % (9.5 to 90.5) of 2 tasks"
    assert evaluation_line("before", 0, result, "rl") == f"held-out, before RL, greedy: {held_out}"
    assert evaluation_line("rl", 40, result, "rl") == f"held-out, step 40, greedy: {held_out}"
    assert evaluation_line("after", 0, result, "rl") == f"held-out, after RL, greedy: {held_out}"
    assert evaluation_line("after", 0, result, "sft") == f"held-out, after SFT, greedy: {held_out}"


def test_the_line_of_an_evaluation_names_the_tier_with_the_least_success() -> None:
    def line(*rewards: float) -> str:
        played = [
            Group(tier, Task(id=tier, tier=tier), [Trajectory("", "", "", reward=reward)])
            for tier, reward in zip("abc", rewards, strict=False)
        ]
        return evaluation_line("after", 0, summarise(played), "rl")

    assert line(1.0, 0.0, 1.0).endswith("of 3 tasks; lowest of 3 tiers: b 0.0 %")
    assert "lowest" not in line(1.0, 1.0)
    assert "lowest" not in line(1.0)


def test_a_stop_at_once_says_what_is_lost() -> None:
    def told(kept: tuple[str, int] | None, complete: tuple[str, int] | None) -> str:
        return stop_line(kept, complete, "ludus train --resume x-1")

    assert told(("rl", 40), ("rl", 43)) == (
        "stopping at once; lost: the running step and 3 complete steps of rl without a checkpoint; "
        "`ludus train --resume x-1` goes on after step 40 of rl"
    )
    assert "and 1 complete step of rl without" in told(("sft", 24), ("rl", 1))
    assert told(("rl", 40), ("rl", 40)).startswith("stopping at once; lost: the running step; `")
    assert told(("sft", 24), ("sft", 24)).endswith("goes on after step 24 of sft")
    assert told(None, None).endswith(
        "lost: the running step; `ludus train --resume x-1` goes on from its start"
    )
