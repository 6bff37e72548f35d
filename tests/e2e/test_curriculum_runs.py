"""Runs with a curriculum of tiers: tiers begin, the stage ends, the same bits when resumed."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from harness import BABYAI, Ludus, Zygote

SMALL, LARGE = "GoToObjS6", "GoToLocalS5N2"
CURRICULUM = {
    "tiers": {
        "small": {"includes": [SMALL], "until": {"success": 0.2, "episodes": 24}},
        LARGE: {},
    },
    "share_earlier": 0.25,
}


def argv(curriculum: dict[str, Any] | None, *more: str) -> tuple[str, ...]:
    return (
        BABYAI,
        "env=babyai",
        f"tasks.train.args.tiers=[{SMALL}, {LARGE}]",
        f"tasks.curriculum={json.dumps(curriculum)}",
        "rl.steps=6",
        "checkpoint.every=2",
        *more,
    )


@pytest.fixture(scope="module")
def whole(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Ludus:
    """A whole run that nothing disturbed; to be read, not changed."""
    ludus = Ludus(zygote, tmp_path_factory.mktemp("curriculum"))
    ludus("train", *argv(CURRICULUM)).ok()
    return ludus


def tiers(ludus: Ludus, stage: str, step: int) -> Counter[str | None]:
    with ludus.store() as store:
        return Counter(group.task.tier for group in store.groups("tiny-1", stage, step))


def rl_lines(ludus: Ludus) -> list[dict[str, Any]]:
    return [line for line in ludus.metrics() if line["stage"] == "rl"]


def test_the_next_tier_begins_when_the_criteria_are_met(whole: Ludus) -> None:
    lines = rl_lines(whole)
    numbers = [line["tasks/tier"] for line in lines]
    assert numbers[0] == 1.0
    assert numbers[-1] == 2.0
    assert numbers == sorted(numbers)
    results: list[float] = []  # of the episodes of the first tier, in the order of their groups
    for step, line in enumerate(lines):
        before = numbers[step - 1] if step else 1.0
        expected = {SMALL: 4} if before == 1.0 else {SMALL: 1, LARGE: 3}
        assert tiers(whole, "rl", step) == expected
        if before > 1.0:
            continue
        with whole.store() as store:
            groups = list(store.groups("tiny-1", "rl", step))
        results += [t.metrics["success"] for group in groups for t in group.trajectories]
        met = len(results) >= 24 and sum(results[-24:]) / 24 >= 0.2
        assert (line["tasks/tier"] == 2.0) == met
        assert line["tasks/success_small"] == pytest.approx(sum(results[-24:]) / len(results[-24:]))
    assert "tasks/until/success" in lines[0]


@pytest.mark.slow
def test_sft_and_evaluations_are_as_without_a_curriculum(whole: Ludus, ludus: Ludus) -> None:
    ludus("train", *argv(None)).ok()
    for stage, steps in {"sft": 24, "evaluate/before": 1, "evaluate/after": 1}.items():
        for step in range(steps):
            assert ids(whole, stage, step) == ids(ludus, stage, step)
    assert tiers(ludus, "rl", 0) != {SMALL: 4}, "without a curriculum, both tiers"


def ids(ludus: Ludus, stage: str, step: int) -> list[str]:
    with ludus.store() as store:
        return [group.task.id for group in store.groups("tiny-1", stage, step)]


def test_progress_and_report_show_the_tier(whole: Ludus) -> None:
    page = (whole.run() / "report.html").read_text(encoding="utf-8")
    assert "Tier of the curriculum after the step" in page


@pytest.mark.slow
def test_killed_and_resumed_it_is_the_same_run(whole: Ludus, ludus: Ludus) -> None:
    """In the first tier, one step after a checkpoint, and in the second one."""
    numbers = [line["tasks/tier"] for line in rl_lines(whole)]
    assert (numbers[1], numbers[4]) == (1.0, 2.0), "a checkpoint of each tier to resume from"
    for call in (8 + 2 * 16 + 5, 2 * 16 + 4 + 2, 16 + 3):
        more = ("--resume", "tiny-1") if ludus.run().exists() else argv(CURRICULUM)
        strike = f'strike("ludus.rollout.collect:run_episode", {call}, "kill")'
        killed = ludus("train", *more, setup=strike)
        assert killed.code == -signal.SIGKILL, killed.all
    ludus("train", "--resume", "tiny-1").ok()
    mine, other = ludus.state(), whole.state()
    assert any(line["train/optimizer_steps"] for line in rl_lines(whole)[3:])
    for part in other:
        assert mine[part] == other[part], f"{part} differ"


@pytest.mark.slow
def test_the_last_tier_ends_the_stage(ludus: Ludus) -> None:
    last = {"tiers": CURRICULUM["tiers"] | {LARGE: {"until": {"episodes": 10}}}}
    done = ludus("train", *argv(last, "rl.steps=40")).ok()
    lines = rl_lines(ludus)
    number = len(lines)
    assert 2 < number < 40
    assert f"rl: the last tier of tasks.curriculum met its criteria at step {number}" in done.err
    assert [line["tasks/tier_episodes"] >= 10 for line in lines[-2:]] == [False, True]
    assert "nothing to do" in ludus("train", "--resume", "tiny-1").ok().err
    ludus("train", "--resume", "tiny-1", "rl.steps=41").ok()
    assert len(rl_lines(ludus)) == number, "more steps do not reopen the stage"
    harder = f"tasks.curriculum.tiers.{LARGE}.until.episodes=20"
    ludus("train", "--resume", "tiny-1", harder).ok()
    assert len(rl_lines(ludus)) > number, "another criterion does"


@pytest.mark.slow
def test_played_ahead_the_tasks_of_the_old_tier_are_finished(ludus: Ludus) -> None:
    more = ("rl.max_staleness=1", "rollout.deterministic=false", "rl.steps=8")
    importance = "rl.algorithm={name: grpo, args: {importance_cap: 2.0}}"
    easy = {"tiers": {"small": {"includes": [SMALL], "until": {"episodes": 24}}, LARGE: {}}}
    ludus("train", *argv(easy, *more, importance)).ok()
    numbers = [line["tasks/tier"] for line in rl_lines(ludus)]
    assert numbers[0] == 1.0
    assert numbers[-1] == 2.0
    assert tiers(ludus, "rl", 7)[LARGE] >= 1


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("tiers.small.includes=[GoToObjS7]", "no training task is of tier 'GoToObjS7'"),
        ("tiers.small.until=null", "`tiers.small.until` is not set, so no later tier would begin"),
        ("tiers.small.until={score/x: 1, sucess: 1}", "(did you mean success?)"),
        ("tiers.small.until.success=2", "needs a success rate above 0 and at most 1, got 2"),
        ("share_earlier=1", "tasks.curriculum.share_earlier must be a number >= 0 and < 1, got 1"),
    ],
)
def test_wrong_settings_are_refused(ludus: Ludus, setting: str, message: str) -> None:
    arguments = argv(CURRICULUM, f"tasks.curriculum.{setting}")
    ludus("train", *arguments).refused(2, message)
    assert not ludus.run().exists()


def test_hosts_refuse_it(ludus: Ludus) -> None:
    done = ludus("train", *argv(CURRICULUM, "backend=verl"))
    done.refused(2, "tasks.curriculum: verl cannot honour it: the tasks of all steps are chosen")


def test_debug_checks_it_too(ludus: Ludus, tmp_path: Path) -> None:
    wrong = "tasks.curriculum.tiers.small.includes=[GoToObjS7]"
    ludus("debug", *argv(CURRICULUM, wrong)).refused(2, "no training task is of tier 'GoToObjS7'")


def test_an_end_without_signal_is_refused(ludus: Ludus) -> None:
    """A new tier may begin without a signal."""
    done = ludus("train", *argv(CURRICULUM, "rl.min_signal=0.1"))
    done.refused(2, "rl.min_signal: a new tier of tasks.curriculum may begin without a signal")
