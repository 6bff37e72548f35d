"""Runs of several policies on Ray, each in actors of its own: they equal the local runs."""

from __future__ import annotations

import signal
from pathlib import Path

import duel
import pytest
from harness import Ludus, Zygote

pytest.importorskip("ray", reason="needs the extra ray")
pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

LIMIT_S = 600  # a guard against a hang


def recipe(ludus: Ludus, won: Path) -> str:
    """`red` and `blue` train; `grey` is an older version, the beginning, or another run's model."""
    base = duel.recipe()
    changes = {
        "roles": {"red": "policy", "blue": "rival", "grey": {"old": 1, "first": 1, "won": 1}},
        "policies": {
            **base["policies"],
            "first": {"weights": "start"},
            "won": {"weights": str(won)},
        },
        "rl": {**base["rl"], "steps": 3, "groups_per_step": 3, "group_size": 3},
    }
    return ludus.recipe("duel", context_length=128, **duel.recipe(**changes))


@pytest.fixture(scope="module")
def reference(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Ludus:
    """The run of the back end `local`; to be read, not changed. Before it, the run `won`."""
    ludus = Ludus(zygote, tmp_path_factory.mktemp("reference"))
    won = ludus.run("won-1")
    name = recipe(ludus, won)
    fixed = "policies={rival: {model: same}, old: {past: {}}}"
    roles = "roles={red: policy, blue: rival, grey: old}"
    ludus("train", name, "name=won", "rl.steps=1", fixed, roles).ok()
    ludus("train", name).ok()
    return ludus


def test_killed_and_resumed_it_is_the_local_run(ludus: Ludus, reference: Ludus) -> None:
    ray = ["backend.name=ray", "backend.args.cpus=0.5"]
    argv = ["train", recipe(ludus, reference.run("won-1")), *ray]
    strike = "strike('ludus.backends.several:SeveralPolicies.save', 2, 'kill after')"
    assert ludus.start(*argv, setup=strike).wait(LIMIT_S).code == -signal.SIGKILL
    ludus.start("train", "--resume", "duel-1", *ray).wait(LIMIT_S).ok()
    mine, theirs = ludus.state("duel-1"), reference.state("duel-1")
    for part in ("metrics", "steps", "evaluations"):
        assert mine[part] == theirs[part], f"{part} differ"
    with ludus.store() as store:
        groups = [g for step in range(3) for g in store.groups("duel-1", "rl", step)]
    policies = {t.policy for group in groups for t in group.trajectories}
    assert policies == {"policy", "rival", "old", "first", "won"}
    for name in ("rival", "old"):
        one, other = (
            x.run("duel-1") / "policies" / name / "checkpoints" for x in (ludus, reference)
        )
        assert {p.name for p in one.iterdir()} == {p.name for p in other.iterdir()}
