"""Values of a recipe follow from measurements."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ludus.config.training import RLConfig
from ludus.core.types import Message
from ludus.data.expert import Demonstration
from ludus.diagnostics.calibration import choices
from ludus.diagnostics.calibration.choices import Lengths
from ludus.diagnostics.calibration.episodes import success_of_one_answer
from ludus.diagnostics.calibration.trials.rl import groups_of, time_rl
from ludus.diagnostics.calibration.trials.trial import Trial
from ludus.pipeline.sft_end import LEAST_UNSEEN

LENGTHS = Lengths(
    prompt_max=40,
    turn_mean=3.0,
    turn_max=4,
    per_turn_max=20.0,
    episode_mean=100.0,
    episode_max=180,
)


def test_a_percentile_is_a_value_of_the_list() -> None:
    values = list(range(1, 11))
    assert choices.percentile(values, 0.9) == 9
    assert choices.percentile(values, 1.0) == 10
    assert choices.percentile([7], 0.5) == 7


def test_turns_leave_the_expert_a_quarter_more() -> None:
    assert choices.turns([4] * 10, own_limit=20) == 6
    assert choices.turns([4] * 10, own_limit=5) == 5
    assert choices.turns([40] * 10, own_limit=20) == 51  # a default that the level exceeds
    assert choices.turns([300] * 10, own_limit=20) == choices.MAX_TURNS
    assert choices.turns([1] * 10, own_limit=1) == 1
    assert choices.turns([8] * 10, own_limit=50, searches=True) == 21
    assert choices.turns([4] * 10, own_limit=5, searches=True) == 5


def test_a_context_holds_the_turns_of_a_failing_episode() -> None:
    room = choices.tokens_per_turn(LENGTHS)
    assert room == 6
    assert choices.context(LENGTHS, max_turns=10, room=room) == 320  # 40 + 10 x (20 + 6 - 3)
    assert choices.context(LENGTHS, max_turns=10_000, room=room) == choices.MAX_CONTEXT


def test_gradients_skip_observations_where_nearly_all_tokens_are_such() -> None:
    assert choices.detaches(replace(LENGTHS, episode_mean=300.0), [4, 6])  # 15 tokens of 300
    assert not choices.detaches(replace(LENGTHS, episode_mean=299.0), [4, 6])
    assert not choices.detaches(replace(LENGTHS, episode_mean=3000.0), [])  # nobody has shown it


def test_a_step_of_sft_has_about_as_many_tokens_whatever_the_length_of_episodes() -> None:
    def per_step(tokens: float, **more: bool) -> int:
        return choices.episodes_per_step(replace(LENGTHS, episode_mean=tokens), 32, **more)

    assert [per_step(tokens) for tokens in (37, 64, 167, 247, 611, 5000)] == [32, 32, 8, 8, 4, 2]
    assert [per_step(n, from_scratch=False) for n in (247, 611, 5000)] == [32, 8, 8]


@pytest.mark.parametrize(
    ("num_train", "measured"),
    [
        (6000, (128, 1)),
        (640, (128, 1)),
        (320, (64, 2)),
        (160, (32, 4)),
        (63, (12, 4)),
        (40, (8, 4)),
    ],
)
def test_the_end_of_sft_is_measured_on_many_tasks(
    num_train: int, measured: tuple[int, int]
) -> None:
    """Half of 32 tasks had the shortest sums: SFT ended at 48 % with 19 % of held-out tasks."""
    assert choices.measured_episodes(num_train) == measured


@pytest.mark.parametrize("num_train", [1, 2, 9, 20, 39])
def test_few_tasks_are_all_measured(num_train: int) -> None:
    """Of 20 tasks SFT leaves 4 out: a success of 25 % was one of them, where 85 % of 20 succeed."""
    assert choices.undemonstrated(num_train) < LEAST_UNSEEN
    assert choices.measured_episodes(num_train) == (num_train, 4)


def test_training_tasks_leave_worlds_to_hold_out() -> None:
    assert choices.training_tasks(1e6, 0.0) == 6000
    assert choices.training_tasks(1000, 0.0) == 600
    assert choices.heldout_tasks(1000) == 250
    assert choices.training_tasks(100, 0.0) == 50
    assert choices.heldout_tasks(100) == 40
    assert choices.training_tasks(1e6, 0.05) == 300  # the comparison would take too long


def test_held_out_tasks_are_as_many_as_the_minutes_allow() -> None:
    assert choices.heldout_tasks(1e6, choices.MOST_HELDOUT) == 2048
    assert choices.affordable_heldout(2048, 0.01, minutes=10) == 2048  # 30 s allow 3,000
    assert choices.affordable_heldout(2048, 0.02, minutes=10) == 1472
    assert choices.affordable_heldout(2048, 0.04, minutes=10) == choices.MANY_HELDOUT
    assert choices.affordable_heldout(2048, 0.1, minutes=10) == 576  # a fifth of the minutes
    assert choices.affordable_heldout(1024, 0.18, minutes=10) == choices.NUM_HELDOUT
    assert choices.affordable_heldout(1024, 0.5, minutes=10) == 128
    assert choices.affordable_heldout(1024, 9.0, minutes=10) == choices.LEAST_HELDOUT
    assert choices.affordable_heldout(100, 0.1, minutes=10) == 100


def test_a_temperature_rises_only_where_groups_are_alike() -> None:
    def of(signal: dict[float, float], success: dict[float, float]) -> float:
        return choices.temperature(Trial(signal=signal, success=success))

    assert of({1.0: 0.6, 1.2: 0.9}, {1.0: 0.3, 1.2: 0.3}) == 1.0
    assert of({1.0: 0.2, 1.2: 0.4}, {1.0: 0.6, 1.2: 0.5}) == 1.2
    assert of({1.0: 0.2, 1.2: 0.4}, {1.0: 0.3, 1.2: 0.1}) == 1.0  # it costs too much success
    assert of({1.0: 0.125, 1.2: 0.16}, {1.0: 0.02, 1.2: 0.02}) == 1.0  # chance
    assert of({1.0: 0.0, 1.2: 0.0}, {1.0: 0.0, 1.2: 0.0}) == 1.0
    assert of({}, {}) == 1.0


def test_a_slow_step_has_fewer_groups() -> None:
    assert groups_of(2.0, 32) == 32
    assert groups_of(9.0, 32) == 16
    assert groups_of(300.0, 32) == 8


@pytest.mark.parametrize(
    ("overhead_s", "measured"), [(0.0, [16]), (4.0, [16, 8])], ids=["fast", "slow"]
)
async def test_a_step_is_timed_with_the_groups_that_it_will_have(
    overhead_s: float, measured: list[int]
) -> None:
    asked = []

    async def seconds_a_group(number: int) -> float:
        asked.append(number)
        return 0.1 + overhead_s / number

    step_s = await time_rl(seconds_a_group, 16, math.inf, RLConfig(groups_per_step=32))
    assert asked == measured
    assert step_s == pytest.approx(32 * (0.1 + overhead_s / measured[-1]))
    assert groups_of(step_s, 32) == (32 if overhead_s == 0 else 8)
    await time_rl(seconds_a_group, 16, 0.0, RLConfig(groups_per_step=32))
    assert asked[len(measured) :] == [16], "the time of the trials is over"


def test_the_minutes_are_divided() -> None:
    trial = Trial(sft_step_s=0.2, curve=[(20, 0.1), (60, 0.5)], rl_step_s=2.0, eval_s=1.0)
    planned = choices.steps(trial, minutes=10, demonstrations_s=10, every=10)
    hard = Trial(sft_step_s=0.2, curve=[(20, 0.0), (60, 0.02)], rl_step_s=2.0, eval_s=1.0)
    assert choices.steps(hard, 10, 10, 10).sft > planned.sft
    assert choices.steps(hard, 10, 10, 10).rl < planned.rl
    assert planned.rl_s + planned.sft_s < 600
    assert planned.likely >= 200
    assert 2 <= planned.likely / planned.every <= 4, "evaluations during RL"
    # All of SFT, or none of it: the minutes are the same.
    sft_step = planned.sft_s / 80  # seconds, of the 60 steps that are expected, and the rate's fall
    rl_step = planned.rl_s / planned.likely
    longest = planned.sft * sft_step + planned.rl * rl_step
    shortest = (planned.rl + int(planned.sft * planned.more)) * rl_step
    assert shortest == pytest.approx(longest, rel=0.05)
    assert planned.sft >= 60
    slow = choices.steps(Trial(sft_step_s=30.0, rl_step_s=100.0), 10, 0, 10)
    assert (slow.sft, slow.rl) == (20, 20)


def test_sft_is_expected_to_go_on_as_the_last_half_of_the_trial() -> None:
    def expected(*curve: tuple[int, float], chance: float = 0.0) -> int | None:
        return choices.expected_sft(Trial(curve=list(curve), chance=chance), 0.4)

    assert expected((20, 0.1), (40, 0.2)) == 80
    assert expected((20, 0.02), (30, 0.1), (40, 0.22)) == 58
    assert expected((20, 0.2)) == 40
    assert expected((20, 0.2), chance=0.1) == 60
    assert expected((20, 0.5)) == 20
    assert expected((20, 0.1), (40, 0.05)) is None
    assert expected((20, 0.1), chance=0.1) is None
    assert expected() is None


def test_time_that_sft_will_not_need_goes_to_rl() -> None:
    rising = [(20, 0.03), (30, 0.10), (40, 0.16)]
    soon = Trial(sft_step_s=0.6, curve=rising, rl_step_s=2.0, eval_s=2.0)
    planned = choices.steps(soon, minutes=10, demonstrations_s=10, every=10)
    assert planned.sft == 290  # four times the expected steps would leave RL too little
    assert planned.rl == 180
    assert planned.likely > 200
    quick = choices.steps(Trial(sft_step_s=0.1, curve=rising, rl_step_s=2.0), 10, 10, 10)
    # Four times the 77 expected, of which half as many again count.
    assert quick.sft == 310
    assert round(quick.sft_s, 3) == 11.6


def test_sft_goes_on_beyond_what_chance_reaches() -> None:
    assert choices.target(0.0) == 0.4
    assert choices.target(0.35) == 0.61

    def played(*answers: str, turns: int = 1) -> list[Demonstration]:
        return [
            Demonstration(
                task_id=str(n),
                tier=None,
                messages=[
                    Message(role="user", content="?"),
                    Message(role="assistant", content=a),
                    Message(role="user", content="right"),  # what an environment says to the answer
                ],
                reward=1.0,
                success=True,
                num_turns=turns,
            )
            for n, a in enumerate(answers)
        ]

    assert success_of_one_answer(played("1", "2", "1", "3")) == 0.5
    assert success_of_one_answer(played("1", "1", turns=2)) == 0.0
    assert success_of_one_answer([]) == 0.0


def test_sft_is_measured_rarely_enough() -> None:
    assert choices.measure_every(Trial(eval_s=1.0, sft_step_s=0.1), 0.4) == 30
    soon = Trial(eval_s=1.0, sft_step_s=0.1, curve=[(20, 0.5)])
    assert choices.measure_every(soon, 0.4) == 10  # it was reached in 20 steps


def test_sft_goes_on_where_it_solves_the_tasks_alone() -> None:
    assert choices.target_after(Trial(curve=[(82, 0.27), (132, 0.91)]), 0.43) == 0.95
    assert choices.target_after(Trial(curve=[(82, 0.27), (132, 0.91)]), 0.97) == 0.97
    assert choices.target_after(Trial(curve=[(82, 0.91), (132, 0.85)]), 0.43) == 0.43
    assert choices.target_after(Trial(), 0.43) == 0.43


def test_groups_that_are_alike_by_success_leave_the_temperature() -> None:
    signal = {1.0: 0.2, 1.2: 0.6}
    assert choices.temperature(Trial(signal=signal, success={1.0: 0.9, 1.2: 0.85})) == 1.0
    assert choices.temperature(Trial(signal=signal, success={1.0: 0.6, 1.2: 0.55})) == 1.2
