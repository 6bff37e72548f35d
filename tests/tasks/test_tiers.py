"""The curriculum of tiers: order, criteria, state."""

import json
import logging
from collections import Counter
from itertools import islice

import pytest

from ludus.config.schema import CurriculumConfig
from ludus.core.errors import CheckpointError, ConfigError
from ludus.core.types import Group, Status, Task, Trajectory
from ludus.rollout.source import DynamicSampling, SyncSource
from ludus.tasks.curriculum import TaskSampler
from ludus.tasks.mixture import PART
from ludus.tasks.readers import TaskList
from ludus.tasks.tiers import TierSampler, check_curriculum, tasks_by_tier
from ludus.telemetry.metrics import MetricsLog

TASKS = [Task(id=f"{tier}-{n}", tier=tier) for tier in ("easy", "medium", "hard") for n in range(5)]

KERNELS = {  # compile rate, success, mean speed-up, least episodes
    "easy": {"until": {"score/compiled": 0.8, "success": 0.6, "score/speedup": 1.2}},
    "medium": {
        "until": {"score/compiled": 0.75, "success": 0.5, "score/speedup": 1.8, "episodes": 200}
    },
    "hard": {
        "until": {"score/compiled": 0.7, "success": 0.4, "score/speedup": 2.5, "episodes": 300}
    },
}


def config(**changes):
    tiers = {
        "easy": {"until": {"success": 0.5, "episodes": 4}},
        "medium": {"until": {"success": 0.5, "episodes": 4}},
        "hard": {},
    }
    return CurriculumConfig(**{"tiers": tiers, "share_earlier": 0.0} | changes)


def sampler(tasks=TASKS, seed=3, batch_size=None, ratios=None, **changes):
    return TierSampler(tasks, seed, True, config(**changes), ratios, batch_size)


def episode(success=1.0, status=Status.COMPLETED, **fields):
    metrics = {"success": float(success)} | fields.pop("metrics", {})
    fields = {"reward": float(success)} | fields
    return Trajectory("t", "g", "a", metrics=metrics, status=status, **fields)


def group(tier, *episodes):
    return Group("g", Task(id=tier, tier=tier), list(episodes))


def played(tier, *successes):
    return [group(tier, *(episode(success) for success in successes))]


def tiers_of(order, count):
    return [task.tier for task in islice(order, count)]


def test_the_first_tier_is_played_until_its_criteria_are_met():
    order = sampler()
    assert set(tiers_of(order, 12)) == {"easy"}
    order.observe(played("easy", 1, 1, 1))
    assert order.current == "easy", "three episodes of four"
    order.observe(played("easy", 0))
    assert order.current == "medium"
    assert set(tiers_of(order, 12)) == {"medium"}
    order.observe(played("medium", 1, 0, 1, 0))
    assert set(tiers_of(order, 12)) == {"hard"}


def test_a_tier_without_enough_success_goes_on_and_the_window_forgets():
    order = sampler()
    order.observe(played("easy", 0, 0, 0, 0, 0, 0))
    order.observe(played("easy", 1))
    assert order.current == "easy"
    assert order.metrics()["tasks/success_easy"] == 0.25
    order.observe(played("easy", 1))
    assert order.current == "medium", "two of the latest four"


def test_a_window_may_differ_from_the_least_number_of_episodes():
    tiers = {"easy": {"until": {"success": 1.0, "episodes": 6}, "window": 2}, "hard": {}}
    order = sampler(TASKS[:5] + TASKS[10:], tiers=tiers)
    order.observe(played("easy", 0, 0, 0, 1, 1))
    assert order.current == "easy"
    order.observe(played("easy", 1))
    assert order.current == "hard"


def test_only_scored_episodes_count():
    order = sampler()
    failed = [episode(1, Status.ERROR_ENV), episode(1, reward=None), episode(1, Status.ABORTED)]
    order.observe([group("easy", *failed, episode(1), episode(1))])
    assert order.metrics()["tasks/tier_episodes"] == 2
    order.observe([group("easy", episode(0, Status.TRUNCATED_TURNS), episode(1))])
    assert order.current == "medium"


def test_a_tier_of_a_number_of_episodes():
    order = sampler(tiers=config().model_dump()["tiers"] | {"easy": {"until": {"episodes": 3}}})
    order.observe(played("easy", 0, 0))
    assert order.current == "easy"
    order.observe(played("easy", 0))
    assert order.current == "medium"


def kernel(compiled, success, speedup=None):
    scores = {"compiled": float(compiled)} | ({} if speedup is None else {"speedup": speedup})
    return episode(success, scores=scores)


def test_criteria_on_named_scores_as_kernels_have_them():
    order = sampler(tiers=KERNELS)
    correct, slow = kernel(1, 1, 1.25), kernel(1, 1, 1.0)
    order.observe([group("easy", *[correct] * 60, *[kernel(1, 0)] * 19, *[kernel(0, 0)] * 21)])
    assert order.current == "easy", "79 % compile"
    metrics = order.metrics()
    assert metrics["tasks/until/score/compiled"] == pytest.approx(0.79)
    assert metrics["tasks/until/success"] == pytest.approx(0.6)
    assert metrics["tasks/until/score/speedup"] == pytest.approx(1.25), "of those that have one"
    order.observe([group("easy", *[slow] * 60, *[kernel(1, 0)] * 40)])
    assert order.current == "easy", "the mean speed-up is 1.0"
    order.observe([group("easy", *[correct] * 60, *[kernel(1, 0)] * 40)])
    assert order.current == "medium"
    order.observe([group("medium", *[kernel(1, 1, 1.8)] * 199)])
    assert order.current == "medium"
    order.observe([group("medium", kernel(1, 1, 1.8))])
    assert order.current == "hard"
    assert not order.finished
    order.observe([group("hard", *[kernel(1, 1, 2.5)] * 300)])
    assert order.finished, "the last tier's criteria end the stage"


def test_counts_of_the_episode_and_rewards_are_criteria():
    until = {"reward": 2.0, "rollout/tool_calls": 1.0, "episodes": 2}
    order = sampler(tiers={"easy": {"until": until}, "hard": {}}, tasks=TASKS[:5] + TASKS[10:])
    few = {"tool_calls": 0.0}
    order.observe([group("easy", *[episode(reward=3.0, metrics=few)] * 2)])
    assert order.current == "easy"
    order.observe([group("easy", *[episode(reward=1.0, metrics={"tool_calls": 4.0})] * 2)])
    assert order.current == "easy"
    enough = [episode(reward=2.0, metrics={"tool_calls": n}) for n in (0.0, 2.0)]
    order.observe([group("easy", *enough)])
    assert order.current == "hard"


def test_values_that_are_not_finite_are_no_values():
    order = sampler(tiers=KERNELS)
    order.observe([group("easy", *[kernel(1, 1, float("inf"))] * 99, kernel(1, 1, 1.0))])
    assert order.current == "easy"
    assert order.metrics()["tasks/until/score/speedup"] == 1.0


def test_a_criterion_without_any_value_is_warned_of_once(caplog):
    order = sampler(
        TASKS[:5] + TASKS[10:],
        tiers={"easy": {"until": {"score/compild": 0.5, "episodes": 2}}, "hard": {}},
    )
    order.observe([group("easy", kernel(1, 1))])
    with caplog.at_level(logging.WARNING):
        assert not caplog.records, "one episode of two"
        for _ in range(3):
            order.observe([group("easy", kernel(1, 1, 2.0))])
    (record,) = caplog.records
    text = record.getMessage() + str(vars(record))
    assert "a criterion of the curriculum has no value" in text
    assert "tasks.curriculum.tiers.easy.until: score/compild" in text
    assert "score/compiled, score/speedup" in text
    assert order.current == "easy"


def test_episodes_of_before_a_tier_began_do_not_count():
    order = sampler(share_next=0.2)
    order.observe(played("medium", 1, 1, 1, 1, 1))
    order.observe(played("easy", 1, 1, 1, 1))
    assert order.current == "medium"
    assert order.metrics()["tasks/tier_episodes"] == 0
    order.observe(played("easy", 1, 1, 1, 1))
    assert order.current == "medium", "episodes of an earlier tier do not end this one"
    order.observe(played("medium", 1, 1, 1, 1))
    assert order.current == "hard"


def test_a_tier_that_was_left_stays_left():
    order = sampler()
    order.observe(played("easy", 1, 1, 1, 1))
    order.observe(played("easy", 0, 0, 0, 0))
    assert order.current == "medium"
    assert order.metrics()["tasks/success_easy"] == 0.0, "what was forgotten is seen"


def test_shares_of_earlier_tiers_and_of_the_next_are_exact_in_every_step():
    order = sampler(share_earlier=0.3, share_next=0.1, batch_size=10)
    steps = [Counter(tiers_of(order, 10)) for _ in range(6)]
    assert steps == [{"easy": 9, "medium": 1}] * 6, "there is no earlier tier yet"
    order.observe(played("easy", 1, 1, 1, 1))
    assert [Counter(tiers_of(order, 10)) for _ in range(6)] == [
        {"easy": 3, "medium": 6, "hard": 1}
    ] * 6
    order.observe(played("medium", 1, 1, 1, 1))
    steps = [Counter(tiers_of(order, 10)) for _ in range(6)]
    assert all(step["hard"] == 7 for step in steps), "there is no next tier"
    total = sum(steps, Counter())
    assert total["easy"] == total["medium"] == 9, "earlier tiers take turns"


def test_each_tier_visits_its_tasks_in_passes_of_its_own():
    order = sampler(share_earlier=0.5)
    order.observe(played("easy", 1, 1, 1, 1))
    seen = [task.id for task in islice(order, 40)]
    for tier in ("easy", "medium"):
        own = [id for id in seen if id.startswith(tier)]
        passes = [own[i : i + 5] for i in range(0, 20, 5)]
        assert all(len(set(one)) == 5 for one in passes)
        assert len({tuple(one) for one in passes}) > 1, "each pass has an order of its own"


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 8])
def test_resumes_exactly(steps):
    def make():
        return sampler(share_earlier=0.25, share_next=0.1, batch_size=8)

    def play(order):
        tasks = list(islice(order, 8))
        wins = [hash_of(task.id) for task in tasks]
        order.observe([group(t.tier, episode(w)) for t, w in zip(tasks, wins, strict=True)])
        return [task.id for task in tasks], order.current

    whole, first = make(), make()
    for _ in range(steps):
        assert play(first) == play(whole)
    next(whole), next(first)  # in the middle of a step
    resumed = make()
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert resumed.metrics() == whole.metrics()
    left = [play(resumed) for _ in range(12)]
    assert left == [play(whole) for _ in range(12)]
    assert left[-1][1] == "hard", "the run reached the last tier"
    assert resumed.state_dict() == whole.state_dict()


def hash_of(text):
    return sum(map(ord, text)) % 3 > 0


def test_refuses_the_state_of_other_tiers_and_of_no_curriculum():
    state = sampler().state_dict()
    other = {"easy": {"until": {"episodes": 1}, "includes": ["easy", "medium"]}, "hard": {}}
    with pytest.raises(CheckpointError, match=r"tiers easy, medium, hard, this run has easy \("):
        sampler(tiers=other).load_state_dict(state)
    turned = {name: {"until": {"episodes": 1}} for name in ("medium", "easy", "hard")}
    with pytest.raises(CheckpointError, match="this run has medium, easy, hard"):
        sampler(tiers=turned).load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"has a tasks\.curriculum, this run has none"):
        TaskSampler(TASKS, seed=3).load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"has no tasks\.curriculum, this run has one"):
        sampler().load_state_dict(TaskSampler(TASKS, seed=3).state_dict())
    with pytest.raises(CheckpointError, match="ratios"):
        sampler(share_earlier=0.5).load_state_dict(state)


def test_criteria_may_change_when_a_run_goes_on():
    done = sampler(tiers=KERNELS)
    for tier, count in (("easy", 100), ("medium", 200), ("hard", 300)):
        done.observe([group(tier, *[kernel(1, 1, 2.6)] * count)])
    assert done.finished
    harder = json.loads(json.dumps(KERNELS))
    harder["hard"]["until"]["score/speedup"] = 3.0
    resumed = sampler(tiers=harder)
    resumed.load_state_dict(done.state_dict())
    assert resumed.current == "hard"
    assert not resumed.finished


def test_a_tier_may_include_several_tiers_of_the_tasks():
    levels = [Task(id=f"{level}-{n}", tier=level) for level in "abcd" for n in range(2)]
    tiers = {
        "easy": {"includes": ["a", "c"], "until": {"success": 0.5}},
        "d": {"includes": ["b", "d"]},
    }
    found = tasks_by_tier(levels, config(tiers=tiers))
    assert {name: sorted({t.tier for t in own}) for name, own in found.items()} == {
        "easy": ["a", "c"],
        "d": ["b", "d"],
    }
    order = TierSampler(levels, 0, True, config(tiers=tiers))
    assert set(tiers_of(order, 4)) == {"a", "c"}


def mixed(part, tier, count):
    name = part if tier is None else f"{part}/{tier}"
    return [Task(id=f"{name}-{n}", tier=name, data={PART: part}) for n in range(count)]


def test_a_mixture_keeps_its_ratios_within_a_tier():
    tasks = mixed("rooms", "small", 5) + mixed("rooms", "large", 5) + mixed("maths", None, 7)
    tiers = {
        "start": {"includes": ["rooms/small", "maths"], "until": {"success": 0.5, "episodes": 4}},
        "end": {"includes": ["rooms"]},
    }
    order = sampler(tasks, tiers=tiers, ratios={"rooms": 1, "maths": 3}, batch_size=8)
    assert Counter(tiers_of(order, 40)) == {"rooms/small": 10, "maths": 30}
    order.observe(played("maths", 1, 1, 1, 1))
    assert set(tiers_of(order, 10)) == {"rooms/large"}
    again = sampler(tasks, tiers=tiers, ratios={"rooms": 1, "maths": 3}, batch_size=8)
    again.load_state_dict(json.loads(json.dumps(order.state_dict())))
    assert tiers_of(again, 20) == tiers_of(order, 20)


def fault(tasks, **changes):
    with pytest.raises(ConfigError) as caught:
        check_curriculum(TaskList(tasks), config(**changes))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_tiers_that_the_tasks_do_not_have_are_refused():
    assert fault(TASKS[:10]) == (
        "tasks.curriculum.tiers.hard: no training task is of tier 'hard'; they have easy, medium "
        "(set `includes` to the tiers of tasks that hard stands for)"
    )
    text = fault(TASKS, tiers=config().model_dump()["tiers"] | {"hard": {"includes": ["hrad"]}})
    assert text == (
        "tasks.curriculum.tiers.hard.includes: no training task is of tier 'hrad' "
        "(did you mean hard?)"
    )
    assert "the training tasks have no tiers; give the reader's `tier`" in fault([Task(id="a")])
    covered = {
        "easy": {"includes": ["rooms/small"], "until": {"episodes": 1}},
        "rooms": {},
    }
    assert "rooms: other tiers include the tiers of all of its tasks" in fault(
        mixed("rooms", "small", 3), tiers=covered
    )


def test_tasks_of_no_tier_are_refused_as_nothing_would_play_them():
    others = [*TASKS, Task(id="x"), Task(id="y", tier="extreme"), Task(id="z", tier="extreme")]
    assert fault(others) == (
        "tasks.curriculum: 3 of 18 training tasks belong to no tier (1 without a tier, 2 of tier "
        "'extreme'): include them in a tier, or leave them out of tasks.train"
    )


def test_distinct_parts_are_refused():
    tasks = TaskList(TASKS, distinct=["rooms"])
    with pytest.raises(ConfigError, match=r"parts\.rooms\.distinct: tasks\.curriculum cannot"):
        check_curriculum(tasks, config())
    check_curriculum(tasks, None)


@pytest.mark.parametrize("name", ["depth-1:32", "Level 1, easy!", "數學"])
def test_any_tier_has_metric_names(tmp_path, name):
    tasks = [Task(id="a", tier=name), Task(id="b", tier="hard")]
    tiers = {name: {"until": {"score/a: b": 0.5, "episodes": 2}}, "hard": {}}
    order = sampler(tasks, tiers=tiers)
    next(order)
    order.observe([group(name, episode(1, scores={"a: b": 1.0}))])
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.log("rl", 0, order.metrics())
    assert order.metrics()["tasks/until/score/a-b"] == 1.0


async def test_every_group_of_dynamic_sampling_counts_and_the_tier_may_change_in_a_step():
    """DAPO plays further groups for those without a signal: these are evidence too."""
    order, asked = sampler(), []

    async def collect(tasks, step, *, first_group):
        asked.append([task.tier for task in tasks])
        return [group(task.tier, episode(1), episode(1)) for task in tasks]

    source = DynamicSampling(SyncSource(order, collect), lambda groups: 0, max_rounds=4)
    groups = await source.take(2, 0, 0)
    assert asked == [["easy"] * 2, ["medium"] * 2, ["hard"] * 2, ["hard"] * 2]
    assert len(groups) == 8
    assert not source.finished
    assert source.metrics()["tasks/tier"] == 3.0
