"""Conformance suite: what every back end must do.

    @pytest.mark.parametrize("check", CHECKS)
    async def test_conformance(check, tmp_path):
        await check(lambda folder: MyBackend(...), tmp_path)

A factory makes a fresh back end with the same initial weights in a folder. Its context holds at
least 16 tokens and its vocabulary 8.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ludus.backends.base import Backend
from ludus.config.schema import OptimizerConfig
from ludus.core.errors import CheckpointError, TrainingError
from ludus.core.types import Group, Sample, Segment, Task, Trajectory
from ludus.models.samplers.base import Completion, SamplingParams
from ludus.rollout.source import require_fresh
from ludus.train import ALGORITHMS
from ludus.train.minibatches import TrainSettings
from ludus.train.samples import to_samples

Factory = Callable[[Path], Backend]
Check = Callable[[Factory, Path], Awaitable[None]]

PROMPT = [3, 4, 5]
SETTINGS = TrainSettings("rl", 8, OptimizerConfig(lr=1e-2), tokens_per_batch=64, minibatches=2)
GRPO = ALGORITHMS.build("grpo")
METRICS = {
    f"train/{name}"
    for name in ("loss", "grad_norm", "lr", "tokens", "loss_tokens", "staleness", "optimizer_steps")
}


async def versions_count_up(make: Factory, folder: Path) -> None:
    """Each publication adds 1, and turns carry the published version."""
    backend = _begin(make(folder))
    for version in range(3):
        assert backend.policy_version == version
        assert {s.policy_version for s in await _samples(backend)} == {version}
        assert await backend.publish_weights() == version + 1
    backend.close()


async def stale_turns_are_refused(make: Factory, folder: Path) -> None:
    """A turn of older weights than the staleness bound, or of unpublished ones, is an error."""
    backend = _begin(make(folder))
    groups = [await _group(backend)]
    require_fresh(groups, backend.policy_version, 0)
    await backend.publish_weights()
    require_fresh(groups, backend.policy_version, 1)
    for version, max_staleness in ((backend.policy_version, 0), (-1, 0)):
        try:
            require_fresh(groups, version, max_staleness)
        except TrainingError:
            continue
        raise AssertionError(f"version {version} accepted turns of version 0")
    backend.close()


async def turns_over_an_update_know_their_versions(make: Factory, folder: Path) -> None:
    """Weights that change during a turn sample none of its tokens before they are published.

    The tokens of version 0 equal those of an undisturbed turn; later tokens have version 1.
    """
    backend = _begin(make(folder))
    params = SamplingParams(max_tokens=12, seed=5)
    samples, undisturbed = await _samples(backend), await _sample(backend, 5, params)
    turn = asyncio.create_task(_sample(backend, 5, params))
    await _yield_to_others(4)
    await backend.train(samples, GRPO)
    await _yield_to_others(4)
    await backend.publish_weights()
    done = await turn
    runs = dict(done.runs)
    assert len(done.runs) == len(runs)
    assert runs.keys() <= {0, 1}
    assert sum(runs.values()) == 12
    assert done.policy_version == min(runs)
    count = runs.get(0, 0)
    assert done.token_ids[:count] == undisturbed.token_ids[:count]
    pairs = zip(done.logprobs[:count], undisturbed.logprobs[:count], strict=True)
    assert all(math.isclose(a, b, abs_tol=1e-3) for a, b in pairs)
    assert (await _sample(backend, 5)).runs == [(1, 4)]
    backend.close()


async def training_reports_metrics(make: Factory, folder: Path) -> None:
    """An iteration changes the policy and returns finite metrics."""
    backend = _begin(make(folder))
    before = await _sample(backend, 0)
    metrics = await backend.train(await _samples(backend), GRPO)
    await backend.publish_weights()
    assert metrics.keys() >= METRICS
    assert metrics["train/optimizer_steps"] == 2
    assert all(map(math.isfinite, metrics.values()))
    assert (await _sample(backend, 0)).logprobs != before.logprobs
    backend.close()


async def nothing_to_train_on_changes_nothing(make: Factory, folder: Path) -> None:
    """No samples, or advantages of 0: no optimizer step, the same policy."""
    backend = _begin(make(folder))
    before = await _sample(backend, 0)
    flat = [replace(s, advantages=[0.0] * len(s.token_ids)) for s in await _samples(backend)]
    for samples in ([], flat):
        assert await backend.train(samples, GRPO) == {"train/optimizer_steps": 0.0}
        await backend.publish_weights()
    assert (await _sample(backend, 0)).logprobs == before.logprobs
    backend.close()


async def scoring_changes_no_group(make: Factory, folder: Path) -> None:
    """Scores are in the returned groups; an algorithm that asks no model gets none."""
    asking = replace(GRPO, critic_lr=1e-3)
    backend = _begin(make(folder))
    groups = [await _group(backend)]
    assert await backend.score(groups, GRPO) == groups
    backend.begin_stage(SETTINGS, asking)
    scored = await backend.score(groups, asking)
    assert [_values(groups), _values(scored)] == [[None, None], [[0.0] * 5, [0.0] * 5]]
    backend.close()


async def resuming_equals_never_having_stopped(make: Factory, folder: Path) -> None:
    """A checkpoint restores weights, optimizer, version and the loop's state."""
    first = _begin(make(folder / "a"))
    await _iterate(first)
    path = first.save("rl", 1, {"cursor": [1, 2]}, None, pin=False)
    expected = [await _iterate(first) for _ in range(2)]
    first.close()
    resumed = _begin(make(folder / "b"))
    await _iterate(resumed)
    assert resumed.load(path) == {"cursor": [1, 2]}
    assert resumed.policy_version == 1
    assert [await _iterate(resumed) for _ in range(2)] == expected
    resumed.close()


async def weights_load_without_a_stage(make: Factory, folder: Path) -> None:
    """A checkpoint's weights sample the same turn, under the same version, in a new back end."""
    first = _begin(make(folder / "a"))
    await _iterate(first)
    path = first.save("rl", 1, {}, None, pin=False)
    loaded = make(folder / "b")
    loaded.load_weights(path)
    assert loaded.policy_version == loaded.sampler.policy_version == 1
    assert await _sample(loaded, 0) == await _sample(first, 0)
    first.close()
    loaded.close()


async def failures_are_errors(make: Factory, folder: Path) -> None:
    """A missing checkpoint and a loss that is not finite raise; the policy stays the same."""
    backend = _begin(make(folder))
    before = await _sample(backend, 0)
    bad = [replace(s, advantages=[math.nan] * len(s.token_ids)) for s in await _samples(backend)]
    try:
        backend.load(folder / "absent-000001")
    except CheckpointError:
        pass
    else:
        raise AssertionError("a checkpoint that does not exist was loaded")
    try:
        await backend.train(bad, GRPO)
    except TrainingError:
        pass
    else:
        raise AssertionError("a loss that is not finite was trained on")
    await backend.publish_weights()
    assert (await _sample(backend, 0)).logprobs == before.logprobs
    backend.close()


CHECKS: list[Check] = [
    versions_count_up,
    stale_turns_are_refused,
    turns_over_an_update_know_their_versions,
    training_reports_metrics,
    nothing_to_train_on_changes_nothing,
    scoring_changes_no_group,
    resuming_equals_never_having_stopped,
    weights_load_without_a_stage,
    failures_are_errors,
]


def _begin(backend: Backend) -> Backend:
    backend.begin_stage(SETTINGS, GRPO)
    return backend


async def _yield_to_others(rounds: int) -> None:
    for _ in range(rounds):
        await asyncio.sleep(0)


async def _sample(backend: Backend, seed: int, params: SamplingParams | None = None) -> Completion:
    backend.sampler.open(str(seed))
    try:
        params = params or SamplingParams(max_tokens=4, seed=seed)
        return await backend.sampler.sample(PROMPT, params, session=str(seed))
    finally:
        backend.sampler.close(str(seed))


async def _group(backend: Backend) -> Group:
    """Two episodes of one turn, with rewards 0 and 1."""
    trajectories = []
    for number in range(2):
        turn = await _sample(backend, number)
        sampled = Segment(
            0,
            turn.token_ids,
            turn.logprobs,
            policy_version=turn.policy_version,
            version_runs=turn.version_runs,
        )
        segments = [Segment(-1, PROMPT), sampled]
        trajectories.append(Trajectory(f"t{number}", "g", "task", segments, reward=float(number)))
    return Group("g", Task(id="task"), trajectories)


async def _samples(backend: Backend) -> list[Sample]:
    return to_samples(GRPO.assign([await _group(backend)]))


async def _iterate(backend: Backend) -> tuple[list[Sample], dict[str, float]]:
    samples = await _samples(backend)
    metrics = await backend.train(samples, GRPO)
    await backend.publish_weights()
    return samples, metrics


def _values(groups: Sequence[Group]) -> list[list[float] | None]:
    return [s.values for g in groups for t in g.trajectories for s in t.segments if s.sampled]
