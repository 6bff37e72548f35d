"""vLLM sampler with a real server: samples, weight updates, failures.

One server serves the tests of this file, and is killed by the last of them but one.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from engine_helpers import expected_logprobs, tiny, tokenizer_of
from engines import engine_python
from jsonschema import validate
from served_world import CONTEXT, LEVERS, PROMPT, World, error_of, perturb, sample

from ludus.config.schema import OptimizerConfig
from ludus.core.errors import (
    ConfigError,
    ContextOverflow,
    LudusError,
    SamplerError,
    SchemaError,
    TrainingError,
)
from ludus.core.types import Group, Message, Segment, Status, Task, ToolSpec, Trajectory
from ludus.loop.loop import Stage, run_stage
from ludus.models.grammars import grammar_of
from ludus.models.samplers.base import Completion, SamplingParams, num_embeddings
from ludus.models.samplers.vllm import VllmSampler, VllmServer, _completion
from ludus.models.samplers.weights import WEIGHTS, write_model
from ludus.models.vocabulary import Vocabulary
from ludus.rollout.source import SyncSource
from ludus.tasks.curriculum import TaskSampler
from ludus.train import ALGORITHMS
from ludus.train.batches.minibatches import TrainSettings
from ludus.train.forward import Forward
from ludus.train.scoring import Scorer

PYTHON = str(engine_python("vllm"))
TOOLS = [ToolSpec(name="pull", parameters={"type": "object", "required": ["lever"]})]

needs_vllm = pytest.mark.engine("vllm")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World("vllm", tmp_path_factory.mktemp("vllm"))
    asyncio.run(sample(made, SamplingParams(1)))
    yield made
    made.backend.close()


async def until_sampling(world: World, num_turns: int) -> None:
    """Wait until vLLM runs `num_turns` turns."""
    start = await counter(world, "generation_tokens_total")
    while (
        await counter(world, "num_requests_running") < num_turns
        or await counter(world, "generation_tokens_total") < start + num_turns
    ):
        await asyncio.sleep(0.01)


async def counter(world: World, name: str) -> float:
    async with httpx.AsyncClient(
        transport=httpx.AsyncHTTPTransport(uds=world.server.socket), base_url="http://vllm"
    ) as client:
        text = (await client.get("/metrics")).text
    return sum(float(v) for v in re.findall(rf"^vllm:{name}{{.*}} (\S+)$", text, re.M))


@needs_vllm
@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 0.6, "top_k": 5}, {"temperature": 1.4, "top_p": 0.7}, {"temperature": 0}],
    ids=str,
)
async def test_logprobs_are_of_the_distribution_sampled_from(
    world: World, settings: dict[str, Any]
) -> None:
    asked = [SamplingParams(24, seed=2**64 - 1 - n, **settings) for n in range(12)]
    done = await asyncio.gather(*[sample(world, p, f"s{n}") for n, p in enumerate(asked)])
    for params, completion in zip(asked, done, strict=True):
        assert len(completion.token_ids) == 24
        assert (completion.finish_reason, completion.policy_version) == ("length", 0)
        assert error_of(world, completion, params) < 1e-3
    assert len({tuple(c.token_ids) for c in done}) == (
        1 if settings.get("temperature") == 0 else 12
    )


@pytest.mark.parametrize(
    ("ids", "never"),
    [([0, 1, 2, 5], [3, 4, *range(6, 61)]), (range(59), [59, 60]), (range(61), None)],
    ids=["gaps", "padding", "all ids"],
)
async def test_ids_without_a_token_are_asked_not_to_be_sampled(
    ids: Any, never: list[int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the in-process sampler: the learner normalises over the ids of tokens only."""
    asked: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content)["sampling_params"])
        choice = {
            "token_ids": [1],
            "logprobs": {"content": [{"logprob": -1.0}]},
            "finish_reason": "length",
            "weight_versions": [{"version": "0", "start": 0, "end": 1}],
        }
        return httpx.Response(200, json={"choices": [choice]})

    class Server:
        alive = True

        def client(self) -> httpx.AsyncClient:
            transport = httpx.MockTransport(answer)
            return httpx.AsyncClient(transport=transport, base_url="http://vllm")

    monkeypatch.setattr("ludus.models.samplers.served.require_package", lambda *_: None)
    made = VllmSampler(tiny(), tokenizer_of(list(ids)), tmp_path, CONTEXT)
    made.server = Server()
    made.open("a")
    await made.sample(PROMPT, SamplingParams(1), session="a")
    expected = None if never is None else {str(id): -1e9 for id in never}
    assert asked[0].get("logit_bias") == expected


@needs_vllm
async def test_sampled_ids_are_tokens(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise half of the ids of this model, which knows nothing, would be others."""
    size = num_embeddings(world.model)
    monkeypatch.setattr(world.sampler, "_never", range(size // 2, size))
    params = SamplingParams(60, temperature=2.0, seed=3)
    done = await sample(world, params)
    assert max(done.token_ids) < size // 2
    rows = torch.tensor([[*PROMPT, *done.token_ids]])
    with torch.no_grad():
        logits_LV = world.model(rows).logits[0, len(PROMPT) - 1 : -1, : size // 2]
    logprobs_LV = (logits_LV / 2.0).log_softmax(-1)
    expected = logprobs_LV.gather(-1, torch.tensor(done.token_ids)[:, None])[:, 0]
    assert done.logprobs == pytest.approx(expected.tolist(), abs=1e-3)


@needs_vllm
async def test_a_turn_ends_at_a_stop(world: World) -> None:
    free = await sample(world, SamplingParams(30, seed=3))
    assert (await sample(world, SamplingParams(30, seed=3))).token_ids == free.token_ids
    stop = free.token_ids[12]
    cut = await sample(world, SamplingParams(30, seed=3, stop_token_ids=(stop,)))
    assert cut.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert cut.finish_reason == "stop"
    decode = world.renderer.tokenizer.decode
    words = [decode([i]).strip() for i in free.token_ids]
    word = next(word for word in words[3:] if word in LEVERS)
    cut = await sample(world, SamplingParams(30, seed=3, stop=(word,)))
    assert cut.finish_reason == "stop"
    assert cut.token_ids == free.token_ids[: words.index(word) + 1]


@needs_vllm
async def test_invalid_turns_are_refused(world: World) -> None:
    with pytest.raises(ContextOverflow, match="exceed"):
        await sample(world, SamplingParams(CONTEXT))
    with pytest.raises(ValueError, match="not open"):
        await world.sampler.sample(PROMPT, SamplingParams(1), session="nobody")
    world.sampler.open("a")
    with pytest.raises(ValueError, match="the model has the ids 0 to"):
        await world.sampler.sample([10**6], SamplingParams(1), session="a")
    long = asyncio.create_task(
        world.sampler.sample(PROMPT, SamplingParams(CONTEXT - 3), session="a")
    )
    await asyncio.sleep(0.05)
    world.sampler.close("a")
    with pytest.raises(asyncio.CancelledError):
        await long


@needs_vllm
async def test_two_steps_of_grpo(world: World) -> None:
    kept: list[tuple[list[Group], dict[str, float]]] = []

    class Recorder:
        def record(self, stage: str, step: int, groups: Any, metrics: dict[str, float]) -> None:
            kept.append((list(groups), dict(metrics)))

    collector = world.collector()

    async def play(tasks: Any, step: int, **_: Any) -> list[Group]:
        return await collector.collect(tasks, step, 8)

    prompts = [[Message(role="user", content=f"pull a lever {lever}")] for lever in LEVERS]
    tasks = [Task(id=str(i), prompt=p) for i, p in enumerate(prompts)]
    stage = Stage(
        TrainSettings("rl", 2, OptimizerConfig(lr=0.01), CONTEXT),
        groups_per_step=4,
        source=SyncSource(TaskSampler(tasks), play),
        algorithm=ALGORITHMS.build("grpo"),
    )
    world.backend.begin_stage(stage.settings, stage.algorithm)
    await run_stage(stage, world.backend, Recorder())
    for step, (groups, metrics) in enumerate(kept):
        sampled = [s for g in groups for t in g.trajectories for s in t.segments if s.sampled]
        assert len(sampled) == 32
        assert {s.policy_version for s in sampled} == {step}
        # The learner computes the very log-probabilities that vLLM sampled with.
        assert metrics["train/ratio"] == pytest.approx(1, abs=1e-3)
        assert metrics["train/policy_version"] == step + 1
    completion = await sample(world, SamplingParams(24, seed=8))
    assert completion.policy_version == 2
    assert error_of(world, completion, SamplingParams(24)) < 1e-3


@needs_vllm
async def test_answers_follow_a_schema_and_the_learner_agrees(world: World, tmp_path: Path) -> None:
    """Half of the turns of a batch are constrained."""
    pytest.importorskip("llguidance", reason="needs the extra agents")
    schema = {
        "type": "object",
        "properties": {"lever": {"enum": [*LEVERS]}, "times": {"type": "integer"}},
        "required": ["lever"],
        "additionalProperties": False,
    }
    with pytest.raises(SchemaError, match="byte-level tokenizers only"):
        world.sampler.check_grammar(grammar_of(schema))
    own = World("vllm", tmp_path, "bpe")
    try:
        own.sampler.check_grammar(grammar_of(schema))
        tokenizer = own.renderer.tokenizer
        stops = tuple(own.renderer.stop_token_ids)
        asked = [
            SamplingParams(
                60, seed=n, stop_token_ids=stops, grammar=grammar_of(schema, TOOLS[: n // 8])
            )
            if n % 2
            else SamplingParams(12, seed=n, stop_token_ids=stops)
            for n in range(16)
        ]
        done = await asyncio.gather(*[sample(own, p, f"s{n}") for n, p in enumerate(asked)])
        turns = [Segment(0, c.token_ids, c.logprobs, policy_version=0) for c in done]
        for turn, params in zip(turns, asked, strict=True):
            turn.constraint = params.constraint
            text = tokenizer.decode(turn.token_ids)
            if params.grammar and turn.token_ids[-1] in stops and "<tool_call>" not in text:
                validate(json.loads(text.removesuffix(tokenizer.eos_token)), schema)
        played = [
            Trajectory(str(n), "g", "t", [Segment(-1, PROMPT), t]) for n, t in enumerate(turns)
        ]
        forward = Forward(own.model, context_length=CONTEXT, vocabulary=Vocabulary.of(tokenizer))
        group = Group("g", Task(id="t"), played)
        [scored] = Scorer(forward, 4096, 0)([group], "learner_logprobs")
        for before, after in zip(turns, scored.trajectories, strict=True):
            assert after.segments[1].learner_logprobs == pytest.approx(before.logprobs, abs=1e-3)
    finally:
        own.backend.close()


def test_labels_of_tokens() -> None:
    """vLLM labels ranges of tokens with versions; a token without a label is refused."""
    choice: dict[str, Any] = {
        "token_ids": [5, 6, 7],
        "logprobs": {"content": [{"logprob": -1.0}] * 3},
        "finish_reason": "stop",
    }

    def parsed(*spans: tuple[str, int, int]) -> Completion:
        labels = [{"version": v, "start": a, "end": b} for v, a, b in spans]
        return _completion({**choice, "weight_versions": labels or None})

    assert parsed(("4", 0, 3)).version_runs is None
    done = parsed(("4", 0, 1), ("5", 1, 3))
    assert (done.policy_version, done.version_runs) == (4, [(4, 1), (5, 2)])
    for wrong in ([], [("4", 0, 2)], [("4", 1, 3)], [("4", 0, 1), ("5", 2, 3)]):
        with pytest.raises(LudusError, match="it must label each"):
            parsed(*wrong)


@needs_vllm
async def test_weight_update_during_a_turn(world: World) -> None:
    before, old = world.sampler.policy_version, copy.deepcopy(world.model)
    turns = [
        asyncio.create_task(sample(world, SamplingParams(CONTEXT - 3, seed=n), f"s{n}"))
        for n in range(8)
    ]
    await until_sampling(world, 8)
    assert not any(turn.done() for turn in turns)
    perturb(world)
    await asyncio.to_thread(world.sampler.publish, before + 1)
    done = await asyncio.gather(*turns)
    assert {turn.policy_version for turn in done} == {before}
    assert {len(turn.token_ids) for turn in done} == {CONTEXT - 3}
    after = await sample(world, SamplingParams(24, seed=8))
    assert after.policy_version == before + 1
    assert error_of(world, after, SamplingParams(24)) < 1e-3
    for turn in done:  # each token was sampled by its version, from keys and values of that version
        (first, num_old), (second, num_new) = turn.runs
        assert (first, second, num_old + num_new) == (before, before + 1, CONTEXT - 3)
        by_old, by_new = (
            expected_logprobs(model, PROMPT, turn, SamplingParams(1))
            for model in (old, world.model)
        )
        assert turn.logprobs == pytest.approx(by_old[:num_old] + by_new[num_old:], abs=1e-3)
        assert by_old[num_old] != pytest.approx(by_new[num_old], abs=1e-3)
        assert by_old[num_old - 1] != pytest.approx(by_new[num_old - 1], abs=1e-3)


@needs_vllm
async def test_weights_that_do_not_match_are_refused(world: World, tmp_path: Path) -> None:
    params, version = SamplingParams(24, seed=8), world.sampler.policy_version
    before = await sample(world, params)
    found = write_model(world.model, tmp_path / "same")
    path = str(tmp_path / "same" / WEIGHTS)

    def load(expected_hash: str) -> Any:
        call = {"path": path, "expected_hash": expected_hash}
        return world.server.post("/collective_rpc", {"method": "ludus_load", "kwargs": call})

    assert load(found)["results"] == [{"hash": found}]
    assert "content hash" in load("0" * 32)["results"][0]["refused"]
    world.sampler._model = tiny()
    with pytest.raises(TrainingError, match=r"refuses weights 99: lm_head\.weight is unknown"):
        world.sampler.publish(99)
    world.sampler._model = world.model
    assert world.sampler.policy_version == version
    after = await sample(world, params)
    assert (after.token_ids, after.policy_version) == (before.token_ids, version)


@needs_vllm
def test_probe_detects_other_weights(world: World) -> None:
    world.sampler.publish(world.sampler.policy_version)
    served = world.sampler._probe
    world.sampler._probe = [value + 0.1 for value in served]
    with pytest.raises(TrainingError, match=r"differ from the learner's by up to 0\.1"):
        world.sampler._require_probe(world.server)
    world.sampler._probe = served


@needs_vllm
async def test_a_killed_server_fails_its_turns_and_restarts(world: World) -> None:
    """Episodes are retried with the weights published last."""
    first, version = world.server, world.sampler.policy_version
    collector = world.collector(max_tokens_per_turn=CONTEXT - 64)
    task = Task(id="t", prompt=[Message(role="user", content="pull a lever")])
    first.post("/pause?mode=keep")
    turn = asyncio.create_task(sample(world, SamplingParams(CONTEXT - 3)))
    episodes = asyncio.create_task(collector.collect([task], 0, 6))
    await asyncio.sleep(0.5)
    os.kill(first.pid, signal.SIGKILL)
    with pytest.raises(SamplerError, match="vLLM died during a turn"):
        await turn
    (group,) = await episodes
    assert world.server is not first
    for trajectory in group.trajectories:
        assert trajectory.status in (Status.COMPLETED, Status.TRUNCATED_LENGTH)
        assert trajectory.metrics["retries"] == 1
        assert trajectory.reward is not None
    after = await sample(world, SamplingParams(24, seed=8))
    assert after.policy_version == version
    assert error_of(world, after, SamplingParams(24)) < 1e-3


@needs_vllm
async def test_episodes_of_a_dead_server_have_no_reward(world: World) -> None:
    """Without retries and restarts: error status, no reward, then the run ends."""
    world.sampler._restarts_left = 0
    collector = world.collector(max_tokens_per_turn=CONTEXT - 64, max_retries=0)
    task = Task(id="t", prompt=[Message(role="user", content="pull a lever")])
    world.server.post("/pause?mode=keep")
    episodes = asyncio.create_task(collector.collect([task], 0, 2))
    await asyncio.sleep(0.5)
    os.kill(world.server.pid, signal.SIGKILL)
    (group,) = await episodes
    for trajectory in group.trajectories:
        assert (trajectory.status, trajectory.reward) == (Status.ERROR_SAMPLER, None)
        assert "server.log" in (trajectory.error or "")
    with pytest.raises(LudusError, match="max_restarts"):
        await collector.collect([task], 1, 2)


@needs_vllm
@pytest.mark.parametrize(
    ("flags", "deadline_s", "told"),
    [
        (["--model", "nowhere"], 120, r"exited during startup \(code 1\)[\s\S]*OSError: "),
        (["--model", "nowhere"], 0.1, "startup_deadline_s = 0.1"),
    ],
    ids=["bad model", "too slow"],
)
def test_startup_failures(tmp_path: Path, flags: list[str], deadline_s: float, told: str) -> None:
    server = VllmServer(PYTHON, flags, {}, tmp_path / "log")
    with pytest.raises(LudusError, match=told):
        server.wait_until_up(deadline_s, threading.Event())
    assert not server.alive


@needs_vllm
def test_the_server_ends_with_a_killed_parent(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path\n"
        "from ludus.models.samplers.vllm import VllmServer\n"
        f"log = Path({str(tmp_path)!r}, 'log')\n"
        f"server = VllmServer({PYTHON!r}, ['--model', 'nowhere'], {{}}, log)\n"
        "print(server.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.killpg(pid, 0)  # it is there
        parent.kill()
    while group_exists(pid):
        time.sleep(0.05)


def group_exists(pid: int) -> bool:
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text()


def refusal(**options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        VllmSampler(tiny(), None, Path("unused"), CONTEXT, **options)
    return str(caught.value)


def test_a_python_without_vllm_is_refused(tmp_path: Path) -> None:
    assert "make vllm" in refusal(python=sys.executable)
    assert "No such file" in refusal(python=str(tmp_path / "python"))


def test_deterministic_mode_is_refused() -> None:
    assert "rollout.deterministic" in refusal(deterministic=True)
