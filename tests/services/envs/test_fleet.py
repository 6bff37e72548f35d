"""RemoteEnv over many hosts: who takes a session, and what happens when a host fails."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from service_world import LIGHTLY, OBEYS, Command, command, service, start, until
from threaded_server import reply, serving

from ludus.config.schema import RolloutConfig
from ludus.core.errors import ConfigError, EnvError, EnvLost
from ludus.core.types import Message, Spec, Status
from ludus.diagnostics.doctor import check_hosts, exit_code
from ludus.envs.remote.connection import Connection
from ludus.envs.remote.env import RemoteEnv
from ludus.envs.remote.lag import Lag
from ludus.models.endpoint.client import Reply
from ludus.rollout.collect import Collector
from ludus.telemetry.hosts import HOSTS

TASK = RemoteEnv.task(None, 1)


@pytest.fixture(autouse=True)
def _forgotten_hosts() -> Iterator[None]:
    HOSTS.states.clear()
    HOSTS.sessions.clear()
    HOSTS.metrics()
    yield
    HOSTS.states.clear()


def fleet(urls: str | Sequence[str], **args: Any) -> RemoteEnv:
    url = urls if isinstance(urls, str) else list(urls)
    return RemoteEnv(url=url, env=args.pop("env", LIGHTLY), **args)


def say(text: str) -> Message:
    return Message(role="assistant", content=text)


def open_at(url: str) -> int:
    return int(httpx.get(url + "/health").json()["sessions"])


async def opened(urls: str | Sequence[str], number: int, **args: Any) -> list[RemoteEnv]:
    """Environments that play, opened at the same time."""
    envs = [fleet(urls, **args) for _ in range(number)]
    await asyncio.gather(*(env.reset(TASK) for env in envs))
    return envs


async def closed(envs: Sequence[RemoteEnv]) -> None:
    for env in envs:
        await env.close()


async def eventually(true: Callable[[], bool]) -> None:
    await asyncio.to_thread(until, true)


def host_of(env: RemoteEnv) -> str:
    assert env._session is not None
    return env._session.host.url


async def test_sessions_spread_over_hosts_and_leave_none_open() -> None:
    with service(LIGHTLY) as one, service(LIGHTLY) as other:
        envs = await opened([one, other], 40)
        assert open_at(one) + open_at(other) == 40
        assert min(open_at(one), open_at(other)) > 5
        results = await asyncio.gather(*(env.step(say("win")) for env in envs))
        assert [result.reward for result in results] == [1.0] * 40
        metrics = HOSTS.metrics()
        assert (metrics["hosts/up"], metrics["hosts/sessions"]) == (2, 40)
        assert sum(metrics[name] for name in metrics if name.startswith("hosts/opened_")) == 40
        await closed(envs)
        await eventually(lambda: open_at(one) + open_at(other) == 0)
        assert HOSTS.metrics()["hosts/sessions"] == 0


async def test_a_task_stays_on_its_host() -> None:
    with service(LIGHTLY) as one, service(LIGHTLY) as other:
        envs = await opened([one, other], 6, affinity="task")
        assert len({host_of(env) for env in envs}) == 1
        await closed(envs)


async def test_a_full_host_leaves_sessions_to_the_next_then_they_wait() -> None:
    with service(LIGHTLY, max_sessions=2) as one, service(LIGHTLY, max_sessions=3) as other:
        envs = await opened([one, other], 5)
        assert (open_at(one), open_at(other)) == (2, 3)
        late = fleet([one, other], patience_s=0.5)
        with pytest.raises(EnvError, match=r"none of 2 environment hosts takes a session: .*full"):
            await late.reset(TASK)
        waiting = [fleet([one, other]) for _ in range(100)]
        HOSTS.metrics()
        resets = [asyncio.create_task(env.reset(TASK)) for env in waiting]
        await asyncio.sleep(1.5)
        assert not any(reset.done() for reset in resets)
        assert HOSTS.metrics()["hosts/full"] <= 8  # the hosts are not asked by each that waits
        await closed(envs)

        async def play(reset: asyncio.Task[Any], env: RemoteEnv) -> float | None:
            await reset
            result = await env.step(say("win"))
            await env.close()
            return result.reward

        played = await asyncio.gather(*map(play, resets, waiting))
        assert played == [1.0] * 100


async def test_a_client_side_limit_holds() -> None:
    with service(LIGHTLY) as one, service(LIGHTLY) as other:
        envs = await opened([one, other], 6, sessions_per_host=3)
        assert (open_at(one), open_at(other)) == (3, 3)
        await closed(envs)


async def test_different_environments_are_refused_with_both_named() -> None:
    with service(LIGHTLY) as one, service("textcraft") as other:
        with pytest.raises(EnvError, match=f"{other}: .*is not served here"):
            RemoteEnv(url=[other], env=LIGHTLY).tools()
        with pytest.raises(ConfigError, match="(?s)" + f"env is .*{one}.*{other}"):
            RemoteEnv(url=[one, other]).tools()
        envs = await opened([one, other], 10)
        assert {host_of(env) for env in envs} == {one}
        await closed(envs)


async def test_a_session_that_is_given_up_closes_after_its_answer() -> None:
    with service(LIGHTLY) as one, service(LIGHTLY) as other:
        env = fleet([one, other])
        await env.reset(TASK)
        step = asyncio.create_task(env.step(say("sleep 0.5")))
        await asyncio.sleep(0.2)
        step.cancel()
        with suppress(asyncio.CancelledError):
            await step
        await env.close()
        assert open_at(one) + open_at(other) == 1
        await eventually(lambda: open_at(one) + open_at(other) == 0)


async def test_a_ping_that_is_cancelled_before_it_starts_is_not_warned_of() -> None:
    """As at the end of a process's loop: pytest turns the warning into an error."""
    with service(LIGHTLY) as url:
        connection = await Connection.open(url, lambda _: None, Lag())
        connection.ping()
        connection.post(op="close")
        for task in list(connection._tasks):
            task.cancel()
        await asyncio.gather(*connection._tasks, return_exceptions=True)
        gc.collect()


def test_the_doctor_asks_each_host() -> None:
    with service(LIGHTLY) as one, service(LIGHTLY) as other:
        checks = check_hosts(f"{one},{other},{absent()}")
        assert [check.ok for check in checks] == [True, True, False]
        assert "ok, served_envs:ObeysLightly of ludus" in checks[0].detail
        assert "no environment service answers" in checks[2].fix
        assert exit_code(checks) == 1


async def test_hosts_that_refuse_the_token_are_told_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    token = "a-token-of-sixteen-letters"
    with service(LIGHTLY, tokens=(token,)) as one, service(LIGHTLY, tokens=(token,)) as other:
        with pytest.raises(EnvError, match="refuses the token: set LUDUS_TOKEN"):
            await fleet([one, other], patience_s=600).reset(TASK)
        monkeypatch.setenv("LUDUS_TOKEN", token)
        await closed(await opened([one, other], 2, sessions_per_host=7))


@contextmanager
def hanging() -> Iterator[str]:
    """A host that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@contextmanager
def rubbish() -> Iterator[str]:
    """A host that answers everything with rubbish."""
    with serving(lambda request: reply(request, 200, b"<html>welcome</html>")) as port:
        yield f"http://127.0.0.1:{port}"


def absent() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.slow
async def test_hosts_that_hang_or_talk_rubbish_get_no_sessions() -> None:
    with service(LIGHTLY) as one, hanging() as mute, rubbish() as odd:
        envs = await opened([one, mute, odd, absent()], 12)
        assert {host_of(env) for env in envs} == {one}
        metrics = HOSTS.metrics()
        assert (metrics["hosts/listed"], metrics["hosts/up"]) == (4, 1)
        await closed(envs)


@pytest.mark.slow
async def test_no_host_answers() -> None:
    with hanging() as mute, rubbish() as odd:
        urls = [mute, odd, absent()]
        env = fleet(urls, patience_s=3)
        with pytest.raises(EnvError, match="none of 3 environment hosts takes a session") as told:
            await env.reset(TASK)
        assert all(url in str(told.value) for url in urls)
        with pytest.raises(EnvError, match="none of 3 hosts answers"):
            env.tools()


@contextmanager
def commands(number: int, *words: str) -> Iterator[list[Command]]:
    with ExitStack() as stack:
        yield [stack.enter_context(command(*words)) for _ in range(number)]


@pytest.mark.slow
async def test_sessions_of_a_killed_host_are_lost_and_the_next_go_elsewhere() -> None:
    with commands(2, LIGHTLY) as hosts:
        urls = [host.url for host in hosts]
        envs = await opened(urls, 20)
        dead = [env for env in envs if host_of(env) == urls[0]]
        steps = [asyncio.create_task(env.step(say("sleep 3"))) for env in dead[:2]]
        await asyncio.sleep(0.3)
        hosts[0].kill()
        for step in steps:
            with pytest.raises(EnvLost, match="is gone"):
                await step
        for env in dead[2:]:
            with pytest.raises(EnvLost, match="is gone"):
                await env.step(say("win"))
        await asyncio.gather(*(env.reset(TASK) for env in dead))
        results = await asyncio.gather(*(env.step(say("win")) for env in envs))
        assert [result.reward for result in results] == [1.0] * 20
        assert {host_of(env) for env in envs} == {urls[1]}
        metrics = HOSTS.metrics()
        assert (metrics["hosts/lost"], metrics["hosts/failures"]) == (len(dead), 1)
        again = await asyncio.to_thread(start, LIGHTLY, port=hosts[0].port)
        try:
            await eventually(lambda: HOSTS.states[urls[0]] == "up")
            more = await opened(urls, 20)
            assert {host_of(env) for env in more} == set(urls)
            await closed([*envs, *more])
        finally:
            again.process.terminate()
            again.process.wait(30)
            again.process.stdout.close()  # type: ignore[union-attr]


class Patient:
    """A model that acts after a pause, and wins with its third action."""

    model = "patient"

    async def chat(self, messages: Sequence[Message], *_: Any) -> Reply:
        await asyncio.sleep(0.4)
        turn = sum(message.role == "assistant" for message in messages)
        return Reply(say(("look", "wait", "win")[turn]), "stop")


@pytest.mark.slow
async def test_episodes_of_killed_hosts_are_played_again_none_lost_doubled_or_scored_0() -> None:
    with commands(3, LIGHTLY) as hosts:
        urls = [host.url for host in hosts]
        spec = Spec(name="remote", args={"url": urls, "env": LIGHTLY})
        config = RolloutConfig(format="plain", concurrency=60, max_retries=4)
        collector = Collector(None, None, config, spec, endpoint=Patient())  # type: ignore[arg-type]
        tasks = [RemoteEnv.task(None, seed) for seed in range(60)]
        playing = asyncio.create_task(collector.collect(tasks, 0, 3))
        await asyncio.sleep(1.0)
        hosts[0].kill()
        await asyncio.sleep(1.5)
        hosts[1].kill()
        played = [t for group in await playing for t in group.trajectories]
        assert len({t.id for t in played}) == len(played) == 180
        assert {(t.status, t.reward, t.num_turns) for t in played} == {(Status.COMPLETED, 1.0, 3)}
        metrics = HOSTS.metrics()
        assert metrics["hosts/lost"] > 0
        assert metrics["hosts/opened"] == 180 + metrics["hosts/lost"]
        assert metrics["hosts/sessions"] == 0
        assert open_at(urls[2]) == 0


@pytest.mark.slow
async def test_a_task_that_kills_its_hosts_is_given_up() -> None:
    with commands(4, "served_envs:Deadly") as hosts:
        env = fleet([host.url for host in hosts], env="served_envs:Deadly")
        with pytest.raises(EnvLost, match="is gone"):
            await env.reset(TASK)
        await eventually(lambda: sum(host.process.poll() is not None for host in hosts) == 3)


@pytest.mark.slow
async def test_a_frozen_host_is_noticed_without_a_call() -> None:
    with commands(2, LIGHTLY) as hosts:
        urls = [host.url for host in hosts]
        envs = await opened(urls, 10)
        os.kill(hosts[0].process.pid, signal.SIGSTOP)
        try:
            await eventually(lambda: HOSTS.states[urls[0]] == "down")
            more = await opened(urls, 5)
            assert {host_of(env) for env in more} == {urls[1]}
        finally:
            os.kill(hosts[0].process.pid, signal.SIGCONT)
        await eventually(lambda: HOSTS.states[urls[0]] == "up")
        await closed([*envs, *more])


@pytest.mark.slow
async def test_a_draining_host_finishes_its_sessions_and_gets_no_new_ones() -> None:
    with commands(2, LIGHTLY, "--drain", "60") as hosts:
        urls = [host.url for host in hosts]
        envs = await opened(urls, 10)
        os.kill(hosts[0].process.pid, signal.SIGTERM)
        await eventually(lambda: httpx.get(urls[0] + "/health").json()["status"] == "draining")
        more = await opened(urls, 10)
        assert {host_of(env) for env in more} == {urls[1]}
        metrics = HOSTS.metrics()
        assert (metrics["hosts/drains"], metrics["hosts/draining"]) == (1, 1)
        results = await asyncio.gather(*(env.step(say("win")) for env in envs))
        assert [result.reward for result in results] == [1.0] * 10
        await closed([*envs, *more])
        assert await asyncio.to_thread(hosts[0].process.wait, 30) in (0, -signal.SIGTERM)


@pytest.mark.slow
async def test_the_list_changes_while_it_is_used(tmp_path: Path) -> None:
    path = tmp_path / "hosts.txt"
    with service(LIGHTLY) as one, service(LIGHTLY) as other:
        path.write_text(one)
        envs = await opened(f"file:{path}", 5)
        path.write_text(f"{one}\n{other}")
        await eventually(lambda: HOSTS.states.get(other) == "up")
        more = await opened(f"file:{path}", 20)
        assert {host_of(env) for env in more} == {one, other}
        path.write_text("no URL")  # the list stays as it is
        await asyncio.sleep(1.5)
        path.write_text(other)
        await eventually(lambda: one not in HOSTS.states)
        last = await opened(f"file:{path}", 10)
        assert {host_of(env) for env in last} == {other}
        results = await asyncio.gather(*(env.step(say("win")) for env in envs))
        assert [result.reward for result in results] == [1.0] * 5
        await closed([*envs, *more, *last])


@pytest.mark.slow
def test_hosts_of_other_arguments_differ() -> None:
    with commands(1, "babyai", "actions=macro") as [macro], service("babyai") as plain:
        told = json.dumps(httpx.get(macro.url + "/envs/babyai").json()["args"])
        assert told == '{"actions": "macro"}'
        with pytest.raises(ConfigError, match=r"args is .*macro"):
            RemoteEnv(url=[macro.url, plain], env="babyai").tools()


@pytest.mark.slow
async def test_workers_of_a_host_share_its_sessions() -> None:
    with commands(1, OBEYS, "--workers", "2") as [host]:
        envs = await opened([host.url], 150, env=OBEYS)
        assert open_at(host.url) == 150
        results = await asyncio.gather(*(env.step(say("win")) for env in envs))
        assert [result.reward for result in results] == [1.0] * 150
        await closed(envs)
