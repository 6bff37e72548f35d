"""From recipe and SPEC to an outcome: costs by hand, scale, bottleneck, advice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ludus.config.load import load_config
from ludus.core.errors import ConfigError
from ludus.diagnostics.episodes import Usage
from ludus.diagnostics.hardware import HARDWARE
from ludus.diagnostics.simulation.advice import advice_lines, search
from ludus.diagnostics.simulation.bottleneck import find_bottleneck
from ludus.diagnostics.simulation.lines import lines
from ludus.diagnostics.simulation.plan import Inputs, inputs_of, needs_expert, simulate
from ludus.diagnostics.simulation.spec import ClusterSpec

RECIPE = str(Path(__file__).parents[3] / "recipes" / "babyai-tiny.yaml")
USAGE = Usage(prompt=60, observed=20, sampled=4, turns=6, reset_s=1e-3, step_s=1e-3)
H100 = {"count": 2, "gpus": 8, "kind": "h100", "cpu_cores": 64}


def inputs(
    spec: ClusterSpec, *changes: str, usage: Usage | None = USAGE, fill: float | None = None
) -> Inputs:
    return inputs_of(load_config(RECIPE, list(changes)), spec, usage, fill, "runs")


def cluster(**keys: Any) -> ClusterSpec:
    return ClusterSpec.model_validate({"nodes": H100, **keys})


def test_costs_follow_the_data_sheet() -> None:
    spec = cluster(learner_gpus=4, costs={"train_mfu": 0.5, "decode_efficiency": 0.25})
    costs, on = inputs(spec).costs, HARDWARE["h100"]
    half = inputs(cluster(learner_gpus=4, costs={"train_mfu": 0.25})).costs
    assert half.train_token_s == pytest.approx(2 * costs.train_token_s)
    more = inputs(cluster(learner_gpus=8, costs={"train_mfu": 0.5})).costs
    assert more.train_token_s == pytest.approx(costs.train_token_s / 2)
    assert 0 < costs.comm_batch_s < more.comm_batch_s  # 3/4 and 7/8 of the weights, three times
    assert more.comm_batch_s / costs.comm_batch_s == pytest.approx((7 / 8) / (3 / 4))
    assert costs.decoding.read_s > 4 * 0.8e6 / on.bandwidth


def test_learners_on_several_nodes_use_the_slower_network() -> None:
    network = {"node_gb_s": 10, "gpu_gb_s": 100}
    inside = inputs(cluster(learner_gpus=8, network=network)).costs
    across = inputs(cluster(learner_gpus=12, network=network)).costs
    assert across.comm_batch_s / inside.comm_batch_s == pytest.approx(10 * (11 / 12) / (7 / 8))


def test_given_costs_replace_the_assumed_ones() -> None:
    given = {"pass_s": 0.5, "train_token_s": 2e-5, "sync_s": 3.0, "turn_s": 0.0}
    found = inputs(cluster(costs=given))
    assert (found.costs.decoding.fixed_s, found.costs.train_token_s) == (0.5, 2e-5)
    assert found.costs.sync_s == 3.0
    assert found.costs.sources["publication"] == "given: costs.sync_s"
    assert found.costs.sources["prefill"].startswith("assumed")


def test_fill_scales_sizes_and_keeps_the_environments_seconds() -> None:
    own, filled = inputs(cluster()).workload, inputs(cluster(), fill=0.5).workload
    assert (filled.step_s, filled.reset_s) == (own.step_s, own.reset_s) == (1e-3, 1e-3)
    assert filled.prompt == inputs(cluster(), usage=None, fill=0.5).workload.prompt != own.prompt
    given = cluster(environment={"cpu_s": 0.25})
    assert inputs(given, fill=0.5).workload.step_s == 0.25
    assert needs_expert(cluster(), 0.5)
    assert needs_expert(given, None)
    assert not needs_expert(given, 0.5)
    assert not needs_expert(cluster(costs={"measured": "run"}), 0.5)


def test_older_weights_cost_another_forward_pass() -> None:
    ahead = ["rl.max_staleness=1", "rollout.deterministic=false"]
    algorithm = "rl.algorithm={name: grpo, args: {importance_cap: 2.0}}"
    plain, capped = inputs(cluster()).costs, inputs(cluster(), *ahead, algorithm).costs
    assert capped.train_token_s == pytest.approx(4 / 3 * plain.train_token_s)


def test_a_model_that_does_not_fit_is_refused() -> None:
    large = "model.architecture.args={hidden_size: 8192, num_layers: 80, intermediate_size: 28672}"
    with pytest.raises(ConfigError, match=r"the learner needs .* GB of a h100"):
        inputs(cluster(learner_gpus=2), large, usage=None)


def test_a_part_of_the_cluster_tells_the_whole() -> None:
    """Half of the size gives the rates of the whole."""
    keys = {
        "learner_gpus": 8,
        "environment": {"latency": {"constant": 0.05}},
        "costs": {"train_token_s": 2e-6},
    }
    whole, part = (
        cluster(**keys, simulate={"steps": 2, "scale": scale, "warmup": 1}) for scale in (1, 2)
    )
    changes = ["rl.groups_per_step=64", "rollout.concurrency=512"]
    one = simulate(inputs(whole, *changes), whole)
    other = simulate(inputs(part, *changes), part)
    assert other.scale == 2
    assert other.num_events < 0.6 * one.num_events
    assert other.episodes_per_s == pytest.approx(one.episodes_per_s, rel=0.1)
    assert other.tokens_per_s == pytest.approx(one.tokens_per_s, rel=0.1)


def test_large_simulations_shrink_by_themselves() -> None:
    spec = cluster(learner_gpus=8, simulate={"steps": 1, "warmup": 0})
    found = inputs(spec, "rl.groups_per_step=256", "rollout.concurrency=2048")
    outcome = simulate(found, spec, events=10_000)
    assert outcome.scale == 2  # at least 4 samplers stay
    assert outcome.num_events < 40_000


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({"costs": {"train_token_s": 1e-3}}, "training"),
        ({"costs": {"pass_s": 0.5}}, "decoding"),
        ({"costs": {"prefill_token_s": 1e-2}}, "prefill"),
        ({"costs": {"sync_s": 100.0}}, "publication of weights"),
        ({"environment": {"latency": {"constant": 20.0}}}, "environment's latency"),
        ({"environment": {"cpu_s": 2.0}, "environment_workers": 4}, "environment's cores"),
    ],
)
def test_the_slowest_part_is_the_bottleneck(keys: dict[str, Any], name: str) -> None:
    spec = cluster(**keys, simulate={"steps": 2, "warmup": 1})
    found = find_bottleneck(inputs(spec), spec)
    assert found.name == name
    assert found.gains[name] > 0.3


@pytest.mark.slow
def test_advice_gives_the_slower_pool_more_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("advice", "bottleneck"):
        monkeypatch.setattr(f"ludus.diagnostics.simulation.{module}.EVENTS", 2_000)
    simulated = {"steps": 1, "warmup": 1}
    training = cluster(costs={"train_mfu": 0.001, "train_step_s": 0.0}, simulate=simulated)
    decoding = cluster(costs={"pass_s": 0.2}, simulate=simulated)
    for spec, share in ((training, 0.5), (decoding, 0.26)):
        found = search(inputs(spec, "rl.groups_per_step=8", "rl.group_size=4"), spec)
        best = found.best[0].outcome.spec
        if best.layout == "disaggregated":
            busy = best.learners / best.num_gpus
            assert (busy >= share) if spec is training else (busy <= share)
        rates = [candidate.rate for candidate in found.best]
        assert rates[0] >= 0.97 * max(rates)
        text = "\n".join(advice_lines(found))
        assert "bottleneck: " in text
        assert "environment workers" in text


def test_advice_needs_a_choice() -> None:
    spec = ClusterSpec.model_validate(
        {"nodes": {"gpus": 0, "kind": "h100", "cpu_cores": 2}, "layout": "local"}
    )
    with pytest.raises(ConfigError, match="one placement only"):
        search(inputs(spec), spec)


def test_other_policies_are_not_simulated_and_a_line_says_so() -> None:
    changes = [
        "policies={rival: {model: same}}",
        "roles={player: policy, opponent: rival}",
        "rollout.deterministic=false",
    ]
    recipe = Path(RECIPE).with_name("tictactoe-tiny.yaml")
    found = inputs_of(load_config(str(recipe), changes), cluster(), USAGE, 1.0, "runs")
    assert "policies: rival not simulated: all samplers are the policy's" in found.notes


def test_lines_name_faults_and_cost() -> None:
    spec = cluster(
        faults={"node_mtbf_h": 10, "recovery_s": 600},
        price_per_gpu_hour=2.0,
        currency="EUR",
        simulate={"steps": 2, "warmup": 1},
    )
    found = inputs(spec)
    outcome = simulate(found, spec)
    text = "\n".join(lines(found, outcome, find_bottleneck(found, spec)))
    assert 0.5 < outcome.faults.ratio < 1
    assert "effective time" in text
    assert "EUR: 32.00 an hour" in text
    assert outcome.price_per_hour == 32
    assert replace(outcome, scale=2).episodes_per_s == 2 * outcome.episodes_per_s
