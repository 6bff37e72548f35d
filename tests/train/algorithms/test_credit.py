"""Credit by hand: turns, tokens, branches, truncation, whitening, importance, punishments."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ludus.core.errors import ConfigError, TrainingError
from ludus.core.types import Group, Message, Segment, Spec, Status, Task, Trajectory
from ludus.train import ALGORITHMS
from ludus.train.algorithms.advantages import EPS, group_centred, group_normalised
from ludus.train.algorithms.base import Assignment, Overlong, ReferenceKl
from ludus.train.algorithms.credit import (
    Advantage,
    Credit,
    Earned,
    Gae,
    Outcome,
    TokenReturns,
    TurnReturns,
    Whitened,
    spread,
    truncated_importance,
)
from ludus.train.algorithms.table import DAPO, GRPO, PPO
from ludus.train.batches.samples import rows, to_samples


def played(name: str, *turns: tuple[int, float | None], reward: float | None = None) -> Trajectory:
    """A prompt, then turns of (number of tokens, reward), each answered by the environment."""
    segments = [Segment(-1, [1, 2])]
    for length, earned in turns:
        turn = Segment(len(segments) - 1, [9] * length, [-1.0] * length, reward=earned)
        segments += [turn, Segment(len(segments), [3])]
    total = math.fsum(r or 0 for _, r in turns) if reward is None else reward
    return Trajectory(name, "g", "task", segments, reward=total)


def of(advantage: Advantage) -> list[list[float]]:
    assert isinstance(advantage, Credit)
    return [row for row in advantage.advantages if row]


def test_a_turns_reward_comes_with_its_last_token() -> None:
    earned = Earned(played("a", (2, 1.0), (3, None), (1, 2.0)))
    assert earned.turn_rewards() == [0, 1, 0, 0, 0, 2, 0]
    assert [row for row in earned.token_rewards() if row] == [[0, 1], [0, 0, 0], [2]]
    assert earned.total == 3


def test_a_verdict_comes_with_the_last_turn() -> None:
    earned = Earned(played("a", (2, 0.25), (1, None), reward=1.0), bonus=-0.5)
    assert earned.turn_rewards() == [0, 0.25, 0, 0.25, 0]
    assert sum(earned.turn_rewards()) == earned.total == 0.5


def test_a_turn_without_a_token_hands_its_reward_on() -> None:
    assert Earned(played("a", (0, 1.0), (1, 2.0))).turn_rewards() == [0, 0, 0, 3, 0]
    assert Earned(played("a", (1, 2.0), (0, 1.0))).turn_rewards() == [0, 3, 0, 0, 0]
    assert Earned(played("a", (0, 1.0))).turn_rewards() == [0, 0, 0]


def test_penalties_lie_on_tokens() -> None:
    earned = Earned(played("a", (2, 1.0), (1, 2.0)), penalties=[[], [0.1, 0.2], [], [0.4], []])
    tokens = [x for row in earned.token_rewards() for x in row]
    assert tokens == pytest.approx([-0.1, 0.8, 1.6])
    assert [earned.turn_rewards()[i] for i in (1, 3)] == pytest.approx([0.7, 1.6])
    assert earned.total == pytest.approx(2.3)
    [[advantage]] = TokenReturns()([[earned]])
    assert [x for row in of(advantage) for x in row] == pytest.approx([2.3, 2.4, 1.6])
    [[advantage]] = TokenReturns(0.5)([[earned]])
    assert [x for row in of(advantage) for x in row] == pytest.approx([0.7, 1.6, 1.6])


def test_turn_returns_by_hand() -> None:
    # Kevin: R_t = sum 0.5^(i - t) s_i. a: 1 + 0.5 * 2 = 2, 2; b: 0. Each trajectory the same:
    # mean (2 + 0) / 2 = 1, squares 1 and 1, std sqrt(2 / (2 - 1)).
    a, b = played("a", (2, 1.0), (1, 2.0)), played("b", (1, 0.0))
    [[of_a, of_b]] = TurnReturns(0.5)([[Earned(a), Earned(b)]])
    unit = 1 / (math.sqrt(2) + EPS)
    assert of(of_a) == [pytest.approx([unit] * 2), pytest.approx([unit])]
    assert of(of_b) == [pytest.approx([-unit])]


def test_turn_returns_of_single_turns_are_grpos() -> None:
    group = [Earned(played(str(r), (2, r))) for r in (1.0, 0.0, 0.5, 1.0)]
    [found] = TurnReturns(0.3)([group])
    [expected] = Outcome(group_normalised)([group])
    assert [of(a)[0][0] for a in found] == pytest.approx(expected)


def test_time_runs_through_branches_as_they_were_sampled() -> None:
    """A context edit: the second turn stands on the prompt, beside the first."""
    t = played("a", (1, 1.0))
    t.segments.append(Segment(0, [7, 7], [-1.0, -1.0], reward=2.0))
    t.reward = 3.0
    [[advantage]] = TokenReturns()([[Earned(t)]])
    assert of(advantage) == [[3.0], [2.0, 2.0]]
    first, second = rows(t, advantage)
    assert first.advantages == [0, 0, 3.0]
    assert second.advantages == [0, 0, 2.0, 2.0]


def valued(status: Status = Status.COMPLETED) -> Earned:
    """Two turns of two tokens and one, rewards 1 and 2, values 1 to 3, and 4 after the last."""
    t = played("a", (2, 1.0), (1, 2.0))
    t.segments[1].values, t.segments[3].values = [1.0, 2.0, 9.0], [3.0, 4.0]
    t.status = status
    return Earned(t)


def test_gae_over_tokens_by_hand() -> None:
    # gamma 0.5, lambda 0.5. Deltas: b0: 2 - 3 = -1; a1: 1 + 1.5 - 2 = 0.5; a0: 0 + 1 - 1 = 0.
    # A: b0 -1; a1 0.5 + 0.25 * -1 = 0.25; a0 0 + 0.25 * 0.25 = 0.0625. The 9.0, which the critic
    # said after the first turn, before the environment spoke, plays no part.
    [[credit]] = Gae(0.5, 0.5)([[valued()]])
    assert of(credit) == [[0.0625, 0.25], [-1.0]]
    assert isinstance(credit, Credit)
    assert credit.returns == [[], [1.0625, 2.25], [], [2.0], []]


def test_gae_bootstraps_where_an_episode_was_cut() -> None:
    # b0: 2 + 0.5 * 4 - 3 = 1; a1: 0.5 + 0.25 = 0.75; a0: 0.1875
    for status in (Status.TRUNCATED_TURNS, Status.TRUNCATED_LENGTH):
        [[credit]] = Gae(0.5, 0.5, bootstrap=True)([[valued(status)]])
        assert of(credit) == [[0.1875, 0.75], [1.0]]
        [[credit]] = Gae(0.5, 0.5)([[valued(status)]])
        assert of(credit) == [[0.0625, 0.25], [-1.0]], "a failure like any other"


def test_gae_over_turns_by_hand() -> None:
    # Values 1 and 3. b: 2 - 3 = -1; a: 1 + 0.5 * 3 - 1 = 1.5, A = 1.5 + 0.25 * -1 = 1.25.
    [[credit]] = Gae(0.5, 0.5, "turn")([[valued()]])
    assert of(credit) == [[1.25, 1.25], [-1.0]]
    assert isinstance(credit, Credit)
    assert credit.returns == [[], [2.25, 2.25], [], [2.0], []]


def test_gae_with_lambda_one_is_the_return_minus_the_value() -> None:
    [[credit]] = Gae(1.0, 1.0)([[valued()]])
    assert of(credit) == [[2.0, 1.0], [-1.0]]


def test_values_and_returns_reach_the_rows() -> None:
    earned = valued()
    [[credit]] = Gae(0.5, 0.5)([[earned]])
    [row] = rows(earned.trajectory, credit)
    assert row.values == [0, 0, 1, 2, 0, 3]
    assert row.returns == [0, 0, 1.0625, 2.25, 0, 2]
    assert row.ref_logprobs is None


def test_whitening_by_hand() -> None:
    # Tokens 1 1 1 | 0: mean 3/4, variance 3/16. Rollouts 1 | 0: mean 1/2, variance 1/4.
    groups = [[Earned(played("a", (3, 1.0)))], [Earned(played("b", (1, 0.0)))]]
    by_token = Whitened(TokenReturns())(groups)
    by_rollout = Whitened(TokenReturns(), "rollout")(groups)
    assert of(by_token[0][0])[0] == pytest.approx([1 / math.sqrt(3)] * 3)
    assert of(by_token[1][0])[0] == pytest.approx([-math.sqrt(3)])
    assert of(by_rollout[0][0])[0] == pytest.approx([1] * 3)
    assert of(by_rollout[1][0])[0] == pytest.approx([-1])


def test_each_rollout_weighs_the_same_however_many_branches_it_has() -> None:
    branched = played("a", (1, None), reward=1.0)
    branched.segments += [Segment(0, [5] * 3, [-1.0] * 3), Segment(0, [6], [-1.0])]
    groups = [[Earned(branched), Earned(played("b", (1, 0.0)))]]
    [[a, b]] = Whitened(Outcome(group_centred), "rollout")(groups)
    assert (a, b) == (1.0, -1.0)
    [[a, b]] = Whitened(Outcome(group_centred))(groups)
    assert a < 1 < -b  # type: ignore[operator]


def test_whitening_of_equal_advantages_is_zero() -> None:
    groups = [[Earned(played(n, (2, 0.1 + 0.2))) for n in "ab"]]
    [[a, b]] = Whitened(TokenReturns())(groups)
    assert of(a) == of(b) == [[0.0, 0.0]]
    assert Whitened(TokenReturns())([]) == []
    assert Whitened(TokenReturns())([[]]) == [[]]


# Corrections


def test_truncated_importance_by_hand() -> None:
    t = played("a", (2, 1.0), (1, 1.0))
    t.segments[1].learner_logprobs = [-1 + math.log(3), -1 + math.log(0.5)]
    t.segments[3].learner_logprobs = [-1 + math.log(1.25)]
    weights = [x for row in truncated_importance(t, 2.0, "token") for x in row]
    assert weights == pytest.approx([2.0, 0.5, 1.25])
    weights = [x for row in truncated_importance(t, 2.0, "trajectory") for x in row]
    assert weights == pytest.approx([3 * 0.5 * 1.25] * 3)
    assert truncated_importance(t, 1.5, "trajectory")[1] == [pytest.approx(1.5)] * 2


def test_importance_weighs_advantages_and_the_learners_logprobs_become_the_old_ones() -> None:
    a, b = played("a", (1, 1.0)), played("b", (1, 0.0))
    for t in (a, b):
        t.segments[1].learner_logprobs = [-1 + math.log(3)]
    row = ALGORITHMS.build(Spec(name="dr_grpo", args={"importance_cap": 2}))
    samples = to_samples(row.assign([Group("g", Task(id="task"), [a, b])]))
    assert [s.advantages[2] for s in samples] == pytest.approx([1.0, -1.0])
    assert samples[0].logprobs[2] == -1 + math.log(3)
    a.segments[1].learner_logprobs = None
    with pytest.raises(ValueError, match="needs the learner's"):
        row.assign([Group("g", Task(id="task"), [a, b])])


def test_overlong_by_hand() -> None:
    # DAPO, equation 13, with L_max = 10 and L_cache = 4.
    shaping = Overlong(10, 4)
    found = [shaping(played("a", (n, None), reward=0.0)) for n in (1, 6, 7, 9, 10, 12)]
    assert found == pytest.approx([0, 0, -0.25, -0.75, -1, -1])


def test_overlong_answers_are_punished_but_give_no_signal() -> None:
    args = {"overlong_length": 10, "overlong_margin": 4}
    row = ALGORITHMS.build(Spec(name="dapo", args=args))
    long, short = played("long", (8, 1.0)), played("short", (2, 0.0))
    groups = [Group("g", Task(id="t"), [long, short])]
    [(_, of_long), (_, of_short)] = row.assign(groups).pairs
    [expected] = [group_normalised([0.5, 0.0])]
    assert [of_long, of_short] == expected
    both = [played("long", (8, 1.0)), played("short", (2, 1.0))]
    assert row.assign([Group("g", Task(id="t"), both)]).pairs == []
    wrong = Spec(name="dapo", args={"overlong_length": 10, "overlong_margin": 20})
    with pytest.raises(ConfigError, match="overlong_margin = 20 must be at most overlong_length"):
        ALGORITHMS.build(wrong, "rl.algorithm")
    assert DAPO.overlong is None


@pytest.mark.parametrize(("kind", "one"), [("k1", 0.5), ("k2", 0.125), ("k3", None)])
def test_divergence_as_a_price_on_the_reward(kind: str, one: float | None) -> None:
    # log pi - log pi_ref = 0.5 at both tokens of a, 0 at b's. k3: e^-0.5 - 1 + 0.5.
    one = math.exp(-0.5) - 0.5 if one is None else one
    a, b = played("a", (2, 1.0)), played("b", (1, 0.0))
    a.segments[1].ref_logprobs, b.segments[1].ref_logprobs = [-1.5, -1.5], [-1.0]
    args = {"kl_coefficient": 0.1, "kl_kind": kind, "kl_in": "reward"}
    row = ALGORITHMS.build(Spec(name="dr_grpo", args=args))
    assert row.reference == ReferenceKl(0.1, kind, "reward")  # type: ignore[arg-type]
    assigned = [x for _, x in row.assign([Group("g", Task(id="t"), [a, b])]).pairs]
    half = (1 - 0.2 * one) / 2
    assert assigned == pytest.approx([half, -half])
    row = ALGORITHMS.build(Spec(name="reinforce_pp", args=args))
    raw = row.advantages.credit([[Earned(a, 0.0, row.reference.penalties(a))]])  # type: ignore
    assert of(raw[0][0])[0] == pytest.approx([1 - 0.2 * one, 1 - 0.1 * one])


# Who trains


def test_an_advantage_that_is_not_finite_is_refused() -> None:
    broken = replace(GRPO, advantages=Outcome(lambda rewards: [math.nan, 1.0]))
    a, b = played("a", (1, 1.0)), played("b", (1, 0.0))
    with pytest.raises(TrainingError, match="of grpo returned nan for trajectory a, "):
        broken.assign([Group("g", Task(id="t"), [a, b])])


def test_a_trajectory_alone_can_train_where_nothing_is_compared() -> None:
    for name in ("reinforce_pp", "ppo"):
        t = played("a", (1, 1.0))
        t.segments[1].values = [0.0, 0.0]
        [(kept, _)] = ALGORITHMS.build(name).assign([Group("g", Task(id="t"), [t])]).pairs
        assert kept is t
        unscored = played("b", (1, 1.0))
        unscored.reward = None
        assigned = ALGORITHMS.build(name).assign([Group("g", Task(id="t"), [unscored])])
        assert assigned == Assignment([], {"b": "no reward"})


def test_what_is_missing_is_named() -> None:
    t = played("a", (1, 1.0))
    with pytest.raises(ValueError, match="needs the critic's values"):
        PPO.assign([Group("g", Task(id="t"), [t])])
    row = ALGORITHMS.build(Spec(name="ppo", args={"kl_coefficient": 1.0, "kl_in": "reward"}))
    with pytest.raises(ValueError, match="needs the reference's"):
        row.assign([Group("g", Task(id="t"), [t])])


def test_an_advantage_is_spread_over_sampled_tokens_only() -> None:
    t = played("a", (2, 1.0))
    t.segments[0].message = Message(role="user", content="go")
    assert spread(t, 0.5) == [[], [0.5, 0.5], []]
