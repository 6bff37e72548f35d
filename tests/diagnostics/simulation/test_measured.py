"""Costs and episodes of a finished run: those of a made store come back, and faults are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ludus.config.load import load_config
from ludus.config.schema import RunConfig
from ludus.core.errors import ConfigError, StoreError
from ludus.core.types import Group, Segment, Status, Task, Trajectory
from ludus.diagnostics.simulation.engine import Simulation
from ludus.diagnostics.simulation.plan import Inputs, inputs_of, setup_of
from ludus.diagnostics.simulation.spec import ClusterSpec
from ludus.store import RunStore

RECIPE = str(Path(__file__).parents[3] / "recipes" / "babyai-tiny.yaml")
SMALL = ["rl.groups_per_step=2", "rl.group_size=4"]
PASS_S, ROW_S, PREFILL_S, TURN_S, TRAIN_S = 1e-3, 1e-4, 1e-5, 5e-4, 2e-5


def trajectory(number: int, latency: float) -> Trajectory:
    """Prompt of 10, two turns of 5 with 3 tokens between: 23 tokens."""
    segments = [Segment(-1, [1] * 10, None, None)]
    for _ in range(2):
        segments.append(Segment(len(segments) - 1, [4 + number] * 5, [-0.5] * 5, None))
        segments.append(Segment(len(segments) - 1, [3] * 3, None, None))
    found = Trajectory(f"t{number}", "g", str(number))
    found.segments, found.status, found.reward = segments[:-1], Status.COMPLETED, 1.0
    found.metrics = {"env_seconds": 2 * (latency + TURN_S)}
    return found


def metrics(**changes: float) -> dict[str, float]:
    """Of 8 episodes: 40 passes, 80 sampled tokens, 2 prompts of 10 and 8 x 3 observed tokens."""
    sample_s = 40 * PASS_S + 80 * ROW_S + 44 * PREFILL_S
    rollout_s = sample_s + 16 * TURN_S
    computed = 2 * 10 + 8 * 13
    known = {
        "rollout/episodes": 8.0, "rollout/turns": 2.0, "rollout/tokens": 184.0,
        "rollout/sampled_tokens": 80.0, "rollout/unique_tokens": 124.0,
        "train/tokens": 184.0, "train/unique_tokens": float(computed), "train/optimizer_steps": 1.0,
        "time/pass_s": PASS_S, "time/pass_row_s": ROW_S, "time/prefill_token_s": PREFILL_S,
        "time/passes": 40.0, "time/sample_s": sample_s, "time/rollout_s": rollout_s,
        "time/train_s": computed * TRAIN_S, "time/checkpoint_s": 5.0, "time/evaluate_s": 7.0,
        "time/wall_s": rollout_s + computed * TRAIN_S + 12.0,
        "time/cpu_s": rollout_s + computed * TRAIN_S,
    }  # fmt: skip
    return {**known, **changes}


def record(folder: Path, *, steps: int = 3, overrides: Any = (), **changes: Any) -> None:
    config = load_config(RECIPE, [*SMALL, *overrides])
    latency = changes.pop("latency", 0.0)
    drop = changes.pop("drop", "")
    with RunStore.open(None, folder) as store:
        store.create_run("base-1", "base", config.model_dump(mode="json"), {})
        for step in range(steps):
            groups = [
                Group(f"g{n}", Task(id=str(n)), [trajectory(4 * n + m, latency) for m in range(4)])
                for n in range(2)
            ]
            known = {k: v for k, v in metrics(**changes).items() if k != drop}
            store.record_step("base-1", "rl", step, groups, known)


def planned(folder: Path, *changes: str, **keys: Any) -> Inputs:
    spec = ClusterSpec.model_validate(
        {
            "nodes": {"gpus": 0, "kind": "h100", "cpu_cores": 1},
            "layout": "local",
            "costs": {"measured": "base-1"},
            **keys,
        }
    )
    return inputs_of(load_config(RECIPE, [*SMALL, *changes]), spec, None, 1.0, str(folder))


def test_the_costs_come_back(tmp_path: Path) -> None:
    record(tmp_path, latency=0.25)
    costs = (found := planned(tmp_path)).costs
    assert costs.decoding.seconds(1, 100) == pytest.approx(PASS_S + ROW_S)
    assert costs.prefill_token_s == pytest.approx(PREFILL_S)
    assert costs.turn_s == pytest.approx(TURN_S)
    assert costs.train_token_s == pytest.approx(TRAIN_S)
    assert costs.parting == pytest.approx(1.0)
    assert costs.observed_share == pytest.approx(1.0)
    assert costs.sources["decoding"].startswith("measured: base-1, 2 steps")
    sizes = found.workload.episodes[0]
    assert (sizes.prompt, sizes.turns, sizes.sampled, sizes.observed) == (10, 2, 5, 3)
    assert sizes.latency == pytest.approx(0.25)
    assert sizes.length == 23


def test_the_run_predicts_its_own_step(tmp_path: Path) -> None:
    record(tmp_path)
    found = planned(tmp_path)
    spec = ClusterSpec(
        nodes=ClusterSpec().nodes.model_copy(update={"gpus": 0, "cpu_cores": 1}), layout="local"
    )
    simulation = Simulation(setup_of(found, spec))
    step = simulation.run()[-1]
    assert step.train_s == pytest.approx(124 * TRAIN_S)
    # Ten passes of eight sequences, and what the run's own metrics say of the rest.
    expected = 10 * (PASS_S + 8 * ROW_S) + 44 * PREFILL_S + 16 * TURN_S
    assert step.rollout_s == pytest.approx(expected, rel=0.02)


def test_larger_groups_share_more(tmp_path: Path) -> None:
    record(tmp_path)
    costs = planned(tmp_path, "rl.group_size=8").costs
    assert costs.prompt_share == 1 / 8
    assert costs.computed_tokens(8 * 23, 8 * 10, 8) == pytest.approx(10 + 8 * 13)


def test_older_weights_cost_a_forward_pass_more(tmp_path: Path) -> None:
    record(tmp_path)
    capped = planned(tmp_path, "rl.algorithm.args.importance_cap=2.0").costs
    assert capped.train_token_s == pytest.approx(4 / 3 * TRAIN_S)
    assert "by its forward passes" in capped.sources["training"]


def test_groups_without_a_signal_do_not_train(tmp_path: Path) -> None:
    """Half of the tokens trained; the forward pass of the importance weights is of all."""
    half = {"train/tokens": 92.0, "train/unique_tokens": 62.0}
    record(tmp_path, **half)
    capped = planned(tmp_path, "rl.algorithm.args.importance_cap=2.0").costs
    plain = planned(tmp_path).costs
    assert plain.train_seconds(184, 80, 4) == pytest.approx(124 * TRAIN_S)
    assert capped.train_token_s == pytest.approx(plain.train_token_s * (1.5 + 1) / 1.5)


@pytest.mark.parametrize(
    ("made", "changes", "keys", "fault"),
    [
        ({"steps": 1}, [], {}, "base-1 has 1 steps of RL; 2 are needed"),
        ({"drop": "time/pass_s"}, [], {}, "has no metric time/pass_s"),
        (
            {
                "overrides": [
                    "rl.max_staleness=1",
                    "rollout.deterministic=false",
                    "rl.algorithm.args.importance_cap=2.0",
                ]
            },
            [],
            {},
            "rl.max_staleness 1: sampling and training overlap",
        ),
        ({}, ["model.context_length=256"], {}, "trained another model than the recipe's"),
    ],
)
def test_runs_that_tell_no_costs(
    tmp_path: Path, made: dict[str, Any], changes: list[str], keys: Any, fault: str
) -> None:
    record(tmp_path, **made)
    with pytest.raises(ConfigError, match=fault):
        planned(tmp_path, *changes, **keys)


def test_an_unknown_run_is_told_with_the_nearest_name(tmp_path: Path) -> None:
    record(tmp_path)
    with pytest.raises(StoreError, match="base-1"):
        planned(tmp_path, costs={"measured": "bsae-1"})


def test_the_made_configuration_is_a_recipe(tmp_path: Path) -> None:
    record(tmp_path)
    with RunStore.open(None, tmp_path, read_only=True) as store:
        config = RunConfig.model_validate(store.run("base-1").config)
    assert config.rl is not None
    assert config.rl.group_size == 4


@pytest.mark.parametrize(
    ("changes", "lockstep"), [([], True), (["rollout.deterministic=false"], False)]
)
def test_samplers_of_a_cluster_wait_for_their_episodes_where_a_run_does(
    tmp_path: Path, changes: list[str], lockstep: bool
) -> None:
    """Each sampler of the back end ray is the in-process one, with the recipe's setting."""
    record(tmp_path)
    nodes = {"count": 3, "gpus": 0, "cpu_cores": 2}
    spec = {"nodes": nodes, "costs": {"measured": "base-1"}, "learner_gpus": 1}
    found = planned(tmp_path, *changes, layout="disaggregated", learner_gpus=1, nodes=nodes)
    setup = setup_of(found, ClusterSpec.model_validate(spec))
    assert setup.samplers == 2
    assert setup.lockstep is lockstep


def test_the_cost_of_context_comes_back(tmp_path: Path) -> None:
    """A sampled token attends to half of its episode after the prompt, in the mean: 16.5 tokens."""
    context_s = 1e-6
    sample_s = metrics()["time/sample_s"] + 80 * 16.5 * context_s
    rollout_s = sample_s + 16 * TURN_S
    record(
        tmp_path,
        **{
            "time/pass_context_s": context_s,
            "time/sample_s": sample_s,
            "time/rollout_s": rollout_s,
            "time/cpu_s": rollout_s + metrics()["time/train_s"],
        },
    )
    decoding = planned(tmp_path).costs.decoding
    assert decoding.seconds(4, 1000) == pytest.approx(PASS_S + 4 * ROW_S + 1000 * context_s)


def test_a_turn_is_the_loops_and_its_environments(tmp_path: Path) -> None:
    record(tmp_path, latency=-TURN_S / 4)  # answers take 3/4 of a turn's time, none of it latency
    costs = planned(tmp_path).costs
    assert (costs.turn_s, costs.turn_env_s) == pytest.approx((TURN_S, TURN_S * 3 / 4))
    given = planned(tmp_path, environment={"cpu_s": 1.0})
    assert given.workload.step_s == 1.0
    assert (given.costs.turn_s, given.costs.turn_env_s) == pytest.approx((TURN_S / 4, 0.0))
    own = planned(tmp_path, costs={"measured": "base-1", "turn_s": 2.0}).costs
    assert (own.turn_s, own.turn_env_s) == (2.0, 0.0)


def test_a_group_on_two_samplers_shares_less(tmp_path: Path) -> None:
    record(tmp_path)
    nodes = {"count": 3, "gpus": 0, "cpu_cores": 2}
    apart = planned(tmp_path, layout="disaggregated", learner_gpus=1, nodes=nodes).costs
    assert planned(tmp_path).costs.prompt_share == 1 / 4
    assert apart.prompt_share == 1 / 2
