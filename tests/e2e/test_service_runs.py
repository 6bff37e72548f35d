"""A run with a remote environment whose service is killed during the steps."""

from __future__ import annotations

import time
from collections import Counter

import httpx
import pytest
from harness import Ludus
from service_world import Command, start, until

pytest.importorskip("websockets", reason="needs the extra remote")

PAYS = "served_envs:Pays"


def num_playing(service: Command) -> int:
    return int(httpx.get(f"{service.url}/health").json()["sessions"])


@pytest.mark.slow
def test_a_killed_service_loses_no_episode_and_scores_none_as_0(ludus: Ludus) -> None:
    """Every episode of this environment ends with the reward 1, after six steps."""
    service = start(PAYS)
    try:
        recipe = ludus.recipe(
            "far",
            context_length=256,
            env={"name": "remote", "args": {"url": service.url, "env": PAYS}},
            tasks={"train": {"name": "env", "args": {"num_tasks": 8}}},
            rollout={
                "max_tokens_per_turn": 24,
                "max_turns": 8,
                "concurrency": 16,
                "max_retries": 3,
                "stop": ["a", "e", "i", "o", "u"],
            },
            rl={"steps": 5, "groups_per_step": 4, "group_size": 4},
            checkpoint={"every": 5},
        )
        run = ludus.start("train", recipe)
        killed_during = []
        for _ in range(2):
            until(lambda service=service: num_playing(service) >= 8, 120)
            killed_during.append(num_playing(service))
            port = service.port
            service.kill()
            assert service.process.stdout is not None
            service.process.stdout.close()
            time.sleep(1)
            service = start(PAYS, port=port)
        run.wait().ok()
    finally:
        service.kill()
        assert service.process.stdout is not None
        service.process.stdout.close()
    assert min(killed_during) > 0
    statuses: Counter[tuple[str, float | None]] = Counter()
    with ludus.store() as store:
        rows = [list(store.trajectories("far-1", "rl", step)) for step in range(5)]
        assert [len(of_step) for of_step in rows] == [16] * 5
        statuses.update((row.status.value, row.reward) for of_step in rows for row in of_step)
        assert list(store.dropped("far-1", "rl")) == []
    assert {status for status, _ in statuses} <= {"completed", "truncated_length"}
    assert ("completed", 0.0) not in statuses
    assert statuses["completed", 1.0] > 60, statuses
    retries = sum(line.get("rollout/retries", 0) for line in ludus.metrics("far-1"))
    assert retries >= len(killed_during), "some episodes were being played"
    assert ludus.status("far-1") == "completed"
