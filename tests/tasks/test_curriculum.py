import json
import random
from itertools import islice

import pytest

from ludus.core.errors import CheckpointError, DataError
from ludus.core.types import Group, Status, Task, Trajectory
from ludus.tasks.curriculum import TaskSampler
from ludus.telemetry.metrics import MetricsLog

TASKS = [Task(id=str(n), data={"seed": n}) for n in range(7)]


def ids(sampler, count):
    return [task.id for task in islice(sampler, count)]


def test_each_pass_visits_every_task_once_in_a_new_order():
    sampler = TaskSampler(TASKS, seed=3)
    passes = [ids(sampler, 7) for _ in range(20)]
    assert all(sorted(one) == sorted(t.id for t in TASKS) for one in passes)
    assert len({tuple(one) for one in passes}) > 15


def test_the_order_is_the_same_on_every_platform():
    assert ids(TaskSampler(TASKS, seed=0), 14) == list("41230653041256")
    assert ids(TaskSampler(TASKS, seed=0, shuffle=False), 9) == list("012345601")


def test_the_order_ignores_the_global_random_state():
    random.seed(1)
    first = ids(TaskSampler(TASKS, seed=5), 21)
    random.seed(2)
    assert ids(TaskSampler(TASKS, seed=5), 21) == first
    assert ids(TaskSampler(TASKS, seed=6), 21) != first


@pytest.mark.parametrize("played", [0, 3, 7, 11, 14])
def test_resumes_exactly(played):
    sampler = TaskSampler(TASKS, seed=1)
    ids(sampler, played)
    state = json.loads(json.dumps(sampler.state_dict()))
    resumed = TaskSampler(TASKS, seed=1)
    resumed.load_state_dict(state)
    assert resumed.metrics() == sampler.metrics()
    assert ids(resumed, 30) == ids(sampler, 30)


def test_refuses_the_state_of_another_run():
    state = TaskSampler(TASKS, seed=1).state_dict()
    with pytest.raises(CheckpointError, match=r"another task list \(7 tasks; this run has 6\)"):
        TaskSampler(TASKS[:6], seed=1).load_state_dict(state)
    changed = [*TASKS[:6], TASKS[6].model_copy(update={"answer": 1})]
    with pytest.raises(CheckpointError, match="another task list"):
        TaskSampler(changed, seed=1).load_state_dict(state)
    with pytest.raises(CheckpointError, match="has seed 1, this run has 2"):
        TaskSampler(TASKS, seed=2).load_state_dict(state)
    with pytest.raises(CheckpointError, match="has shuffle True, this run has False"):
        TaskSampler(TASKS, seed=1, shuffle=False).load_state_dict(state)


def test_no_tasks():
    with pytest.raises(DataError, match="at least one task"):
        TaskSampler([])


def test_metrics_tell_the_pass_and_the_reward_of_each_tier():
    sampler = TaskSampler(TASKS)
    ids(sampler, 14)
    groups = [
        Group("g", Task(id="a", tier="hard"), [played(1.0), played(0.0), played(None)]),
        Group("h", Task(id="b"), [played(0.5), played(9.0, Status.ERROR_ENV)]),
    ]
    sampler.observe(groups)
    assert sampler.metrics() == {
        "tasks/epoch": 2.0,
        "tasks/reward_all": 0.5,
        "tasks/reward_hard": 0.5,
    }


@pytest.mark.parametrize(
    ("tier", "name"),
    [
        ("depth-2/heldout", "depth-2/heldout"),
        ("depth-1:32", "depth-1-32"),
        ("  Level 1, easy! ", "Level-1-easy"),
        ("//x//y/", "x/y"),
        ("數學", "-"),
        ("", "all"),
    ],
)
def test_any_tier_has_a_metric_name(tmp_path, tier, name):
    sampler = TaskSampler(TASKS)
    sampler.observe([Group("g", Task(id="a", tier=tier), [played(0.5)])])
    metrics = sampler.metrics()
    assert metrics[f"tasks/reward_{name}"] == 0.5
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.log("rl", 0, metrics)


def test_tiers_of_one_name_are_averaged():
    sampler = TaskSampler(TASKS)
    tiers = {"a b": 1.0, "a: b": 0.0}
    sampler.observe([Group(t, Task(id=t, tier=t), [played(r)]) for t, r in tiers.items()])
    assert sampler.metrics()["tasks/reward_a-b"] == 0.5


def played(reward, status=Status.COMPLETED):
    return Trajectory(id="t", group_id="g", task_id="a", reward=reward, status=status)
