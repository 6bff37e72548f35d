"""Each algorithm on one group, by hand, from rewards to the step's loss and its gradient.

The group: two trajectories. X has reward 1 and one sampled token, Y has reward 0 and three. The
policy has moved: every token's ratio r = pi / pi_old is 1.5 for X, and 1.1, 0.5, 1.5 for Y.
All log-probabilities were -1 when sampled, so now they are -1 + log r.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ludus.core.errors import ConfigError, TrainingError
from ludus.core.types import Group, Sample, Segment, Spec, Status, Task, Trajectory
from ludus.train import ALGORITHMS
from ludus.train.algorithms.aggregates import (
    Aggregate,
    constant_length,
    token_mean,
    trajectory_mean,
    trajectory_sum,
)
from ludus.train.algorithms.losses import LossInputs
from ludus.train.algorithms.table import (
    ADPO,
    CISPO,
    DAPO,
    DR_GRPO,
    GIGPO,
    GRPO,
    GSPO,
    PPO,
    REINFORCE_PP,
    REINFORCE_PP_BASELINE,
    RLOO,
    ROWS,
    SFT,
    TURN_GRPO,
    Algorithm,
)
from ludus.train.batches.samples import to_samples

RELATIVE = [row for row in ROWS if row.compares]
RATIOS = [1.5, 1.1, 0.5, 1.5]


def episode(name: str, reward: float | None, num_sampled: int = 1, **more: object) -> Trajectory:
    turn = Segment(0, [9] * num_sampled, logprobs=[-1.0] * num_sampled)
    turn.values = [0.25] * (num_sampled + 1)
    made = Trajectory(name, "g", "task", segments=[Segment(-1, [1, 2]), turn], reward=reward)
    for key, value in more.items():
        setattr(made, key, value)
    return made


def group(*trajectories: Trajectory) -> Group:
    return Group("g", Task(id="task", consistency=0.55), list(trajectories))


def masked(samples: list[Sample], lists: Sequence[Sequence[float]]) -> Tensor:
    """The entries of the loss tokens, of all samples."""
    values = [x for row in lists for x in row]
    mask = [has_loss for sample in samples for has_loss in sample.loss_mask]
    return torch.tensor(values, dtype=torch.float64)[torch.tensor(mask)]


def step(algorithm: Algorithm, p: float = 0.55) -> tuple[float, list[float]]:
    """Loss of the step and its gradient in the four log-probabilities. `p`: task's consistency."""
    played = group(episode("X", 1.0, 1), episode("Y", 0.0, 3))
    played.task = Task(id="task", consistency=p)
    samples = to_samples(algorithm.assign([played]))
    old_N = masked(samples, [s.logprobs for s in samples])
    advantages_N = masked(samples, [s.advantages for s in samples])
    weights_N = masked(samples, algorithm.aggregate(samples))
    logprobs_N = torch.tensor([-1 + math.log(r) for r in RATIOS], dtype=torch.float64)
    logprobs_N.requires_grad_()
    inputs = LossInputs(logprobs_N, old_N, advantages_N, torch.tensor([0, 1, 1, 1]))
    if samples[0].consistency is not None:
        each = [[s.consistency or 0.0] * len(s.token_ids) for s in samples]
        inputs = replace(inputs, consistency_N=masked(samples, each))
    if algorithm.critic_lr:
        returns_N = masked(samples, [s.returns or [] for s in samples])
        old_values_N = masked(samples, [s.values or [] for s in samples])
        inputs = replace(
            inputs, values_N=old_values_N + 0.5, old_values_N=old_values_N, returns_N=returns_N
        )
    output = algorithm.loss(inputs)
    total = (output.loss_N * weights_N).sum()
    total.backward()
    assert logprobs_N.grad is not None
    return total.item(), logprobs_N.grad.tolist()


def test_grpo_by_hand() -> None:
    # DeepSeekMath (2402.03300), equation 3 without KL, clip 0.2.
    # A: mean 0.5, std sqrt(0.5 / 1) = 0.7071068, +-0.5 / 0.7072068 = a = 0.7070068
    # X: min(1.5 a, 1.2 a) = 1.2 a, clipped
    # Y: min(-1.1 a, -1.1 a), min(-0.5 a, -0.8 a) clipped, min(-1.5 a, -1.2 a)
    #  = -1.1 a, -0.8 a, -1.5 a
    # loss = -[1/2 * 1.2 a + 1/2 * 1/3 * (-3.4 a)] = -0.6 a + 0.5666667 a = -0.0333333 a
    a = 0.5 / (math.sqrt(0.5) + 1e-4)
    loss, gradient = step(GRPO)
    assert loss == pytest.approx(-a / 30)
    assert gradient == pytest.approx([0, 1.1 * a / 6, 0, 1.5 * a / 6])


def test_dr_grpo_by_hand() -> None:
    # Dr. GRPO (2503.20783): A = +-0.5; mean over trajectories of the sum, divided by 1024.
    # loss = -1/2 * [1.2 * 0.5 + (-3.4 * 0.5)] / 1024 = 0.55 / 1024
    loss, gradient = step(DR_GRPO)
    assert loss == pytest.approx(0.55 / 1024)
    assert gradient == pytest.approx([0, 0.275 / 1024, 0, 0.375 / 1024])


def test_dapo_by_hand() -> None:
    # DAPO (2503.14476), equation 8: GRPO's advantages, clip 0.2 and 0.28, mean over the 4 tokens.
    # X: min(1.5 a, 1.28 a); Y as in GRPO. loss = -[1.28 a - 3.4 a] / 4 = 0.53 a
    a = 0.5 / (math.sqrt(0.5) + 1e-4)
    loss, gradient = step(DAPO)
    assert loss == pytest.approx(0.53 * a)
    assert gradient == pytest.approx([0, 1.1 * a / 4, 0, 1.5 * a / 4])


def test_rloo_by_hand() -> None:
    # RLOO (2402.14740; Kool et al. 2019): A = 1 - 0 and 0 - 1; -A log pi of whole trajectories.
    # X: log pi = -1 + log 1.5. Y: log pi = -3 + log(1.1 * 0.5 * 1.5).
    # loss = -1/2 * [(-1 + log 1.5) - (-3 + log 0.825)]
    loss, gradient = step(RLOO)
    assert loss == pytest.approx(-0.5 * (2 + math.log(1.5) - math.log(0.825)))
    assert gradient == pytest.approx([-0.5, 0.5, 0.5, 0.5])


def test_gspo_by_hand() -> None:
    # GSPO (2507.18071), equations 5 to 7: s = geometric mean of the ratios, clip 3e-4 and 4e-4.
    # X: s = 1.5, A = a > 0: clipped to 1.0004. Y: s = 0.825^(1/3) < 1 - 3e-4, A = -a: clipped.
    a = 0.5 / (math.sqrt(0.5) + 1e-4)
    loss, gradient = step(GSPO)
    assert loss == pytest.approx(-0.5 * (1.0004 - (1 - 3e-4)) * a)
    assert gradient == [0] * 4
    # Wide clips: loss = -1/2 (1.5 a - s a); each token of Y has 1/3 of its trajectory's gradient.
    s = 0.825 ** (1 / 3)
    loss, gradient = step(ALGORITHMS.build(wide("gspo")))
    assert loss == pytest.approx(-0.5 * (1.5 - s) * a)
    assert gradient == pytest.approx([-0.75 * a] + [s * a / 6] * 3)


def test_gspo_token_by_hand() -> None:
    # One turn a trajectory, so that GSPO and GSPO-token are the same (section 4.3).
    of_turns, whole = (step(ALGORITHMS.build(wide(name))) for name in ("gspo_token", "gspo"))
    assert [of_turns[0], *of_turns[1]] == pytest.approx([whole[0], *whole[1]])


def wide(name: str) -> Spec:
    return Spec(name=name, args={"clip_low": 0.9, "clip_high": 9.0})


def test_cispo_by_hand() -> None:
    # CISPO (2506.13585): -min(r, 5) A log pi, mean over the 4 tokens; the ratio has no gradient.
    # With the cap at 1.2: weights 1.2 | 1.1 0.5 1.2.
    a = 0.5 / (math.sqrt(0.5) + 1e-4)
    _, gradient = step(CISPO)
    assert gradient == pytest.approx([-1.5 * a / 4, 1.1 * a / 4, 0.5 * a / 4, 1.5 * a / 4])
    loss, gradient = step(ALGORITHMS.build(Spec(name="cispo", args={"cap": 1.2})))
    assert gradient == pytest.approx([-1.2 * a / 4, 1.1 * a / 4, 0.5 * a / 4, 1.2 * a / 4])
    logprobs = [-1 + math.log(r) for r in RATIOS]
    assert loss == pytest.approx(sum(g * p for g, p in zip(gradient, logprobs, strict=True)))


def test_turn_grpo_by_hand() -> None:
    # One turn each: GRPO's advantages, DAPO's clips, trajectory mean.
    # loss = -[1/2 * 1.28 a + 1/2 * 1/3 * (-3.4 a)]
    a = 0.5 / (math.sqrt(0.5) + 1e-4)
    assert step(TURN_GRPO)[0] == pytest.approx(-0.64 * a + 3.4 / 6 * a)


def test_gigpo_by_hand() -> None:
    # GiGPO (2505.10978): the prompt is a state that both have, so +-a twice; token mean.
    # X: min(1.5, 1.2) 2a; Y: -2a max(1.1), max(0.5, 0.8), 1.5
    a = 0.5 / (math.sqrt(0.5) + 1e-4)
    assert step(GIGPO)[0] == pytest.approx(-2 * a * (1.2 - 3.4) / 4)


def test_reinforce_pp_by_hand() -> None:
    # REINFORCE++ (2501.03262): returns 1 | 0 0 0 over 4 tokens: mean 1/4, variance 3/16.
    # A: sqrt(3) | -1/sqrt(3) three times. Clip 0.2, token mean.
    # loss = -1/4 [1.2 sqrt(3) - (1.1 + 0.8 + 1.5) / sqrt(3)]
    loss, gradient = step(REINFORCE_PP)
    b = math.sqrt(3)
    assert loss == pytest.approx(-(1.2 * b - 3.4 / b) / 4)
    assert gradient == pytest.approx([0, 1.1 / b / 4, 0, 1.5 / b / 4])
    # Each rollout the same: mean 1/2, variance 1/4, A = 1 | -1.
    even = ALGORITHMS.build(Spec(name="reinforce_pp", args={"whiten_over": "rollout"}))
    assert step(even)[0] == pytest.approx(-(1.2 - 3.4) / 4)


def test_reinforce_pp_baseline_by_hand() -> None:
    # Rewards minus their group's mean: 0.5 | -0.5 three times; over tokens mean -0.25, variance
    # 3/16: the same as without the baseline, for there is one group.
    based, plain = step(REINFORCE_PP_BASELINE), step(REINFORCE_PP)
    assert [based[0], *based[1]] == pytest.approx([plain[0], *plain[1]])


@pytest.mark.parametrize(
    ("p", "scale", "high"),
    [(0.1, 0.6, 0.3), (0.3, 0.6, 0.3), (0.55, 0.8, 0.25), (0.8, 1.0, 0.2), (1.0, 1.0, 0.2)],
)
def test_adpo_by_hand(p: float, scale: float, high: float) -> None:
    # Agent0 (2511.16043): GRPO's advantages times s(p), lower clip 0.2, upper clip
    # 0.2 + 0.1 clip((0.8 - p) / 0.5, 0, 1), mean over the 4 tokens.
    # X: min(1.5 b, (1 + high) b) = (1 + high) b, clipped, with b = s(p) a
    # Y: -1.1 b; min(-0.5 b, -0.8 b) clipped; -1.5 b
    b = scale * 0.5 / (math.sqrt(0.5) + 1e-4)
    loss, gradient = step(ADPO, p)
    assert loss == pytest.approx((3.4 - 1 - high) * b / 4)
    assert gradient == pytest.approx([0, 1.1 * b / 4, 0, 1.5 * b / 4])


def adpo(**args: object) -> Algorithm:
    return ALGORITHMS.build(Spec(name="adpo", args=args))


def test_the_parts_of_adpo_alone_and_none() -> None:
    a = 0.5 / (math.sqrt(0.5) + 1e-4)
    scaled, clip_only = adpo(dynamic_clip=False), adpo(scale_advantages=False)
    assert step(scaled, 0.3)[0] == pytest.approx((3.4 - 1.2) * 0.6 * a / 4)
    assert step(clip_only, 0.3)[0] == pytest.approx((3.4 - 1.3) * a / 4)
    none = adpo(dynamic_clip=False, scale_advantages=False, average="trajectory")
    assert step(none) == step(GRPO)
    assert not none.needs_consistency
    assert len({step(ADPO, p)[0] for p in (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)}) == 6  # moves with p


def test_adpo_needs_the_consistency_of_each_task() -> None:
    played = group(episode("X", 1.0), episode("Y", 0.0))
    played.task = Task(id="q7", answer="4")
    with pytest.raises(TrainingError, match="task task has no `consistency`"):
        ADPO.assign([played])


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ({"p_low": 0.8, "p_high": 0.5}, "p_low = 0.8 must be below p_high = 0.5"),
        ({"dynamic_clip": False, "clip_extra": 0.3}, "clip_extra = 0.3 has no effect"),
        ({"scale_advantages": False, "min_scale": 0.3}, "min_scale = 0.3 has no effect"),
    ],
)
def test_settings_of_adpo_without_effect_are_refused(args: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        adpo(**args)


def test_ppo_by_hand() -> None:
    # Values 0.25, gamma 1, lambda 0.95, both trajectories ended.
    # X: delta 1 - 0.25 = 0.75. Y: deltas 0, 0, -0.25, so A = -0.25 (0.9025 0.95 1).
    # Returns: 1 | 0.024375 0.0125 0. A is whitened over its 4 values; the critic now says 0.75,
    # clipped to 0.45: its loss is the larger of the two squared errors, halved.
    raw = [0.75, -0.225625, -0.2375, -0.25]
    mean = sum(raw) / 4
    std = math.sqrt(sum((x - mean) ** 2 for x in raw) / 4)
    white = [(x - mean) / std for x in raw]
    policy = -(1.2 * white[0] + 1.1 * white[1] + 0.8 * white[2] + 1.5 * white[3]) / 4
    returns = [1, 0.024375, 0.0125, 0]
    critic = sum(max((0.75 - r) ** 2, (0.45 - r) ** 2) / 2 for r in returns) / 4
    loss, gradient = step(PPO)
    assert loss == pytest.approx(policy + 0.5 * critic)
    assert gradient == pytest.approx([0, -1.1 * white[1] / 4, 0, -1.5 * white[3] / 4])


def test_sft_by_hand() -> None:
    # The mean of -log pi over the 4 tokens, whatever the rewards.
    loss, gradient = step(SFT)
    assert loss == pytest.approx(-(-4 + math.log(1.5 * 1.1 * 0.5 * 1.5)) / 4)
    assert gradient == pytest.approx([-0.25] * 4)


# Who trains


@pytest.mark.parametrize("algorithm", RELATIVE, ids=lambda a: a.name)
def test_the_excluded_have_a_reason_and_no_part_in_the_baseline(algorithm: Algorithm) -> None:
    failed = [
        episode("env", 0.0, status=Status.ERROR_ENV, error="the door jammed"),
        episode("late", 0.0, status=Status.ERROR_TIMEOUT),
        episode("unscored", None),
        episode("nan", math.nan),
        episode("mute", 0.0, num_sampled=0),
        episode("before", 0.0, dropped="stale"),
    ]
    headless = Trajectory("head", "g", "task", reward=0.0)
    headless.segments = [Segment(-1, [], None), Segment(0, [7], logprobs=[-1.0])]
    good = [episode("a", 1.0), episode("b", 0.0, status=Status.TRUNCATED_TURNS)]
    alone = group(*(episode(t.id, t.reward) for t in good))
    mixed = group(*failed, good[0], headless, good[1])

    assigned = algorithm.assign([mixed])
    expected = algorithm.assign([alone]).pairs
    assert [(t.id, a) for t, a in assigned.pairs] == [(t.id, a) for t, a in expected]
    assert assigned.excluded == {
        "env": "error_env: the door jammed",
        "late": "error_timeout",
        "unscored": "no reward",
        "nan": "the reward is not finite: nan",
        "mute": "no sampled token",
        "before": "stale",
        "head": "its first token was sampled: nothing before it predicts it",
    }
    assert {t.id: t.dropped for t in mixed.trajectories if t.dropped} == {"before": "stale"}


@pytest.mark.parametrize("algorithm", RELATIVE, ids=lambda a: a.name)
def test_a_trajectory_alone_is_dropped(algorithm: Algorithm) -> None:
    lonely = group(episode("a", 1.0), episode("b", None))
    assigned = algorithm.assign([lonely])
    assert assigned.pairs == []
    assert assigned.excluded["a"] == (
        "alone in its group: no other trainable trajectory to compare it with"
    )


def test_only_dapo_drops_groups_without_signal() -> None:
    for algorithm in ROWS:
        same = group(episode("a", 0.0), episode("b", 0.0))
        kept = algorithm.assign([same])
        assert len(kept.pairs) == (0 if algorithm is DAPO else 2)
        reason = "no signal: all rewards of the group are 0.0"
        assert kept.excluded == (dict.fromkeys("ab", reason) if algorithm is DAPO else {})


def test_nearly_equal_rewards_are_named_when_dropped() -> None:
    near = group(episode("a", 0.3), episode("b", 0.1 + 0.2))
    assigned = DAPO.assign([near])
    assert assigned.pairs == []
    assert assigned.excluded["a"] == (
        "no signal: the rewards of the group are 0.3, 0.30000000000000004"
    )


def test_groups_do_not_mix() -> None:
    groups = [
        group(episode("a", 1.0), episode("b", 0.0)),
        group(episode("c", 5.0), episode("d", 3)),
    ]
    assigned = DR_GRPO.assign(groups).pairs
    assert [(t.id, a) for t, a in assigned] == [("a", 0.5), ("b", -0.5), ("c", 1.0), ("d", -1.0)]


# Aggregates


def sample(name: str, num_loss_tokens: int) -> Sample:
    length = num_loss_tokens + 1
    mask = [False] + [True] * num_loss_tokens
    return Sample([1] * length, mask, [0.0] * length, [0.0] * length, name)


@pytest.mark.parametrize(
    ("aggregate", "first", "second"),
    [
        (trajectory_mean, 1 / 2, 1 / 6),
        (token_mean, 1 / 4, 1 / 4),
        (trajectory_sum, 1 / 2, 1 / 2),
        (constant_length(10), 1 / 20, 1 / 20),
    ],
)
def test_aggregates_by_hand(aggregate: Aggregate, first: float, second: float) -> None:
    # Trajectory a: one row of one token. Trajectory b: two rows, of one and of two tokens.
    weights = aggregate([sample("a", 1), sample("b", 1), sample("b", 2)])
    expected = [[0, first], [0, second], [0, second, second]]
    for row, wanted in zip(weights, expected, strict=True):
        assert row == pytest.approx(wanted)


@pytest.mark.parametrize(
    "aggregate", [trajectory_mean, token_mean, trajectory_sum, constant_length(3)]
)
def test_aggregates_of_nothing(aggregate: Aggregate) -> None:
    assert aggregate([]) == []
    assert aggregate([sample("a", 0)]) == [[0.0]]


@pytest.mark.parametrize("aggregate", [trajectory_mean, token_mean])
def test_means_weigh_one_in_all(aggregate: Aggregate) -> None:
    weights: Sequence[Sequence[float]] = aggregate([sample("a", 3), sample("b", 5), sample("a", 2)])
    assert sum(map(sum, weights)) == pytest.approx(1)


# The table


@pytest.mark.parametrize("row", ROWS, ids=lambda a: a.name)
def test_the_registry_builds_every_row(row: Algorithm) -> None:
    built = ALGORITHMS.build(row.name)
    assert built.name == row.name in ALGORITHMS.names()
    for name in (
        "advantages",
        "keep",
        "compares",
        "scored",
        "regularised",
        "max_rounds",
        "critic_lr",
    ):
        assert getattr(built, name) == getattr(row, name), name
    assert step(built) == step(row)


def test_arguments_replace_values() -> None:
    wide = ALGORITHMS.build(Spec(name="dapo", args={"clip_high": 0.6}))
    # X is no longer clipped: -[1.5 a - 3.4 a] / 4
    assert step(wide)[0] == pytest.approx(1.9 / 4 * 0.5 / (math.sqrt(0.5) + 1e-4))
    longer = ALGORITHMS.build(Spec(name="dr_grpo", args={"length": 2048}))
    assert step(longer)[0] == pytest.approx(step(DR_GRPO)[0] / 2)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"name": "dpo"}, "rl.algorithm.name: 'dpo' is not a known algorithm"),
        ({"name": "dapo", "args": {"clip_hihg": 1}}, "did you mean rl.algorithm.args.clip_high"),
        ({"name": "grpo", "args": {"clip_low": 1.5}}, "rl.algorithm.args.clip_low must be"),
        ({"name": "dr_grpo", "args": {"length": 0}}, "rl.algorithm.args.length must be"),
    ],
)
def test_wrong_arguments_are_refused(spec: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ALGORITHMS.build(Spec.model_validate(spec), "rl.algorithm")
