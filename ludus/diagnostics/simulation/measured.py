"""Costs and episodes of a finished run, from its store.

pass, sequence, prompt token    the sampler's own fit (`time/pass_s`, ...), scaled so that the
                                passes of the run take its `time/sample_s`
turn                            processor time of the rollouts besides sampling: environments,
                                parsing, templates
training                        all of a step after its rollouts, for each computed token
episodes                        turns, tokens, and seconds that they waited for environments
sharing                         the trees of the run's groups, for groups of another size
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev

from ludus.config.schema import RunConfig
from ludus.core.errors import ConfigError, StoreError
from ludus.core.types import Group, Trajectory
from ludus.diagnostics.simulation.costs import Costs, forward_passes
from ludus.diagnostics.simulation.replica import PassCost
from ludus.diagnostics.simulation.sharing import Sharing, Tree, sharing_of
from ludus.diagnostics.simulation.spec import ClusterSpec
from ludus.diagnostics.simulation.workload import Sizes
from ludus.store import RunStore

NUM_STEPS = 8
"""Steps whose episodes are read at most, spread over the stage."""

FITTED = ("time/pass_s", "time/pass_row_s", "time/prefill_token_s")

CONTEXT = "time/pass_context_s"
"""A run of an older ludus lacks it."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run's RL steps without the first (it builds kernels and caches), and its episodes."""

    id: str
    config: RunConfig
    steps: Sequence[Mapping[str, float]]
    episodes: Sequence[Sizes]
    sharing: Sharing = field(default_factory=lambda: Sharing(1, Tree(1), Tree(1)))

    def total(self, *names: str) -> float:
        """Sum of metrics over the steps."""
        return sum(step.get(name, 0.0) for step in self.steps for name in names)

    @property
    def num_episodes(self) -> float:
        return self.total("rollout/episodes")

    @property
    def trained(self) -> float:
        """Part of the episodes' tokens that trained: groups without a signal do not."""
        tokens = sum(s.get("train/tokens", 0.0) * s["train/optimizer_steps"] for s in self.steps)
        epochs = self.config.rl.epochs if self.config.rl else 1
        return min(tokens / epochs / self.total("rollout/tokens"), 1.0)

    def trained_in(self, size: int) -> float:
        """The same part in groups of another size: more of the larger ones have a signal."""
        return 1 - (1 - self.trained) * self.sharing.idle(size)

    @property
    def turn_s(self) -> float:
        """Processor seconds of a turn besides sampling."""
        rollout = self.total("time/rollout_s") - self.total("time/sample_s")
        cpu = self.total("time/cpu_s") - self.total("time/train_s", "time/sample_s")
        turns = sum(s["rollout/turns"] * s["rollout/episodes"] for s in self.steps)
        return max(min(rollout, cpu), 0.0) / turns

    @property
    def turn_env_s(self) -> float:
        """Of these, the environment's: its answers' time, as far as it is no latency."""
        turns = sum(episode.turns for episode in self.episodes)
        waited = sum(min(e.answer_s, self.turn_s) * e.turns for e in self.episodes)
        return waited / turns if turns else 0.0


def read_run(run_id: str, where: str, store: str | None, runs_dir: str) -> Run:
    """Returns a run of the store. Errors: ConfigError, StoreError; they name the key `where`."""
    try:
        return _read_run(run_id, where, store, runs_dir)
    except StoreError as error:
        raise StoreError(f"{where}: {run_id}: {error}") from None


def _read_run(run_id: str, where: str, store: str | None, runs_dir: str) -> Run:
    with RunStore.open(store, runs_dir, read_only=True) as runs:
        config = RunConfig.model_validate(runs.run(run_id).config)
        rows = [row for row in runs.steps(run_id, "rl") if row.metrics.get("rollout/turns")]
        if len(rows) < 2:
            raise ConfigError(f"{where}: {run_id} has {len(rows)} steps of RL; 2 are needed")
        metrics = [row.metrics for row in rows[1:]]
        numbers = [row.step for row in rows[1:]]
        groups: list[Group] = []
        for number in numbers[:: -(-len(numbers) // NUM_STEPS)]:
            groups += runs.groups(run_id, "rl", number)
    assert config.rl is not None
    run = Run(run_id, config, metrics, ())
    played = [t for g in groups for t in g.trajectories if t.status.trainable and t.num_turns]
    return replace(
        run,
        episodes=[_sizes(t, run.turn_s) for t in played],
        sharing=sharing_of(groups, config.rl.group_size, all_train=run.trained == 1),
    )


def _sizes(trajectory: Trajectory, turn_s: float) -> Sizes:
    """Sizes of an episode; its latency is the wait for its environment less `turn_s`, which holds
    the processor time of the environment."""
    turns, prompt = trajectory.num_turns, 0
    for segment in trajectory.segments:
        if segment.logprobs is not None:
            break
        prompt += len(segment.token_ids)
    sampled = trajectory.num_sampled_tokens
    observed = trajectory.num_tokens - prompt - sampled
    waited = trajectory.metrics.get("env_seconds", 0.0) + trajectory.metrics.get("tool_seconds", 0)
    return Sizes(
        float(prompt),
        turns,
        sampled / turns,
        observed / max(turns - 1, 1),
        max(waited / turns - turn_s, 0.0),
        waited / turns,
    )


def measured_costs(
    costs: Costs, config: RunConfig, spec: ClusterSpec, run: Run, played: Run
) -> Costs:
    """Returns the costs with those of a run of the same model on one such device.

    `played`: the run of the episodes, whose share of groups with a signal trains.

    Errors: ConfigError for a run that does not tell its costs.
    """
    where = f"costs.measured: {run.id}"
    rl = run.config.rl
    assert rl is not None
    if rl.max_staleness:
        raise ConfigError(
            f"{where} has rl.max_staleness {rl.max_staleness}: sampling and training overlap in "
            "its times; name a run with rl.max_staleness: 0"
        )
    last = run.steps[-1]
    if any(name not in last for name in FITTED) or "rollout/unique_tokens" not in last:
        raise ConfigError(
            f"{where} has no metric {FITTED[0]}: its sampler counts no passes, or an older ludus "
            "made it; give costs.pass_s, costs.row_s and costs.prefill_token_s"
        )
    if run.config.model != config.model:
        raise ConfigError(f"{where} trained another model than the recipe's (section `model`)")
    if spec.gpus_per_sampler > 1:
        raise ConfigError(
            f"{where} sampled on one device: set gpus_per_sampler: 1, or give the costs"
        )
    size = config.rl.group_size if config.rl else rl.group_size
    together = max(round(size / spec.samplers), 1)
    shares = _shares(run, rl.group_size) * run.sharing.observed.per_episode(together)
    scale = _fit_scale(run)
    pass_s, row_s, prefill_s = (last[name] * scale for name in FITTED)
    trained = run.trained
    whole = _computed(run) / trained if trained else 0.0
    parting = _parting(run, whole, rl.group_size)
    prompts = run.num_episodes * fmean(e.prompt for e in run.episodes)
    model = replace(costs, parting=parting, shares_prefixes=run.config.learner.share_prefixes)
    computed = model.computed_tokens(run.total("rollout/tokens"), prompts, rl.group_size)
    spent = run.total("time/wall_s") - run.total(
        "time/rollout_s", "time/checkpoint_s", "time/evaluate_s"
    )
    if (tree := run.sharing.trained).through and size != rl.group_size:
        parting = _parting(run, whole * tree.per_episode(size), size)
    now = forward_passes(config, played.trained_in(size))
    then = forward_passes(run.config, trained)
    ratio = now / then if then else 1.0
    return replace(
        costs,
        decoding=PassCost(
            fixed_s=pass_s, row_s=row_s, context_read_s=scale * last.get(CONTEXT, 0.0)
        ),
        prefill_token_s=prefill_s,
        train_token_s=spent / computed * ratio / spec.learners,
        train_step_s=0.0,
        turn_s=run.turn_s,
        turn_env_s=run.turn_env_s,
        parting=parting,
        shares_prefixes=config.learner.share_prefixes,
        prompt_share=1 / together,
        observed_share=min(shares, 1.0),
        sources={**costs.sources, **_sources(run, spec, ratio, size)},
    )


def _fit_scale(run: Run) -> float:
    """Measured over fitted seconds of sampling: the fit is of the last passes only."""
    last = run.steps[-1]
    pass_s, row_s, prefill_s = (last[name] for name in FITTED)
    sampled = run.total("rollout/sampled_tokens")
    prefilled = run.total("rollout/unique_tokens") - sampled
    fitted = run.total("time/passes") * pass_s + sampled * row_s + prefilled * prefill_s
    fitted += sampled * _mean_context(run) * last.get(CONTEXT, 0.0)
    return run.total("time/sample_s") / fitted if fitted else 1.0


def _mean_context(run: Run) -> float:
    """Tokens before a sampled token, as if an episode grew evenly after its prompt."""
    sampled = sum(e.turns * e.sampled for e in run.episodes)
    before = sum(e.turns * e.sampled * (e.prompt + e.length) / 2 for e in run.episodes)
    return before / sampled if sampled else 0.0


def _shares(run: Run, group_size: int) -> float:
    """Part of the observed tokens that the sampler computed; the group shares the rest."""
    num = run.num_episodes
    prompts = num * fmean(e.prompt for e in run.episodes)
    sampled = run.total("rollout/sampled_tokens")
    observed = run.total("rollout/tokens") - prompts - sampled
    computed = run.total("rollout/unique_tokens") - sampled - prompts / group_size
    return min(max(computed / observed, 0.0), 1.0) if observed > 0 else 1.0


def _computed(run: Run) -> float:
    """Tokens that training computed."""
    return sum(
        step.get("train/unique_tokens", step.get("train/tokens", 0.0))
        * step.get("train/optimizer_steps", 0.0)
        for step in run.steps
    )


def _parting(run: Run, computed: float, group_size: int) -> float:
    """Solves `Costs.computed_tokens` for the part of a group's tokens that is not shared."""
    tokens = run.total("rollout/tokens")
    prompts = run.num_episodes * fmean(e.prompt for e in run.episodes)
    alike = tokens / group_size
    apart = tokens - prompts * (1 - 1 / group_size)
    return min(max((computed - alike) / max(apart - alike, 1.0), 0.0), 1.0)


def _sources(run: Run, spec: ClusterSpec, ratio: float, size: int) -> dict[str, str]:
    seconds = [step["time/wall_s"] for step in run.steps]
    spread = stdev(seconds) / fmean(seconds) if len(seconds) > 1 else 0.0
    told = f"measured: {run.id}, {len(seconds)} steps, +- {100 * spread:.0f} % between them"
    training = told
    if spec.learners > 1:
        training += f"; assumed: {spec.learners} learners take 1/{spec.learners} of the time"
    if ratio != 1:
        training += f"; assumed: {ratio:.2f} times as much, by its forward passes"
    if size > run.sharing.size and run.sharing.observed.size > 1:
        training += f"; assumed: groups of {size} share as those of {run.sharing.size}, continued"
    names = ("decoding", "prefill", "turn")
    return {**dict.fromkeys(names, told), "training": training, "step": "measured: in training"}
