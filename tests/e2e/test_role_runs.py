"""Runs of several roles: which policies train, which do not, and a resume with all of them."""

from __future__ import annotations

import json
import signal
from typing import Any

import duel
import pytest
import yaml
from harness import Ludus, Zygote
from safetensors.torch import load_file

from ludus.core.types import Group

DUEL = "duel"


def recipe(ludus: Ludus, **sections: Any) -> str:
    """Write the recipe of the game, with these sections; returns its name."""
    return ludus.recipe(DUEL, context_length=128, **duel.recipe(**sections))


@pytest.fixture(scope="module")
def undisturbed(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Ludus:
    """A whole run; to be read, not changed."""
    ludus = Ludus(zygote, tmp_path_factory.mktemp("undisturbed"))
    ludus("train", recipe(ludus)).ok()
    return ludus


def trained(groups: list[Group]) -> set[str]:
    return {
        t.policy
        for group in groups
        for t in group.trajectories
        if any(segment.advantages for segment in t.segments)
    }


def weights(ludus: Ludus, *below: str) -> dict[str, Any]:
    folder = ludus.run("duel-1").joinpath(*below, "checkpoints")
    (newest,) = [path for path in folder.iterdir() if path.name.startswith("rl-")]
    return load_file(newest / "model.safetensors")


def test_policies_that_train_and_older_ones(undisturbed: Ludus) -> None:
    ludus = undisturbed
    with ludus.store() as store:
        groups = [g for step in range(4) for g in store.groups("duel-1", "rl", step)]
        final = store.groups("duel-1", "evaluate/after", 0)
    assert trained(groups) == {"policy", "rival"}
    assert {t.role for g in final for t in g.trajectories} == {"red", "blue", "grey"}
    for group in groups:
        assert len({(t.role, t.policy) for t in group.trajectories}) == 1
        assert len(group.trajectories) == 4
    last = [line for line in ludus.metrics("duel-1") if line["stage"] == "rl"][-1]
    assert {"role/red/reward", "role/blue/reward", "role/grey/reward"} <= {*last}
    assert last["policy/rival/loss"] is not None
    policy, rival = weights(ludus), weights(ludus, "policies", "rival")
    assert policy.keys() == rival.keys()
    assert any((policy[name] != rival[name]).any() for name in policy)
    kept = sorted(p.name for p in (ludus.run("duel-1") / "policies/old/checkpoints").iterdir())
    assert kept == [f"past-00000{version}" for version in (1, 2, 3, 4)], "two, and spare ones"


@pytest.mark.slow
def test_a_damaged_checkpoint_of_another_policy(ludus: Ludus) -> None:
    sections = {"checkpoint": {"every": 1, "keep_last": 3, "keep_best": 0}}
    stop = "strike('ludus.backends.several:SeveralPolicies.save', 3, 'kill after')"
    assert ludus("train", recipe(ludus, **sections), setup=stop).code == -signal.SIGKILL
    rival = ludus.run("duel-1") / "policies" / "rival" / "checkpoints" / "rl-000003"
    weights_file = rival / "model.safetensors"
    weights_file.write_bytes(weights_file.read_bytes()[:-1] + b"x")
    refused = ludus("train", "--resume", "duel-1")
    refused.refused(refused.code, "rival/checkpoints/rl-000003", "--skip-damaged")
    ludus("train", "--resume", "duel-1", "--skip-damaged").ok()
    assert ludus.status("duel-1") == "completed"


def test_another_policy_is_exported_like_a_run(undisturbed: Ludus, ludus: Ludus) -> None:
    runs = undisturbed.run("duel-1") / "policies"
    ludus("checkpoint", "export", "rival", "rival", "--runs-dir", runs).ok()
    exported = load_file(ludus.cwd / "rival" / "model.safetensors")
    trained = weights(undisturbed, "policies", "rival")
    assert all((exported[name] == trained[name]).all() for name in exported)


KILLS = {
    "a step of one policy": ("ludus.train.learner:Learner.train_step", 3),
    "one of two checkpoints": ("ludus.backends.local:LocalBackend.save", 2),
    "letting go of a checkpoint": ("ludus.train.checkpoint.store:CheckpointStore.keep_only", 1),
    "a version that joins": ("ludus.pipeline.parts.policies:League._save", 1),
}


@pytest.mark.slow
def test_killed_and_resumed_it_is_the_same_run(ludus: Ludus, undisturbed: Ludus) -> None:
    argv = ["train", recipe(ludus)]
    for place, (target, nth) in KILLS.items():
        died = ludus(*argv, setup=f"strike({target!r}, {nth}, 'kill')")
        assert died.code == -signal.SIGKILL, f"{place}: not reached\n{died.all}"
        argv = ["train", "--resume", "duel-1"]
    ludus(*argv).ok()
    mine, theirs = ludus.state("duel-1"), undisturbed.state("duel-1")
    for part in theirs:
        assert mine[part] == theirs[part], f"{part} differ"
    for below in ((), ("policies", "rival")):
        one, two = weights(ludus, *below), weights(undisturbed, *below)
        assert all((one[name] == two[name]).all() for name in one)


def test_demonstrations_train_all_policies(ludus: Ludus) -> None:
    """And the league begins with RL: nobody plays against a version from the middle of SFT."""
    talks = [
        [{"role": "user", "content": f"word {n}"}, {"role": "assistant", "content": "more"}]
        for n in range(4)
    ]
    lines = [json.dumps({"messages": talk}) for talk in talks]
    (ludus.cwd / "sft.jsonl").write_text("\n".join(lines))
    sft = {"data": "sft.jsonl", "steps": 2, "episodes_per_step": 2, "optimizer": {"lr": 1.0e-2}}
    ludus("train", recipe(ludus, sft=sft), "rl.steps=1").ok()
    steps = [line for line in ludus.metrics("duel-1") if line["stage"] == "sft"]
    assert all(line["policy/rival/loss"] > 0 for line in steps)
    kept = sorted(p.name for p in (ludus.run("duel-1") / "policies/old/checkpoints").iterdir())
    assert kept == ["past-000002", "past-000003"]


@pytest.mark.slow
def test_a_league_that_is_drawn_late_is_the_same_after_a_resume(
    ludus: Ludus, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory
) -> None:
    sections: dict[str, Any] = {
        "roles": {"red": "policy", "blue": "policy", "grey": {"policy": 0.9, "old": 0.1}},
        "policies": {"old": {"past": {"every": 1, "most": 9}}},
        "seed": 3,
    }
    whole = Ludus(zygote, tmp_path_factory.mktemp("whole"))
    whole("train", recipe(whole, **sections)).ok()
    strike = "strike('ludus.backends.several:SeveralPolicies.save', 2, 'kill after')"
    assert ludus("train", recipe(ludus, **sections), setup=strike).code == -signal.SIGKILL
    ludus("train", "--resume", "duel-1").ok()
    assert ludus.state("duel-1") == whole.state("duel-1")


@pytest.mark.slow
def test_fixed_weights_and_other_opponents_in_evaluation(ludus: Ludus) -> None:
    ludus("train", recipe(ludus), "rl.steps=1").ok()
    changed = recipe(
        ludus,
        roles={"red": "policy", "blue": "policy", "grey": "first"},
        policies={"first": {"weights": "start"}, "won": {"weights": "duel-1"}},
        evaluate={"roles": {"red": "policy", "blue": "won", "grey": "won"}},
    )
    ludus("train", changed).ok()
    with ludus.store() as store:
        last = store.groups("duel-2", "evaluate/after", 0)
        groups = store.groups("duel-2", "rl", 0)
    assert {t.role: t.policy for g in last for t in g.trajectories} == {
        "red": "policy", "blue": "won", "grey": "won"
    }  # fmt: skip
    assert trained(groups) == {"policy"}
    ludus("evaluate", "duel-2").ok()
    ludus("debug", changed).ok()
    refused = ludus("train", changed, "model.tokenizer=bpe")
    refused.refused(2, "policies.won.weights: it has another tokenizer")


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"roles": {"red": "policy", "blue": "rivul"}}, "`roles.blue`: no policy 'rivul'"),
        ({"roles": {"red": "rival", "grey": "old"}}, "none is played by `policy`"),
        ({"roles": {"red": "policy", "blue": "rival"}}, "`policies.old`: no role has this policy"),
        ({"roles": {}}, "`policies` needs `roles`"),
        ({"agent": None, "judge": "answer"}, "need an `agent`"),
        ({"policies": {"rival": {}, "old": {"past": {}}}}, "set exactly one of `model`"),
        (
            {"policies": {"rival": {"model": "same", "weights": "start"}, "old": {"past": {}}}},
            "not model and weights",
        ),
        (
            {"policies": {"rival": {"weights": "no-such-run"}, "old": {"past": {}}}},
            "policies.rival.weights: no-such-run is not a folder",
        ),
        (
            {"policies": {"rival": {"weights": "."}, "old": {"past": {}}}},
            "policies.rival.weights: . is neither a run",
        ),
        (
            {
                "policies": {
                    "rival": {
                        "model": {
                            "architecture": "qwen3",
                            "tokenizer": "bpe",
                            "context_length": 128,
                        }
                    },
                    "old": {"past": {}},
                }
            },
            "policies.rival.model.tokenizer: 'bpe' is another tokenizer than that of `model`",
        ),
        (
            {
                "policies": {
                    "rival": {
                        "endpoint": {"base_url": "http://h/v1", "model": "m", "api_key": "$ABSENT"}
                    },
                    "old": {"past": {}},
                }
            },
            "policies.rival.endpoint.api_key: $ABSENT is not set",
        ),
        ({"roles": {"red": {"policy": 1, "no": 2}}}, "`roles.red`: no policy 'no'"),
        ({"roles": {"red": {"policy": 0}, "blue": "rival"}}, "or names with weights above 0"),
        ({"roles": {"red": {"policy": "x"}}}, "not {'policy': 'x'}"),
        ({"roles": {"Red Wolf": "policy"}}, "'Red Wolf' is no name"),
        ({"evaluate": {"roles": {"red": "policy"}}}, "has to name the roles"),
    ],
)
def test_wrong_roles(ludus: Ludus, sections: dict[str, Any], told: str) -> None:
    name = recipe(ludus, **sections)
    assert yaml.safe_load((ludus.cwd / name).read_text())
    done = ludus("train", name)
    assert done.code in (1, 2), done.all
    done.refused(done.code, told)
    assert not ludus.run("duel-1").exists()
