"""RemoteEnv: the same rollouts as in process; failures of the service."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest
from service_world import OBEYS, Command, command, service, start

from ludus.config.schema import ModelConfig, RolloutConfig
from ludus.core.errors import ConfigError, EnvError, EpisodeTimeout, ToolError
from ludus.core.types import Group, Message, Spec, Status, Task, ToolCall
from ludus.data.expert import run_expert
from ludus.envs.babyai.env import BabyAI
from ludus.envs.base import Env
from ludus.envs.checks.check import check_env
from ludus.envs.remote.env import RemoteEnv
from ludus.envs.textcraft.env import TextCraft
from ludus.models.build import build_model
from ludus.models.chat.by_task import TaskRenderers
from ludus.models.chat.renderer import Renderer
from ludus.models.chat.tokenizers import train_tokenizer
from ludus.models.samplers.base import Completion
from ludus.models.samplers.engine import InProcessSampler
from ludus.rollout.collect import Collector

ARCHITECTURE = Spec(
    name="qwen3",
    args={
        "hidden_size": 32,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 16,
        "intermediate_size": 48,
    },
)


def remote(url: str, env: str, **args: Any) -> RemoteEnv:
    return RemoteEnv(url=url, env=env, **args)


def say(text: str) -> Message:
    return Message(role="assistant", content=text)


class Ending(InProcessSampler):
    """The real sampler; truncated turns end normally, so episodes have several turns."""

    end: int

    async def sample(self, *args: Any, **kwargs: Any) -> Completion:
        made = await super().sample(*args, **kwargs)
        if made.finish_reason == "stop":
            return made
        return replace(
            made,
            token_ids=[*made.token_ids, self.end],
            logprobs=[*made.logprobs, -1.0],
            finish_reason="stop",
        )


class Policy:
    """A small random policy over the words of an environment."""

    def __init__(self, env: type[Env], format: str) -> None:
        tools = env().tools() if format == "tools" else []
        played = [asyncio.run(run_expert(env(), env.task(None, seed), format)) for seed in range(8)]  # type: ignore[arg-type]
        texts = [m.content for episode in played for m in episode.messages]
        texts += [m.model_dump_json() for episode in played for m in episode.messages]
        self.tokenizer = train_tokenizer(Spec(name="words"), texts, "plain", tools)
        config = ModelConfig(
            architecture=ARCHITECTURE, tokenizer=Spec(name="words"), context_length=1024
        )
        self.model = build_model(config, self.tokenizer, seed=3)
        self.renderer = Renderer(self.tokenizer, None, tools, "keep")
        self.format = format

    def collect(self, env: Spec, tasks: Sequence[Task], kind: type[Ending] = Ending) -> list[Group]:
        sampler = kind(self.model, context_length=1024, decode=self.tokenizer.decode)
        sampler.end = self.renderer.stop_token_ids[0]
        config = RolloutConfig(format=self.format, max_turns=4, max_tokens_per_turn=6)  # type: ignore[arg-type]
        collector = Collector(sampler, TaskRenderers(self.renderer), config, env)
        return asyncio.run(collector.collect(tasks, step=0, group_size=3))


def tokens(groups: list[Group]) -> list[Any]:
    """The rollouts without their times."""
    return [
        [
            (t.id, t.status, t.reward, t.error, t.metrics["success"], t.segments)
            for t in g.trajectories
        ]
        for g in groups
    ]


@pytest.mark.parametrize("format", ["plain", "tools"])
@pytest.mark.parametrize("env", [TextCraft, BabyAI])
def test_rollouts_equal_the_local_environment_token_for_token(
    url: str, env: type[Env], format: str
) -> None:
    name = env.__name__.lower()
    policy = Policy(env, format)
    here = [env.task(None, seed) for seed in range(6)]
    there = [RemoteEnv.task(None, seed) for seed in range(6)]
    far = Spec(name="remote", args={"url": url, "env": name})
    own = policy.collect(Spec(name=name), here)
    assert tokens(own) == tokens(policy.collect(far, there))
    assert tokens(own) == tokens(policy.collect(far, here))
    assert all(t.num_turns == 4 for g in own for t in g.trajectories)


async def test_served_environment_passes_the_checks(url: str) -> None:
    spec = Spec(name="remote", args={"url": url, "env": "textcraft"})
    findings = await check_env(spec, num_tasks=2)
    assert [f for f in findings if f.severity == "error"] == []


async def test_demonstrations_equal_the_local_environment(url: str) -> None:
    for format in ("plain", "tools"):
        there = await run_expert(remote(url, "textcraft"), RemoteEnv.task("depth-2", 3), format)  # type: ignore[arg-type]
        here = await run_expert(TextCraft(), TextCraft.task("depth-2", 3), format)  # type: ignore[arg-type]
        assert there.messages == here.messages
        assert there.reward == here.reward == 1.0


def test_schema_equals_the_local_environment(url: str) -> None:
    env = remote(url, "babyai")
    assert (env.success_at, env.score_range, env.max_turns) == (1e-6, (0.0, 1.0), 20)
    assert list(env.tools()) == list(BabyAI().tools())


async def test_errors_keep_their_kind(url: str) -> None:
    for order, error in (("hang", EpisodeTimeout), ("raise", EnvError), ("tool", ToolError)):
        env = remote(url, OBEYS)
        await env.reset(RemoteEnv.task(None, 1))
        with pytest.raises(error):
            await env.step(say(order))
        await env.reset(RemoteEnv.task(None, 1))
        assert (await env.step(say("win"))).reward == 1.0
        await env.close()


async def test_unknown_tool_call_is_answered(url: str) -> None:
    env = remote(url, OBEYS)
    await env.reset(RemoteEnv.task(None, 1))
    call = ToolCall(name="act", id="3")
    said = await env.step(Message(role="assistant", content=env.text_of(call), tool_calls=[call]))
    assert "the argument action is missing" in said.messages[0].content
    await env.close()


@pytest.mark.slow
async def test_slow_expert_has_the_time_that_the_service_allows() -> None:
    ponders = "served_envs:Ponders"
    with service(ponders, expert_deadline_s=3) as url:
        env = remote(url, ponders)
        await env.reset(RemoteEnv.task(None, 2))
        assert await asyncio.to_thread(env.expert_action) == "win"
        assert (await env.step(say("win"))).reward == 1.0
        await env.reset(RemoteEnv.task(None, 5))
        with pytest.raises(EnvError, match="the expert took too long"):
            await asyncio.to_thread(env.expert_action)
        await env.close()


@pytest.mark.slow
async def test_wrong_addresses_are_reported(url: str) -> None:
    with pytest.raises(EnvError, match="start it with `ludus serve env`"):
        await remote("http://127.0.0.1:9", "textcraft", patience_s=0).reset(RemoteEnv.task(None, 0))
    for env, said in (("chess", "'chess' is not served here"), (None, r"name one as args\.env")):
        wrong = RemoteEnv(url=url, env=env)
        with pytest.raises(EnvError, match=said):
            await wrong.reset(RemoteEnv.task(None, 0))
        await wrong.close()
    with pytest.raises(ConfigError, match="http://"):
        RemoteEnv(url="localhost:8000")


async def test_token_comes_from_the_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    token = "a-token-of-sixteen-letters"
    with service("textcraft", tokens=(token,)) as url:
        with pytest.raises(EnvError, match="LUDUS_TOKEN"):
            await RemoteEnv(url=url, env="textcraft").reset(RemoteEnv.task(None, 0))
        monkeypatch.setenv("LUDUS_TOKEN", token)
        env = RemoteEnv(url=url)
        assert (await env.reset(RemoteEnv.task(None, 0))).messages
        await env.close()


@pytest.fixture
def served() -> Iterator[Command]:
    with command("textcraft", OBEYS) as started:
        yield started


async def seconds_until_noticed(served: Command, number: int) -> float:
    """Seconds from a signal to the service until a waiting step raises EnvError."""
    env = remote(served.url, OBEYS)
    await env.reset(RemoteEnv.task(None, 1))
    step = asyncio.create_task(env.step(say("sleep 20")))
    await asyncio.sleep(0.3)
    began = time.monotonic()
    os.kill(served.process.pid, number)
    with pytest.raises(EnvError, match="is gone"):
        await step
    return time.monotonic() - began


async def test_killed_service_is_detected(served: Command) -> None:
    await seconds_until_noticed(served, signal.SIGKILL)


async def test_frozen_service_is_detected(served: Command) -> None:
    try:
        await seconds_until_noticed(served, signal.SIGSTOP)
    finally:
        os.kill(served.process.pid, signal.SIGCONT)


async def test_slow_step_is_not_a_dead_service(served: Command) -> None:
    env = remote(served.url, OBEYS)
    await env.reset(RemoteEnv.task(None, 1))
    assert (await env.step(say("sleep 2.2"))).messages
    await env.close()


def test_rollouts_continue_when_the_service_returns(served: Command) -> None:
    policy = Policy(TextCraft, "plain")
    tasks = [RemoteEnv.task(None, seed) for seed in range(8)]
    spec = Spec(name="remote", args={"url": served.url, "env": "textcraft"})
    undisturbed = policy.collect(spec, tasks)
    again: list[Command] = []

    class Killing(Ending):
        """Kills the service during the rollouts and restarts it."""

        turns = 0

        async def sample(self, *args: Any, **kwargs: Any) -> Any:
            completion = await super().sample(*args, **kwargs)
            Killing.turns += 1
            if Killing.turns == 9:
                served.kill()
                loop = asyncio.get_running_loop()
                port = served.port
                loop.run_in_executor(None, lambda: again.append(start("textcraft", port=port)))
            return completion

    try:
        groups = policy.collect(spec, tasks, Killing)
    finally:
        for started in again:
            started.process.terminate()
            started.process.wait(30)
            assert started.process.stdout is not None
            started.process.stdout.close()
    assert sum(t.metrics["retries"] > 0 for g in groups for t in g.trajectories) > 0
    assert {t.status for g in groups for t in g.trajectories} <= {
        Status.COMPLETED,
        Status.TRUNCATED_TURNS,
        Status.TRUNCATED_LENGTH,
    }
    assert tokens(groups) == tokens(undisturbed)


def test_sessions_end_with_the_client(served: Command) -> None:
    async def leave() -> None:
        env = remote(served.url, OBEYS)
        await env.reset(RemoteEnv.task(None, 1))
        assert httpx.get(served.url + "/health").json()["sessions"] == 1
        await env.close()

    asyncio.run(leave())
    for _ in range(200):
        if httpx.get(served.url + "/health").json()["sessions"] == 0:
            return
        time.sleep(0.02)
    raise AssertionError("the session is still open")
