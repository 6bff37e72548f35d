"""A simulated run as text: what it rests on, its rates, its steps, and its cost."""

from __future__ import annotations

from ludus.diagnostics.plan_lines import device_line, duration
from ludus.diagnostics.simulation.bottleneck import Bottleneck
from ludus.diagnostics.simulation.plan import Inputs, Outcome
from ludus.diagnostics.simulation.spec import ClusterSpec

WIDTH = 21

LEAST = 0.01
"""A smaller part of effective time is none."""


def lines(inputs: Inputs, outcome: Outcome, bottleneck: Bottleneck) -> list[str]:
    """Returns the lines of a simulation."""
    return [
        f"{inputs.config.name} on {placement(outcome.spec)}",
        *_basis(inputs, outcome),
        "",
        *_steps(outcome),
        *_bottleneck(bottleneck),
        "",
        *_time_and_cost(inputs, outcome),
    ]


def placement(spec: ClusterSpec) -> str:
    """Returns the hardware and the run's place on it, in words."""
    nodes, width = spec.nodes, spec.gpus_per_sampler
    device = f"{nodes.gpus} x {nodes.kind}" if nodes.gpus else f"{nodes.kind} (no GPU)"
    where = f"{nodes.count} node{'s'[: nodes.count != 1]} of {device}"
    workers = f"{spec.workers:,} cores for environments"
    if spec.cores is not None:
        workers = f"{spec.workers:,} environment workers, all on {spec.cores:,} cores together"
    of = f"{spec.samplers:,} sampler{'s'[: spec.samplers != 1]} of {width}"
    if spec.layout == "local":
        return f"{where}: one process"
    if spec.layout == "colocated":
        return f"{where}: colocated, {of}, {workers}"
    return f"{where}: {spec.learners:,} train, {of}, {workers}"


def _basis(inputs: Inputs, outcome: Outcome) -> list[str]:
    setup, mean = outcome.setup, inputs.workload.mean()
    latency = inputs.workload.latency
    answers = "measured" if latency is None else f"given: {latency.show(' s')}"
    if latency is not None and not latency.mean:
        answers = "none given: environment.latency"
    text = [
        device_line(inputs.device),
        *[f"  {part:{WIDTH}} {source}" for part, source in inputs.costs.sources.items()],
        *[f"  {key:{WIDTH}} {told}" for key, _, told in (n.partition(": ") for n in inputs.notes)],
        f"  {'':{WIDTH}} mean {mean.turns} turns, {mean.length:,.0f} tokens, of these "
        f"{mean.turns * mean.sampled:,.0f} sampled",
        f"  {'latency':{WIDTH}} {answers}",
    ]
    part = f"1/{outcome.scale} of the size, " if outcome.scale > 1 else ""
    if part and not setup.max_staleness:
        part += "which is too fast: the longest of fewer episodes ends the step; "
    text.append(
        f"  {'simulated':{WIDTH}} {part}{setup.steps} steps after {setup.warmup}, "
        f"{outcome.num_events:,} events, seed {setup.seed}"
    )
    return text


def _steps(outcome: Outcome) -> list[str]:
    seconds = [step.seconds for step in outcome.steps]
    spread = f" ({min(seconds):,.3g} to {max(seconds):,.3g})" if len(seconds) > 1 else ""
    text = [
        f"step                  {outcome.step_s:,.3g} s{spread}",
        f"  waiting for episodes  {outcome.mean('rollout_s'):>9,.3g} s",
        f"  training              {outcome.mean('train_s'):>9,.3g} s",
        f"  publication           {outcome.mean('sync_s'):>9,.3g} s",
        f"throughput            {outcome.episodes_per_s:,.3g} episodes/s, "
        f"{outcome.tokens_per_s:,.0f} tokens/s, "
        f"{outcome.scale * outcome.totals.sampled / outcome.totals.time:,.0f} sampled tokens/s",
        "in use                "
        + ", ".join(f"{pool} {100 * part:.0f} %" for pool, part in outcome.use.items()),
    ]
    if outcome.setup.max_staleness:
        cut = outcome.mean("cut") / max(outcome.mean("episodes") + outcome.mean("cut"), 1)
        text.append(
            f"staleness             {outcome.mean('staleness'):.2f} versions in the mean, at most "
            f"{outcome.setup.max_staleness}; {100 * cut:.1f} % of the episodes are cut"
        )
    if (capacity := outcome.setup.costs.capacity) < float("inf"):
        full = 100 * min(outcome.peak_tokens / capacity, 1)
        text.append(f"KV cache              {full:.0f} % of {capacity:,.0f} tokens a sampler")
    return text


def _bottleneck(bottleneck: Bottleneck) -> list[str]:
    gains = sorted(bottleneck.gains.items(), key=lambda item: -item[1])
    listed = ", ".join(f"{part} {100 * gain:+.0f} %" for part, gain in gains)
    return [
        f"bottleneck            {bottleneck.name}",
        f"  episodes/s if it took half the time: {listed}",
    ]


def _time_and_cost(inputs: Inputs, outcome: Outcome) -> list[str]:
    rl, faults, spec = inputs.config.rl, outcome.faults, outcome.spec
    assert rl is not None
    text = [_faults_line(outcome)] if spec.faults.node_mtbf_h is not None else []
    if faults.ratio < LEAST:
        return [*text, "the run never gets ahead of its faults: lower checkpoint.every"]
    hours = rl.steps * outcome.step_s / faults.ratio / 3600
    text.append(f"rl.steps = {rl.steps:<10,} {duration(3600 * hours)}, evaluations not included")
    if (price := outcome.price_per_hour) is not None:
        episodes = outcome.episodes_per_s * 3600 * faults.ratio
        text.append(
            f"cost                  {hours * price:,.2f} {spec.currency}: {price:,.2f} an hour, "
            f"{1e6 * price / episodes:,.2f} for a million episodes"
        )
    return text


def _faults_line(outcome: Outcome) -> str:
    faults = outcome.faults
    text = (
        f"faults                effective time {100 * faults.ratio:.2f} %: a learner's node every "
    )
    text += f"{faults.learner_h:,.0f} h ({faults.repeated:.1f} steps again)"
    if faults.sampler_h < float("inf"):
        text += f", a sampler's node every {faults.sampler_h:,.0f} h"
    return text
