"""Playing ahead: the policy learns while episodes go on, within a bound on their weights' age."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_helpers import LEVERS, PLACES, Bandit, Recording, World, task

from ludus.config.schema import RunConfig
from ludus.core.errors import ConfigError, TrainingError
from ludus.core.types import (
    Group,
    Message,
    Segment,
    Spec,
    Status,
    StepResult,
    Task,
    Trajectory,
)
from ludus.core.versions import mean_age
from ludus.loop.loop import Stage, run_stage
from ludus.models.samplers.base import SamplingParams
from ludus.pipeline.stages import sample_until_signal
from ludus.rollout.prefetch import PrefetchSource, longest_wait, token_ages
from ludus.rollout.source import require_fresh
from ludus.tasks.curriculum import TaskSampler
from ludus.train.batches.packing import pack
from ludus.train.batches.samples import to_samples

GRPO = Spec(name="grpo", args={"importance_cap": 2.0})
EVERYTHING = [(place, lever) for place in PLACES for lever in LEVERS]


MADE: list[World] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    """No learner's thread outlives its test."""
    yield
    while MADE:
        MADE.pop().backend.close()


class Moody(Bandit):
    """Three pulls, each of which takes its time: mostly none, now and then very long."""

    max_turns = 3

    def __init__(self, seconds: float, share: float = 1.0) -> None:
        self.seconds, self.share, self.pulls = seconds, share, 0

    async def step(self, action: Message) -> StepResult:
        self.pulls += 1
        if random.random() < self.share:
            time.sleep(self.seconds * random.random())
        result = await super().step(action)
        more = [Message(role="user", content="pull a lever in the hall")]
        return result.model_copy(update={"messages": more, "terminated": self.pulls == 3})


class Lottery(Bandit):
    """Any lever wins something."""

    async def step(self, action: Message) -> StepResult:
        return StepResult(reward=random.random(), terminated=True)


class Sticky(Bandit):
    """Takes its time to close."""

    async def close(self) -> None:
        time.sleep(0.02)


async def world_of(folder: Path, env: str | dict[str, Any] | None = None, **changes: Any) -> World:
    """A world whose learner has a thread of its own, and whose policy pulls any lever."""
    world = World(folder)
    changed = world.config.model_dump()
    changed["rl"] = {"max_staleness": 2, "tokens_per_batch": 128, "algorithm": GRPO}
    changed["rollout"]["deterministic"] = False
    if env is not None:
        changed["env"] = env
    world.config = RunConfig.model_validate({**changed, **changes})
    model = world.backend.model
    world.backend = type(world.backend)(lambda: model, world.renderer, world.config, folder)
    MADE.append(world)
    await run_stage(world.sft(EVERYTHING, steps=30), world.backend, Recording())
    return world


def ahead(world: World, tasks: Sequence[Task], steps: int, bound: int = 2, **options: Any) -> Stage:
    """The reinforcement learning of `World`, played ahead."""
    stage = world.rl(tasks, steps, **{"algorithm": GRPO, **options})
    collector = world.collector(concurrency=24 * (bound + 1))
    source = PrefetchSource(
        lambda step: collector,
        TaskSampler(tasks),
        steps=steps,
        groups_per_step=stage.groups_per_step,
        group_size=8,
        max_staleness=bound,
    )
    stage.source = sample_until_signal(source, stage.algorithm)
    return stage


def played(kept: Recording) -> list[Group]:
    return [group for _, _, groups, _ in kept.steps for group in groups]


async def test_grpo_finds_the_lever_that_pays(tmp_path: Path) -> None:
    world, kept = await world_of(tmp_path), Recording()
    stage = ahead(world, [task(place) for place in PLACES], steps=18)
    await run_stage(stage, world.backend, kept)
    success = kept.metric("rollout/success")
    assert sum(success[:2]) / 2 < 0.6
    assert sum(success[-2:]) / 2 > 0.9
    assert kept.metric("train/policy_version") == list(range(31, 49))
    ages = kept.metric("rollout/staleness_max")
    assert max(ages) == 2  # it does play ahead
    assert ages[0] == 0
    assert len({group.id for group in played(kept)}) == len(played(kept))


@pytest.mark.parametrize("bound", [1, 3])
async def test_no_turn_is_older_than_the_bound(tmp_path: Path, bound: int) -> None:
    moody = {"name": "test_prefetch:Moody", "args": {"seconds": 0.2, "share": 0.1}}
    world, kept = await world_of(tmp_path, moody), Recording()
    stage = ahead(world, [task(place) for place in PLACES], 12, bound)
    await run_stage(stage, world.backend, kept)
    for _, step, groups, metrics in kept.steps:
        ages = {
            30 + step - version
            for g in groups
            for t in g.trajectories
            for s in t.segments
            for version, _ in s.runs
        }
        assert ages <= set(range(bound + 1))
        assert metrics["rollout/staleness_max"] <= bound
        assert metrics["rollout/staleness_mean"] <= metrics["rollout/staleness_max"]
        assert len(groups) >= 3
    assert max(kept.metric("rollout/staleness_max")) == bound
    everyone = [t for group in played(kept) for t in group.trajectories]
    cut = [t for t in everyone if t.status is Status.ABORTED]
    assert len(cut) == sum(kept.metric("rollout/cut"))
    assert all("rl.max_staleness" in str(t.error) and t.error in str(t.dropped) for t in cut)
    assert all(t.status.trainable for t in everyone if t not in cut)
    assert all(t.dropped is None for t in everyone if t not in cut)


async def test_stragglers_are_cut_and_the_rest_of_their_group_trains(tmp_path: Path) -> None:
    """One episode in every task hangs for good: the others do not wait for it."""
    world, kept = await world_of(tmp_path, "test_prefetch:OneHangs"), Recording()
    stage = ahead(world, [task("hall"), task("roof")], 6, 1, groups_per_step=2)
    try:
        await run_stage(stage, world.backend, kept)
    finally:
        RELEASE.set()
    everyone = [t for group in played(kept) for t in group.trajectories]
    cut = [t for t in everyone if t.status is Status.ABORTED]
    assert 0 < len(cut) == sum(kept.metric("rollout/cut"))
    hit = [g for g in played(kept) if any(t in cut for t in g.trajectories)]
    for group in hit:
        assert [t.dropped is None for t in group.trajectories] == [
            t not in cut for t in group.trajectories
        ]
    assert sum(len(group.trajectories) for group in hit) > len(cut)
    assert len(kept.steps) == 6


@pytest.mark.parametrize(("running", "seconds"), [(1, 10 / 64), (6, 60 / 64), (40, 2.0)])
def test_a_step_waits_for_stragglers_as_long_as_they_are_worth(running: int, seconds: float):
    assert longest_wait(10.0, running, 64) == pytest.approx(seconds)


RELEASE = threading.Event()
HANGING: set[str] = set()


class OneHangs(Bandit):
    """The first two episodes of all never end."""

    async def step(self, action: Message) -> StepResult:
        if len(HANGING) < 2:
            HANGING.add(str(id(self)))
            RELEASE.wait(20)
        return await super().step(action)


@pytest.mark.parametrize("algorithm", ["grpo", "dapo"])
@pytest.mark.parametrize("pays", ["all", "broken"])
async def test_steps_of_which_everything_is_dropped_go_on(
    tmp_path: Path, algorithm: str, pays: str
) -> None:
    world, kept = await world_of(tmp_path), Recording()
    row = Spec(name=algorithm, args={"importance_cap": 2.0})
    stage = ahead(world, [task(place, pays=pays) for place in PLACES], 4, algorithm=row)
    async with asyncio.timeout(60):
        await run_stage(stage, world.backend, kept)
    assert kept.metric("train/policy_version") == [31, 32, 33, 34]
    rounds = 4 if algorithm == "dapo" else 1
    assert kept.metric("rollout/rounds") == [rounds] * 4


def left(tasks: set[asyncio.Task[Any]]) -> list[str]:
    """Names of the running tasks, except the paused sampler's."""
    names = [str(t) for t in asyncio.all_tasks() - tasks if not t.done()]
    return [name for name in names if "_run_steps" not in name]


async def test_a_failing_learner_stops_the_episodes(tmp_path: Path) -> None:
    world = await world_of(tmp_path, "test_prefetch:Lottery")
    before = asyncio.all_tasks()
    stage = ahead(world, [task(place) for place in PLACES], 5)

    def fail(*_: Any) -> None:
        raise TrainingError("the loss is nan")

    world.backend.learner.train_step = fail  # type: ignore[method-assign, assignment]
    with pytest.raises(TrainingError, match="the loss is nan"):
        await run_stage(stage, world.backend, Recording())
    assert not left(before)
    assert not world.backend.sampler._scheduler.sessions  # type: ignore[attr-defined]


async def test_a_failing_sampler_stops_the_learner(tmp_path: Path) -> None:
    world, kept = await world_of(tmp_path), Recording()
    before = asyncio.all_tasks()
    stage = ahead(world, [task(place) for place in PLACES], 50)
    sample = world.backend.sampler.sample

    async def fail(*args: Any, **options: Any) -> Any:
        if len(kept.steps) >= 2:
            raise TrainingError("logits are not finite")
        return await sample(*args, **options)

    world.backend.sampler.sample = fail  # type: ignore[method-assign]
    with pytest.raises(TrainingError, match="not finite"):
        await run_stage(stage, world.backend, kept)
    assert 2 <= len(kept.steps) <= 5  # what had been played by then may have been trained on
    assert not left(before)


async def test_cancelling_the_run_stops_both(tmp_path: Path) -> None:
    """As with Ctrl-C, asyncio cancels the main task."""
    world = await world_of(tmp_path, {"name": "test_prefetch:Moody", "args": {"seconds": 0.1}})
    kept = Recording()
    before = asyncio.all_tasks()
    stage = ahead(world, [task(place) for place in PLACES], 10_000)
    running = asyncio.create_task(run_stage(stage, world.backend, kept))
    while len(kept.steps) < 2:
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not left(before)
    world.backend.close()
    for thread in world.backend._thread._threads:  # the step that it computes is not awaited
        thread.join(60)
        assert not thread.is_alive()


async def test_the_sampler_rests_from_the_first_look_to_the_publication(tmp_path: Path) -> None:
    """A sampler that shares the weights: no token is sampled with weights that change, or that have
    no version."""
    shared = Spec(name="in_process", args={"path": "generic"})
    world = await world_of(tmp_path, "test_prefetch:Lottery", sampler=shared)
    kept = Recording()
    backend, seen = world.backend, []
    stage = ahead(world, [task(place) for place in PLACES], 6, minibatches=2)
    forward = backend.sampler.decoder.forward  # type: ignore[attr-defined]
    tree = {"version": [p._version for p in backend.model.parameters()]}

    def watched(batch: Any) -> Any:
        now = [p._version for p in backend.model.parameters()]
        seen.append(now == tree["version"])
        return forward(batch)

    publish = backend.sampler.publish

    def published(version: int) -> None:
        tree["version"] = [p._version for p in backend.model.parameters()]
        publish(version)

    backend.sampler.decoder.forward = watched  # type: ignore[attr-defined]
    backend.sampler.publish = published  # type: ignore[method-assign]
    await run_stage(stage, backend, kept)
    assert seen
    assert all(seen)
    assert sum(kept.metric("train/optimizer_steps")) > 0


async def test_a_server_that_takes_the_weights_holds_nobody_up(tmp_path: Path) -> None:
    """Publishing to what does not share the learner's thread leaves the event loop free."""
    backend, ticked = (await world_of(tmp_path)).backend, asyncio.Event()
    loop = asyncio.get_running_loop()

    class Server:
        """Is done with the weights when the event loop has had a turn."""

        shares_weights = False

        def pause(self) -> None: ...

        def publish(self, version: int) -> None:
            done = asyncio.run_coroutine_threadsafe(ticked.wait(), loop)
            loop.call_soon_threadsafe(ticked.set)
            assert done.result(timeout=60)

        def resume(self) -> None: ...

        def shutdown(self) -> None: ...

    backend.sampler = Server()  # type: ignore[assignment]
    assert await backend.publish_weights() == 31
    assert backend.policy_version == 31


async def test_a_turn_may_go_on_over_an_update_and_knows_the_version_of_each_token(
    tmp_path: Path,
) -> None:
    world = await world_of(tmp_path)
    sampler = world.backend.sampler
    params = SamplingParams(max_tokens=40, seed=3)
    sampler.open("s")
    turn = asyncio.create_task(sampler.sample([5, 6, 7], params, session="s"))
    while not sampler.num_decode_tokens:  # type: ignore[attr-defined]
        await asyncio.sleep(0)
    sampler.pause()
    sampled = sampler.num_decode_tokens  # type: ignore[attr-defined]
    for _ in range(20):
        await asyncio.sleep(0)
    assert sampler.num_decode_tokens == sampled  # type: ignore[attr-defined]
    assert not turn.done()
    sampler.publish(31)
    sampler.resume()
    done = await turn
    assert done.runs == [(30, sampled), (31, 40 - sampled)]
    assert done.policy_version == 30
    sampler.close("s")


async def test_a_resumed_run_plays_what_was_under_way_again(tmp_path: Path) -> None:
    world, kept = await world_of(tmp_path), Recording()
    tasks = [task(place, number=i) for i, place in enumerate(PLACES * 2)]
    stage = ahead(world, tasks, 5)
    saved: dict[str, Any] = {}

    async def after_step(done: int) -> bool:
        if done == 2:
            saved.update(json.loads(json.dumps(stage.source.state_dict())))
        return done < 2

    stage.after_step = after_step
    await run_stage(stage, world.backend, kept)
    stage = ahead(world, tasks, 5)
    stage.source.load_state_dict(saved)
    assert stage.source.state_dict() == saved
    await run_stage(stage, world.backend, kept, start=2)
    names = sorted(group.id for group in played(kept))
    assert names == [f"rl-{step:06d}/g{i:04d}" for step in range(5) for i in range(3)]
    order = [group.task.id for group in sorted(played(kept), key=lambda g: g.id)]
    plain = TaskSampler(tasks)
    assert order == [next(plain).id for _ in range(15)]  # each in its turn, none left out


@pytest.mark.parametrize("pays", ["all", "broken"])
async def test_the_last_step_ends_whatever_is_due(tmp_path: Path, pays: str) -> None:
    """All of the last groups are due and useless, and there are no others to wait for."""
    world, kept = await world_of(tmp_path), Recording()
    stage = ahead(world, [task(place, pays=pays) for place in PLACES], 3, 1)
    async with asyncio.timeout(60):
        await run_stage(stage, world.backend, kept)
    assert len(kept.steps) == 3


@pytest.mark.parametrize("env", [None, "test_prefetch:Sticky"])
async def test_what_no_step_trained_on_comes_back_with_the_reason(
    tmp_path: Path, env: str | None
) -> None:
    """An episode that was scored already, and is being closed, is complete."""
    world, kept = await world_of(tmp_path, env), Recording()
    stage = ahead(world, [task(place) for place in PLACES], 20, 2)
    left: list[Group] = []

    async def after_step(done: int) -> bool:
        if done == 3:
            left.extend(await stage.source.close())
        return done < 3

    stage.after_step = after_step
    await run_stage(stage, world.backend, kept)
    names = [group.id for group in [*played(kept), *left]]
    assert left
    assert len(set(names)) == len(names) == stage.source.state_dict()["ahead"]["next_number"]
    assert stage.source.state_dict()["ahead"]["again"] == []
    for trajectory in (t for group in left for t in group.trajectories):
        assert "no step was left" in str(trajectory.dropped)
        assert trajectory.status in (Status.COMPLETED, Status.ABORTED)
        assert (trajectory.reward is None) == (trajectory.status is Status.ABORTED)


async def test_without_playing_ahead_it_is_the_synchronous_loop_to_the_bit(tmp_path: Path) -> None:
    """Written out here, line by line: the same losses, gradients and weights."""
    tasks, steps = [task(place) for place in PLACES], 4
    world, kept = World(tmp_path / "a"), Recording()
    changed = {**world.config.model_dump(), "rl": {"max_staleness": 0, "algorithm": GRPO}}
    world.config = RunConfig.model_validate(changed)
    model = world.backend.model
    world.backend = type(world.backend)(lambda: model, world.renderer, world.config, tmp_path)
    await run_stage(world.sft(EVERYTHING, steps=10), world.backend, Recording())
    await run_stage(world.rl(tasks, steps, GRPO), world.backend, kept)

    plain = World(tmp_path / "b")
    await run_stage(plain.sft(EVERYTHING, steps=10), plain.backend, Recording())
    stage, backend, found = plain.rl(tasks, steps, GRPO), plain.backend, []
    algorithm, sampler = stage.algorithm, TaskSampler(tasks)
    pad_id, layout = plain.renderer.tokenizer.pad_token_id, backend.learner.forward.layout
    for step in range(steps):
        collector = plain.collector()
        chosen = [next(sampler) for _ in range(stage.groups_per_step)]
        groups = await collector.collect(chosen, step, 8)
        scored = await backend.score(algorithm.screen(groups).groups, algorithm)
        samples = to_samples(algorithm.credit(scored))
        weighted = zip(samples, algorithm.aggregate(samples), strict=True)
        live = [(sample, weight) for sample, weight in weighted if any(sample.advantages)]
        rows, weights = [s for s, _ in live], [w for _, w in live]
        batch = pack(rows, weights, tokens_per_batch=128, pad_id=pad_id, layout=layout)
        found.append(backend.learner.train_step(batch, algorithm.loss))
        await backend.publish_weights()

    for name in ("loss", "grad_norm", "ratio", "entropy"):
        assert kept.metric(f"train/{name}") == [metrics[name] for metrics in found]
    assert min(kept.metric("train/grad_norm")) > 0
    for ours, theirs in zip(
        world.backend.model.parameters(), plain.backend.model.parameters(), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_the_age_of_tokens_by_hand() -> None:
    assert token_ages([], 3) == {}
    turns = [
        Segment(-1, [5]),
        Segment(0, [6, 7], [-1.0, -1.0], policy_version=1),
        Segment(1, [7], [-1.0]),
        Segment(2, [8, 9, 9], [-1.0] * 3, policy_version=1, version_runs=[(1, 1), (3, 2)]),
    ]
    aborted = Trajectory("b", "g", "t", turns, status=Status.ABORTED)
    groups = [Group("g", Task(id="t"), [Trajectory("a", "g", "t", turns), aborted])]
    ages = token_ages(groups, 3)
    assert ages == {2: 3, 0: 2}
    assert mean_age(ages) == pytest.approx(6 / 5)
    assert mean_age(Counter()) == 0


@pytest.mark.parametrize(
    ("runs", "told"),
    [
        ([(3, 1), (5, 2)], None),
        ([(2, 1), (4, 2)], "version 2 of the weights"),
        ([(4, 1), (6, 1), (4, 1)], "version 6 of the weights"),
    ],
)
def test_every_token_of_a_turn_must_be_fresh(runs: list[tuple[int, int]], told: str | None) -> None:
    oldest = min(version for version, _ in runs)
    turn = Segment(-1, [6, 7, 8], [-1.0] * 3, policy_version=oldest, version_runs=runs)
    groups = [Group("g", Task(id="t"), [Trajectory("a", "g", "t", [turn])])]
    if told is None:
        require_fresh(groups, 5, 2)
    else:
        with pytest.raises(TrainingError, match=told):
            require_fresh(groups, 5, 2)


@pytest.mark.parametrize(
    ("section", "key", "value", "told"),
    [
        ("rollout", "deterministic", True, "rollout.deterministic: false"),
        ("rl", "algorithm", "grpo", "importance_cap"),
        (None, "verify", True, "verify: false"),
    ],
)
async def test_what_playing_ahead_needs(
    tmp_path: Path, section: str | None, key: str, value: Any, told: str
) -> None:
    config = (await world_of(tmp_path)).config.model_dump()
    (config[section] if section else config)[key] = value
    with pytest.raises((ConfigError, ValueError), match=told):
        RunConfig.model_validate(config)
