"""SGLang sampler with a real server: samples, weight updates, failures.

One server serves the tests of this file, and is killed by the last of them but one.
"""

from __future__ import annotations

import asyncio
import copy
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import expected_logprobs, tiny
from engines import engine_python
from served_world import CONTEXT, LEVERS, PROMPT, World, error_of, perturb, sample

from ludus.config.schema import OptimizerConfig
from ludus.core.errors import LudusError, SamplerError, TrainingError
from ludus.core.types import Group, Message, Status, Task
from ludus.loop.loop import Stage, run_stage
from ludus.models.samplers.base import Completion, SamplingParams, num_embeddings
from ludus.rollout.source import SyncSource
from ludus.tasks.curriculum import TaskSampler
from ludus.train import ALGORITHMS
from ludus.train.batches.minibatches import TrainSettings

pytestmark = [pytest.mark.engine("sglang"), pytest.mark.timeout(900)]

LONG = 900


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World("sglang", tmp_path_factory.mktemp("sglang"))
    asyncio.run(sample(made, SamplingParams(1)))
    yield made
    made.backend.close()


async def until_sampling(world: World, num_tokens: int) -> None:
    """Wait until the KV cache has this many tokens of running turns."""
    async with world.server.client() as client:
        while (await client.get("/get_load")).json()["load"] < num_tokens:
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.6}, {"temperature": 0}], ids=str)
async def test_logprobs_are_of_the_distribution_sampled_from(
    world: World, settings: dict[str, Any]
) -> None:
    params = SamplingParams(24, **settings)
    done = await asyncio.gather(*[sample(world, params, f"s{n}") for n in range(12)])
    for completion in done:
        assert len(completion.token_ids) == 24
        assert (completion.finish_reason, completion.policy_version) == ("length", 0)
        assert error_of(world, completion, params) < 1e-3
    assert len({tuple(c.token_ids) for c in done}) == (
        1 if settings.get("temperature") == 0 else 12
    )


async def test_sampled_ids_are_tokens(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise half of the ids of this model, which knows nothing, would be others."""
    size = num_embeddings(world.model)
    monkeypatch.setattr(world.sampler, "_never", range(size // 2, size))
    done = await sample(world, SamplingParams(60, temperature=2.0))
    assert max(done.token_ids) < size // 2
    rows = torch.tensor([[*PROMPT, *done.token_ids]])
    with torch.no_grad():
        logits_LV = world.model(rows).logits[0, len(PROMPT) - 1 : -1, : size // 2]
    logprobs_LV = (logits_LV / 2.0).log_softmax(-1)
    expected = logprobs_LV.gather(-1, torch.tensor(done.token_ids)[:, None])[:, 0]
    assert done.logprobs == pytest.approx(expected.tolist(), abs=1e-3)


async def test_a_turn_ends_at_a_stop(world: World) -> None:
    """Greedy turns, which repeat."""
    free = await sample(world, SamplingParams(30, temperature=0))
    stop = free.token_ids[5]
    cut = await sample(world, SamplingParams(30, temperature=0, stop_token_ids=(stop,)))
    assert cut.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert cut.finish_reason == "stop"
    words = [world.renderer.tokenizer.decode([id]).strip() for id in free.token_ids]
    cut = await sample(world, SamplingParams(30, temperature=0, stop=(words[5],)))
    assert cut.finish_reason == "stop"
    assert cut.token_ids == free.token_ids[: words.index(words[5]) + 1]


async def test_the_models_own_end_does_not_end_a_turn(world: World) -> None:
    own = world.renderer.tokenizer.eos_token_id
    other = next(id for id in range(num_embeddings(world.model)) if id != own)
    done = [await sample(world, SamplingParams(60, stop_token_ids=(other,))) for _ in range(6)]
    assert any(own in turn.token_ids[:-1] for turn in done)
    for turn in done:
        assert (turn.token_ids[-1] == other) == (turn.finish_reason == "stop")


async def test_the_whole_context_can_be_used(world: World) -> None:
    prompt = [5 + n % 20 for n in range(CONTEXT - 8)]
    world.sampler.open("a")
    done = await world.sampler.sample(prompt, SamplingParams(8), session="a")
    world.sampler.close("a")
    assert len(done.token_ids) == 8


async def test_a_cancelled_turn_ends_in_the_server(world: World) -> None:
    turn = asyncio.create_task(sample(world, SamplingParams(CONTEXT - 3)))
    await until_sampling(world, 10)
    world.sampler.close("a")
    with pytest.raises(asyncio.CancelledError):
        await turn
    while not world.server.send("/flush_cache").is_success:  # not while a turn runs
        await asyncio.sleep(0.02)


async def test_two_steps_of_grpo(world: World) -> None:
    kept: list[tuple[list[Group], dict[str, float]]] = []

    class Recorder:
        def record(self, stage: str, step: int, groups: Any, metrics: dict[str, float]) -> None:
            kept.append((list(groups), dict(metrics)))

    collector = world.collector()

    async def play(tasks: Any, step: int, **_: Any) -> list[Group]:
        return await collector.collect(tasks, step, 8)

    prompts = [[Message(role="user", content=f"pull a lever {lever}")] for lever in LEVERS]
    stage = Stage(
        TrainSettings("rl", 2, OptimizerConfig(lr=0.01), CONTEXT),
        groups_per_step=4,
        source=SyncSource(
            TaskSampler([Task(id=str(i), prompt=p) for i, p in enumerate(prompts)]), play
        ),
        algorithm=ALGORITHMS.build("grpo"),
    )
    world.backend.begin_stage(stage.settings, stage.algorithm)
    await run_stage(stage, world.backend, Recorder())
    for step, (groups, metrics) in enumerate(kept):
        sampled = [s for g in groups for t in g.trajectories for s in t.segments if s.sampled]
        assert len(sampled) == 32
        assert {s.policy_version for s in sampled} == {step}
        # The learner computes the very log-probabilities that SGLang sampled with.
        assert metrics["train/ratio"] == pytest.approx(1, abs=1e-3)
        assert metrics["train/policy_version"] == step + 1
    completion = await sample(world, SamplingParams(24))
    assert completion.policy_version == 2
    assert error_of(world, completion, SamplingParams(24)) < 1e-3


async def test_weight_update_during_a_turn(world: World) -> None:
    before, old = world.sampler.policy_version, copy.deepcopy(world.model)
    turns = [asyncio.create_task(sample(world, SamplingParams(LONG), f"s{n}")) for n in range(4)]
    await until_sampling(world, 4 * 20)
    assert not any(turn.done() for turn in turns)
    perturb(world)
    await asyncio.to_thread(world.sampler.publish, before + 1)
    done = await asyncio.gather(*turns)
    assert {turn.policy_version for turn in done} == {before}
    assert {len(turn.token_ids) for turn in done} == {LONG}
    after = await sample(world, SamplingParams(24))
    assert after.policy_version == before + 1
    assert error_of(world, after, SamplingParams(24)) < 1e-3
    for turn in done:  # each token was sampled by its version, from keys and values of that version
        (first, num_old), (second, num_new) = turn.runs
        assert (first, second, num_old + num_new) == (before, before + 1, LONG)
        by_old, by_new = (
            expected_logprobs(model, PROMPT, turn, SamplingParams(1))
            for model in (old, world.model)
        )
        assert turn.logprobs == pytest.approx(by_old[:num_old] + by_new[num_old:], abs=1e-3)
        assert by_old[num_old] != pytest.approx(by_new[num_old], abs=1e-3)
        assert by_old[num_old - 1] != pytest.approx(by_new[num_old - 1], abs=1e-3)


async def test_an_update_from_the_thread_of_the_turns(world: World) -> None:
    """As in a Ray actor: it must not wait for turns, which wait for this thread."""
    before = world.sampler.policy_version
    turns = [asyncio.create_task(sample(world, SamplingParams(LONG), f"s{n}")) for n in range(4)]
    await until_sampling(world, 4 * 10)
    world.sampler.publish(before + 1)
    done: list[Completion] = await asyncio.gather(*turns)
    assert {version for turn in done for version, _ in turn.runs} == {before, before + 1}
    assert {len(turn.token_ids) for turn in done} == {LONG}


async def test_weights_that_do_not_match_are_refused(world: World) -> None:
    version = world.sampler.policy_version
    world.sampler._model = tiny()
    with pytest.raises(TrainingError, match=r"refuses weights 99: lm_head\.weight is unknown"):
        world.sampler.publish(99)
    world.sampler._model = world.model
    assert world.sampler.policy_version == version
    after = await sample(world, SamplingParams(24))
    assert after.policy_version == version
    assert error_of(world, after, SamplingParams(24)) < 1e-3


def test_probe_detects_other_weights(world: World) -> None:
    served = world.sampler._probe
    world.sampler._probe = [value + 0.1 for value in served]
    with pytest.raises(TrainingError, match=r"differ from the learner's by up to 0\.1"):
        world.sampler._require_probe(world.server)
    world.sampler._probe = served


async def test_a_killed_server_fails_its_turns_and_restarts(world: World) -> None:
    """Episodes are retried with the weights published last."""
    first, version = world.server, world.sampler.policy_version
    collector = world.collector(max_tokens_per_turn=100)
    task = Task(id="t", prompt=[Message(role="user", content="pull a lever")])
    first.post("/pause_generation", {"mode": "abort"})
    turn = asyncio.create_task(sample(world, SamplingParams(CONTEXT - 3)))
    episodes = asyncio.create_task(collector.collect([task], 0, 4))
    await asyncio.sleep(0.5)
    os.kill(first.pid, signal.SIGKILL)
    with pytest.raises(SamplerError, match="SGLang died during a turn"):
        await turn
    (group,) = await episodes
    assert world.server is not first
    for trajectory in group.trajectories:
        assert trajectory.status in (Status.COMPLETED, Status.TRUNCATED_LENGTH)
        assert trajectory.metrics["retries"] == 1
        assert trajectory.reward is not None
    after = await sample(world, SamplingParams(24))
    assert after.policy_version == version
    assert error_of(world, after, SamplingParams(24)) < 1e-3


async def test_episodes_of_a_dead_server_have_no_reward(world: World) -> None:
    """Without retries and restarts: error status, no reward, then the run ends. Here a process of
    the server is killed, its scheduler."""
    world.sampler._restarts_left = 0
    collector = world.collector(max_tokens_per_turn=CONTEXT - 64, max_retries=0)
    task = Task(id="t", prompt=[Message(role="user", content="pull a lever")])
    world.server.post("/pause_generation", {"mode": "abort"})
    episodes = asyncio.create_task(collector.collect([task], 0, 2))
    await asyncio.sleep(0.5)
    for child in Path(f"/proc/{world.server.pid}/task").glob("*/children"):
        for pid in child.read_text().split():
            if b"sglang::scheduler" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(int(pid), signal.SIGKILL)
    (group,) = await episodes
    for trajectory in group.trajectories:
        assert (trajectory.status, trajectory.reward) == (Status.ERROR_SAMPLER, None)
        assert "server.log" in (trajectory.error or "")
    with pytest.raises(LudusError, match="max_restarts"):
        await collector.collect([task], 1, 2)


def test_the_server_ends_with_a_killed_parent(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path\n"
        "from ludus.models.samplers.sglang import SglangServer\n"
        f"log = Path({str(tmp_path)!r}, 'log')\n"
        f"python = {str(engine_python('sglang'))!r}\n"
        "server = SglangServer(python, ['--model-path', 'nowhere'], {}, log)\n"
        "print(server.pid, flush=True); time.sleep(600)"
    )
    command, env = [sys.executable, "-c", program], os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.killpg(pid, 0)  # it is there
        parent.kill()
    while _is_alive(pid):
        time.sleep(0.05)
    assert not list(tmp_path.glob("ludus-sglang-*"))  # its sockets


def _is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and " Z " not in stat.read_text()
