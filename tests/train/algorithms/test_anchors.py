"""GiGPO's credit by hand: turns from the same observation are compared within their group."""

from __future__ import annotations

import math

import pytest

from ludus.core.errors import ConfigError
from ludus.core.types import Message, Segment, Spec, Trajectory
from ludus.train import ALGORITHMS
from ludus.train.algorithms.advantages import group_centred, group_normalised
from ludus.train.algorithms.anchors import AnchorStates, observation_before
from ludus.train.algorithms.credit import Advantage, Credit, Earned

KITCHEN, CELLAR, GARDEN = [1, 5], [1, 6], [1, 7]


def visited(name: str, *rooms: list[int], reward: float = 0.0) -> Trajectory:
    """A turn of one token in each room; the reward belongs to the last turn."""
    segments: list[Segment] = []
    for room in rooms:
        observation = Segment(len(segments) - 1, room)
        segments += [observation, Segment(len(segments), [9], [-1.0])]
    return Trajectory(name, "g", "task", segments, reward=reward)


def of(advantage: Advantage) -> list[float]:
    assert isinstance(advantage, Credit)
    return [x for row in advantage.advantages for x in row]


def test_the_turn_that_leads_to_the_reward_sooner_has_the_higher_advantage() -> None:
    # Returns, discounted by a half: found 1/2, 1; lost 0, 0, 0.
    # At the kitchen 1/2, 0 and 0: mean 1/6. The garden and the cellar have one visit each.
    found = visited("found", KITCHEN, GARDEN, reward=1.0)
    lost = visited("lost", KITCHEN, CELLAR, KITCHEN)
    [[a, b]] = AnchorStates(group_centred, 0.5, 2.0)([[Earned(found), Earned(lost)]])
    assert of(a) == pytest.approx([0.5 + 2 * (1 / 2 - 1 / 6), 0.5])
    assert of(b) == pytest.approx([-0.5 - 2 / 6, -0.5, -0.5 - 2 / 6])


def test_episodes_that_all_succeed_differ_by_their_turns() -> None:
    # At the kitchen 1 and 1/2 and 1: mean 5/6, while the episodes' own rewards are alike.
    short = visited("short", KITCHEN, reward=1.0)
    detour = visited("detour", KITCHEN, KITCHEN, reward=1.0)
    [[a, b]] = AnchorStates(group_centred, 0.5, 1.0)([[Earned(short), Earned(detour)]])
    assert of(a) == pytest.approx([1 / 6])
    assert of(b) == pytest.approx([-1 / 3, 1 / 6])


def test_advantages_divided_by_the_std_of_their_own_group() -> None:
    # Episodes 1 and 0, and returns 1 and 0 at the kitchen: both +-0.5 / sqrt(0.5).
    won, lost = visited("won", KITCHEN, reward=1.0), visited("lost", KITCHEN)
    [[a, b]] = AnchorStates(group_normalised, 0.95, 1.0)([[Earned(won), Earned(lost)]])
    unit = 0.5 / (math.sqrt(0.5) + 1e-4)
    assert [*of(a), *of(b)] == pytest.approx([2 * unit, -2 * unit])


def test_groups_have_their_own_states() -> None:
    won, lost = visited("won", KITCHEN, reward=1.0), visited("lost", KITCHEN)
    other = visited("other", KITCHEN, reward=1.0)
    credit = AnchorStates(group_centred, 0.95, 1.0)
    [[a, b], [c]] = credit([[Earned(won), Earned(lost)], [Earned(other)]])
    assert [of(a), of(b), of(c)] == [[1.0], [-1.0], [0.0]]


def test_turns_that_were_not_sampled_end_an_observation() -> None:
    """A copy of the turn without its reasoning, in the branch that goes on from it."""
    t = visited("t", KITCHEN)
    copy = Segment(0, [8], message=Message(role="assistant", content="open the door"))
    t.segments += [copy, Segment(2, CELLAR), Segment(3, [9], [-1.0])]
    assert observation_before(t, 4) == tuple(CELLAR)


def test_turns_without_an_observation_are_not_compared() -> None:
    def twice(name: str, reward: float) -> Earned:
        t = visited(name, KITCHEN, reward=reward)
        t.segments.append(Segment(1, [9], [-1.0]))
        return Earned(t)

    [[a, b]] = AnchorStates(group_centred, 1.0, 1.0)([[twice("a", 1.0), twice("b", 0.0)]])
    assert [of(a), of(b)] == [[1.0, 0.5], [-1.0, -0.5]]


def test_an_observation_is_all_that_was_not_sampled_since_the_turn_before() -> None:
    t = visited("t", KITCHEN)
    t.segments += [Segment(1, [3]), Segment(2, [4, 4]), Segment(3, [9], [-1.0])]
    t.segments.append(Segment(0, [9, 9], [-1.0, -1.0]))  # a branch of the first observation
    assert observation_before(t, 1) == (1, 5)
    assert observation_before(t, 4) == (3, 4, 4)
    assert observation_before(t, 5) == (1, 5)


@pytest.mark.parametrize(
    ("args", "named"), [({"turn_weight": 0}, "turn_weight"), ({"gamma": 1.1}, "gamma")]
)
def test_wrong_arguments_are_refused(args: dict[str, float], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ALGORITHMS.build(Spec(name="gigpo", args=args))
