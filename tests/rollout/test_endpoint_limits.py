"""Rate limits of endpoints: one bucket for judges, evaluated models and other processes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from chat_server import ChatServer, text
from ports import free_port
from redis_server import start_redis
from starlette.responses import Response

from ludus.config.load import load_config
from ludus.config.schema import LimitConfig
from ludus.core.errors import ConfigError, SamplerError
from ludus.core.types import Message, Spec, Status, Task, Trajectory
from ludus.data.splits import Splits
from ludus.loop.metrics import group_metrics
from ludus.models.endpoint.client import Endpoint
from ludus.models.samplers.base import SamplingParams
from ludus.pipeline.build import make_collector, make_limits
from ludus.tasks.readers import TaskList
from ludus.tools.limits.limiter import Limits

HELLO = [Message(role="user", content="hello")]
RUBRIC = {"criteria": [{"name": "short", "text": "has one word"}]}


def say(body: dict[str, Any]) -> Any:
    """The model, and the judge that scores it 1."""
    if "response_format" not in body:
        return text("red")
    verdict: dict[str, Any] = {"explanation": "so", "score": 1}
    schema = body["response_format"]["json_schema"]["schema"]
    return text(json.dumps(verdict if "score" in schema["required"] else {"short": verdict}))


def limits_at(url: str, store: str, **settings: Any) -> Limits:
    return Limits({url: LimitConfig(store=store, **settings)}, [url])


def judge_at(url: str, name: str = "model", **args: Any) -> Spec:
    return Spec(name=name, args={"base_url": url, "model": "judge", **args})


async def play(url: str, limits: Limits, judge: Spec, num_tasks: int = 1) -> list[Trajectory]:
    """Play episodes of the endpoint's model, scored by a judge of each task."""
    config = load_config({**BASE, "rollout": {"max_retries": 0, "max_tokens_per_turn": 8}})
    tasks = [Task(id=str(n), prompt=HELLO, judge=judge) for n in range(num_tasks)]
    async with Endpoint(url, "m", limits=limits) as endpoint:
        collector = make_collector(config, None, None, limits, endpoint=endpoint)
        try:
            groups = await collector.collect(tasks, 0, 1)
        finally:
            await collector.close()
    waits = [t.metrics["endpoint_wait_seconds"] for g in groups for t in g.trajectories]
    mean = group_metrics(groups)["rollout/endpoint_wait_seconds"]
    assert mean == pytest.approx(sum(waits) / len(waits))
    return [t for group in groups for t in group.trajectories]


BASE: dict[str, Any] = {
    "model": {"architecture": "qwen3", "tokenizer": {"name": "words"}},
    "tasks": {"train": {"name": "json", "args": {"path": "unused"}}},
    "judge": "answer",
    "rl": {},
}


def splits_of(*tasks: Task) -> Splits:
    return Splits(TaskList(tasks), TaskList([]))


async def test_model_and_judges_of_an_endpoint_wait_for_one_limit(tmp_path: Path) -> None:
    with ChatServer(say) as server:
        limits = limits_at(server.url, f"file://{tmp_path}", rate_per_s=10)
        judges = {
            "whole": judge_at(server.url).model_dump(),
            "parts": judge_at(server.url + "/", "rubric", **RUBRIC).model_dump(),
        }
        judge = Spec(name="sum", args={"parts": judges, "weights": {"whole": 0.5, "parts": 0.5}})
        started = time.monotonic()
        played = await play(server.url, limits, judge, num_tasks=2)
        seconds = time.monotonic() - started
    assert [(t.status, t.reward) for t in played] == [(Status.COMPLETED, 1.0)] * 2
    assert len(server.bodies) == 6
    # Permits at 0, 0.1, ... 0.5 s. The two judges of an episode wait at the same time.
    assert seconds >= 0.5 - 0.01
    assert sum(t.metrics["endpoint_wait_seconds"] for t in played) >= 0.5 - 0.01


async def test_retries_take_permits_too(tmp_path: Path) -> None:
    answers = iter([Response("busy", 429), Response("busy", 429), text("red")])
    with ChatServer(lambda body: next(answers)) as server:
        limits = limits_at(server.url, f"file://{tmp_path}", rate_per_s=5)
        started = time.monotonic()
        options: dict[str, Any] = {"pauses_s": (0.0, 0.0), "tokens": False, "limits": limits}
        async with Endpoint(server.url, "m", **options) as endpoint:
            await endpoint.chat(HELLO, SamplingParams(1))
        assert time.monotonic() - started >= 0.4 - 0.01
    limits.close()


OTHER = """
import asyncio, sys
from ludus.config.schema import LimitConfig
from ludus.core.errors import SamplerError
from ludus.core.types import Message
from ludus.models.endpoint.client import Endpoint
from ludus.models.samplers.base import SamplingParams
from ludus.tools.limits.limiter import Limits

async def main(url, settings):
    limits = Limits({url: LimitConfig.model_validate_json(settings)}, [url])
    async with Endpoint(url, "m", tokens=False, limits=limits) as endpoint:
        for _ in range(9):
            await endpoint.chat([Message(role="user", content="hello")], SamplingParams(1))

try:
    asyncio.run(main(*sys.argv[1:]))
except SamplerError as error:
    print(error)
"""


async def test_processes_share_the_limit(tmp_path: Path) -> None:
    """A new store counts as empty since boot: it has all three permits 150 s after it."""
    settings = LimitConfig(rate_per_s=0.02, burst=3, store=f"file://{tmp_path}", max_wait_s=2)
    began = time.monotonic()
    with ChatServer(say) as server:
        limits = Limits({server.url: settings}, [server.url])
        async with Endpoint(server.url, "m", tokens=False, limits=limits) as endpoint:
            await endpoint.chat(HELLO, SamplingParams(1))
        limits.close()
        command = [sys.executable, "-c", OTHER, server.url, settings.model_dump_json()]
        other = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
    assert f"limits.{server.url}: no permit within 2 s" in other.stdout, other
    assert 3 <= len(server.bodies) <= 3 + (time.monotonic() - began) // 50


async def test_without_a_permit_there_is_no_score_and_no_reward_of_0(tmp_path: Path) -> None:
    with ChatServer(say) as server:
        store = f"file://{tmp_path}"
        limits = limits_at(server.url, store, rate_per_s=0.01, max_wait_s=0.1)
        [judged] = await play(server.url, limits, judge_at(server.url))
        limits = limits_at(server.url, store, rate_per_s=0.01, max_wait_s=0.1)
        async with Endpoint(server.url, "m", limits=limits) as endpoint:
            with pytest.raises(SamplerError, match=r"limits\.http.*no permit within 0\.1 s"):
                await endpoint.chat(HELLO, SamplingParams(1))
        limits.close()
    assert (judged.status, judged.reward) == (Status.UNSCORABLE, None)
    assert "the judge's model gave no verdict: limits.http" in (judged.error or "")
    assert len(server.bodies) == 1


async def test_a_lost_redis_is_no_score(tmp_path: Path) -> None:
    port = free_port()
    redis = start_redis(port, tmp_path)

    def lose(body: dict[str, Any]) -> Any:
        redis.kill()
        redis.wait()
        return text("red")

    with ChatServer(lose) as server:
        store = f"redis://127.0.0.1:{port}/0"
        limits = limits_at(server.url, store, rate_per_s=100, max_wait_s=0.3)
        [trajectory] = await play(server.url, limits, judge_at(server.url))
    assert (trajectory.status, trajectory.reward) == (Status.UNSCORABLE, None)
    assert f"Redis at {store} does not answer" in (trajectory.error or "")


def made(limits: Sequence[str], judge: Spec | None, *tasks: Task, folder: Path) -> Limits:
    limit = {"rate_per_s": 1, "store": f"file://{folder}"}
    judges = {"judge": judge.model_dump()} if judge else {}
    config = load_config({**BASE, **judges, "limits": dict.fromkeys(limits, limit)})
    return make_limits(config, splits_of(*tasks))


def test_a_limit_names_an_endpoint_of_a_judge(tmp_path: Path) -> None:
    first, second = "http://one.example:8000/v1", "https://two.example/v1"
    inner = judge_at(first).model_dump()
    judge = Spec(name="first", args={"judges": {"rule": "answer", "model": inner}})
    task = Task(id="t", prompt=HELLO, judge=judge_at("https://TWO.example:443/v1/"))
    limits = made([first + "/", second], judge, task, folder=tmp_path)
    assert first in limits
    assert second in limits
    limits.close()


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (["http://judge.example/v2"], r"no judge or model .* mean http://judge\.example/v1\?\)"),
        (["ftp://judge.example/v1"], r"limits\.ftp://.* must have the form http"),
        (["http://u:p@judge.example/v1"], r"limits\.http.* must not have a user"),
        (["http://judge.example/v1", "http://judge.example/v1/"], "another limit has the same"),
        (["judge"], r"limits\.judge: 'judge' is no function of `tools` \(the run has no tools\)"),
    ],
)
def test_limits_without_effect_are_refused(keys: list[str], told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=told):
        made(keys, judge_at("http://judge.example/v1"), folder=tmp_path)


def test_a_limit_of_an_endpoint_without_any_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"asks this endpoint \(none asks an endpoint\)"):
        made(["http://judge.example/v1"], None, folder=tmp_path)
