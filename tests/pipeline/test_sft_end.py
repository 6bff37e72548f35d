"""The measured end of SFT."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from ludus.config.load import load_config
from ludus.config.schema import RunConfig
from ludus.config.training import OptimizerConfig, SFTConfig, SFTUntilConfig
from ludus.core.types import Message, Task
from ludus.data.conversations import Conversation
from ludus.data.demonstrations import Dropped, dropped_path
from ludus.evaluate import Evaluation
from ludus.pipeline import sft_end
from ludus.pipeline.build import Run
from ludus.pipeline.sft_end import (
    Decision,
    Measured,
    decided,
    expected_gain,
    last_step,
    not_shown,
    reason_to_end,
    rl_steps,
    told,
    unseen,
)
from ludus.store.folders import RunFolder


def at(*successes: float, every: int = 10) -> list[Measured]:
    """Measurements after each `every` steps."""
    return [(every * n, value) for n, value in enumerate(successes, 1)]


def run_of(sft: SFTConfig, *, then_rl: bool = True) -> RunConfig:
    """A run with this SFT, and with or without RL."""
    return cast(RunConfig, SimpleNamespace(sft=sft, rl=object() if then_rl else None))


def test_a_target_that_is_not_reached_is_told() -> None:
    until = SFTUntilConfig(success=0.44)
    assert told(until, None, 90, [0.1, 0.2, 0.3]) == (
        "sft: ends after step 90, all of its steps; 25% of the sampled episodes of the last two "
        "measurements succeed, of 44% (until.success)"
    )


def test_with_wsd_the_rate_falls_before_sft_ends() -> None:
    until = SFTUntilConfig(success=0.4, every=30)
    sft = SFTConfig(steps=500, until=until, optimizer=OptimizerConfig(schedule="wsd"))
    assert [last_step(sft, step) for step in (30, 90, 360, 450)] == [40, 120, 480, 500]
    constant = sft.model_copy(update={"optimizer": OptimizerConfig()})
    assert last_step(constant, 90) == 90
    decision = Decision(90, "40% of the sampled episodes succeed (until.success)", 120)
    assert told(until, decision, 90, [0.4]).endswith("the rate falls until it ends, after step 120")
    assert told(until, decision, 120, [0.4, 0.7]) == (
        "sft: ends after step 120: 70% of the sampled episodes succeed"
    )
    at_once = Decision(90, "enough", 90)
    assert told(until, at_once, 90, [0.4]) == "sft: ends after step 90: enough"


def test_success_ends_sft() -> None:
    until = SFTUntilConfig(success=0.4)
    assert reason_to_end(until, at()) is None
    assert reason_to_end(until, at(0.1, 0.39)) is None
    assert "40% of the sampled episodes" in str(reason_to_end(until, at(0.1, 0.3, 0.5)))
    assert "45% of the sampled episodes" in str(reason_to_end(until, at(0.45)))


def test_one_lucky_measurement_does_not_end_sft() -> None:
    until = SFTUntilConfig(success=0.4)
    assert reason_to_end(until, at(0.3, 0.2, 0.42)) is None
    assert reason_to_end(until, at(0.3, 0.42, 0.37)) is None


def test_success_that_no_longer_rises_ends_sft() -> None:
    until = SFTUntilConfig(success=0.9, patience=3)
    assert reason_to_end(until, at(0.2, 0.1, 0.2)) is None
    assert "above 20% in 3" in str(reason_to_end(until, at(0.2, 0.1, 0.2, 0.15)))
    assert reason_to_end(until, at(0.2, 0.1, 0.2, 0.25)) is None


def test_sft_goes_on_where_hardly_any_episode_succeeds() -> None:
    until = SFTUntilConfig(success=0.9, patience=3)
    assert reason_to_end(until, at(*[0.0] * 20)) is None
    assert reason_to_end(until, at(0.05, *[0.01] * 20)) is None


def test_the_tasks_that_a_file_of_conversations_shows_are_known_by_their_questions() -> None:
    """The file's ids are those of its lines, so 32 "unseen" tasks were shown ones."""

    def asked(question: str) -> list[Message]:
        return [Message(role="user", content=question)]

    train = [Task(id=f"rows.jsonl:{n}", prompt=asked(f"{n} + 1?")) for n in range(4)]
    answer = Message(role="assistant", content="3")
    opening = Message(role="system", content="Be short.")
    shown = [
        Conversation(Task(id=f"sft.jsonl:{n}"), [opening, *asked(f"{n} + 1?"), answer], 1.0, True)
        for n in range(1, 3)
    ]
    assert [task.id for task in not_shown(train, shown)] == ["rows.jsonl:0", "rows.jsonl:3"]
    by_id = [Conversation(train[0], [*asked("other"), answer], 1.0, True)]
    assert not_shown(train, by_id) == train[1:]
    worlds = [Task(id="env:1"), Task(id="env:2")]  # an environment opens them
    assert not_shown(worlds, shown) == worlds


COIN = (0.375, 0.359, 0.242, 0.414, 0.367, 0.383, 0.383, 0.313, 0.391, 0.414)
"""A real curve, every 100 steps: 37 % at the first measurement, and no more after 1,000 steps."""


def test_a_gain_is_foretold_with_the_logarithm_of_the_steps() -> None:
    # Odds of 1:9, 1:4.5, 1:2.25, 1:1.125, which each doubling doubles; then 1.78:1 and 3.56:1.
    doublings = [(100 * 2**n, 1 / (1 + 9 / 2**n)) for n in range(4)]
    assert expected_gain(doublings, 3200, 10**9) == pytest.approx(0.78 - 0.4706, abs=1e-3)
    assert expected_gain(doublings, 800, 128) == 0.0
    assert expected_gain(doublings[:3], 3200, 128) == math.inf
    assert expected_gain(doublings, 3200, 128) > 0.32, "with one standard error"
    late = [(50 * n, 0.2) for n in range(1, 8)] + doublings[2:]
    assert expected_gain(late, 3200, 10**9) > 0.1, "of the later half alone"
    close = [(1000, 0.99), (1001, 0.5), (1002, 0.3), (1003, 0.15)]
    assert expected_gain(close, 2000, 128) == math.inf
    falls = [(100, 1.0), (110, 0.9), (120, 0.1), (145, 0.0)]
    assert expected_gain(falls, 10**30, 10**9) == pytest.approx(0.0, abs=1e-3), "no overflow"
    none = [(100 * n, 0.0) for n in range(1, 6)]
    assert 0 < expected_gain(none, 600, 128) < 0.1
    assert expected_gain([(at, 1.0) for at, _ in none], 600, 128) < 0.01


CHAIN_SUM = [
    *(
        0,
        3,
        2,
        0,
        0,
        0,
        2,
        1,
        3,
        2,
        1,
        3,
        1,
        3,
        1,
        1,
        3,
        2,
        3,
        2,
        4,
        4,
        2,
        0,
        5,
        3,
        4,
        4,
        1,
        1,
        5,
        5,
    ),
    *(
        3,
        5,
        3,
        2,
        5,
        4,
        7,
        8,
        4,
        7,
        5,
        5,
        4,
        3,
        5,
        5,
        4,
        6,
        8,
        6,
        12,
        6,
        8,
        9,
        2,
        8,
        13,
        8,
        9,
        16,
        13,
    ),
]
"""A real curve, every 10 steps, of 128 episodes: the skill appears late, and then success rises
fast. A line through success itself promised 9 points for the 820 steps that were left."""


def test_sft_goes_on_where_a_skill_has_begun_to_appear() -> None:
    until = SFTUntilConfig(success=0.4, patience=73, min_gain=0.1, min_steps=290)
    found = at(*(n / 128 for n in CHAIN_SUM))
    assert reason_to_end(until, found, 1450, 128) is None
    assert expected_gain(found, 900, 128) < 0.07
    assert reason_to_end(until, found, 900, 128) is None, "RL from 11 % would gain even less"
    assert reason_to_end(until, found, 700, 128) is not None


def test_sft_ends_where_what_is_left_of_it_promises_little() -> None:
    until = SFTUntilConfig(success=0.45, patience=6, min_gain=0.05, num_tasks=128)
    until = until.model_copy(update={"samples_per_task": 1})
    ends = [n for n in range(1, 11) if reason_to_end(until, at(*COIN[:n], every=100), 1080, 128)]
    assert ends[0] == 4, "after 400 of 1,080 steps"
    told = str(reason_to_end(until, at(*COIN[:4], every=100), 1080, 128))
    assert told.startswith(
        "33% of the sampled episodes of the last two measurements succeed, and the 680 "
    )
    rising = at(0.11, 0.17, 0.2, 0.24, 0.26, every=100)
    assert reason_to_end(until, rising, 1080, 128) is None
    few = reason_to_end(until, at(*COIN[:4], every=100), 1080, 16)
    assert few is None, "of 16 episodes, one standard error promises more"
    last = at(*COIN[:4], every=100)
    assert reason_to_end(until, last, 400, 128) is None, "all of its steps"
    assert reason_to_end(until, at(*[0.02] * 8, every=100), 1080, 128) is None, "too little for RL"
    without = until.model_copy(update={"min_gain": None})
    assert reason_to_end(without, at(*COIN[:4], every=100), 1080, 128) is None
    chance = [0.16, 0.16, 0.21, 0.16, 0.14]
    until = until.model_copy(update={"min_gain": 0.1})
    assert reason_to_end(until, at(*chance, every=30), 1900, 128) is None, "it may still rise"
    chance = [0.16] * 9
    assert reason_to_end(until, at(*chance, every=30), 600, 128) is not None
    later = until.model_copy(update={"min_steps": 292})
    assert reason_to_end(later, at(*chance, every=30), 600, 128) is None, "no trend at chance"
    assert reason_to_end(later, at(0.5, 0.5, every=30), 1900, 128) is not None, "enough success"
    stands = at(*[0.2] * 10, every=30)
    assert reason_to_end(later, stands[:9], 1900, 128) is None, "nor patience"
    assert reason_to_end(later, stands, 1900, 128) is not None


def test_tasks_that_the_expert_failed_are_not_measured(tmp_path: Path) -> None:
    """Of 128 tasks without a demonstration, 119 were of a broken level's."""
    train = [Task(id=f"env:{n}") for n in range(100)]
    shown = [Conversation(task, [], 1.0, True) for task in train[:50]]
    folder = RunFolder(tmp_path)
    failed = [
        Dropped(task_id=task.id, tier=None, kind="error", reason="KeyError").model_dump_json()
        for task in train[50:90]
    ]
    run = SimpleNamespace(
        splits=SimpleNamespace(train=train),
        conversations=shown,
        folder=folder,
        config=SimpleNamespace(seed=0),
    )
    assert len(unseen(cast(Run, run), 20)) == 20, "without that file"
    dropped_path(folder.demonstrations).write_text("\n".join(failed) + "\n")
    assert {task.id for task in unseen(cast(Run, run), 20)} == {t.id for t in train[90:]}


def test_a_decision_stays_when_the_distance_of_measurements_changes() -> None:
    def result(success: float) -> Evaluation:
        estimate = SimpleNamespace(value=success)
        return cast(Evaluation, SimpleNamespace(success=estimate, num_episodes=128))

    found = [(5, result(0.1)), (10, result(0.6)), (14, result(0.8))]
    for every in (5, 4):
        sft = SFTConfig(steps=24, until=SFTUntilConfig(success=0.3, every=every))
        decision = decided(run_of(sft), found)
        assert decision is not None
        assert (decision.step, decision.last) == (10, 10)
    at_the_end = SFTConfig(steps=14, until=SFTUntilConfig(success=0.65, every=5))
    assert decided(run_of(at_the_end), found) is None, "all of its steps"


@pytest.mark.parametrize(("success", "step"), [(0.5, 30), (0.3, 90)], ids=["reached", "plateau"])
def test_rl_begins_at_once_and_without_it_the_rate_falls(success: float, step: int) -> None:
    estimate = SimpleNamespace(value=success)
    results = [cast(Evaluation, SimpleNamespace(success=estimate, num_episodes=128))] * 6
    until = SFTUntilConfig(success=0.4, patience=2, every=30)
    sft = SFTConfig(steps=500, until=until, optimizer=OptimizerConfig(schedule="wsd"))
    found = list(zip(range(30, 210, 30), results, strict=True))
    for then_rl, last in ((True, step), (False, step * 4 // 3)):
        decision = decided(run_of(sft, then_rl=then_rl), found)
        assert decision is not None
        assert (decision.step, decision.last) == (step, last)


def test_steps_that_sft_leaves_are_added_to_those_of_rl(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = load_config("recipes/babyai-tiny.yaml")
    assert config.sft is not None
    assert config.rl is not None
    folder = RunFolder(tmp_path / "run-1")

    def steps(share: float, done: int | None, until: bool = True) -> int:
        assert config.sft is not None
        assert config.rl is not None
        folder.evaluations.mkdir(parents=True, exist_ok=True)
        for old in folder.evaluations.iterdir():
            old.unlink()
        if done is not None:
            for step in (done - 10, done):
                (folder.evaluations / f"sft-{step:06d}.json").touch()
        sft = config.sft.model_copy(update={"steps": 200, "until": SFTUntilConfig()})
        rl = config.rl.model_copy(update={"steps": 50, "steps_per_unused_sft_step": share})
        changed = {"sft": sft if until else None, "rl": rl}
        return rl_steps(config.model_copy(update=changed), folder)

    assert steps(0.35, 120) == 78
    assert steps(0.35, 200) == 50
    assert steps(0.0, 120) == 50
    assert steps(0.35, None) == 50, "nothing was measured"
    assert steps(0.35, 120, until=False) == 50
    assert rl_steps(config.model_copy(update={"rl": None}), folder) == 0
    last = SimpleNamespace(stage="sft", step=180)
    monkeypatch.setattr(sft_end, "list_checkpoints", lambda folder: [last])
    assert steps(0.35, 120) == 57, "a resumed SFT may end after its last measurement"
