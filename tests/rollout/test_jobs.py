"""Rollout jobs with an OpenAI-compatible endpoint, over HTTP."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import socket
import threading
from typing import Any

import pytest
from chat_server import ChatServer, call, num_turns, text
from played_envs import Say, task_of
from rollout_world import CONTEXT, World
from starlette.responses import RedirectResponse, Response
from variants import variants

from ludus.config.schema import RolloutConfig
from ludus.core.errors import ConfigError, SamplerError
from ludus.core.seeds import derive_seed
from ludus.core.types import Message, Spec, Status
from ludus.data.expert import run_expert
from ludus.models.endpoint import addresses
from ludus.models.endpoint.addresses import is_blocked
from ludus.models.endpoint.client import Endpoint, Reply, check_url
from ludus.models.samplers.base import SamplingParams
from ludus.models.samplers.engine import InProcessSampler
from ludus.rollout.hosts.host import LocalEnvs
from ludus.rollout.jobs import EpisodeRecord, RolloutJob
from ludus.rollout.requests import answer_of, tasks_of
from ludus.rollout.sessions.session import TokenRow, extend_rows

NUMBER = {
    derive_seed(0, str(number), 0, turn) % 2**31: number for number in range(6) for turn in range(5)
}
"""The id of a request, by its seed."""


def number_of(body: dict[str, Any]) -> int:
    return NUMBER[body["seed"]]


def obedient(body: dict[str, Any]) -> dict[str, Any]:
    """A model that says the word it is asked for."""
    return text(body["messages"][-1]["content"].split()[1])


def job_of(
    url: str, seeds: list[int], env: str = "Say", timeout_s: float = 20.0, **settings: Any
) -> RolloutJob:
    settings = {"format": "plain", "max_tokens_per_turn": 40, "max_retries": 0, **settings}
    deadline = settings.pop("deadline_s", None)
    return RolloutJob(
        Endpoint(url, "m", timeout_s=timeout_s),
        LocalEnvs(Spec(name=f"played_envs:{env}")),
        RolloutConfig(**settings),
        [(task_of(seed), EpisodeRecord(id=seed)) for seed in seeds],
        deadline_s=deadline,
    )


def wanted(seed: int) -> list[str]:
    env = Say()
    asyncio.run(env.reset(task_of(seed)))
    return env.wanted


async def run(made: RolloutJob) -> list[EpisodeRecord]:
    async with made.endpoint:
        return await made.run()


def played(*args: Any, **settings: Any) -> list[EpisodeRecord]:
    return asyncio.run(run(job_of(*args, **settings)))


def test_episodes_equal_those_of_the_environment() -> None:
    with ChatServer(obedient) as server:
        episodes = played(server.url, list(range(6)), concurrency=3)
    assert [e.id for e in episodes] == list(range(6))
    for seed, episode in enumerate(episodes):
        assert (episode.status, episode.error) == (Status.COMPLETED, None)
        assert (episode.reward, episode.score, episode.success) == (3.0, 1.0, True)
        shown = asyncio.run(run_expert(Say(), task_of(seed))).messages
        assert episode.conversation == shown
        assert episode.num_turns == 3
        assert episode.rows is None  # this endpoint tells no ids


def test_token_ids_and_logprobs_are_kept_unchanged(world: World) -> None:
    renderer = world.renderer()
    engine = InProcessSampler(world.model, context_length=CONTEXT, deterministic=False)
    sampled: list[list[int]] = []

    async def say(body: dict[str, Any]) -> dict[str, Any]:
        prompt = renderer.open([Message(**m) for m in body["messages"]])
        name = f"turn{len(sampled)}"
        params = SamplingParams(
            body["max_tokens"],
            body["temperature"],
            stop_token_ids=tuple(renderer.stop_token_ids),
            seed=body["seed"],
        )
        engine.open(name)
        done = await engine.sample(prompt, params, session=name)
        engine.close(name)
        sampled.append(done.token_ids)
        told = {"content": [{"token": "", "logprob": p} for p in done.logprobs]}
        more = {"token_ids": done.token_ids, "logprobs": told} if body["return_token_ids"] else {}
        content = renderer.parse(done.token_ids).message.content
        answer = text(content, done.finish_reason, **more)
        return {**answer, "prompt_token_ids": prompt}

    with ChatServer(say) as server:
        episodes = played(server.url, [0, 1], system_prompt="plain", concurrency=1)
    told = []
    for episode in episodes:
        assert episode.status.trainable, episode.error
        assert episode.rows is not None
        for row in episode.rows:
            assert len(row.token_ids) == len(row.mask) == len(row.logprobs)
            assert all(p == 0 for p, m in zip(row.logprobs, row.mask, strict=True) if not m)
            told += [i for i, m in zip(row.token_ids, row.mask, strict=True) if m]
        first = renderer.open(episode.conversation[:2])
        assert episode.rows[0].token_ids[: len(first)] == first
        assert episode.rows[0].mask[: len(first)] == [0] * len(first)
    assert told == [i for turn in sampled for i in turn]
    assert len(sampled) == sum(e.num_turns for e in episodes) > 2


def test_a_row_ends_where_the_endpoint_renders_other_ids() -> None:
    turn = Message(role="assistant", content="a")

    def reply(prompt: list[int], ids: list[int]) -> Reply:
        return Reply(turn, "stop", None, prompt, ids, [-0.5] * len(ids))

    rows = extend_rows(extend_rows([], reply([1, 2], [3])), reply([1, 2, 3, 4], [5]))
    one = TokenRow(token_ids=[1, 2, 3, 4, 5], mask=[0, 0, 1, 0, 1], logprobs=[0, 0, -0.5, 0, -0.5])
    assert rows == [one]
    assert extend_rows(rows, reply([1, 9, 3], [6])) == [
        one,
        TokenRow(token_ids=[1, 9, 3, 6], mask=[0, 0, 0, 1], logprobs=[0, 0, 0, -0.5]),
    ]
    assert extend_rows(rows, Reply(turn, "stop")) is None


@pytest.mark.parametrize(
    ("told", "kept"),
    [
        ([3, 4, 4], [3, 4, 4]),
        ([None, 7, None], [None, 7, None]),
        ([None, None, None], None),
        (["v3", True, -1], None),
    ],
)
def test_each_turn_records_its_policy_version(
    told: list[Any], kept: list[int | None] | None
) -> None:
    """The endpoint may swap its weights during an episode."""

    def say(body: dict[str, Any]) -> dict[str, Any]:
        turn = num_turns(body)
        version = {} if told[turn] is None else {"policy_version": told[turn]}
        return {**text(f"wrong {turn}"), **version}

    with ChatServer(say) as server:
        [episode] = played(server.url, [0], max_turns=3)
    assert episode.num_turns == 3
    assert episode.policy_versions == kept


@pytest.mark.parametrize(
    ("told", "kept"),
    [
        ([[3, 2], [5, 1]], [(3, 2), (5, 1)]),
        ([[3, 3]], None),
        (None, None),
        ([[3, 2], [5, 2]], None),
        ([[4, 2], [5, 1]], None),
        ([[3, 2], [True, 1]], None),
        ([[3, 2], ["5", 1]], None),
        ([3, 2], None),
        ("of another server", None),
    ],
)
def test_each_token_has_its_policy_version(told: Any, kept: list[tuple[int, int]] | None) -> None:
    """Runs that do not fit the tokens are another server's: the oldest version counts for all."""
    content = [{"token": "a", "logprob": -0.5}] * 3

    def say(body: dict[str, Any]) -> dict[str, Any]:
        tokens = {"token_ids": [7, 8, 9], "logprobs": {"content": content}}
        answer = {**text("wrong", **tokens), "policy_version": 3, "prompt_token_ids": [1, 2]}
        answer["choices"][0] |= {} if told is None else {"version_runs": told}
        return answer

    async def ask(url: str) -> Reply:
        async with Endpoint(url, "m") as endpoint:
            return await endpoint.chat([Message(role="user", content="a")], SamplingParams(3))

    with ChatServer(say) as server:
        reply = asyncio.run(ask(server.url))
        [episode] = played(server.url, [0], max_turns=1)
    assert (reply.policy_version, reply.version_runs) == (3, kept)
    assert episode.policy_versions == [3]
    assert episode.rows is not None
    expected = [3, 3, 5] if kept else [3, 3, 3]
    assert episode.rows[0].policy_versions == [None, None, *expected]


def test_an_endpoint_without_token_ids_is_asked_for_them_once() -> None:
    def say(body: dict[str, Any]) -> Any:
        if "return_token_ids" in body:
            return Response('{"error": {"message": "unknown argument"}}', 400)
        return obedient(body)

    with ChatServer(say) as server:
        episodes = played(server.url, [0, 1], concurrency=1)
        asked = ["return_token_ids" in body for body in server.bodies]
    assert all(e.success for e in episodes)
    assert asked[:2] == [True, False]
    assert not any(asked[1:])


def test_tool_replies_carry_the_call_ids() -> None:
    def say(body: dict[str, Any]) -> Any:
        assert body["tools"][0]["function"]["name"]
        if not num_turns(body):
            return call("say", "{no json")
        told = [m["content"] for m in body["messages"] if m["content"].startswith("say ")]
        return call("say", f'{{"word": "{told[-1].split()[1]}"}}')

    ungrey = next(s for s in range(99) if "grey" not in wanted(s))  # it is not for calling
    with ChatServer(say) as server:
        [episode] = played(server.url, [ungrey], format="tools")
        last = server.bodies[-1]["messages"]
    assert "no JSON object" in episode.conversation[2].content
    assert episode.success
    assert last[-1]["role"] == "tool"
    assert last[-1]["tool_call_id"] == last[-2]["tool_calls"][0]["id"] == "call_x"


def test_faults_of_the_endpoint_touch_their_own_ids_only() -> None:
    faults = {
        1: Response("<html>", 200),
        2: Response('{"choices": []}', 200),
        3: Response('{"error": {"message": "out of memory"}}', 500),
    }

    async def say(body: dict[str, Any]) -> Any:
        if number_of(body) == 4:
            await asyncio.sleep(30)
        broken = faults.get(number_of(body)) if num_turns(body) == 1 else None
        return broken or obedient(body)

    with ChatServer(say) as server:
        episodes = played(server.url, list(range(6)), timeout_s=2.0)
    assert [e.success for e in episodes] == [True, False, False, False, False, True]
    for episode in episodes[1:5]:
        assert episode.status is Status.ERROR_SAMPLER
        assert episode.reward is episode.score is None
    told = [str(e.error) for e in episodes[1:5]]
    assert "malformed response" in told[0]
    assert "malformed response" in told[1]
    assert "answered 500: out of memory" in told[2]
    assert "did not answer within 2 s" in told[3]
    numbers = answer_of("say", episodes, 1.0, None)
    assert (numbers.num_evaluated, numbers.success_rate) == (2, 1.0)


LARGE = f'{{"logprobs": {{"content": [{{"logprob": 1{"0" * 400}}}]}}, "token_ids": [1]'
SURROGATES = {
    "choices": [
        {"message": {"content": "\ud800 x", "reasoning_content": "\udfff", "tool_calls": []}}
    ]
}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (RedirectResponse("/v2"), r"answered 307, a redirect to '/v2': give the address it leads"),
        (
            Response(f'{{"prompt_token_ids": [1], "choices": [{LARGE}, "message": {{}}}}]}}'),
            "malformed response .OverflowError",
        ),
        (Response(json.dumps({"error": {"message": "\ud800"}}), 500), r"answered 500: \?$"),
    ],
)
async def test_answers_of_a_hostile_endpoint_are_told_in_words(answer: Any, said: str) -> None:
    with ChatServer(lambda _: answer) as server:
        async with Endpoint(server.url, "m") as endpoint:
            with pytest.raises(SamplerError, match=said) as caught:
                await endpoint.chat([Message(role="user", content="x")], SamplingParams(4))
    assert str(caught.value).encode()


async def test_lone_surrogates_of_an_endpoint_are_replaced() -> None:
    """They cannot be written to a file or a terminal."""
    with ChatServer(lambda _: Response(json.dumps(SURROGATES))) as server:
        async with Endpoint(server.url, "m") as endpoint:
            reply = await endpoint.chat([Message(role="user", content="x")], SamplingParams(4))
    assert (reply.message.content, reply.message.thinking) == ("? x", "?")
    assert reply.message.model_dump_json()


def test_an_unreachable_endpoint_is_not_a_reward_of_zero() -> None:
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        [episode] = played(url, [0])
    assert (episode.status, episode.reward) == (Status.ERROR_SAMPLER, None)
    assert "cannot be reached" in str(episode.error)
    assert answer_of("say", [episode], 1.0, None).mean_reward is None


def test_a_busy_endpoint_is_retried() -> None:
    turns = iter([Response("{}", 503)])

    with ChatServer(lambda body: next(turns, None) or obedient(body)) as server:
        [episode] = played(server.url, [0])
    assert episode.success


def test_a_context_overflow_is_truncated_length() -> None:
    error = '{"error": {"code": "context_length_exceeded", "message": "too long"}}'

    with ChatServer(lambda b: Response(error, 400) if num_turns(b) else text("?")) as server:
        [episode] = played(server.url, [0])
    assert (episode.status, episode.reward) == (Status.TRUNCATED_LENGTH, 0.0)


@pytest.mark.parametrize("how", variants(["deadline", "stop"], ["stop"]))
def test_a_job_that_ends_early_keeps_its_episodes(how: str) -> None:
    asked_again = threading.Event()

    async def say(body: dict[str, Any]) -> Any:
        if number_of(body) == 1 and num_turns(body):
            asked_again.set()
            await asyncio.sleep(60)
        return obedient(body)

    async def ended(url: str) -> RolloutJob:
        made = job_of(url, [0, 1, 2], concurrency=1, deadline_s=4.0 if how == "deadline" else None)
        if how == "stop":
            running = asyncio.create_task(run(made))
            while not asked_again.is_set():
                await asyncio.sleep(0.01)
            made.stop()
            await running
        else:
            await run(made)
        return made

    with ChatServer(say) as server:
        made = asyncio.run(ended(server.url))
    first, second, third = made.episodes
    assert first.success
    assert second.status is (Status.ERROR_TIMEOUT if how == "deadline" else Status.ABORTED)
    assert second.num_turns == 1
    assert second.reward is None
    assert (third.status, third.error) == (Status.ABORTED, "it was not started")
    assert made.stopped == ("deadline" if how == "deadline" else "cancelled")


@pytest.mark.parametrize(
    "url",
    ["", "localhost:8000", "ftp://host/v1", "http://", "http://a:b@host/v1", "http://host/v1?x=1",
     "http://169.254.169.254/v1", "http://[fe80::1]/v1", "http://host:999999/v1"],
)  # fmt: skip
def test_bad_addresses_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="base_url"):
        check_url(url)


@pytest.mark.parametrize(
    ("number", "refused"),
    [("169.254.169.254", True), ("::ffff:169.254.169.254", True), ("64:ff9b::a9fe:a9fe", True),
     ("2002:a9fe:a9fe::1", True), ("fe80::1%1", True), ("100.100.100.200", True),
     ("ff02::1", True), ("127.0.0.1", False), ("::1", False), ("10.0.0.1", False),
     ("fd00::1", False), ("metadata", False)],
)  # fmt: skip
def test_addresses_of_cloud_metadata_services(number: str, refused: bool) -> None:
    assert is_blocked(number) is refused


def test_a_host_name_is_checked_at_connection_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name resolves to this machine first, then to a metadata service."""
    own, numbers = socket.getaddrinfo, ["127.0.0.1"]

    def resolve(host: Any, port: Any, *rest: Any, **more: Any) -> Any:
        if host not in ("model.example", b"model.example"):
            return own(host, port, *rest, **more)
        number = numbers.pop(0) if len(numbers) > 1 else numbers[0]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (number, port))]

    async def ask(url: str) -> Reply:
        async with Endpoint(url, "m") as endpoint:
            await endpoint.check()
            return await endpoint.chat([Message(role="user", content="x")], SamplingParams(4))

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with ChatServer(lambda _: text("hi")) as server:
        named = server.url.replace("127.0.0.1", "model.example")
        assert asyncio.run(ask(named)).message.content == "hi"
        numbers[:] = ["127.0.0.1", "169.254.169.254"]
        with pytest.raises(SamplerError, match=r"refused: model.example is 169\.254"):
            asyncio.run(ask(named))
        assert len(server.bodies) == 1


async def test_the_connected_address_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the name changes between the check and the connection, nothing is sent."""
    monkeypatch.setattr(addresses, "METADATA", {ipaddress.ip_address("127.0.0.1")})

    async def knows_nothing(host: str, port: int) -> None:
        pass

    monkeypatch.setattr(addresses, "check_host", knows_nothing)
    with ChatServer(lambda _: text("hi")) as server:
        url = server.url.replace("127.0.0.1", "localhost")
        async with Endpoint(url, "m") as endpoint:
            with pytest.raises(SamplerError, match=r"refused: localhost is 127\.0\.0\.1"):
                await endpoint.chat([Message(role="user", content="x")], SamplingParams(4))
        assert server.bodies == []


def test_a_key_is_sent_and_not_in_errors() -> None:
    async def ask(url: str) -> None:
        async with Endpoint(url, "m", "secret-key") as endpoint:
            await endpoint.chat([Message(role="user", content="x")], SamplingParams(4))

    with ChatServer(lambda _: Response('{"error": "no such key"}', 401)) as server:
        with pytest.raises(SamplerError, match="answered 401: no such key") as caught:
            asyncio.run(ask(server.url))
        assert server.headers[0]["authorization"] == "Bearer secret-key"
    assert "secret-key" not in str(caught.value)


def test_unknown_ids_are_refused() -> None:
    textcraft = Spec(name="textcraft")
    assert [t.id for t in tasks_of(textcraft, [3, "textcraft_3"], None)] == ["textcraft_3"] * 2
    assert [t.id for t in tasks_of(textcraft, [3], "depth-1")] == ["textcraft/depth-1/3"]
    for ids, tier in (
        ([549], None),
        (["babyai_1"], None),
        ([0], "depth-9"),
        (["textcraft_1"], "x"),
    ):
        with pytest.raises(ConfigError):
            list(tasks_of(textcraft, ids, tier))
