"""Actors die: they are replaced, and no turn, episode or step is lost or doubled."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ludus.backends.conformance import GRPO, SETTINGS, check_refusal, rewarded, turns
from ludus.backends.ray.backend import RayBackend
from ludus.core.errors import ConfigError, EnvLost, LudusError
from ludus.core.types import Message, Spec
from ludus.envs import ENVS
from ludus.rollout.hosts.threads import EnvThread

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("local_ray")]

Make = Callable[..., RayBackend]


def kill(actor: Any) -> None:
    """Kill the process of an actor, as the kernel does where memory is short."""
    import ray

    facts = actor.facts.remote()
    os.kill(int(ray.get(facts)["pid"]), signal.SIGKILL)


async def test_turns_go_on_where_a_sampler_dies(make: Make, tmp_path: Path) -> None:
    backend = make(tmp_path, samplers=2)
    backend.begin_stage(SETTINGS, GRPO)
    expected = await turns(backend)
    await backend.train(rewarded(expected), GRPO)
    await backend.publish_weights()
    trained = await turns(backend)
    task = asyncio.create_task(turns(backend))
    await asyncio.sleep(0)
    kill(backend.sampler.replicas[0].channel.actor)
    assert await task == trained
    assert backend.sampler.num_deaths == 1
    while len([r for r in backend.sampler.replicas if r.alive]) < 2:
        await asyncio.sleep(0.1)
    kill(backend.sampler.replicas[1].channel.actor)
    assert await turns(backend) == trained  # by the replacement too, with the trained weights
    backend.close()


@pytest.mark.long
async def test_a_sampler_that_dies_between_turns_gets_no_weights(
    make: Make, tmp_path: Path
) -> None:
    backend = make(tmp_path, samplers=1)
    backend.begin_stage(SETTINGS, GRPO)
    await backend.train(rewarded(await turns(backend)), GRPO)
    kill(backend.sampler.replicas[0].channel.actor)
    assert await backend.publish_weights() == 1
    assert {turn.policy_version for turn in await turns(backend)} == {1}
    backend.close()


@pytest.mark.parametrize(
    ("saved", "ranks"),
    [
        (True, 2),
        pytest.param(False, 1, marks=pytest.mark.long),
        pytest.param(False, 2, marks=pytest.mark.long),
        pytest.param(True, 1, marks=pytest.mark.long),
    ],
)
async def test_a_dead_rank_is_replaced_and_its_steps_are_repeated(
    make: Make, tmp_path: Path, ranks: int, saved: bool
) -> None:
    calm, struck = (make(tmp_path / name, learner_ranks=ranks) for name in ("calm", "struck"))
    metrics: dict[RayBackend, list[dict[str, float]]] = {calm: [], struck: []}
    for backend, found in metrics.items():
        backend.begin_stage(SETTINGS, GRPO)
        for step in range(4):
            samples = rewarded(await turns(backend))
            if backend is struck and step == 2:
                task = asyncio.create_task(backend.train(samples, GRPO))
                await asyncio.sleep(0)
                kill(backend.learners.actors[-1])
                found.append(await task)
            else:
                found.append(await backend.train(samples, GRPO))
            assert await backend.publish_weights() == step + 1
            if saved and step == 0:
                backend.save("rl", 1, {"cursor": 1}, None, pin=False)
                backend.finish_save()
    assert struck.learners.num_deaths == 1
    assert metrics[calm] == metrics[struck]
    assert await turns(calm) == await turns(struck)
    calm.close()
    struck.close()


@pytest.mark.long
@pytest.mark.parametrize("training", [False, True])
async def test_weights_outlive_the_rank_that_published_them(
    make: Make, tmp_path: Path, training: bool
) -> None:
    """A new sampler gets them where both have died, the rank first."""
    backend = make(tmp_path, samplers=1)
    backend.begin_stage(SETTINGS, GRPO)
    samples = rewarded(await turns(backend))
    await backend.train(samples, GRPO)
    await backend.publish_weights()
    trained = await turns(backend)
    kill(backend.learners.actors[0])
    task = asyncio.create_task(backend.train(samples, GRPO)) if training else None
    await asyncio.sleep(0.5)
    kill(backend.sampler.replicas[0].channel.actor)
    assert await turns(backend) == trained
    assert (backend.sampler.num_deaths, backend.learners.num_deaths) == (1, 1)
    if task is not None:
        await task
    await backend.publish_weights()
    assert {turn.policy_version for turn in await turns(backend)} == {2}
    backend.close()


@pytest.mark.long
async def test_a_rank_that_dies_while_samplers_fetch_its_weights(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make(tmp_path, samplers=1)
    backend.begin_stage(SETTINGS, GRPO)
    await backend.train(rewarded(await turns(backend)), GRPO)
    update = backend.sampler.update

    async def dying(*args: Any) -> None:
        if not backend.learners.num_deaths:
            kill(backend.learners.actors[0])
            await asyncio.sleep(1)
        await update(*args)

    monkeypatch.setattr(backend.sampler, "update", dying)
    assert await backend.publish_weights() == 1
    assert {turn.policy_version for turn in await turns(backend)} == {1}
    assert backend.learners.num_deaths == 1
    backend.close()


@pytest.mark.long
async def test_the_run_stops_after_too_many_deaths(make: Make, tmp_path: Path) -> None:
    backend = make(tmp_path, max_deaths=1)
    backend.begin_stage(SETTINGS, GRPO)
    samples = rewarded(await turns(backend))
    kill(backend.learners.actors[0])
    await backend.train(samples, GRPO)
    kill(backend.learners.actors[0])
    with pytest.raises(LudusError, match=r"learner rank 0 of 1 died in train.*max_deaths"):
        await backend.train(samples, GRPO)
    for last in (False, True):
        task = asyncio.create_task(turns(backend))
        await asyncio.sleep(0)
        kill(backend.sampler.replicas[0].channel.actor)
        if not last:
            await task
    with pytest.raises(LudusError, match=r"sampler 0 has died.*max_deaths"):
        await task
    backend.close()


async def test_an_episode_whose_worker_dies_has_lost_its_environment(
    make: Make, tmp_path: Path
) -> None:
    backend = make(tmp_path, env_workers=2)
    assert backend.envs is not None
    envs = backend.make_envs(Spec(name="textcraft"))
    env_class: Any = ENVS.load("textcraft")
    task = env_class.task(env_class.tiers()[0], 1)
    thread = EnvThread()
    played = [envs.host(task, thread, 30.0) for _ in range(4)]
    opened = [(await env.reset(task)).messages for env in played if env]
    assert len({str(messages) for messages in opened}) == 1
    kill(backend.envs.workers[0].channel.actor)
    action = Message(role="assistant", content="inventory")
    done = await asyncio.gather(
        *(env.step(action) for env in played if env), return_exceptions=True
    )
    lost = [error for error in done if isinstance(error, EnvLost)]
    assert len(lost) == 2
    assert "environment worker 0 has died" in str(lost[0])
    again = envs.host(task, thread, 30.0)
    assert again is not None
    assert (await again.reset(task)).messages == opened[0]
    for env in (*played, again):
        assert env is not None
        await env.close()
    backend.close()


def test_a_placement_that_can_never_be_met(make: Make, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"samplers = 40.*the cluster has 16: .* CPUs are missing"
    ):
        make(tmp_path, samplers=40, cpus=1)


def test_a_placement_that_others_hold(make: Make, tmp_path: Path) -> None:
    first = make(tmp_path / "a", cpus=6)
    with pytest.raises(ConfigError, match=r"within placement_deadline_s = 1 s; free are 4 CPUs"):
        make(tmp_path / "b", cpus=6, placement_deadline_s=1)
    first.close()
    make(tmp_path / "c", cpus=6).close()


async def test_keys_that_it_does_not_honour(make: Make, tmp_path: Path) -> None:
    await check_refusal(lambda: make(tmp_path, {"verify": True}), "verify: true")


def test_actors_end_with_the_back_end(make: Make, tmp_path: Path) -> None:
    import psutil
    import ray

    backend = make(tmp_path, env_workers=1)
    actors = [backend.learners.actors[0], backend.sampler.replicas[0].channel.actor]
    pids = [int(ray.get(actor.facts.remote())["pid"]) for actor in actors]
    backend.close()
    deadline = time.monotonic() + 20
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(psutil.pid_exists, pids))
