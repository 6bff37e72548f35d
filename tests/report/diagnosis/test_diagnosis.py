"""Findings from made metrics: a fault is told with its number and its remedy."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from ludus.config.load import load_config
from ludus.config.schema import RunConfig
from ludus.config.training import SFTUntilConfig
from ludus.pipeline.quick import quick
from ludus.report.diagnosis import Diagnosis, Finding, diagnose, read_findings
from ludus.report.diagnosis.diagnosis import CHECKS, COVERED, ONCE, RARE, WATCHED, write_findings
from ludus.report.diagnosis.findings import WINDOW, History, percent
from ludus.telemetry.metrics import Line

RECIPE = "recipes/babyai-tiny.yaml"
Change = Mapping[str, float] | Callable[[int], Mapping[str, float]]


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return load_config(RECIPE)


def sound(step: int, draw: random.Random) -> dict[str, float]:
    """A step of a run that learns, with numbers as babyai-tiny has them."""
    success = 0.9 - 0.35 * 0.97**step + draw.gauss(0, 0.04)
    return {
        "rollout/episodes": 256.0,
        "rollout/excluded": 0.0,
        "rollout/tokens": 27000.0,
        "rollout/reward": 0.9 * success,
        "rollout/success": success,
        "rollout/groups_with_signal": 0.4 + 0.5 * 0.97**step,
        "rollout/groups_failed": 0.03,
        "rollout/groups_solved": 0.57 - 0.5 * 0.97**step,
        "rollout/truncated_turns": 1 - success,
        "rollout/truncated_length": 0.0,
        "rollout/truncated_context": 0.0,
        "rollout/turns_of_success": 4.5,
        "rollout/turns_of_truncated": 8.0,
        "rollout/unknown_tokens": 0.0,
        "train/entropy": 0.08 + 0.35 * 0.95**step,
        "train/grad_norm": draw.lognormvariate(-0.7, 0.6),
        "train/kl": 0.003,
        "train/ratio": 1.0,
        "train/clip_fraction": 0.02,
        "train/sampler_gap": 1e-6,
    }


def lines(num_steps: int, change: Change = {}, stage: str = "rl") -> Iterator[Line]:  # noqa: B006
    draw = random.Random(0)
    for step in range(num_steps):
        own = change(step) if callable(change) else change
        yield Line(stage, step, 0.0, {**sound(step, draw), **own})


def told(config: RunConfig, num_steps: int, change: Change) -> list[Finding]:
    return diagnose(config, lines(num_steps, change)).findings


def test_a_run_that_learns_has_no_finding(config: RunConfig) -> None:
    assert told(config, 400, {}) == []


NOTHING = {
    "rollout/success": 0.0, "rollout/reward": 0.0, "rollout/groups_with_signal": 0.0,
    "rollout/groups_failed": 1.0, "rollout/groups_solved": 0.0, "rollout/truncated_turns": 0.5,
}  # fmt: skip

FAULTS: dict[str, tuple[Change, str, int, list[str]]] = {
    "reach": (NOTHING, "rl step 2", 30, ["no success in 96 groups of 8", "pass@8 is below 3.1 %",
              "sft.steps", "tasks.curriculum"]),
    "signal": ({"rollout/groups_with_signal": 0.05, "rollout/groups_failed": 0.6}, "rl step 9", 30,
               ["95 % of the groups", "in 60 % no episode succeeds", "rl.group_size"]),
    "turns": ({"rollout/truncated_turns": 0.8, "rollout/turns_of_success": 7.0}, "rl step 9", 30,
              ["cut 80 %", "after 8.0 turns", "took 7.0", "`rollout.max_turns` (now 8)"]),
    "length": ({"rollout/truncated_length": 0.4}, "rl step 9", 30,
               ["cut 40 %", "`rollout.max_tokens_per_turn` (now 6)"]),
    "unknown": ({"rollout/unknown_tokens": 0.031}, "rl step 0", 30,
                ["3.1 % of the tokens", "`<unk>`", "model.tokenizer"]),
    "excluded": ({"rollout/excluded": 64.0}, "rl step 9", 30,
                 ["25 % of the episodes", "ludus show"]),
    "fall": (lambda step: {"rollout/success": 0.6 if step < 12 else 0.1, "rollout/truncated_length":
             0.0 if step < 12 else 0.9, "train/entropy": 0.4 if step < 12 else 0.0,
             "rollout/groups_with_signal": 0.8 if step < 12 else 0.0}, "rl step 13", 29,
             ["success fell from 60 % to 27 % in the last 3 steps", "rl.optimizer.lr"]),
    "sharp": ({"train/entropy": 0.01, "rollout/groups_with_signal": 0.3}, "rl step 2", 9,
              ["0.010 nats", "rollout.temperature"]),
    "drift": ({"train/kl": 0.2, "train/clip_fraction": 0.4}, "rl step 9", 30,
              ["0.2 nats", "40 % of the tokens clipped", "rl.optimizer.lr` (now 0.0003)"]),
    "sampler": ({"train/sampler_gap": 0.08}, "rl step 9", 30, ["0.08 nats", "model.dtype"]),
    "gradient": (lambda step: {"train/grad_norm": 40.0 if step > 20 else 0.5}, "rl step 23", 30,
                 ["80 times, from 0.5 to 40", "max_grad_norm"]),
    "entropy": (lambda step: {"train/entropy": 0.4 * 0.8**step, "rollout/success": 0.5,
                "rollout/reward": 0.4, "rollout/groups_with_signal": 0.3}, "rl step 20", 21,
                ["the entropy fell from", "no longer explores", "entropy_bonus"]),
    "narrow": (lambda step: {"rollout/groups_failed": 0.3 if step < 15 else 0.58,
               "rollout/groups_with_signal": 0.65 if step < 15 else 0.25, "rollout/success": 0.25,
               "rollout/reward": 0.25}, "rl step 20", 40,
               ["70 % of the groups had a success in the first 10 steps, 53 % in the last 10",
                "of the episodes 25 % and 25 %", "rl.optimizer.lr` (now 0.0003)",
                "raise `rollout.temperature` (now 1.2)"]),
    "noise": (lambda step: {"train/entropy": 0.4 * 1.08**step, "rollout/success": 0.1 if step < 15
              else 0.05, "rollout/reward": 0.1 if step < 15 else 0.05}, "rl step 24", 30,
              ["the entropy rose from 0.58 nats", "to 1.8, and success went from 10 % in the "
               "first 10 steps to 5.0 % in the last 10",
               "noise", "rl.optimizer.lr` (now 0.0003)", "rollout.temperature` (now 1.2)"]),
}  # fmt: skip


def test_the_sampler_is_found_to_differ_without_importance_weights(config: RunConfig) -> None:
    without = {"train/sampler_gap": math.nan, "train/first_kl": 0.0032, "train/staleness": 0.0}
    [found] = told(config, 30, without)
    assert (found.kind, found.where) == ("sampler", "rl step 9")
    assert "0.08 nats" in str(found)
    assert told(config, 30, {**without, "train/staleness": 0.5}) == []  # of other weights
    assert told(config, 30, {**without, "train/first_kl": 5e-4}) == []  # bfloat16
    assert told(config, 30, {**without, "train/first_kl": -1e-9}) == []


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_is_told_with_its_number_and_remedy(config: RunConfig, kind: str) -> None:
    change, where, num_steps, words = FAULTS[kind]
    found = told(config, num_steps, change)
    assert [finding.kind for finding in found] == [kind], found
    assert found[0].where == where
    for word in words:
        assert word in str(found[0])
    assert found[0].lasting


@pytest.mark.parametrize("value", [math.inf, -math.inf, 1e308, math.nan])
def test_values_that_are_no_measurements_say_nothing(config: RunConfig, value: float) -> None:
    names = [name for name in sound(0, random.Random(0)) if name != "rollout/episodes"]
    assert told(config, 120, dict.fromkeys(names, value)) == []
    assert told(config, 60, {"rollout/episodes": value}) == []


def noisy(level: float) -> Change:
    draw = random.Random(1)
    return lambda step: {"rollout/reward": level + draw.gauss(0, 0.03), "rollout/success": level}


def test_a_reward_that_does_not_rise_is_told_after_50_steps(config: RunConfig) -> None:
    [found] = told(config, 120, noisy(0.5))
    assert (found.kind, found.where) == ("flat", "rl step 49")
    assert "did not rise in 50 steps: 0.5" in found.text
    assert "Welch's t test" in found.text
    assert told(config, 120, noisy(0.97)) == []  # nothing is left to gain


def test_rewards_without_advantages_are_the_algorithms_fault(config: RunConfig) -> None:
    diagnosis = Diagnosis(config)
    metrics = {
        "rollout/success": 0.95,
        "rollout/groups_solved": 0.7,
        "rollout/groups_with_signal": 0.25,
        "train/groups_with_advantage": 0.0,
    }
    found = [finding for step in range(6) for finding in diagnosis.step("rl", step, metrics)]
    assert [finding.kind for finding in found] == ["signal"]
    assert found[0].text.startswith("25 % of the groups of the last 5 steps have different rewards")
    assert "`advantages`" in found[0].advice


@pytest.mark.parametrize(
    ("success", "min_gain", "steps", "advice"),
    [
        (0.33, 0.1, 100, "it ended after 100 of 400 steps (`sft.until.min_gain=null`, or a h"),
        (0.33, None, 100, "100 of 400 steps (a higher `sft.until.patience`, now 5)"),
        (0.45, 0.1, 100, "100 of 400 steps (a higher `sft.until.success`, now 0.4)"),
        (0.33, 0.1, 380, ""),
    ],
)
def test_where_rl_raises_nothing_more_of_an_early_sft_is_advised(
    config: RunConfig, success: float, min_gain: float | None, steps: int, advice: str
) -> None:
    assert config.sft is not None
    until = SFTUntilConfig(success=0.4, min_gain=min_gain)
    sft = config.sft.model_copy(update={"until": until, "steps": 400})
    diagnosis = Diagnosis(config.model_copy(update={"sft": sft}))
    for step in range(steps):
        diagnosis.step("sft", step, {})
    diagnosis.step("evaluate/sft", steps, {"evaluate/success": success})
    found = [
        finding
        for line in lines(60, noisy(0.33))
        for finding in diagnosis.step(line.stage, line.step, line.metrics)
    ]
    gain = {"evaluate/gain": 0.02, "evaluate/gain_low": -0.01, "evaluate/gain_high": 0.05}
    found += diagnosis.step("evaluate/after", 0, gain)
    assert [finding.kind for finding in found] == ["flat", "evaluation"]
    for finding in found:
        assert ("let SFT go on" in finding.advice) == bool(advice)
        assert advice in finding.advice


def test_a_long_run_has_a_quarter_of_its_steps_to_rise(config: RunConfig) -> None:
    assert config.rl is not None
    long = config.model_copy(update={"rl": config.rl.model_copy(update={"steps": 620})})
    assert told(long, 199, noisy(0.5)) == []
    [found] = told(long, 200, noisy(0.5))
    assert (found.kind, found.where) == ("flat", "rl step 199")
    assert "in the first 77, 0.5" in found.text
    draw = random.Random(1)
    late = [0.5 + max(step - 90, 0) / 400 + draw.gauss(0, 0.03) for step in range(200)]
    change = lambda step: {"rollout/reward": late[step], "rollout/success": late[step]}  # noqa: E731
    assert told(long, 200, change) == []


@pytest.mark.parametrize(
    ("kl", "advice"),
    [
        (1e-6, "Try a higher `rl.optimizer.lr` (now 0.0003: a step moves the policy by no more"),
        (8e-4, "Try a lower `rl.optimizer.lr` (now 0.0003: a step moves the policy by 0.0008 nats"),
    ],
)
def test_the_rate_follows_from_how_far_a_step_moves(
    config: RunConfig, kl: float, advice: str
) -> None:
    flat = noisy(0.5)
    [found] = told(config, 120, lambda step: {**flat(step), "train/kl": kl})
    assert advice in found.advice.replace(f"now {config.rl.optimizer.lr:g}", "now 0.0003")  # type: ignore[union-attr]


def test_a_reward_that_falls_is_told_as_that(config: RunConfig) -> None:
    draw = random.Random(2)
    found = told(
        config, 60, lambda step: {"rollout/reward": 0.5 - step / 200 + draw.gauss(0, 0.02)}
    )
    assert [f.kind for f in found] == ["decline"]


def test_tasks_of_a_curriculum_may_get_harder(config: RunConfig) -> None:
    def change(step: int) -> dict[str, float]:
        return {"rollout/reward": 0.6 - step / 300, "tasks/tier": 1.0 + step // 20}

    assert told(config, 60, change) == []


def test_groups_with_equal_rewards_that_train_are_no_fault(config: RunConfig) -> None:
    """Those of one episode with a critic, and of turns that are compared."""
    alike = {"rollout/groups_with_signal": 0.0, "rollout/groups_solved": 0.6}
    assert [f.kind for f in told(config, 30, alike)] == ["signal"]
    assert told(config, 30, {**alike, "train/groups_with_advantage": 1.0}) == []
    nothing = told(config, 100, {**NOTHING, "train/groups_with_advantage": 1.0})
    assert "reach" in [f.kind for f in nothing], "a critic tells no success from another either"
    none = {"train/groups_with_advantage": 0.0, "rollout/groups_solved": 0.6}
    assert [f.kind for f in told(config, 30, none)] == ["signal"]


def test_rewards_of_degrees_are_a_signal_without_success(config: RunConfig) -> None:
    partial = {**NOTHING, "rollout/groups_with_signal": 0.9}
    rising = told(config, 40, lambda step: {**partial, "rollout/reward": step / 100})
    assert rising == []


def rising(reward: Callable[[int], float], times: float) -> Change:
    """Entropy that grows within 100 steps, with a reward."""

    def change(step: int) -> dict[str, float]:
        entropy = 0.4 * (1 + (times - 1) * min(step / 100, 1.0))
        return {
            "train/entropy": entropy,
            "rollout/success": reward(step),
            "rollout/reward": reward(step),
        }

    return change


def kinds(config: RunConfig, change: Change) -> set[str]:
    return {finding.kind for finding in told(config, 120, change)}


def test_entropy_may_rise_with_the_reward_or_a_little(config: RunConfig) -> None:
    steady = kinds(config, rising(lambda step: 0.45, 2.0))
    assert "noise" not in steady  # 0.7 to 1.4 nats in a run whose success rose later
    assert kinds(config, rising(lambda step: 0.3 + step / 400, 6.0)) == set()
    assert "noise" in kinds(config, rising(lambda step: 0.3 - step / 1000, 6.0))
    tiers = told(config, 120, lambda step: {**NOTHING, "train/entropy": step, "tasks/tier": 1.0})
    assert "noise" not in {finding.kind for finding in tiers}


def test_the_advice_against_noise_names_what_the_recipe_has(config: RunConfig) -> None:
    def advice(**changes: object) -> str:
        changed = config.model_copy(update=changes)
        return next(f.advice for f in told(changed, 120, noise) if f.kind == "noise")

    noise = rising(lambda step: 0.3 - step / 1000, 6.0)
    assert config.rl is not None
    assert config.sft is not None
    args = {**config.rl.algorithm.args, "entropy_bonus": 0.03}
    algorithm = config.rl.algorithm.model_copy(update={"args": args})
    with_bonus = advice(rl=config.rl.model_copy(update={"algorithm": algorithm}))
    assert with_bonus.startswith("Lower `entropy_bonus` of `rl.algorithm` (now 0.03) or leave it")
    algorithm = config.rl.algorithm.model_copy(update={"args": {}})
    without = advice(rl=config.rl.model_copy(update={"algorithm": algorithm}))
    assert without.startswith("Lower `rl.optimizer.lr` (now 0.0003)")
    assert "entropy_bonus" not in without
    assert "more `sft.steps` (now" in without
    assert advice(sft=None).endswith("an `sft` stage")
    until = config.sft.model_copy(update={"until": SFTUntilConfig(success=0.4)})
    assert advice(sft=until).endswith("a higher `sft.until.success` (now 0.4)")
    cool = config.rollout.model_copy(update={"temperature": 1.0})
    assert "temperature" not in advice(rollout=cool)


def test_a_finding_is_told_again_only_when_it_is_clearly_worse(config: RunConfig) -> None:
    def change(step: int) -> dict[str, float]:
        cut = 0.0 if step < 10 else 0.4 if step < 40 else 0.95
        return {"rollout/truncated_length": cut}

    found = told(config, 80, change)
    assert [(f.kind, f.level, f.step) for f in found] == [("length", 1, 16), ("length", 2, 46)]


def test_a_finding_that_passed_says_so(config: RunConfig) -> None:
    diagnosis = diagnose(config, lines(12, {"rollout/truncated_length": 0.5}))
    [early] = diagnosis.findings
    assert early.lasting
    for line in lines(30):
        diagnosis.step(line.stage, line.step, line.metrics)
    assert [f.lasting for f in diagnosis.findings if f.kind == "length"] == [False]


def test_metrics_decide_alone_so_a_resumed_run_finds_the_same(config: RunConfig) -> None:
    every = list(lines(60, lambda step: {**FAULTS["drift"][0], "rollout/truncated_length": 0.4}))
    resumed = diagnose(config, every[:25])
    before = len(resumed.findings)
    assert before == 2
    later = [f for line in every[25:] for f in resumed.step(line.stage, line.step, line.metrics)]
    assert later == []  # not told again
    assert resumed.findings == diagnose(config, every).findings


def test_lost_episodes_of_a_short_run_are_told(config: RunConfig) -> None:
    assert config.rl is not None
    short = config.model_copy(update={"rl": config.rl.model_copy(update={"steps": 4})})
    [found] = diagnose(short, lines(4, {"rollout/excluded": 64.0})).findings
    assert (found.kind, found.step) == ("excluded", 3)
    assert "25 % of the episodes of the last 4 steps" in found.text


def test_an_evaluation_is_compared_with_the_start(config: RunConfig) -> None:
    diagnosis = Diagnosis(config)
    gain = {"evaluate/gain": 0.02, "evaluate/gain_low": -0.01, "evaluate/gain_high": 0.05}
    assert diagnosis.step("evaluate/rl", 40, gain) == []  # it may still rise
    [found] = diagnosis.step("evaluate/after", 0, gain)
    assert str(found).startswith(
        "evaluation at the end: success on held-out tasks is not significantly above its start: "
        "+2.0 points (95 % interval -1.0 to +5.0)"
    )
    loss = {name: value - 0.1 for name, value in gain.items()}
    [found] = diagnosis.step("evaluate/rl", 80, loss)
    assert "evaluation at step 80: success on held-out tasks is below its start" in str(found)


@pytest.mark.parametrize(
    ("number", "told"), [(None, "hold out"), (512, "hold out"), (128, "evaluate")]
)
def test_more_tasks_are_evaluated_only_where_there_are_more(
    config: RunConfig, number: int | None, told: str
) -> None:
    evaluation = config.evaluate.model_copy(update={"num_tasks": number})
    changed = config.model_copy(update={"evaluate": evaluation})
    gain = {"evaluate/gain": 0.02, "evaluate/gain_low": -0.01, "evaluate/gain_high": 0.05}
    [found] = Diagnosis(changed).step("evaluate/after", 0, gain)
    assert f"a smaller gain, {told} more tasks" in found.advice


def test_a_fall_is_not_answered_with_more_of_the_same(config: RunConfig) -> None:
    fall = {"evaluate/gain": -0.12, "evaluate/gain_low": -0.17, "evaluate/gain_high": -0.07}
    [found] = Diagnosis(config).step("evaluate/after", 0, fall)
    assert "is below its start: -12.0 points" in found.text
    [lost] = Diagnosis(config).step("evaluate/after", 0, {**fall, "evaluate/gain_from": 0.12})
    assert "from 12.0 to 0.0 % of the same tasks" in lost.text
    assert "lower `rl.optimizer.lr`" in found.advice
    assert "marks as best" in found.advice
    assert "longer" not in found.advice
    assert "more tasks" not in found.advice


def test_a_fall_tells_the_start_on_the_same_tasks_and_names_the_setting_that_decides(
    config: RunConfig,
) -> None:
    assert config.rl is not None
    held = config.rl.optimizer.model_copy(update={"target_kl": 4e-4})
    changed = config.model_copy(update={"rl": config.rl.model_copy(update={"optimizer": held})})
    fall = {"evaluate/gain": -0.12, "evaluate/gain_low": -0.17, "evaluate/gain_high": -0.07}
    [found] = Diagnosis(changed).step("evaluate/rl", 9, {**fall, "evaluate/gain_from": 0.43})
    assert found.text.endswith(
        "(95 % interval -17.0 to -7.0), from 43.0 to 31.0 % of the same tasks"
    )
    assert "lower `rl.optimizer.target_kl` (now 0.0004)" in found.advice


def test_other_findings_are_named_only_where_there_are_some(config: RunConfig) -> None:
    gain = {"evaluate/gain": 0.02, "evaluate/gain_low": -0.01, "evaluate/gain_high": 0.05}
    [alone] = Diagnosis(config).step("evaluate/after", 0, gain)
    assert alone.advice.startswith(
        "Train longer (`rl.steps`, or a recipe of `ludus init --minutes`); to tell"
    )
    cut = diagnose(config, lines(12, {"rollout/truncated_length": 0.5}))
    assert [finding.kind for finding in cut.findings] == ["length"]
    [after] = cut.step("evaluate/after", 0, gain)
    assert after.advice.startswith("See the other findings; else train longer (`rl.steps`, ")
    passed = diagnose(
        config, lines(40, lambda step: {"rollout/truncated_length": 0.5 * (step < 12)})
    )
    assert [finding.lasting for finding in passed.findings] == [False]
    [after] = passed.step("evaluate/after", 0, gain)
    assert after.advice == alone.advice


@pytest.mark.parametrize(("heldout", "level"), [(0.0, 1), (0.3, 0), (0.6, 0)])
def test_sft_that_learns_its_training_tasks_by_heart_is_told_before_rl(
    config: RunConfig, heldout: float, level: int
) -> None:
    """Mental arithmetic had 45 % of training problems after SFT, and 0.0 % of others."""
    diagnosis = Diagnosis(config)
    for step, success in enumerate((0.4, 0.5)):
        diagnosis.step("evaluate/sft", step, {"evaluate/success": success})
    found = diagnosis.step("evaluate/before", 0, {"evaluate/success": heldout})
    assert [f.kind for f in found] == ["memory"] * level
    for finding in found:
        assert str(finding).startswith(
            "evaluation before RL: of sampled episodes of training tasks 45 % succeed, of the "
            "held-out tasks 0 %: the policy learns its training tasks by heart"
        )


def test_an_end_of_sft_far_below_its_target_is_told(config: RunConfig) -> None:
    assert config.sft is not None
    until = SFTUntilConfig(success=0.4)
    sft = config.sft.model_copy(update={"until": until, "steps": 40})
    config = config.model_copy(update={"sft": sft})

    def told(steps: int, *successes: float) -> list[Finding]:
        diagnosis = Diagnosis(config)
        for step in range(steps):
            diagnosis.step("sft", step, {})
        for step, success in enumerate(successes):
            diagnosis.step("evaluate/sft", step, {"evaluate/success": success})
        return diagnosis.step("evaluate/before", 0, {"evaluate/success": 0.9})

    [found] = told(40, 0.3, 0.05, 0.07)
    assert str(found).startswith(
        "evaluation before RL: SFT ended where 6.0 % of the sampled episodes succeed, of 40 % that "
        "`sft.until.success` asks"
    )
    assert "Give SFT more steps (`sft.steps`, now 40), show more demonstrations" in found.advice
    [patient] = told(30, 0.0, 0.0)
    assert patient.level == 2
    assert patient.advice.startswith("Show more demonstrations")
    assert told(40, 0.05, 0.3, 0.2) == []
    assert told(40) == [], "nothing was measured"

    # Without held-out tasks RL's first step tells it, and without RL the evaluation after SFT.
    for stage in ("rl", "evaluate/after"):
        diagnosis = Diagnosis(config)
        diagnosis.step("sft", 0, {})
        diagnosis.step("evaluate/sft", 1, {"evaluate/success": 0.05})
        assert [f.kind for f in diagnosis.step(stage, 0, {})] == ["short"]
        assert diagnosis.step(stage, 1, {}) == []


def test_a_start_without_room_is_told_as_such(config: RunConfig) -> None:
    even = {"evaluate/gain": -0.0, "evaluate/gain_low": -0.01, "evaluate/gain_high": 0.01}
    [found] = Diagnosis(config).step("evaluate/after", 0, {**even, "evaluate/gain_from": 1.0})
    assert "RL had nothing to raise: 100 % of the held-out tasks" in found.text
    assert "changed by +0.0 points" in found.text
    assert "longer" not in found.advice


def test_a_quick_test_proves_nothing(config: RunConfig) -> None:
    """Two steps of RL and a few held-out tasks."""
    gain = {"evaluate/gain": -0.5, "evaluate/gain_low": -0.9, "evaluate/gain_high": -0.1}
    small, _ = quick(config)
    assert Diagnosis(small).step("evaluate/after", 0, gain) == []
    assert Diagnosis(config).step("evaluate/after", 0, gain) != []


def test_training_tasks_learned_by_heart(config: RunConfig) -> None:
    diagnosis = Diagnosis(config)
    gain = {"evaluate/gain": 0.02, "evaluate/gain_low": -0.01, "evaluate/gain_high": 0.05}
    for step in range(WINDOW):
        diagnosis.step("rl", step, {"rollout/success": 0.97})
    assert diagnosis.step("evaluate/rl", 9, {**gain, "evaluate/success": 0.9}) == []
    [found] = diagnosis.step("evaluate/after", 0, {**gain, "evaluate/success": 0.48})
    assert found.kind == "memory"  # which explains that there is no gain
    assert "of the training episodes of the last 10 steps 97 % succeed" in found.text
    assert "of the held-out tasks 48 %" in found.text


def test_a_strong_drift_is_told_after_three_steps(config: RunConfig) -> None:
    [found] = told(config, 5, {"train/kl": 1.7})
    assert (found.kind, found.level, found.where) == ("drift", 2, "rl step 2")
    assert "1.7 nats a token in the last 3 steps" in found.text
    assert told(config, 5, {"train/kl": 0.2}) == []


def test_unknown_words_are_told_once_for_all_stages(config: RunConfig) -> None:
    diagnosis = Diagnosis(config)
    unknown = {"rollout/unknown_tokens": 0.01}
    assert len(diagnosis.step("evaluate/before", 0, unknown)) == 1
    assert diagnosis.step("rl", 0, unknown) == []
    assert len(diagnosis.step("rl", 1, {"rollout/unknown_tokens": 0.2})) == 1  # clearly worse


def test_demonstrations_that_sft_leaves_out(config: RunConfig) -> None:
    counts = {"sft/conversations": 60.0, "sft/too_long": 30.0, "sft/failed": 10.0}
    [found] = diagnose(config, [Line("sft", 0, 0.0, counts)]).findings
    assert "leaves out 40 % of the demonstrations: 10 that the expert lost" in found.text
    assert "30 longer than the context" in found.text
    assert "model.context_length` (now 512)" in found.advice


def test_findings_are_kept_in_a_file(tmp_path: Path, config: RunConfig) -> None:
    path = tmp_path / "findings.json"
    assert read_findings(path) == []
    found = told(config, 30, FAULTS["drift"][0])
    write_findings(path, found)
    assert read_findings(path) == found
    path.write_text('[{"kind": 1}]')
    assert read_findings(path) == []


def test_the_tables_name_checks_that_exist() -> None:
    kinds = {kind for checks in CHECKS.values() for kind in checks}
    assert {*COVERED, *(k for covers in COVERED.values() for k in covers), *ONCE, *RARE} <= kinds
    history = History(WATCHED)
    history.add({})
    assert history.last(WATCHED[0]) == []
    assert history.overall(WATCHED[0]) is None
    assert (percent(0.031), percent(0.83), percent(0.0)) == ("3.1 %", "83 %", "0 %")


def test_a_policy_that_rl_destroys_has_learned_nothing_by_heart(config: RunConfig) -> None:
    """An algorithm with the wrong sign took 100 % of the held-out tasks to 39."""
    diagnosis = Diagnosis(config)
    gain = {"evaluate/gain": -0.61, "evaluate/gain_low": -0.7, "evaluate/gain_high": -0.5}
    for step, success in enumerate((0.95, 0.97, 0.97, 0.84, 0.94, 0.69, 0.64, 0.27, 0.47, 0.36)):
        diagnosis.step("rl", step, {"rollout/success": success})
    [found] = diagnosis.step("evaluate/after", 0, {**gain, "evaluate/success": 0.39})
    assert found.kind == "evaluation"
    assert "success on held-out tasks is below its start: -61.0 points" in found.text
