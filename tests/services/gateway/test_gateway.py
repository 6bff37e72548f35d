"""The gateway over a real socket, with OpenAI's client."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from gateway_world import ASKED, CALL, TOOL, play
from played_envs import task_of
from rollout_world import Scripted, World

from ludus.core.types import Status, Trajectory
from ludus.rollout.workflow import Agent
from ludus.services.gateway.gateway import HttpGateway
from ludus.train.batches.samples import rows


async def test_openais_client_plays_an_episode(world: World):
    async def run(task, model):
        client, messages = model.openai(), list(ASKED)
        for _ in range(2):
            reply = await client.chat.completions.create(model=model.name, messages=messages)
            messages.append(reply.choices[0].message.model_dump(exclude_none=True))
            messages.append({"role": "user", "content": "and now ?"})
        return reply.choices[0].message.content == "blue"

    played = await play(world, run, "blue")
    assert (played.status, played.reward, played.num_turns) == (Status.COMPLETED, 1.0, 2)
    assert len(rows(played, 1.0)) == 1


def test_a_blocking_client(world: World):
    def run(task, model):
        with openai.OpenAI(base_url=model.base_url, api_key=model.api_key) as client:
            reply = client.chat.completions.create(model="policy", messages=ASKED)
        return reply.choices[0].message.content == "blue"

    assert asyncio.run(play(world, run, "blue")).reward == 1.0


async def test_a_stream_has_the_text_of_the_turn(world: World):
    async def run(task, model):
        client = model.openai()
        options = {"stream": True, "stream_options": {"include_usage": True}}
        stream = await client.chat.completions.create(model=model.name, messages=ASKED, **options)
        events = [event async for event in stream]
        text = "".join(e.choices[0].delta.content or "" for e in events if e.choices)
        assert events[-1].usage.completion_tokens > 0
        return text == "blue red"

    assert (await play(world, run, "blue red")).reward == 1.0


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_calls_go_round(world: World, stream: bool):
    """The agent sends calls back in its own JSON; they are still the model's own turn."""

    async def run(task, model):
        client, messages = model.openai(), list(ASKED)
        given = {"model": model.name, "messages": messages, "tools": [TOOL]}
        if stream:
            events = [e async for e in await client.chat.completions.create(**given, stream=True)]
            (call,) = [c for e in events for c in e.choices[0].delta.tool_calls or []]
        else:
            (call,) = (await client.chat.completions.create(**given)).choices[0].message.tool_calls
        assert call.function.name == "say"
        again = {"name": "say", "arguments": '{ "word" : "red" }'}
        sent = {"id": call.id, "type": "function", "function": again}
        messages.append({"role": "assistant", "content": None, "tool_calls": [sent]})
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "well done"})
        await client.chat.completions.create(**given)
        return 1

    played = await play(world, run, CALL, "blue", style="tools")
    assert played.error is None
    assert len(rows(played, 1.0)) == 1
    assert played.num_turns == 2


async def test_completions_that_extend_one_another_are_one_row(world: World):
    async def run(task, model):
        client = model.openai()
        extra = {"return_token_ids": True}
        first = await client.completions.create(
            model=model.name, prompt="red ?", extra_body=extra, max_tokens=8
        )
        choice = first.choices[0]
        ids = [*choice.prompt_token_ids, *choice.token_ids, choice.token_ids[0]]
        await client.completions.create(model=model.name, prompt=ids, max_tokens=8)
        return 1

    played = await play(world, run, "blue")
    assert len(rows(played, 1.0)) == 1
    assert played.num_turns == 2


def function(parameters: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}]}


def says(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


BAD: list[tuple[dict[str, Any], int, str]] = [
    ({"model": "polcy"}, 404, "did you mean policy"),
    ({"messages": None}, 400, "messages"),
    ({"messages": []}, 400, "messages"),
    ({"max_tokns": 3}, 400, "max_tokns"),
    (says([{"type": "image_url", "image_url": {"url": "x"}}]), 400, "messages.0.content"),
    ({"response_format": {"type": "json_schema"}}, 400, "response_format"),
    (says("red " * 400), 400, "context length"),
    (function({"type": 3}), 400, "JSON schema"),
    (function({"$ref": "http://127.0.0.1/x"}), 400, "external reference"),
    (says("x" * 5_000_000), 413, "bytes"),
]


async def test_bad_requests_are_refused_and_the_episode_goes_on(world: World):
    async def run(task, model):
        headers = {"authorization": f"Bearer {model.api_key}"}
        async with httpx.AsyncClient(base_url=model.base_url, headers=headers) as client:
            for changed, status, told in BAD:
                body = {"model": "policy", "messages": ASKED, **changed}
                answer = await client.post("/chat/completions", json=body)
                assert answer.status_code == status, (str(body)[:200], answer.text[:300])
                assert told in answer.text, (str(body)[:200], answer.text[:300])
            answer = await client.post("/chat/completions", content=b"{not json")
            assert answer.status_code == 400
        return float((await model.chat(ASKED)).content == "blue")

    played = await play(world, run, "blue")
    assert (played.error, played.reward, played.num_turns) == (None, 1.0, 1)


async def test_keys(world: World):
    kept: dict[str, str] = {}

    async def run(task, model):
        body = {"model": "policy", "messages": ASKED}
        root = model.base_url.partition("/s/")[0]
        async with httpx.AsyncClient() as client:
            post = client.post
            url = f"{root}/v1/chat/completions"
            assert (await post(url, json=body)).status_code == 401
            wrong = {"authorization": "Bearer sk-ludus-of-another"}
            assert (await post(url, json=body, headers=wrong)).status_code == 401
            assert (await post(url, json=body, headers={"x-api-key": model.api_key})).is_success
            path = f"{root}/s/{model.api_key}/v1/chat/completions"
            assert (await post(path, json=body)).is_success
            listed = await client.get(f"{root}/s/{model.api_key}/v1/models")
            assert [m["id"] for m in listed.json()["data"]] == ["policy", "policy:untrained"]
            assert (await client.get(f"{root}/health")).json()["sessions"] == 1
        kept.update(url=url, key=model.api_key)
        return 1

    played = await play(world, run, "blue")
    assert (played.error, played.num_turns) == (None, 2)
    with pytest.raises(httpx.ConnectError):  # the gateway has closed with its collector
        httpx.post(kept["url"], json={}, headers={"x-api-key": kept["key"]})


async def test_the_key_of_an_ended_episode(world: World):
    kept: list[Any] = []

    async def run(task, model):
        kept.append((model.base_url, model.api_key))
        await model.chat(ASKED)
        if len(kept) == 2:
            url, key = kept[0]
            body = {"model": "policy", "messages": ASKED}
            async with httpx.AsyncClient() as client:
                answer = await client.post(
                    f"{url}/chat/completions", json=body, headers={"x-api-key": key}
                )
            assert (answer.status_code, answer.json()["error"]["code"]) == (410, "episode_ended")
            return 1
        raise RuntimeError("again")

    played = await play(world, run, "blue", max_retries=1)
    assert (played.error, played.reward) == (None, 1.0)


async def test_logprobs_of_completions(world: World):
    async def run(task, model):
        client = model.openai()
        given = {"model": model.name, "prompt": "red ?", "max_tokens": 8}
        for stream in (False, True):
            answer = await client.completions.create(**given, logprobs=0, stream=stream)
            events = [event async for event in answer] if stream else [answer]
            found = [e.choices[0].logprobs for e in events if e.choices[0].logprobs]
            assert [value for each in found for value in each.token_logprobs] == [-0.5, -0.5]
        return 1

    assert (await play(world, run, "blue")).error is None


async def test_a_stream_counts_the_sampled_tokens_without_their_logprobs(world: World):
    async def run(task, model):
        given = {"model": model.name, "messages": ASKED, "stream_options": {"include_usage": True}}
        stream = await model.openai().chat.completions.create(**given, stream=True)
        *_, last = [event async for event in stream]
        assert last.usage.completion_tokens == 2
        return 1

    assert (await play(world, run, "blue")).error is None


async def test_untrained_by_name_and_by_header(world: World):
    async def run(task, model):
        client = model.openai()
        await client.chat.completions.create(
            model="policy:untrained", messages=ASKED, temperature=0
        )
        told = await client.chat.completions.with_raw_response.create(
            model="policy", messages=ASKED, temperature=0, extra_headers={"x-ludus-train": "false"}
        )
        assert "x-ludus-ignored" not in told.headers
        told = await client.chat.completions.with_raw_response.create(
            model="policy", messages=ASKED, temperature=0
        )
        assert told.headers["x-ludus-ignored"] == "temperature"
        return 1

    played = await play(world, run, "blue")
    assert (played.error, played.num_turns) == (None, 1)


async def test_fields_that_agents_send_are_told_to_have_no_effect(world: World):
    """A named tool is what AgentScope and LangChain ask for, to get structured output."""
    choice = {"type": "function", "function": {"name": "say"}}
    sent = {
        "tool_choice": choice,
        "presence_penalty": 0.5,
        "reasoning_effort": "low",
        "extra_body": {"chat_template_kwargs": {"enable_thinking": False}, "min_p": 0.1},
    }

    async def run(task, model):
        create = model.openai().chat.completions.with_raw_response.create
        told = await create(model="policy", messages=ASKED, tools=[TOOL], **sent)
        assert told.headers["x-ludus-ignored"] == (
            "presence_penalty, min_p, reasoning_effort, chat_template_kwargs, tool_choice"
        )
        choice["function"]["name"] = "sya"
        with pytest.raises(openai.BadRequestError, match="no tool 'sya'"):
            await create(model="policy", messages=ASKED, tools=[TOOL], **sent)
        return 1

    played = await play(world, run, CALL, style="tools")
    assert (played.error, played.num_turns) == (None, 1)


async def test_a_client_that_leaves_cancels_its_call(world: World):
    async def run(task, model):
        client = model.openai(timeout=0.3)
        with pytest.raises(openai.APITimeoutError):
            await client.chat.completions.create(model="policy", messages=ASKED)
        return 1

    class Slow(Scripted):
        async def sample(self, *args: Any, **kwargs: Any) -> Any:
            await asyncio.sleep(20)

    sampler = Slow(world.renderer(), "blue")
    collector = world.collector(None, "plain", sampler=sampler, system_prompt=None, max_retries=0)
    agent = Agent(run, frozenset({"task", "model"}))
    collector = replace(collector, agent=agent, gateway=HttpGateway())
    (group,) = await asyncio.wait_for(collector.collect([task_of(0)], 0, 1), 15)
    await collector.close()
    assert "made no call" in (group.trajectories[0].dropped or "")
    assert sampler.sessions == set()


def test_a_server_that_starts_again_has_its_unix_socket(world: World):
    gateway = HttpGateway(unix=True)
    collector = world.collector(None, "plain", sampler=Scripted(world.renderer(), "blue"))
    collector = replace(collector, agent=Agent(print, frozenset()))
    session = collector.episode(task_of(0), Trajectory("t", "g", "q")).session
    first, folder = gateway.admit(session), None
    try:
        gateway._server.should_exit = True
        gateway._thread.join(10)
        again = gateway.admit(session)
        assert again.socket == first.socket
        folder = again.socket.parent
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(again.socket))) as client:
            headers = {"x-api-key": again.api_key}
            assert client.get("http://x/v1/models", headers=headers).status_code == 200
    finally:
        gateway.close()
    assert not folder.exists()


async def test_a_server_that_died_starts_again_on_its_port(world: World):
    gateway, urls = HttpGateway(), []

    async def run(task, model):
        urls.append(model.base_url)
        async with openai.AsyncOpenAI(base_url=model.base_url, api_key=model.api_key) as client:
            reply = await client.chat.completions.create(model="policy", messages=ASKED)
        if len(urls) == 1:
            gateway._server.should_exit = True
            gateway._thread.join(10)
        return float(reply.choices[0].message.content == "blue")

    sampler = Scripted(world.renderer(), "blue")
    settings = {"system_prompt": None, "max_retries": 0, "concurrency": 1}
    collector = world.collector(None, "plain", sampler=sampler, **settings)
    agent = Agent(run, frozenset({"task", "model"}))
    collector = replace(collector, agent=agent, gateway=gateway)
    groups = await collector.collect([task_of(0), task_of(1)], 0, 1)
    await collector.close()
    assert [g.trajectories[0].reward for g in groups] == [1.0, 1.0]
    assert len({url.partition("/s/")[0] for url in urls}) == 1
