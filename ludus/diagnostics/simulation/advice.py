"""Placement advice: learner and sampler GPUs, colocated or not, staleness, environment workers.

Each candidate is simulated at a reduced size. Candidates rank by episodes per second times the
effective time; of two that differ by less than MARGIN, the one with less staleness is better: it
trains on newer episodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ludus.config.schema import RunConfig
from ludus.core.errors import ConfigError
from ludus.diagnostics.simulation.bottleneck import Bottleneck, find_bottleneck
from ludus.diagnostics.simulation.plan import Inputs, Outcome, placed_elsewhere, simulate
from ludus.diagnostics.simulation.spec import ClusterSpec

EVENTS = 30_000
"""Of a candidate's simulation; of a synchronous one, which ends with the longest of all its
episodes, SYNCHRONOUS times as many."""

SYNCHRONOUS = 4

LEARNER_SHARES = (1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4)
STALENESS = (0, 1, 2, 4)

MARGIN = 0.03
"""Candidates whose rates differ by less are alike."""

WORKER_USE = 0.7
"""Use of the environment workers above which episodes wait for them noticeably."""

SHOWN = 4


@dataclass(frozen=True, slots=True)
class Candidate:
    """A placement. `workers`: cores that suffice for its environments."""

    outcome: Outcome
    staleness: int
    workers: int
    bottleneck: Bottleneck | None = None

    @property
    def rate(self) -> float:
        """Episodes per second, faults included."""
        return self.outcome.episodes_per_s * self.outcome.faults.ratio


@dataclass(frozen=True, slots=True)
class Advice:
    """The best candidates, best first; the number simulated; why others are impossible."""

    best: Sequence[Candidate]
    number: int
    impossible: Sequence[str]
    notes: Sequence[str]


def search(inputs: Inputs, spec: ClusterSpec) -> Advice:
    """Returns the best placements on the hardware of `spec`. Errors: ConfigError if none fits."""
    if spec.layout == "local":
        raise ConfigError("--advice: `layout: local` has one placement only: set another layout")
    found: list[Candidate] = []
    impossible: list[str] = []
    for placed in _placements(spec):
        for staleness in STALENESS:
            try:
                there = placed_elsewhere(inputs, _with_staleness(inputs.config, staleness), placed)
            except ConfigError as error:
                impossible.append(str(error))
                break
            outcome = simulate(there, placed, EVENTS if staleness else SYNCHRONOUS * EVENTS)
            found.append(Candidate(outcome, staleness, _workers(outcome)))
    if not found:
        raise ConfigError(f"--advice: no placement is possible: {impossible[0]}")
    best = [
        Candidate(
            c.outcome, c.staleness, c.workers, find_bottleneck(c.outcome.inputs, c.outcome.spec)
        )
        for c in _ranked(found)[:SHOWN]
    ]
    return Advice(best, len(found), impossible, _notes(inputs, best[0]))


def _explained(candidate: Candidate) -> Candidate:
    outcome = candidate.outcome
    return replace(candidate, bottleneck=find_bottleneck(outcome.inputs, outcome.spec))


def _placements(spec: ClusterSpec) -> Iterator[ClusterSpec]:
    """Yields the specs of the other placements."""
    total, width = spec.num_gpus, spec.gpus_per_sampler
    simulated = spec.simulate.model_copy(update={"scale": None, "steps": 4, "warmup": None})
    common = {"environment_workers": spec.environment_workers, "simulate": simulated}
    yield spec.model_copy(update={"layout": "colocated", "learner_gpus": None, **common})
    learners = {max(round(total * share), 1) for share in LEARNER_SHARES}
    if spec.layout == "disaggregated":
        learners.add(spec.learners)
    for number in sorted(n for n in learners if total - n >= width):
        yield spec.model_copy(update={"layout": "disaggregated", "learner_gpus": number, **common})


def _with_staleness(config: RunConfig, staleness: int) -> RunConfig:
    """The recipe with another staleness; above 0, with the importance weights that it needs."""
    rl = config.rl
    assert rl is not None
    algorithm = rl.algorithm
    if staleness and not algorithm.args.get("importance_cap"):
        args = {**algorithm.args, "importance_cap": 2.0}
        algorithm = algorithm.model_copy(update={"args": args})
    changed = rl.model_copy(update={"max_staleness": staleness, "algorithm": algorithm})
    return config.model_copy(update={"rl": changed})


def _workers(outcome: Outcome) -> int:
    """Cores for environments at a use of WORKER_USE."""
    used = outcome.totals.worker_s / max(outcome.totals.time, 1e-12) * outcome.scale
    return max(min(math.ceil(used / WORKER_USE), outcome.spec.workers), 1)


def _ranked(found: Sequence[Candidate]) -> list[Candidate]:
    """Best first: repeatedly the least stale of those that are alike to the fastest."""
    left, ranked = list(found), []
    while left:
        fastest = max(candidate.rate for candidate in left)
        alike = [c for c in left if c.rate >= fastest * (1 - MARGIN)]
        chosen = min(alike, key=lambda c: (c.staleness, -c.rate))
        left.remove(chosen)
        ranked.append(chosen)
    return ranked


def _notes(inputs: Inputs, best: Candidate) -> list[str]:
    rl = inputs.config.rl
    assert rl is not None
    ahead = rl.groups_per_step * rl.group_size * (best.staleness + 1)
    notes = []
    if inputs.config.rollout.concurrency < ahead:
        notes.append(
            f"rollout.concurrency = {inputs.config.rollout.concurrency:,} is below the {ahead:,} "
            "episodes that max_staleness allows: a higher one may be faster"
        )
    return notes


def advice_lines(advice: Advice) -> list[str]:
    """Returns the lines of an advice."""
    scale = max(candidate.outcome.scale for candidate in advice.best)
    text = [
        f"best of {advice.number} simulated placements"
        + (f" (at up to 1/{scale} of the size)" if scale > 1 else "")
    ]
    for candidate in advice.best:
        text += _candidate_lines(candidate)
    if advice.impossible:
        text.append(f"{len(advice.impossible)} placements do not fit: {advice.impossible[0]}")
    return text + list(advice.notes)


def _candidate_lines(candidate: Candidate) -> list[str]:
    outcome, spec = candidate.outcome, candidate.outcome.spec
    where = f"{spec.learners:,} train, {spec.samplers:,} samplers"
    if spec.layout == "colocated":
        where = f"colocated, {spec.samplers:,} samplers"
    use = ", ".join(f"{pool} {100 * part:.0f} %" for pool, part in outcome.use.items())
    text = [
        f"  {candidate.rate:,.3g} episodes/s: {where}, max_staleness {candidate.staleness}, "
        f"{candidate.workers:,} environment workers"
    ]
    if (bottleneck := candidate.bottleneck) is not None:
        name = bottleneck.name
        gain = (
            "" if name == "none" else f" ({100 * bottleneck.gains[name]:+.0f} % if twice as fast)"
        )
        text.append(f"    bottleneck: {name}{gain}; in use: {use}")
    return text
