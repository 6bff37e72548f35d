"""The simulated run: synchronous steps, staleness, Little's law, conservation, seeds."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from ludus.core.errors import ConfigError
from ludus.diagnostics.simulation.costs import Costs
from ludus.diagnostics.simulation.engine import Simulation
from ludus.diagnostics.simulation.parts import Setup
from ludus.diagnostics.simulation.replica import PassCost
from ludus.diagnostics.simulation.spec import Distribution
from ludus.diagnostics.simulation.workload import Workload

COSTS = Costs(
    decoding=PassCost(fixed_s=0.01, row_s=0.001),
    prefill_token_s=1e-4,
    train_token_s=1e-4,
    train_step_s=0.5,
    sync_s=0.1,
    turn_s=0.0,
)
WORK = Workload(
    prompt=20,
    turns=Distribution(constant=3),
    sampled=Distribution(constant=10),
    observed=5,
    latency=Distribution(constant=0.0),
)


def setup(**changes: Any) -> Setup:
    given = {
        "groups_per_step": 4,
        "group_size": 4,
        "concurrency": 64,
        "max_staleness": 0,
        "layout": "disaggregated",
        "samplers": 2,
        "workers": 8,
        "costs": COSTS,
        "workload": WORK,
        "steps": 4,
        "warmup": 1,
    }
    return Setup(**{**given, **changes})  # type: ignore[arg-type]


def run(**changes: Any) -> Simulation:
    simulation = Simulation(setup(**changes))
    simulation.run()
    return simulation


def test_synchronous_step_is_the_longest_episode_then_training_then_publication() -> None:
    """One episode a sampler: each takes what its tokens take; the step waits for the longest."""
    lengths = Distribution(p50=20, p99=200)
    simulation = run(
        groups_per_step=3,
        group_size=1,
        samplers=3,
        steps=5,
        workload=replace(WORK, sampled=lengths, latency=Distribution(constant=0.25)),
        costs=replace(COSTS, shares_prefixes=False),
    )
    rng_again = Simulation(setup(workload=replace(WORK, sampled=lengths))).rng
    for step in simulation.steps:
        sizes = [replace(WORK, sampled=lengths).draw(rng_again) for _ in range(3)]
        expected = max(
            s.prompt * 1e-4 + (s.turns - 1) * s.observed * 1e-4
            + s.turns * (s.sampled * 0.011 + 0.25)
            for s in sizes
        )  # fmt: skip
        assert step.rollout_s == pytest.approx(expected)
        assert step.train_s == pytest.approx(0.5 + 1e-4 * sum(s.length for s in sizes))
        assert step.sync_s == pytest.approx(0.1)
        assert (step.staleness, step.cut, step.episodes) == (0, 0, 3)


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("layout", ["disaggregated", "colocated", "local"])
def test_episodes_are_conserved(staleness: int, layout: str) -> None:
    simulation = run(
        max_staleness=staleness,
        layout=layout,
        samplers=1 if layout == "local" else 2,
        cores=1 if layout == "local" else math.inf,
        workload=replace(WORK, latency=Distribution(p50=0.1, p99=5.0)),
    )
    total = simulation.counts[-1]
    assert total.started == total.finished + total.cut + simulation.num_open
    trained = sum(step.episodes for step in simulation.steps)
    cut = sum(step.cut for step in simulation.steps)
    created = 16 * (5 + staleness)  # a step starts as many groups as it takes
    assert trained + cut + simulation.num_pending >= created
    assert (trained + cut + simulation.num_pending) % 4 == 0
    if not staleness:
        assert trained == total.finished == total.started == 16 * 5
    tokens = sum(replica.sampled for replica in simulation.replicas)
    assert tokens >= 30 * trained - 1e-6


def test_littles_law() -> None:
    """Mean number of open episodes = rate of starts times their mean time, in a closed interval."""
    simulation = run(workload=replace(WORK, latency=Distribution(p50=0.2, p99=2.0)), steps=10)
    totals = simulation.totals()
    assert totals.started == totals.finished
    assert totals.open_s == pytest.approx(totals.episode_s)
    mean_open, rate = totals.open_s / totals.time, totals.finished / totals.time
    assert mean_open == pytest.approx(rate * totals.episode_s / totals.finished)


def test_concurrency_limits_open_episodes() -> None:
    few = run(concurrency=4, samplers=1).counted
    many = run(concurrency=64, samplers=1).counted
    waves = 16 / 4
    alone = 3 * 10 * (0.01 + 4 * 0.001)
    assert few[0].rollout_s == pytest.approx(waves * alone, rel=0.1)
    assert many[0].rollout_s < few[0].rollout_s


@pytest.mark.parametrize("bound", [1, 2, 4])
def test_staleness_stays_within_its_bound(bound: int) -> None:
    simulation = run(
        max_staleness=bound,
        steps=12,
        warmup=bound + 1,
        workload=replace(WORK, latency=Distribution(p50=0.5, p99=20.0)),
    )
    stale = [step.staleness for step in simulation.steps]
    assert max(stale) <= bound + 1e-9
    assert stale[0] == 0
    assert sum(stale) > 0


def test_asynchronous_steps_are_bound_by_the_slower_pool() -> None:
    """Playing ahead hides the shorter of sampling and training."""
    slow_learner = replace(COSTS, train_step_s=10.0)
    simulation = run(max_staleness=2, steps=6, warmup=3, costs=slow_learner)
    for step in simulation.counted:
        assert step.rollout_s == pytest.approx(0, abs=1e-6)
    synchronous = run(costs=slow_learner).counted
    assert simulation.counted[0].seconds < synchronous[0].seconds


def test_colocated_sampling_stops_while_training() -> None:
    costs = replace(COSTS, train_step_s=10.0)
    apart = run(max_staleness=1, steps=6, costs=costs)
    same = run(max_staleness=1, steps=6, costs=costs, layout="colocated")
    assert same.counted[-1].rollout_s > apart.counted[-1].rollout_s == pytest.approx(0, abs=1e-6)


def test_one_core_is_shared_by_learner_and_sampler() -> None:
    """On one core nothing is won by overlap; on two, the shorter part is hidden."""
    changes = {"max_staleness": 2, "layout": "local", "samplers": 1, "steps": 8, "warmup": 3}
    one = run(**changes, cores=1).totals().time / 8
    two = run(**changes, cores=2).totals().time / 8
    alone = run(layout="local", samplers=1, steps=8).totals().time / 8
    assert one == pytest.approx(alone, rel=0.1)
    assert two < 0.8 * alone


def test_environments_wait_for_a_core() -> None:
    """16 episodes of 3 turns and a reset, 1 s of a core each, on 2 cores."""
    work = replace(WORK, step_s=1.0, reset_s=1.0)
    simulation = run(workers=2, workload=work, steps=1, warmup=0)
    step = simulation.steps[0]
    assert step.rollout_s >= 16 * 4 / 2
    assert step.rollout_s == pytest.approx(16 * 4 / 2, rel=0.1)
    assert simulation.totals().worker_s == pytest.approx(16 * 4)


def test_late_answers_begin_the_episode_again() -> None:
    """Three attempts of 2 s each, then the episode is given up: it trains no step."""
    work = replace(WORK, latency=Distribution(constant=10.0))
    simulation = run(workload=work, deadline_s=2.0, max_retries=2, steps=1, warmup=0)
    turn = 20 * 1e-4 + 10 * (0.01 + 8 * 0.001)
    assert simulation.steps[0].rollout_s == pytest.approx(3 * 2 + 3 * turn, rel=0.1)
    assert simulation.steps[0].episodes == 0
    assert simulation.counts[-1].cut == 16


def test_the_same_seed_gives_the_same_run() -> None:
    work = replace(WORK, latency=Distribution(p50=0.1, p99=5.0))
    first, second = (run(workload=work, max_staleness=1, seed=3) for _ in range(2))
    assert first.steps == second.steps
    assert first.clock.num_events == second.clock.num_events
    assert run(workload=work, max_staleness=1, seed=4).steps != first.steps


def test_events_do_not_grow_with_tokens() -> None:
    short = run().clock.num_events
    long = run(workload=replace(WORK, sampled=Distribution(constant=10_000))).clock.num_events
    assert long <= short * 1.1


def test_too_many_events_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"simulate\.max_events = 50"):
        run(max_events=50)


def test_training_computes_shared_prefixes_once() -> None:
    costs = replace(COSTS, parting=1.0)
    assert costs.computed_tokens(4 * 100, 4 * 40, 4) == pytest.approx(40 + 4 * 60)
    alike = replace(COSTS, parting=0.0)
    assert alike.computed_tokens(4 * 100, 4 * 40, 4) == pytest.approx(100)
    plain = replace(COSTS, shares_prefixes=False)
    assert plain.computed_tokens(400, 160, 4) == 400
    bound = replace(COSTS, comm_batch_s=2.0, batch_tokens=100.0, shares_prefixes=False)
    assert bound.train_seconds(400, 160, 4) == pytest.approx(4 * 2.0 + 0.5)
    assert math.isinf(COSTS.batch_tokens)


@pytest.mark.slow
def test_a_thousand_gpus_with_a_hundred_thousand_episodes_stay_within_their_events() -> None:
    """Whole size, no event a token: at most 4 events a turn."""
    work = replace(WORK, turns=Distribution(constant=5), latency=Distribution(p50=0.2, p99=10.0))
    simulation = run(
        groups_per_step=6_250,
        group_size=16,
        concurrency=100_000,
        samplers=500,
        workers=8_000,
        workload=work,
        steps=1,
        warmup=0,
        max_events=4 * 5 * 100_000,
    )
    assert simulation.totals().finished == 100_000
