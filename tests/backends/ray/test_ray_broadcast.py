"""Weights by broadcast: the results of the object store, also where members die or hang."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ludus.backends.conformance import GRPO, SETTINGS, rewarded, turns
from ludus.backends.ray.backend import RayBackend
from ludus.backends.ray.publication import publisher

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.usefixtures("local_ray")]

Make = Callable[..., RayBackend]
BROADCAST: dict[str, Any] = {"weights": "broadcast", "broadcast_timeout_s": 100.0}


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """The outcome of each broadcast: its fault, and whether an actor died."""
    seen: list[tuple[str, bool]] = []
    note = publisher.Broadcasts.note

    def noted(self: Any, fault: str, *, died: bool) -> None:
        seen.append((fault, died))
        note(self, fault, died=died)

    monkeypatch.setattr(publisher.Broadcasts, "note", noted)
    return seen


def pid_of(actor: Any) -> int:
    import ray

    return int(ray.get(actor.facts.remote())["pid"])


async def step(backend: RayBackend) -> dict[str, float]:
    metrics = await backend.train(rewarded(await turns(backend)), GRPO)
    await backend.publish_weights()
    return metrics


@pytest.mark.parametrize("ranks", [1, 2])
async def test_results_are_those_of_the_object_store(
    make: Make, tmp_path: Path, faults: list[tuple[str, bool]], ranks: int
) -> None:
    """Metrics, turns with their log-probabilities, and the checksums of the weights."""
    found = []
    for name, args in (("stored", {"weights": "object_store"}), ("broadcast", BROADCAST)):
        backend = make(tmp_path / name, learner_ranks=ranks, samplers=2, **args)
        backend.begin_stage(SETTINGS, GRPO)
        metrics = [await step(backend) for _ in range(3)]
        weights = backend.sampler.weights
        assert weights is not None
        assert weights.is_stored == (name == "stored")
        found.append((metrics, await turns(backend), weights.checksums))
        backend.close()
    assert found[0] == found[1]
    assert faults == [("", False)] * 3


async def test_a_sampler_that_dies_in_a_broadcast(
    make: Make, tmp_path: Path, faults: list[tuple[str, bool]]
) -> None:
    """It hangs, so that the broadcast is under way, and is killed. Its successor joins the next."""
    calm, struck = (make(tmp_path / n, samplers=2, **BROADCAST) for n in ("calm", "struck"))
    for backend in (calm, struck):
        backend.begin_stage(SETTINGS, GRPO)
        assert await step(backend)
    samples = {backend: rewarded(await turns(backend)) for backend in (calm, struck)}
    assert await calm.train(samples[calm], GRPO) == await struck.train(samples[struck], GRPO)
    await calm.publish_weights()
    pid = pid_of(struck.sampler.replicas[1].channel.actor)
    os.kill(pid, signal.SIGSTOP)
    faults.clear()
    task = asyncio.create_task(struck.publish_weights())
    await asyncio.sleep(1)
    assert not task.done()
    os.kill(pid, signal.SIGKILL)
    assert await task == 2
    assert struck.sampler.num_deaths == 1
    ((fault, died),) = faults
    assert fault.startswith("sampler 1 has died")
    assert died
    assert await turns(calm) == await turns(struck)
    while len(struck.sampler.alive) < 2:
        await asyncio.sleep(0.1)
    assert await turns(calm) == await turns(struck)  # by the successor too
    assert await step(calm) == await step(struck)
    assert faults[1:] == [("", False)] * 2
    assert await turns(calm) == await turns(struck)
    calm.close()
    struck.close()


async def test_a_rank_that_dies_in_a_broadcast(
    make: Make, tmp_path: Path, faults: list[tuple[str, bool]]
) -> None:
    calm, struck = (make(tmp_path / n, samplers=1, **BROADCAST) for n in ("calm", "struck"))
    for backend in (calm, struck):
        backend.begin_stage(SETTINGS, GRPO)
        assert await step(backend)
    samples = {backend: rewarded(await turns(backend)) for backend in (calm, struck)}
    assert await calm.train(samples[calm], GRPO) == await struck.train(samples[struck], GRPO)
    await calm.publish_weights()
    pid = pid_of(struck.learners.actors[0])
    os.kill(pid, signal.SIGSTOP)
    faults.clear()
    task = asyncio.create_task(struck.publish_weights())
    await asyncio.sleep(1)
    assert not task.done()
    os.kill(pid, signal.SIGKILL)
    assert await task == 2
    assert struck.learners.num_deaths == 1
    ((fault, died),) = faults
    assert "learner rank 0 of 1 died in weights" in fault
    assert died
    assert await turns(calm) == await turns(struck)
    assert await step(calm) == await step(struck)
    assert faults[1:] == [("", False)] * 2
    assert await turns(calm) == await turns(struck)
    calm.close()
    struck.close()


async def test_a_sampler_that_hangs_is_ended_and_replaced(
    make: Make, tmp_path: Path, faults: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "GRACE_S", 2.0)
    backend = make(tmp_path, samplers=2, weights="broadcast", broadcast_timeout_s=3.0)
    backend.begin_stage(SETTINGS, GRPO)
    pid = pid_of(backend.sampler.replicas[1].channel.actor)
    os.kill(pid, signal.SIGSTOP)
    assert await backend.publish_weights() == 1
    ((fault, died),) = faults
    assert fault == "sampler 1 did not come within 3 s"
    assert died
    assert backend.sampler.num_deaths == 1
    assert {turn.policy_version for turn in await turns(backend)} == {1}
    backend.close()
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


async def test_a_sampler_that_dies_later_gets_weights_that_were_broadcast(
    make: Make, tmp_path: Path, faults: list[tuple[str, bool]]
) -> None:
    """From the learner, which puts them into the object store."""
    backend = make(tmp_path, samplers=1, **BROADCAST)
    backend.begin_stage(SETTINGS, GRPO)
    await step(backend)
    trained = await turns(backend)
    os.kill(pid_of(backend.sampler.replicas[0].channel.actor), signal.SIGKILL)
    assert await turns(backend) == trained
    assert backend.sampler.weights is not None
    assert backend.sampler.weights.is_stored
    assert faults == [("", False)]
    backend.close()


async def test_a_group_that_cannot_be_formed(
    make: Make, tmp_path: Path, faults: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing listens at the store's port, as behind a firewall. Two trials, then no more."""
    monkeypatch.setattr(publisher.Broadcasts, "_address", lambda self: ("127.0.0.1", 9))
    monkeypatch.setattr(publisher.Broadcasts, "end", lambda self, reason: None)
    backend = make(tmp_path, samplers=1, weights="broadcast", broadcast_timeout_s=1.0)
    backend.begin_stage(SETTINGS, GRPO)
    for version in (1, 2, 3):
        assert await backend.publish_weights() == version
        assert {turn.policy_version for turn in await turns(backend)} == {version}
    assert len(faults) == 2
    assert all("the driver's store does not answer" in fault for fault, _ in faults)
    backend.close()
