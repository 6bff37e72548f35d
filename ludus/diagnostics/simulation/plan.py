"""`ludus plan RECIPE --cluster SPEC`: simulate a recipe's RL stage on a cluster."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ludus.config.schema import RunConfig
from ludus.core.errors import ConfigError, did_you_mean
from ludus.diagnostics.episodes import Usage, local
from ludus.diagnostics.hardware import HARDWARE, Hardware, find_hardware
from ludus.diagnostics.plan import turns_of_parts
from ludus.diagnostics.simulation.costs import Costs, device_costs, with_given
from ludus.diagnostics.simulation.engine import Simulation
from ludus.diagnostics.simulation.faults import Effective, Hazard, effective
from ludus.diagnostics.simulation.measured import Run, measured_costs, read_run
from ludus.diagnostics.simulation.parts import Counts, Setup, Step
from ludus.diagnostics.simulation.spec import ClusterSpec, Distribution
from ludus.diagnostics.simulation.workload import Workload

EVENTS = 1_000_000
"""Without `simulate.scale`, a larger simulation is that of a part of the cluster."""

EVENTS_A_TURN = 3.5

TOO_MANY = 4
"""Times `simulate.max_events`, from which on a simulation does not begin: it would run for long and
then be refused."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """The needs of a simulation besides the SPEC. `notes`: assumptions, in words."""

    config: RunConfig
    costs: Costs
    workload: Workload
    device: Hardware
    notes: Sequence[str] = ()
    measured: Run | None = None
    played: Run | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """A simulated run, by means of its steps. Rates are of the whole cluster."""

    spec: ClusterSpec
    setup: Setup
    steps: Sequence[Step]
    totals: Counts
    num_events: int
    scale: int
    peak_tokens: float
    inputs: Inputs
    faults: Effective = field(default_factory=lambda: Effective(1.0))

    def mean(self, name: str) -> float:
        """Mean of a value of the steps."""
        values = [float(getattr(step, name)) for step in self.steps]
        return sum(values) / len(values)

    @property
    def step_s(self) -> float:
        return self.mean("seconds")

    @property
    def episodes_per_s(self) -> float:
        """Trained episodes, without faults."""
        return self.scale * self.mean("episodes") / self.step_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens of trained episodes, without faults."""
        return self.scale * self.mean("tokens") / self.step_s

    @property
    def use(self) -> dict[str, float]:
        """Part of the time in which each pool computes."""
        time = max(self.totals.time, 1e-12)
        setup = self.setup
        use = {
            # A prefill counts when it begins, so the share of a short time may exceed 1.
            "samplers": min(self.totals.sampler_s / time / setup.samplers, 1.0),
            "learner": self.totals.learner_s / time,
        }
        if setup.layout != "local":
            use["environment workers"] = self.totals.worker_s / time / setup.workers
        return use

    @property
    def price_per_hour(self) -> float | None:
        price = self.spec.price_per_gpu_hour
        return None if price is None else price * self.spec.num_gpus


def inputs_of(
    config: RunConfig, spec: ClusterSpec, usage: Usage | None, fill: float | None, runs_dir: str
) -> Inputs:
    """Returns costs and episodes for a recipe.

    Args:
        usage: the expert's episodes: their sizes (unless `fill` is given) and seconds of the
            environment, where neither the SPEC nor a measured run tells them.
        fill: fraction of turns and context that episodes use; None: as the expert's, else all.

    Errors: ConfigError, StoreError.
    """
    if config.rl is None:
        raise ConfigError("--cluster: the recipe has no `rl`: the simulation is of this stage")
    config = local(config)
    if spec.nodes.kind not in (kinds := [*HARDWARE, "here"]):
        near = did_you_mean(spec.nodes.kind, kinds)
        raise ConfigError(f"nodes.kind: there is no {spec.nodes.kind!r}{near}")
    if spec.nodes.kind == "here" and spec.nodes.gpus and config.model.device == "cpu":
        raise ConfigError(
            "nodes.kind: `here` measures this machine's CPU, as the recipe's model.device is cpu; "
            "name the GPU, e.g. h100, or set nodes.gpus: 0"
        )
    runs: dict[str, Run] = {}
    for key, name in measured_runs(spec).items():
        if name not in runs:
            runs[name] = read_run(name, key, config.store, runs_dir)
    played = runs.get(spec.episodes.measured or spec.costs.measured or "")
    workload, notes = _workload(config, spec, usage, fill, played)
    if usage is not None and usage.failed:
        notes.append(f"episodes: {usage.failed}")
    if others := [name for name, policy in config.policies.items() if policy.endpoint is None]:
        told = f"{', '.join(others)} not simulated: all samplers are the policy's"
        notes.insert(0, f"policies: {told}")
    device = find_hardware(spec.nodes.kind, config.model)
    measured = runs.get(spec.costs.measured or "")
    if measured is not None:  # its costs of a turn hold the environment's
        workload = replace(workload, step_s=spec.environment.cpu_s or 0.0, reset_s=0.0)
    costs = _costs(config, spec, device, workload, measured, played)
    return Inputs(config, costs, workload, device, notes, measured, played)


def placed_elsewhere(inputs: Inputs, config: RunConfig, spec: ClusterSpec) -> Inputs:
    """Returns the inputs for another placement on the same devices. Errors: ConfigError."""
    runs = inputs.measured, inputs.played
    costs = _costs(config, spec, inputs.device, inputs.workload, *runs)
    return replace(inputs, config=config, costs=costs)


def _costs(
    config: RunConfig,
    spec: ClusterSpec,
    device: Hardware,
    workload: Workload,
    run: Run | None,
    played: Run | None,
) -> Costs:
    mean = workload.mean()
    costs = device_costs(config, spec, device, mean.length, mean.turns * mean.sampled)
    if run is not None:
        costs = measured_costs(costs, config, spec, run, played or run)
    return with_given(costs, spec)


def needs_expert(spec: ClusterSpec, fill: float | None) -> bool:
    """True if the expert's episodes tell what SPEC and `fill` do not: sizes, or the environment's
    seconds."""
    sizes = fill is None and spec.episodes.turns is None and not measured_runs(spec)
    return sizes or (spec.environment.cpu_s is None and not spec.costs.measured)


def measured_runs(spec: ClusterSpec) -> dict[str, str]:
    """Returns the runs that a SPEC names, by key."""
    named = {"costs.measured": spec.costs.measured, "episodes.measured": spec.episodes.measured}
    return {key: name for key, name in named.items() if name}


def _workload(
    config: RunConfig, spec: ClusterSpec, usage: Usage | None, fill: float | None, run: Run | None
) -> tuple[Workload, list[str]]:
    """Returns the episodes, and how they are known."""
    given, environment, context = spec.episodes, spec.environment, config.model.context_length
    turns = _max_turns(config)
    cpu_s = environment.cpu_s
    if cpu_s is None:
        cpu_s = usage.step_s if usage else 0.0
    latency = environment.latency or Distribution(constant=0.0)
    shared = {
        "latency": latency,
        "step_s": cpu_s,
        "reset_s": usage.reset_s if usage else 0.0,
        "context": float(context),
        "max_turns": max(math.ceil(turns), 1),
    }
    if run is not None and given.turns is None:
        work = Workload(run.episodes, **{**shared, "latency": environment.latency})  # type: ignore[arg-type]
        return work, [f"episodes: measured: {len(run.episodes):,} of {run.id}, drawn at random"]
    if given.turns is not None and given.sampled is not None:
        assert given.prompt is not None
        assert given.observed is not None
        if given.prompt >= context:
            raise ConfigError(
                f"episodes.prompt: {given.prompt:g} tokens leave no room for a turn in the "
                f"recipe's model.context_length of {context:,}: lower it, or raise that"
            )
        shared["max_turns"] = 1_000_000
        sizes = {"prompt": given.prompt, "turns": given.turns, "sampled": given.sampled}
        work = Workload(**sizes, observed=given.observed, **shared)  # type: ignore[arg-type]
        return work, ["episodes: given"]
    if usage is not None and fill is None:
        shown = min(usage.turns, turns)
        number = shown + (turns - shown) / 4
        work = Workload(
            prompt=usage.prompt,
            turns=Distribution(constant=number),
            sampled=Distribution(constant=usage.sampled),
            observed=usage.observed,
            **shared,  # type: ignore[arg-type]
        )
        return work, [
            f"episodes: assumed: as the expert plays, with {number:.1f} turns (a quarter of those "
            "between the expert's and the limit), all alike"
        ]
    fill = 1.0 if fill is None else fill
    sampled = max(min(fill * config.rollout.max_tokens_per_turn, context / 2), 1.0)
    number = max(fill * turns, 1.0)
    rest = max(fill * context - number * sampled, 2.0)
    work = Workload(
        prompt=rest / 2,
        turns=Distribution(constant=number),
        sampled=Distribution(constant=sampled),
        observed=rest / 2 / max(number - 1, 1),
        **shared,  # type: ignore[arg-type]
    )
    return work, [
        f"episodes: assumed: {fill:g} of their turns and their context (--fill), the rest half "
        "prompt, half observations"
    ]


def _max_turns(config: RunConfig) -> float:
    """Mean of the most turns over the parts of a mixture, at the end of the stage."""
    return sum(share * turns for share, turns in turns_of_parts(config))


def setup_of(inputs: Inputs, spec: ClusterSpec, *, scale: int = 1) -> Setup:
    """Returns the simulation's setup, of a part `1 / scale` of the cluster."""
    config, rl = inputs.config, inputs.config.rl
    assert rl is not None
    warmup = spec.simulate.warmup
    costs = inputs.costs
    if scale > 1:
        # The learner keeps its seconds a step: it has a part of the tokens.
        costs = replace(
            costs,
            train_token_s=costs.train_token_s * scale,
            batch_tokens=costs.batch_tokens / scale,
        )
    return Setup(
        groups_per_step=max(rl.groups_per_step // scale, 1),
        group_size=rl.group_size,
        concurrency=max(config.rollout.concurrency // scale, 1),
        max_staleness=rl.max_staleness,
        layout=spec.layout,
        samplers=max(spec.samplers // scale, 1),
        workers=max(spec.workers // scale, 1),
        costs=costs,
        workload=inputs.workload,
        lockstep=config.rollout.deterministic and config.sampler.name == "in_process",
        cores=_cores(spec),
        sticks_by_name=config.rollout.deterministic,
        shares_weights=_shares_weights(config),
        deadline_s=config.rollout.step_deadline_s,
        max_retries=config.rollout.max_retries,
        steps=spec.simulate.steps,
        warmup=rl.max_staleness + 1 if warmup is None else warmup,
        seed=spec.simulate.seed,
        max_events=spec.simulate.max_events,
    )


def _cores(spec: ClusterSpec) -> float:
    """Cores that all processes share. In the layout `local`, a GPU is one."""
    if spec.layout == "local":
        return 1 if spec.nodes.gpus else spec.nodes.cpu_cores
    return math.inf if spec.cores is None else spec.cores


def _shares_weights(config: RunConfig) -> bool:
    """True if the local back end's sampler reads the learner's weights in place, which stops it
    while they change: on a GPU, without a type of its own."""
    own = config.sampler.name != "in_process" or config.model.device == "cpu"
    half = config.sampler.args.get("dtype") == "bfloat16" and config.model.dtype != "bfloat16"
    return not (own or half)


def scale_for(inputs: Inputs, spec: ClusterSpec, events: float) -> int:
    """Returns the whole number by which a simulation shrinks to about so many events.

    It leaves 4 samplers and 4 groups a step at least.
    """
    setup = setup_of(inputs, spec)
    wanted = _num_events(inputs, setup) / events
    most = min(setup.samplers // 4, setup.groups_per_step // 4, setup.workers)
    return max(min(math.ceil(wanted), most), 1)


def _num_events(inputs: Inputs, setup: Setup) -> float:
    """About the number of events of a simulation."""
    turns = setup.episodes_per_step * inputs.workload.mean().turns
    return EVENTS_A_TURN * turns * (setup.steps + setup.warmup)


def simulate(inputs: Inputs, spec: ClusterSpec, events: float = EVENTS) -> Outcome:
    """Simulate a recipe on a cluster.

    Errors: ConfigError above `simulate.max_events`, and where no episode ends.
    """
    scale = spec.simulate.scale or scale_for(inputs, spec, events)
    whole = setup_of(inputs, spec)
    most = min(whole.samplers, whole.groups_per_step, whole.workers, whole.concurrency)
    if scale > most:
        raise ConfigError(
            f"simulate.scale: {scale} leaves less than one sampler, group a step, worker or "
            f"episode: at most {most}"
        )
    setup = setup_of(inputs, spec, scale=scale)
    if (expected := _num_events(inputs, setup)) > TOO_MANY * setup.max_events:
        raise ConfigError(
            f"the simulation needs about {expected:,.0f} events, more than simulate.max_events = "
            f"{setup.max_events:,}: lower simulate.steps, simulate.warmup or the recipe's "
            "rl.groups_per_step, or raise simulate.scale"
        )
    simulation = Simulation(setup)
    simulation.run()
    steps = simulation.counted
    if not any(step.episodes for step in steps):
        raise ConfigError(
            "environment.latency: no episode ends, since its answers take longer than the recipe's "
            f"rollout.step_deadline_s = {setup.deadline_s:g} s: lower it, or raise that"
        )
    rl = inputs.config.rl
    assert rl is not None
    hazard = _hazard(spec, inputs.config.checkpoint.every)
    return Outcome(
        spec,
        setup,
        steps,
        simulation.totals(),
        simulation.clock.num_events,
        scale,
        max(replica.peak_tokens for replica in simulation.replicas),
        inputs,
        effective(steps, hazard, spec.simulate.seed),
    )


def _hazard(spec: ClusterSpec, every: int | None) -> Hazard:
    nodes, faults = spec.nodes.count, spec.faults
    rate = 0.0 if faults.node_mtbf_h is None else 1 / (3600 * faults.node_mtbf_h)
    learners = nodes
    if spec.layout == "disaggregated":
        learners = math.ceil(spec.learners / max(spec.nodes.gpus, 1))
    return Hazard(
        learner_rate=learners * rate,
        sampler_rate=max(nodes - learners, 0) * rate,
        recovery_s=faults.recovery_s,
        sampler_recovery_s=faults.sampler_recovery_s,
        lost_share=1 / max(nodes - learners, 1),
        checkpoint_every=every or 1_000_000,
    )
