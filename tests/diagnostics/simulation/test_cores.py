"""Processes that share cores: times in closed form."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from ludus.diagnostics.simulation.clock import Clock
from ludus.diagnostics.simulation.cores import Cores, Process
from ludus.diagnostics.simulation.costs import Costs
from ludus.diagnostics.simulation.engine import Simulation
from ludus.diagnostics.simulation.parts import Setup
from ludus.diagnostics.simulation.replica import PassCost, Replica, Turn
from ludus.diagnostics.simulation.spec import Distribution
from ludus.diagnostics.simulation.workload import Workload


def machine(cores: float, processes: int) -> tuple[Clock, list[Process]]:
    clock, shared = Clock(), Cores(cores)
    made = [Process(clock, shared.share) for _ in range(processes)]
    shared.of(made)
    return clock, made


@pytest.mark.parametrize("cores", [1, 2, 3])
@pytest.mark.parametrize("number", [1, 2, 3, 5])
def test_k_processes_on_c_cores_take_k_over_c_times_as_long(cores: int, number: int) -> None:
    clock, processes = machine(cores, number)
    ended: list[float] = []
    for process in processes:
        process.run(2.0, lambda _: ended.append(clock.now))
    clock.run()
    assert ended == pytest.approx([2.0 * max(number / cores, 1.0)] * number)


def test_a_shorter_job_leaves_its_share_to_the_others() -> None:
    """1 s and 3 s on one core: both at half speed until 2 s, then one alone until 4 s."""
    clock, (short, long) = machine(1, 2)
    ended: dict[str, float] = {}
    for name, process, seconds in (("short", short, 1.0), ("long", long, 3.0)):
        process.run(seconds, lambda name: ended.update({name: clock.now}), name)
    clock.run()
    assert ended == pytest.approx({"short": 2.0, "long": 4.0})
    assert (short.busy_s, long.busy_s) == pytest.approx((2.0, 4.0))


def test_a_process_does_its_jobs_in_order() -> None:
    clock, (process,) = machine(1, 1)
    ended: list[tuple[int, float]] = []
    for number, seconds in enumerate((2.0, 0.0, 1.0)):
        process.run(seconds, lambda number: ended.append((number, clock.now)), number)
    assert process.waiting == 3
    clock.run()
    assert ended == [(0, 2.0), (1, 2.0), (2, 3.0)]
    assert not process.computing


def test_work_is_conserved() -> None:
    """Two cores are never idle while two processes have work: the last ends as by its work."""
    rng = random.Random(0)
    clock, processes = machine(2, 4)
    ended: list[float] = []
    jobs = [[rng.uniform(0.1, 2.0) for _ in range(20)] for _ in processes]
    for process, own in zip(processes, jobs, strict=True):
        for seconds in own:
            process.run(seconds, lambda _: ended.append(clock.now))
    clock.run()
    work = sorted(map(sum, jobs))
    # All four at half speed, then three at 2/3, then two at full speed, then one.
    expected, done, left = 0.0, 0.0, 4
    for total in work:
        expected += (total - done) * max(left / 2, 1.0)
        done, left = total, left - 1
    assert max(ended) == pytest.approx(expected)


def test_a_part_of_a_core_is_slower() -> None:
    """Another program has half of the time of two cores: one process is as fast, two are not."""
    for number, seconds in ((1, 1.0), (2, 2.0)):
        clock, processes = machine(1.0, number)
        ended: list[float] = []
        for process in processes:
            process.run(1.0, lambda _, ended=ended, clock=clock: ended.append(clock.now))
        clock.run()
        assert max(ended) == pytest.approx(seconds)
    clock, (process,) = machine(0.5, 1)
    process.run(1.0, lambda _: None)
    clock.run()
    assert clock.now == pytest.approx(2.0)


def test_decoding_and_prefill_share_a_core_with_a_process() -> None:
    """10 passes of 0.1 s after a prefill of 1 s, beside work of 2 s: 4 s on one core in all."""
    clock, shared = Clock(), Cores(1)
    ended: list[float] = []
    replica = Replica(clock, PassCost(fixed_s=0.1), 0.01, on_busy=shared.share)
    process = Process(clock, shared.share)
    shared.of([replica, process])
    replica.enter()
    process.run(2.0, lambda _: ended.append(clock.now))
    replica.submit(Turn(10, 100, 0, lambda: ended.append(clock.now)))
    clock.run()
    assert ended == pytest.approx([4.0, 4.0])


WORK = Workload(
    prompt=20,
    turns=Distribution(constant=3),
    sampled=Distribution(constant=10),
    observed=5,
    step_s=0.01,
    latency=Distribution(constant=0.0),
)
COSTS = Costs(
    decoding=PassCost(fixed_s=0.01, row_s=0.001),
    prefill_token_s=1e-4,
    train_token_s=1e-4,
    turn_s=0.02,
    turn_env_s=0.015,
)


def simulated(**changes: Any) -> Simulation:
    given: dict[str, Any] = {
        "groups_per_step": 4, "group_size": 4, "concurrency": 64, "max_staleness": 0,
        "layout": "disaggregated", "samplers": 2, "workers": 2, "costs": COSTS, "workload": WORK,
        "steps": 2, "warmup": 1,
    }  # fmt: skip
    simulation = Simulation(Setup(**{**given, **changes}))
    simulation.run()
    return simulation


def test_a_run_on_few_cores_takes_at_least_its_work() -> None:
    """Six processes: on six cores or more, as fast as can be; on one, the sum of all work."""
    many, six, two, one = (simulated(cores=cores).counted[0].seconds for cores in (60, 6, 2, 1))
    assert many == six
    assert six < two < one
    turns = 16 * 3
    decoding = turns * 10 * 0.001  # and 0.01 a pass, of as many passes as it takes
    prefill = 1e-4 * (16 * 20 * COSTS.prompt_share + 16 * 2 * 5)
    training = 1e-4 * COSTS.computed_tokens(16 * 60, 16 * 20, 4)
    work = turns * (0.02 + 0.01) + decoding + prefill + training
    assert one >= work + 2 * 3 * 10 * 0.01 - 1e-9
    assert one == pytest.approx(work + 2 * 3 * 10 * 0.01, rel=0.25)
    assert two >= (one - training) / 2


def test_the_loop_is_one_process_and_the_workers_are_several() -> None:
    """48 turns of ludus's own 5 ms in one process; the environments' 25 ms in two."""
    costs = replace(COSTS, decoding=PassCost(fixed_s=1e-6), prefill_token_s=0.0)
    slow_loop = replace(costs, turn_s=0.115)
    step = simulated(costs=slow_loop, cores=60).counted[0]
    assert step.rollout_s >= 48 * 0.1
    assert step.rollout_s == pytest.approx(48 * 0.1, rel=0.1)
    slow_env = simulated(costs=replace(costs, turn_s=0.2, turn_env_s=0.2), cores=60).counted[0]
    assert slow_env.rollout_s == pytest.approx(48 * 0.21 / 2, rel=0.1)


def test_the_latencies_of_a_run_may_be_given() -> None:
    """A group's n-th episode has its own; all turns of one wait 10 s each."""
    asked: list[tuple[int, int]] = []

    def answers(group: int, attempt: int) -> Any:
        asked.append((group, attempt))
        while True:
            yield 10.0 if (group, attempt) == (5, 2) else 0.0

    simulation = simulated(workload=replace(WORK, answers=answers), warmup=0)
    first, second = simulation.steps
    assert first.rollout_s < 10
    assert 30 < second.rollout_s < 40
    assert sorted(asked) == [(g, a) for g in range(8) for a in range(4)]
