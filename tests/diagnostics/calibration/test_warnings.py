"""Warnings that follow from measurements."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ludus.data.demonstrations import Dropped
from ludus.data.expert import Demonstration
from ludus.diagnostics.calibration import warnings
from ludus.diagnostics.calibration.choices import Lengths
from ludus.diagnostics.calibration.episodes import RandomEpisode
from ludus.diagnostics.calibration.expert import Expert
from ludus.diagnostics.calibration.trials.trial import Trial
from ludus.evaluate.results import Estimate


def expert(*rewards: float, success: bool = True) -> Expert:
    return Expert(
        [
            Demonstration(
                task_id=str(n), tier=None, messages=[], reward=r, success=success, num_turns=2
            )
            for n, r in enumerate(rewards)
        ]
    )


def test_a_sound_environment_is_not_warned_about() -> None:
    played = [RandomEpisode(0.0, False, 0.001), RandomEpisode(1.0, True, 0.001)]
    assert list(warnings.of_expert(expert(1.0, 1.0))) == []
    assert list(warnings.of_random(played, expert(1.0))) == []
    assert list(warnings.of_tasks(1e6, 256, "env")) == []


def test_levels_that_fail_in_part_are_told() -> None:
    dropped = [
        Dropped(task_id=str(n), tier="two", kind="error", reason="KeyError: 'k' [g.py, line 3]")
        for n in range(3)
    ]
    fine = expert(*[1.0] * 5).demonstrations
    shown = [d.model_copy(update={"tier": "two"}) for d in fine]
    assert list(warnings.of_expert(Expert(shown, dropped), ["one", "two"])) == [
        "level 'two': 38% of 8 episodes of the expert gave no demonstration: 3 x error: "
        "KeyError: 'k' [g.py, line 3]"
    ]


def test_huge_and_broken_rewards_are_told() -> None:
    assert "rewards reach 1e+06" in "".join(warnings.of_expert(expert(1.0, 1e6)))
    assert "1 of 2 episodes has the reward nan" in "".join(
        warnings.of_expert(expert(1.0, float("nan")))
    )


def test_a_constant_reward_gives_nothing_to_learn() -> None:
    played = [RandomEpisode(1.0, True)] * 4
    told = "".join(warnings.of_random(played, expert(1.0)))
    assert "random actions succeed in 100%" in told
    assert "every episode has the reward 1" in told


def test_a_slow_environment_is_told_with_the_time_of_a_step() -> None:
    played = [RandomEpisode(0.0, False, step_s=2.0)]
    assert "waits 17 minutes" in "".join(warnings.of_random(played, expert(1.0)))


def test_few_episodes_of_rl_are_told() -> None:
    assert "RL has 1,920 episodes" in "".join(warnings.of_episodes(1920))
    assert list(warnings.of_episodes(5120)) == []


def test_a_busy_machine_and_too_few_minutes_are_told() -> None:
    assert "load 5.0 on 2 cores" in "".join(warnings.of_load(5.0, 2))
    assert list(warnings.of_load(1.8, 2)) == []
    assert "about 12 minutes, more than the 10 of" in "".join(warnings.of_time(720, 10))
    assert list(warnings.of_time(600, 10)) == []


def test_fast_steps_in_threads_are_told() -> None:
    played = [RandomEpisode(0.0, False, step_s=2e-5)] * 4
    assert "`blocking = False`" in "".join(warnings.of_threads(played, blocking=True))
    assert list(warnings.of_threads(played, blocking=False)) == []


def test_episodes_beyond_the_context_are_counted() -> None:
    episodes = [*[20] * 98, 5000, 9000]
    lengths = Lengths(10, 5, 5, 5, 20, 9000, 20, episodes)
    told = "".join(warnings.of_lengths(lengths, 128))
    assert "2 of 100 episodes of the expert exceed the context of 128 tokens, the longest " in told
    assert "with 9,000: such episodes are not shown" in told
    assert "1 of 100 episodes of the expert exceeds" in "".join(warnings.of_lengths(lengths, 5000))
    assert list(warnings.of_lengths(lengths, 9000)) == []


def test_experts_beyond_the_turns_are_told() -> None:
    assert "50% of the expert's episodes need more than the 100" in "".join(
        warnings.of_turns([50, 150], 100)
    )
    assert list(warnings.of_turns([5] * 10, 8)) == []


def test_few_tasks_and_no_success_are_told() -> None:
    assert "about 5 different tasks" in "".join(warnings.of_tasks(5, 1, "data"))
    told = "".join(warnings.of_tasks(1.2, 1, "data"))
    assert "the rows have about 1 different task: " in told
    assert "and 1 held-out task gives intervals of 100 points" in told
    assert "49 held-out tasks have intervals of +-14 points" in "".join(
        warnings.of_tasks(127, 49, "env")
    )
    assert "give more --minutes" in "".join(warnings.of_tasks(1e6, 64, "env"))
    nothing = Trial(curve=[(100, 0.0)], signal={1.0: 0.0})
    assert "RL cannot help" in "".join(warnings.of_trial(nothing, 500, 0.4))
    assert list(warnings.of_trial(Trial(curve=[(10, 0.3)], signal={1.0: 0.5}), 500, 0.4)) == []


def test_a_target_out_of_reach_is_foretold() -> None:
    flat = Trial(curve=[(290, 0.01), (660, 0.03)], signal={1.0: 0.2})
    assert "not expected to reach 40%" in "".join(warnings.of_trial(flat, 3000, 0.4))

    def told(source: str, levels: Sequence[str], tiers: Sequence[str]) -> str:
        return "".join(warnings.of_trial(flat, 3000, 0.4, source, levels, tiers))

    levels = ["two words", "hard", "no"]
    assert "choose easier levels (--tiers 'two words', the first" in told("env", levels, levels)
    assert "choose easier levels with --tiers, give" in told("env", levels, levels[1:2])
    assert "make easier tasks: other arguments of the environment" in told("env", ["one"], ["one"])
    assert "--tiers" not in told("env", [], [])
    assert "take easier questions" in told("data", [], [])
    rising = Trial(curve=[(20, 0.02), (40, 0.12)], signal={1.0: 0.2})
    assert list(warnings.of_trial(rising, 120, 0.4)) == []


def test_random_episodes_that_mostly_fail_tell_nothing_else() -> None:
    played = [RandomEpisode(1.0, True)] * 25 + [RandomEpisode(0.0, False, error="nan")] * 175
    [warning] = warnings.of_random(played, expert(1.0))
    assert warning == "175 of 200 episodes of random actions failed: nan"


def test_held_out_tasks_that_differ_are_foretold() -> None:
    def told(trained: Estimate | None, heldout: Estimate | None, source: str = "env") -> list[str]:
        trial = Trial(curve=[(330, 0.1)], trained=trained, heldout=heldout)
        return list(warnings.of_heldout(trial, source))

    tenth = Estimate(value=0.1, low=0.06, high=0.16, num_tasks=128)
    none = Estimate(value=0.0, low=0.0, high=0.03, num_tasks=128)
    [warning] = told(tenth, none)
    assert warning.startswith(
        "after 330 steps of SFT sampled episodes succeed in 10.0 % (6.0 to 16.0) of 128 training "
        "tasks, and in 0.0 % (0.0 to 3.0) of 128 held-out tasks"
    )
    assert "more seeds or levels" in warning
    assert "more rows" in told(tenth, none, "data")[0]
    assert told(tenth, None) == told(None, None) == told(tenth, tenth) == []
    assert told(tenth, Estimate(value=0.03, low=0.01, high=0.07, num_tasks=128)) == []
    half = Estimate(value=0.5, low=0.48, high=0.52, num_tasks=2000)
    third = Estimate(value=0.35, low=0.33, high=0.37, num_tasks=2000)
    assert told(half, third) == [], "harder, but no other kind of task"
    quarter = Estimate(value=0.26, low=0.24, high=0.28, num_tasks=2000)
    assert told(half, quarter), "more than half of it, but 24 points lower"


def test_held_out_tasks_that_cannot_be_played_are_told() -> None:
    trial = Trial(curve=[(120, 0.2)], unplayed="nothing to evaluate: 8 tasks, none of them scored")
    [warning] = warnings.of_heldout(trial)
    assert warning.startswith("held-out tasks cannot be played: nothing to evaluate")
    assert warning.endswith("`ludus train` refuses the recipe, or ends at its first evaluation")


def test_held_out_levels_with_other_words_are_foretold() -> None:
    def told(own: float, others: float) -> list[str]:
        return list(warnings.of_heldout(Trial(curve=[(120, 0.0)], gap=(own, others))))

    assert told(0.23, 0.24) == told(0.4, 0.85) == told(math.inf, math.inf) == []
    [warning] = told(0.2, math.inf)
    assert warning.startswith("every episode of the expert in held-out levels exceeds the context")
    [warning] = told(0.15, 4.27)
    assert "a loss of 0.15 nats a token" in warning
    assert "and of 4.27 in held-out levels" in warning
    assert "many more different words" in warning


def test_worlds_that_no_run_compares_are_told() -> None:
    assert "may be memory" in "".join(warnings.of_worlds(336, undeclared=True))
    assert list(warnings.of_worlds(336, undeclared=False)) == []
    assert list(warnings.of_worlds(1e6, undeclared=True)) == []


def test_one_cause_is_told_once() -> None:
    few = [*warnings.of_tasks(20, 5, "env", True), *warnings.of_worlds(20, undeclared=True)]
    assert len(few) == 1
    assert "more seeds open the same. The class declares neither `cheap_reset` nor" in few[0]
    assert "cheap_reset" not in "".join(warnings.of_tasks(20, 5, "env"))
    assert few[0].startswith("the recipe's levels and seeds have about 20 different tasks")
    lucky = [RandomEpisode(1.0, True)] * 9 + [RandomEpisode(0.0, False)]
    solved = Trial(curve=[(20, 0.97)], signal={1.0: 0.1}, chance=0.9)
    easy = [*warnings.of_random(lucky, expert(1.0)), *warnings.of_trial(solved, 500, 0.4)]
    assert len(easy) == 1
    assert "random actions succeed in 90%" in easy[0]
    learned = Trial(curve=[(20, 0.97)], signal={1.0: 0.1}, chance=0.1)
    said = "".join(warnings.of_trial(learned, 500, 0.95))
    assert "leaves RL little to add, so SFT goes on until 95% succeed: make harder" in said
