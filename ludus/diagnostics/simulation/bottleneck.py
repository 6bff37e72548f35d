"""The bottleneck of a simulated run: the part whose acceleration raises the throughput most."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from ludus.diagnostics.simulation.engine import Simulation
from ludus.diagnostics.simulation.parts import Setup
from ludus.diagnostics.simulation.plan import Inputs, scale_for, setup_of
from ludus.diagnostics.simulation.replica import PassCost
from ludus.diagnostics.simulation.spec import ClusterSpec
from ludus.diagnostics.simulation.workload import Workload

EVENTS = 60_000
"""Of one of the simulations."""

GAIN = 0.03
"""A smaller gain in throughput is none: the simulated steps differ by chance."""


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """Gains: part to the relative gain in episodes per second if it took half the time."""

    gains: Mapping[str, float]

    @property
    def name(self) -> str:
        """The part with the largest gain; "none alone" where no part by itself has one."""
        best = max(self.gains, key=lambda part: self.gains[part])
        return best if self.gains[best] >= GAIN else "none alone"


def find_bottleneck(inputs: Inputs, spec: ClusterSpec) -> Bottleneck:
    """Simulate with each part in half the time, at a reduced size; the same random numbers."""
    setup = setup_of(inputs, spec, scale=scale_for(inputs, spec, EVENTS))
    base = max(_rate(setup), 1e-300)
    return Bottleneck({part: _rate(half) / base - 1 for part, half in _halves(setup).items()})


def _rate(setup: Setup) -> float:
    simulation = Simulation(setup)
    simulation.run()
    steps = simulation.counted
    return sum(s.episodes for s in steps) / max(sum(s.seconds for s in steps), 1e-300)


def _halves(setup: Setup) -> dict[str, Setup]:
    costs, work = setup.costs, setup.workload
    decoding = PassCost(
        **{f.name: getattr(costs.decoding, f.name) / 2 for f in fields(costs.decoding)}
    )
    learner = replace(
        costs,
        train_token_s=costs.train_token_s / 2,
        train_step_s=costs.train_step_s / 2,
        comm_batch_s=costs.comm_batch_s / 2,
    )
    return {
        "decoding": replace(setup, costs=replace(costs, decoding=decoding)),
        "prefill": replace(setup, costs=replace(costs, prefill_token_s=costs.prefill_token_s / 2)),
        "training": replace(setup, costs=learner),
        "publication of weights": replace(setup, costs=replace(costs, sync_s=costs.sync_s / 2)),
        "environment's cores": replace(
            setup,
            costs=replace(costs, turn_s=costs.turn_s / 2, turn_env_s=costs.turn_env_s / 2),
            workload=replace(work, step_s=work.step_s / 2, reset_s=work.reset_s / 2),
        ),
        "environment's latency": replace(setup, workload=_faster(work)),
    }


def _faster(work: Workload) -> Workload:
    """The same episodes with half the latency."""
    latency = work.latency
    if latency is not None:
        halved = {
            name: value / 2
            for name in ("constant", "p50", "p99")
            if (value := getattr(latency, name)) is not None
        }
        latency = latency.model_copy(update=halved)
    episodes = [replace(episode, latency=episode.latency / 2) for episode in work.episodes]
    return replace(work, latency=latency, episodes=episodes)
