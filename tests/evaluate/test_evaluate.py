import io
import math
import random

import pytest
from rich.console import Console

from ludus.core.errors import DataError
from ludus.core.types import Group, Segment, Status, Task, Trajectory
from ludus.evaluate import compare, render_comparison, render_evaluation, summarise
from ludus.evaluate.results import Comparison, Evaluation


def played(reward, status=Status.COMPLETED, error=None):
    trajectory = Trajectory(id="t", group_id="g", task_id="x", reward=reward, status=status)
    trajectory.error = error
    trajectory.segments = [Segment(-1, [1, 2]), Segment(0, [3, 4, 5], [-0.1] * 3)]
    return trajectory


def group(name, *rewards, tier=None):
    trajectories = [r if isinstance(r, Trajectory) else played(r) for r in rewards]
    return Group(name, Task(id=name, tier=tier, data={"name": name}), trajectories)


def groups(rewards, tier=None):
    return [group(f"task-{i}", *one, tier=tier) for i, one in enumerate(rewards)]


def wilson(successes, n, z=1.959963984540054):
    """Wilson's interval, as in his paper of 1927."""
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return pytest.approx((centre - half, centre + half))


def ends(estimate):
    return estimate.low, estimate.high


def test_one_episode_a_task_gives_wilsons_interval():
    evaluation = summarise(groups([[1.0]] * 57 + [[0.0]] * 43))
    assert evaluation.success.value == 0.57
    assert ends(evaluation.success) == wilson(57, 100)
    assert evaluation.pass_at == {1: evaluation.success}
    assert evaluation.num_tasks == evaluation.num_episodes == 100
    assert evaluation.success_bounds == (0.57, 0.57)
    assert (evaluation.mean_turns, evaluation.mean_sampled_tokens) == (1.0, 3.0)
    assert evaluation.sampling == "greedy"
    assert str(evaluation) == "success 57.0 % (47.2 to 66.3) of 100 tasks"


def test_graded_scores_are_in_the_line_of_an_evaluation():
    evaluation = summarise(groups([[0.25]] * 10 + [[0.75]] * 10))
    assert str(evaluation) == "success 0.0 % (0.0 to 16.1) of 20 tasks, mean score 0.500"


@pytest.mark.parametrize(("reward", "other"), [(1.0, 0), (0.0, 1)])
def test_all_or_none_still_has_an_interval(reward, other):
    success = summarise(groups([[reward]] * 20)).success
    assert success.value == reward
    assert success.low <= success.value <= success.high
    assert success.high - success.low == pytest.approx(0.1611, abs=1e-4)
    assert 0 <= success.low <= success.high <= 1


def test_success_starts_at_the_threshold():
    evaluation = summarise(groups([[0.5], [0.49], [1.0]]), success_at=0.5)
    assert evaluation.success.value == pytest.approx(2 / 3)
    assert evaluation.score.value == pytest.approx(1.99 / 3)


def test_a_verdict_of_the_agent_comes_before_the_threshold():
    """`Outcome(success=...)` and `Score(success=...)`."""
    played = groups([[0.5, 1.0], [0.5, 0.2]])
    for trajectory, verdict in zip(
        (t for group in played for t in group.trajectories), (1.0, 0.0, 1.0, 0.0), strict=True
    ):
        trajectory.metrics["success"] = verdict
    evaluation = summarise(played)
    assert evaluation.success.value == 0.5
    assert [o.successes for o in evaluation.outcomes] == [[True, False], [True, False]]


def test_score_interval_is_students():
    score = summarise(groups([[1.0], [2.0], [3.0], [4.0]])).score
    half = 3.182446305284263 * math.sqrt(5 / 3) / 2  # t(0.975, 3), s / sqrt(n)
    assert score.value == 2.5
    assert ends(score) == pytest.approx((2.5 - half, 2.5 + half))
    assert ends(summarise(groups([[1.0]])).score) == (None, None)


@pytest.mark.parametrize(
    ("score_range", "within"),
    [((0.0, 1.0), True), ((-1.0, 1.0), True), (None, False), ((0.0, 0.9), False)],
    ids=["the env's", "with losses", "of a judge", "of another env"],
)
def test_score_interval_is_within_the_possible_scores(
    score_range: tuple[float, float] | None, within: bool
):
    played = groups([[1.0]] * 9 + [[0.2]])
    low, high = ends(summarise(played, score_range=score_range).score)
    assert low == pytest.approx(0.739, abs=1e-3)  # 0.92 -+ t(0.975, 9) * 0.08
    assert high == pytest.approx(1.0 if within else 1.101, abs=1e-3)


def test_pass_at_k_by_hand():
    # 2 of 4 succeed: pass@2 = 1 - C(2,2)/C(4,2) = 5/6; none of 4: 0; 1 of 4: 1 - 3/6 = 1/2
    evaluation = summarise(groups([[1, 1, 0, 0], [0, 0, 0, 0], [0, 1, 0, 0]]), temperature=1.0)
    values = {k: estimate.value for k, estimate in evaluation.pass_at.items()}
    expected = {1: 3 / 12, 2: (5 / 6 + 1 / 2) / 3, 3: (1 + 3 / 4) / 3, 4: 2 / 3}
    assert values == pytest.approx(expected)
    assert evaluation.samples_per_task == 4
    assert evaluation.sampling == "sampled"


def test_tasks_with_too_few_scored_episodes_are_left_out_of_that_k():
    broken = played(None, Status.ERROR_ENV, "boom")
    evaluation = summarise([group("a", 1, 0), group("b", 1, broken)])
    assert evaluation.pass_at[1].num_tasks == 2
    assert evaluation.pass_at[2].num_tasks == 1


def test_intervals_are_over_tasks():
    agreeing = summarise(groups([[1] * 8] * 25 + [[0] * 8] * 25)).success
    assert ends(agreeing) == wilson(25, 50)  # 400 episodes tell no more than 50
    mixed = summarise(groups([[1, 0] * 4] * 50)).success
    assert ends(mixed) == wilson(200, 400)  # every task alike: all episodes count


def test_the_interval_covers_the_truth_as_often_as_it_says():
    draw = random.Random(0)
    hits = 0
    for _ in range(400):
        chances = [draw.betavariate(1.5, 1.0) for _ in range(40)]  # mean 0.6
        rewards = [[float(draw.random() < p) for _ in range(4)] for p in chances]
        success = summarise(groups(rewards)).success
        hits += success.low <= 0.6 <= success.high
    assert 0.92 <= hits / 400 <= 0.98


def test_excluded_episodes_are_reported_not_failed():
    evaluation = summarise(
        [
            group("a", 1.0),
            group("b", played(None, Status.ERROR_TIMEOUT, "60 s passed")),
            group("c", played(0.0, Status.ERROR_ENV, "KeyError: 'key'")),
            group("d", played(None)),
            group("e", played(math.nan)),
            group("f", played(0.0, Status.TRUNCATED_TURNS)),
        ]
    )
    assert evaluation.success.value == 0.5
    assert evaluation.success.num_tasks == 2
    assert evaluation.num_excluded == 4
    assert evaluation.success_bounds == pytest.approx((1 / 6, 5 / 6))
    assert {reason: x.count for reason, x in evaluation.excluded.items()} == {
        "error_timeout": 1,
        "error_env": 1,
        "no reward": 1,
        "reward is not finite": 1,
    }
    assert evaluation.excluded["error_env"].example == "KeyError: 'key'"
    reasons = "1 error_timeout: 60 s passed, 1 error_env: KeyError: 'key', 1 no reward"
    assert f"4 episodes left out: {reasons}" in str(evaluation)
    shown = " ".join(printed(render_evaluation(evaluation)).split())
    assert f"4 episodes left out ({reasons}" in shown


def test_the_tiers_of_excluded_episodes_are_named():
    def broken():
        return played(0.0, Status.ERROR_ENV, "KeyError: 'k'")

    one = [group(f"one-{i}", 1.0, tier="one") for i in range(2)]
    evaluation = summarise([*one, *(group(f"two-{i}", broken(), tier="two") for i in range(3))])
    assert str(evaluation).endswith(
        "of 2 scored of 5 tasks, 3 episodes of tier 'two' left out: 3 error_env: KeyError: 'k'"
    )
    shown = " ".join(printed(render_evaluation(evaluation)).split())
    assert "3 episodes of tier 'two' left out (3 error_env: KeyError: 'k')" in shown
    both = summarise([*one, group("two", broken(), tier="two"), group("x", broken(), tier="one")])
    assert both.excluded_episodes == "2 episodes of tiers 'one' (1), 'two' (1)"
    many = summarise([*one, *(group(f"t{i}", broken(), tier=f"t{i}") for i in range(6))])
    assert many.excluded_episodes.endswith("'t3' (1), 2 more")
    assert summarise([*one, group("x", broken(), tier="one")]).excluded_episodes == "1 episode"


def test_nothing_scored():
    with pytest.raises(DataError, match="1 tasks, 1 episodes, none of them scored"):
        summarise([group("a", played(None, Status.ABORTED))])
    with pytest.raises(DataError, match="no episode was played"):
        summarise([])


def test_tiers():
    evaluation = summarise(
        [
            group("a", 1.0, tier="easy"),
            group("b", 1.0, tier="easy"),
            group("c", 0.0, tier="hard"),
            group("d", played(None, Status.ABORTED), tier="hard"),
            group("e", 0.0),
        ]
    )
    assert list(evaluation.tiers) == ["easy", "hard"]
    assert evaluation.tiers["easy"].success.value == 1.0
    assert ends(evaluation.tiers["easy"].success) == wilson(2, 2)
    assert evaluation.tiers["hard"].num_episodes == 2
    assert evaluation.tiers["hard"].num_excluded == 1


def test_json_round_trip():
    a = summarise(groups([[1, 0], [0, 0]], tier="x"), label="sft", policy_version=3, seconds=1.5)
    assert Evaluation.model_validate_json(a.model_dump_json()) == a
    comparison = compare(a, a)
    assert Comparison.model_validate_json(comparison.model_dump_json()) == comparison


def test_a_difference_by_hand():
    # 1 lost, 9 won, 10 the same
    before = summarise(groups([[1]] + [[0]] * 9 + [[1]] * 5 + [[0]] * 5), label="sft")
    after = summarise(groups([[0]] + [[1]] * 9 + [[1]] * 5 + [[0]] * 5), label="rl")
    comparison = compare(before, after)
    success = comparison.success
    assert (success.a, success.b, success.value) == pytest.approx((0.3, 0.7, 0.4))
    assert success.test == "Bonett-Price"
    assert (comparison.num_better, comparison.num_worse) == (9, 1)
    # Bonett and Price: p12 = 10/22, p21 = 2/22
    error = math.sqrt((12 / 22 - (8 / 22) ** 2) / 22)
    half = 1.959963984540054 * error
    assert ends(success) == pytest.approx((8 / 22 - half, 8 / 22 + half))
    assert success.p_value == pytest.approx(math.erfc(8 / 22 / error / math.sqrt(2)))


@pytest.mark.parametrize("seed", range(40))
def test_interval_and_p_value_never_disagree(seed):
    draw = random.Random(seed)
    size, samples, gain = draw.randint(2, 40), draw.choice([1, 3]), draw.choice([0.0, 0.25, 0.5])

    def played_with(chance):
        rewards = [[float(draw.random() < chance) for _ in range(samples)] for _ in range(size)]
        return summarise(groups(rewards))

    comparison = compare(played_with(0.3), played_with(0.3 + gain))
    for difference in (comparison.success, comparison.score):
        if difference.low is not None and any(ends(difference)):
            significant = difference.low > 0 or difference.high < 0
            assert significant == (difference.p_value < 0.05)


def test_several_episodes_a_task_are_one_observation():
    draw = random.Random(1)
    before = summarise(groups([[float(draw.random() < 0.4) for _ in range(4)] for _ in range(60)]))
    after = summarise(groups([[float(draw.random() < 0.7) for _ in range(4)] for _ in range(60)]))
    comparison = compare(before, after)
    assert comparison.success.test == "Bonett-Price"
    assert comparison.score.test == "paired t"
    assert comparison.success.p_value < 1e-4
    assert 0 < comparison.success.low < comparison.success.value < comparison.success.high
    assert compare(after, before).success.value == pytest.approx(-comparison.success.value)


def test_equal_evaluations_do_not_differ():
    same = summarise(groups([[1.0], [0.0], [1.0]]))
    comparison = compare(same, same)
    assert comparison.success.p_value == comparison.score.p_value == 1.0
    assert comparison.success.value == comparison.score.value == 0.0
    assert comparison.success.low < 0 < comparison.success.high


def test_tasks_without_a_score_on_one_side_are_left_out_and_counted():
    a = summarise([group("a", 1.0), group("b", 0.0), group("c", played(None))])
    b = summarise([group("a", 1.0), group("b", played(None)), group("c", 1.0)])
    comparison = compare(a, b)
    assert comparison.num_left_out == 2
    assert comparison.success.num_tasks == 1
    assert comparison.score.low is None


def test_the_tasks_of_both_are_compared_where_one_has_more():
    few, many = summarise(groups([[0.0], [1.0]])), summarise(groups([[1.0]] * 6))
    for a, b, gain in ((few, many, 0.5), (many, few, -0.5)):
        comparison = compare(a, b)
        assert comparison.success.num_tasks == 2
        assert comparison.success.value == gain
        assert comparison.num_unpaired == 4
    assert compare(many, many).num_unpaired == 0


def test_other_tasks_are_refused_by_name():
    a = summarise(groups([[1.0]] * 6), label="sft")
    others = groups([[1.0]] * 7)
    with pytest.raises(DataError, match=r"4 only in sft \(task-0, task-1, task-2, \.\.\.\)"):
        compare(a, summarise(others[4:]))
    with pytest.raises(DataError, match=r"1 only in the second \(task-6\)"):
        compare(a, summarise(others[4:]))
    changed = groups([[1.0]] * 6)
    changed[3].task = changed[3].task.model_copy(update={"data": {}})
    with pytest.raises(DataError, match=r"1 with the same id but different content \(task-3\)"):
        compare(a, summarise(changed))
    with pytest.raises(DataError, match=r"differ in success_at: 1.0 and 0.5"):
        compare(a, summarise(groups([[1.0]] * 6), success_at=0.5))


def printed(renderable):
    console = Console(width=120, file=io.StringIO())
    console.print(renderable)
    return console.file.getvalue()


def test_rendering_says_what_counts():
    before = summarise(
        [*groups([[1.0, 0.0], [0.0, 0.0]], tier="GoTo[x]"), group("z", played(None), 1.0)],
        label="after SFT",
        temperature=0.7,
    )
    text = printed(render_evaluation(before))
    assert "after SFT, sampled at temperature 0.7" in text
    assert "GoTo[x]" in text
    assert "50.0 %" in text
    assert "pass@2" in text
    assert "1 episode left out (1 no reward): success would be 33.3 %" in text
    after = summarise([*groups([[1.0, 1.0], [1.0, 0.0]], tier="GoTo[x]"), group("z", 1.0, 1.0)])
    text = printed(render_comparison(compare(before, after)))
    assert "after SFT against b, 3 tasks" in text
    assert "+33.3" in text
    assert "b is better on 2 tasks, worse on 0" in text
    assert "the difference is b minus after SFT" in text
