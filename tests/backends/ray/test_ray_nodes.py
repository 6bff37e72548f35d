"""A cluster of several nodes: a node dies, and its actors go on elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ludus.backends.conformance import GRPO, SETTINGS, rewarded, turns
from ludus.backends.ray.backend import RayBackend
from ludus.core.errors import ConfigError

ray = pytest.importorskip("ray", reason="needs the extra ray")
pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Three nodes of this machine; the head has no room for actors but one."""
    from ray.cluster_utils import Cluster

    if ray.is_initialized():
        ray.shutdown()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    for _ in range(2):
        cluster.add_node(num_cpus=4)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def nodes_of(backend: RayBackend) -> set[str]:
    actors = [*backend.learners.actors, *(r.channel.actor for r in backend.sampler.replicas)]
    return set(ray.get([actor.node_id.remote() for actor in actors]))


async def test_a_node_dies_and_the_run_goes_on(
    cluster: Any, make: Callable[..., RayBackend], tmp_path: Path
) -> None:
    """All actors of a run are on two nodes; one node dies in a step. Another has joined."""
    calm = make(tmp_path / "calm", learner_ranks=2, samplers=2, cpus=1)
    struck = make(tmp_path / "struck", learner_ranks=2, samplers=2, cpus=1)
    metrics: dict[RayBackend, list[dict[str, float]]] = {calm: [], struck: []}
    assert nodes_of(struck)
    for backend, found in metrics.items():
        backend.begin_stage(SETTINGS, GRPO)
        for step in range(2):
            samples = rewarded(await turns(backend))
            task = asyncio.create_task(backend.train(samples, GRPO))
            if backend is struck and step == 1:
                await asyncio.sleep(0)
                cluster.add_node(num_cpus=4)
                used = nodes_of(struck)
                node = next(n for n in cluster.worker_nodes if n.node_id in used)
                cluster.remove_node(node)
            found.append(await task)
            await backend.publish_weights()
        if backend is calm:
            expected = await turns(calm)
            calm.close()
    assert metrics[calm] == metrics[struck]
    assert struck.learners.num_deaths + struck.sampler.num_deaths >= 1
    assert await turns(struck) == expected
    struck.close()


def test_what_no_node_has(cluster: Any, make: Callable[..., RayBackend], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no node has 4\.5 CPUs, which one actor needs"):
        make(tmp_path, cpus=4.5, samplers=1)


def test_two_runs_do_not_see_each_other(
    cluster: Any, make: Callable[..., RayBackend], tmp_path: Path
) -> None:
    first, second = (make(tmp_path / name, cpus=1) for name in ("a", "b"))
    first.close()
    assert asyncio.run(turns(second))
    second.close()
