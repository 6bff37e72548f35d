"""A run that plays ahead: killed, interrupted, resumed, it trains on every task once."""

from __future__ import annotations

import signal

import pytest
from harness import BABYAI, Ludus

AHEAD = [
    "rl.max_staleness=1",
    "rollout.deterministic=false",
    "rl.algorithm={name: grpo, args: {importance_cap: 2.0}}",
]


@pytest.mark.slow
def test_it_may_be_switched_on_and_off_between_checkpoints(ludus: Ludus) -> None:
    interrupt = "strike('ludus.rollout.{}:run_episode', 20, 'interrupt')"
    ludus("train", BABYAI, setup=interrupt.format("collect")).refused(130, "finishing this step")
    resume = ["train", "--resume", "tiny-1"]
    ludus(*resume, *AHEAD, setup=interrupt.format("prefetch")).refused(130, "finishing this step")
    done = ludus(*resume, "rl.max_staleness=0").ok()
    assert "tasks are dropped" in done.all
    steps = [step for step in ludus.state()["steps"] if step["at"][0] == "rl"]
    ids = [group.id for step in steps for group in step["groups"]]
    assert len(set(ids)) == len(ids)


@pytest.mark.slow
def test_killed_and_interrupted_it_goes_on(ludus: Ludus) -> None:
    again = "ludus train --resume tiny-1"
    kill = "strike('ludus.rollout.prefetch:PrefetchSource.take', 3, 'kill')"
    assert ludus("train", BABYAI, *AHEAD, setup=kill).code == -signal.SIGKILL
    interrupt = "strike('ludus.rollout.prefetch:PrefetchSource.take', 2, 'interrupt')"
    ludus("train", "--resume", "tiny-1", setup=interrupt).refused(130, "finishing this step", again)
    twice = "strike('ludus.rollout.prefetch:PrefetchSource.take', 1, 'interrupt twice')"
    ludus("train", "--resume", "tiny-1", setup=twice).refused(130, again)
    ludus("train", "--resume", "tiny-1").ok()
    steps = [step for step in ludus.state()["steps"] if step["at"][0] == "rl"]
    groups = [group for step in steps for group in step["groups"]]
    assert len({group.id for group in groups}) == len(groups)
    assert [step["at"][1] for step in steps] == list(range(len(steps)))
    assert all(0 <= step["metrics"]["rollout/staleness_max"] <= 1 for step in steps)
    tasks = [group.task.id for group in sorted(groups, key=lambda group: group.id)]
    assert len(tasks) == len(groups) >= len(steps)


def test_what_was_played_ahead_of_an_early_end_is_stored(ludus: Ludus) -> None:
    """Each task that was begun is in the store once, trained on or with the reason why not."""
    early = ["rl.steps=9", "rl.max_staleness=3", "evaluate.every=1", "rl.min_success_to_stop=1e-9"]
    ludus("train", BABYAI, *AHEAD, *early, "evaluate.num_tasks_between=8").ok()
    steps = ludus.state()["steps"]
    trained = [g.id for step in steps if step["at"][0] == "rl" for g in step["groups"]]
    left = [g for step in steps if step["at"][0] == "rl/left" for g in step["groups"]]
    assert left
    assert not {group.id for group in left} & set(trained)
    for trajectory in (t for group in left for t in group.trajectories):
        assert "no step was left to train on it" in trajectory.dropped
