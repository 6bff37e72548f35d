"""Conformance suite: what every back end must do.

    def make(folder):
        return BACKENDS.build(Spec(name="my.py:MyBackend"), "backend", **tiny_context(folder))

    @pytest.mark.parametrize("check", CHECKS)
    async def test_conformance(check, tmp_path):
        await check(make, tmp_path)

A factory makes a fresh back end with the same initial weights in a folder. Its context holds at
least 16 tokens and its vocabulary 8.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ludus.backends.base import Backend
from ludus.config.schema import OptimizerConfig, RunConfig
from ludus.core.errors import (
    CheckpointError,
    ConfigError,
    ContextOverflow,
    TrainingError,
    Unscorable,
)
from ludus.core.types import Group, Message, Sample, Segment, Spec, Task, Trajectory
from ludus.judges import JUDGES
from ludus.judges.base import close_all
from ludus.models.chat.renderer import Renderer
from ludus.models.chat.tokenizers import train_tokenizer
from ludus.models.samplers.base import Completion, SamplingParams
from ludus.rollout.hosts.host import LocalEnvs
from ludus.rollout.hosts.threads import EnvThread
from ludus.rollout.source import require_fresh
from ludus.train import ALGORITHMS
from ludus.train.batches.minibatches import TrainSettings
from ludus.train.batches.samples import to_samples
from ludus.train.checkpoint.policy import build_policy

Factory = Callable[[Path], Backend]
Check = Callable[[Factory, Path], Awaitable[None]]

PROMPT = [3, 4, 5]
SETTINGS = TrainSettings("rl", 8, OptimizerConfig(lr=1e-2), tokens_per_batch=64, minibatches=2)
GRPO = ALGORITHMS.build("grpo")
METRICS = {
    f"train/{name}"
    for name in ("loss", "grad_norm", "lr", "tokens", "loss_tokens", "staleness", "optimizer_steps")
}


def tiny_context(folder: Path, **changes: Any) -> dict[str, Any]:
    """The arguments that a registry gives a back end: a model of two small layers from scratch, its
    tokenizer, a configuration with `changes` of the top-level keys, and the run's folder."""
    shape = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "head_dim": 16, "init_range": 0.2}
    fields: dict[str, Any] = {
        "model": {
            "architecture": {"name": "qwen3", "args": {**shape, "intermediate_size": 48}},
            "tokenizer": "words",
            "context_length": 48,
        },
        "tasks": {"train": "env"},
        "rollout": {"max_tokens_per_turn": 8},
        "threads": 1,
        **changes,
    }
    config = RunConfig.model_validate(fields)
    texts = ["go left", "go right", "stop here now"]
    renderer = Renderer(train_tokenizer(Spec(name="words"), texts))
    return {
        "make_model": lambda: build_policy(config.model, renderer.tokenizer, config.seed),
        "renderer": renderer,
        "config": config,
        "run_dir": folder,
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


async def a_shortened_stage_has_its_schedule(make: Factory, folder: Path) -> None:
    """The rate of a stage that is shortened falls by its new last step."""
    falling = replace(SETTINGS, optimizer=OptimizerConfig(lr=1e-2, schedule="linear"))
    backend = _begin(make(folder))
    rates: list[list[float]] = []
    for steps, shorten in ((8, None), (4, None), (8, 4)):
        backend.begin_stage(replace(falling, steps=steps), GRPO)
        if shorten is not None:
            backend.shorten_stage(shorten)
        rates.append([(await _iterate(backend))[1]["train/lr"] for _ in range(3)])
    whole, half, shortened = rates
    assert shortened == half != whole
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


async def an_ended_episode_frees_its_session(make: Factory, folder: Path) -> None:
    """Closing a session cancels its turn; its name may be used again, by a turn of any length."""
    backend = _begin(make(folder))
    expected = await _sample(backend, 1)
    backend.sampler.open("1")
    params = SamplingParams(max_tokens=12, seed=1)
    turn = asyncio.create_task(backend.sampler.sample(PROMPT, params, session="1"))
    await _yield_to_others(3)
    turn.cancel()
    backend.sampler.close("1")
    backend.sampler.close("1")
    await asyncio.gather(turn, return_exceptions=True)
    assert await _sample(backend, 1) == expected
    backend.close()


async def faulty_turns_are_errors(make: Factory, folder: Path) -> None:
    """A prompt beyond the context is a ContextOverflow, an unknown id a ValueError; the sampler
    goes on."""
    backend = _begin(make(folder))
    expected = await _sample(backend, 1)
    limit = backend.sampler.context_length
    for prompt, kind in (([3] * limit, ContextOverflow), ([10**6], ValueError)):
        backend.sampler.open("bad")
        try:
            params = SamplingParams(max_tokens=4)
            await backend.sampler.sample(prompt, params, session="bad")
        except kind:
            pass
        else:
            raise AssertionError(f"a turn that is wrong raised no {kind.__name__}")
        finally:
            backend.sampler.close("bad")
    assert await _sample(backend, 1) == expected
    backend.close()


async def environments_play(make: Factory, folder: Path) -> None:
    """Environments of the back end answer as those of this process, and report their limits."""
    from ludus.envs import ENVS

    backend = make(folder)
    spec = Spec(name="textcraft")
    env_class: Any = ENVS.load(spec.name)
    task = env_class.task(env_class.tiers()[0], 1)
    action = Message(role="assistant", content="inventory")
    seen = []
    for envs in (LocalEnvs(spec), backend.make_envs(spec)):
        thread = EnvThread()
        env = envs.host(task, thread, 60.0)
        assert env is not None
        opening = await env.reset(task)
        step = await env.step(action)
        seen.append((opening, step, env.max_turns, env.env.success_at, await env.scores()))
        await env.close()
        thread.close()
        assert env.seconds > 0  # a metric of the episode
    assert seen[0] == seen[1]
    backend.close()


async def judges_score(make: Factory, folder: Path) -> None:
    """A judge scores where the back end runs it as it does in this process."""
    backend = make(folder)
    spec = Spec(name="answer")
    task = Task(id="t", answer="42")
    answers = [Message(role="assistant", content=text) for text in ("It is 42.", "41", "42")]
    own = JUDGES.build(spec, "judge")
    hosted = backend.host_judge(spec, own)
    for number, message in enumerate(answers):
        segments = [Segment(-1, PROMPT), Segment(0, [6], [-0.1], message=message)]
        trajectory = Trajectory(f"t{number}", "g", "t", segments)
        assert await hosted(task, trajectory) == await own(task, trajectory)
    silent = Trajectory("t9", "g", "t", [Segment(-1, PROMPT)])
    for judge in (own, hosted):
        try:
            await judge(task, silent)
        except Unscorable:
            continue
        raise AssertionError("a trajectory without an answer was scored")
    await close_all([hosted])
    backend.close()


async def check_refusal(make: Callable[[], Backend], key: str) -> None:
    """A back end that cannot honour a recipe's key refuses it, and names the key and the back ends
    that can. `make` builds it with a recipe that has the key."""
    try:
        backend = make()
    except ConfigError as error:
        message = str(error)
        assert key in message, f"{message!r} does not name {key}"
        assert "backend" in message, f"{message!r} does not name a back end that honours {key}"
        return
    backend.close()
    raise AssertionError(f"{key} was accepted")


CHECKS: list[Check] = [
    versions_count_up,
    stale_turns_are_refused,
    turns_over_an_update_know_their_versions,
    training_reports_metrics,
    nothing_to_train_on_changes_nothing,
    scoring_changes_no_group,
    a_shortened_stage_has_its_schedule,
    resuming_equals_never_having_stopped,
    weights_load_without_a_stage,
    failures_are_errors,
    an_ended_episode_frees_its_session,
    faulty_turns_are_errors,
    environments_play,
    judges_score,
]


async def turns(backend: Backend, count: int = 8, max_tokens: int = 24) -> list[Completion]:
    """Sample turns of as many sessions, all at once; turn n has the seed n."""
    return await asyncio.gather(
        *(_sample(backend, n, SamplingParams(max_tokens=max_tokens, seed=n)) for n in range(count))
    )


def rewarded(done: Sequence[Completion]) -> list[Sample]:
    """Returns samples for `Backend.train`: turns with the advantages -1 and 1 in alternation."""
    return [
        Sample(
            token_ids=[*PROMPT, *turn.token_ids],
            loss_mask=[False] * len(PROMPT) + [True] * len(turn.token_ids),
            logprobs=[0.0] * len(PROMPT) + turn.logprobs,
            advantages=[0.0] * len(PROMPT) + [2.0 * (n % 2) - 1.0] * len(turn.token_ids),
            trajectory_id=f"t{n}",
            policy_version=turn.policy_version,
        )
        for n, turn in enumerate(done)
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
