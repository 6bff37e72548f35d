"""Anthropic's Messages API over a real socket, with its client."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from gateway_world import ASKED, CALL, RED, play
from played_envs import SAY
from rollout_world import World

from ludus.core.types import Message, Status
from ludus.train.batches.samples import rows

anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed")

TOOL = {"name": SAY.name, "description": SAY.description, "input_schema": SAY.parameters}
BOTH = Message(
    role="assistant", content="red blue", thinking="the colour is red", tool_calls=[RED, RED]
)


def connected(model: Any, **options: Any) -> Any:
    """Its clients add `/v1` to the address themselves."""
    root = model.base_url.removesuffix("/v1")
    return anthropic.AsyncAnthropic(base_url=root, api_key=model.api_key, max_retries=0, **options)


async def test_a_text_and_its_usage(world: World):
    async def run(task, model):
        async with connected(model) as client:
            answer = await client.messages.create(model="policy", max_tokens=16, messages=ASKED)
        assert [(block.type, block.text) for block in answer.content] == [("text", "blue")]
        assert (answer.stop_reason, answer.role) == ("end_turn", "assistant")
        assert answer.usage.input_tokens > 0
        assert answer.usage.output_tokens > 0
        return 1

    played = await play(world, run, "blue")
    assert (played.error, played.num_turns) == (None, 1)


def test_a_blocking_client(world: World):
    def run(task, model):
        root = model.base_url.removesuffix("/v1")
        with anthropic.Anthropic(base_url=root, api_key=model.api_key) as client:
            answer = client.messages.create(model="policy", max_tokens=16, messages=ASKED)
            with client.messages.stream(model="policy", max_tokens=16, messages=ASKED) as stream:
                text = "".join(stream.text_stream)
        return answer.content[0].text == text == "blue"

    assert asyncio.run(play(world, run, "blue")).reward == 1.0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("said", [CALL, BOTH])
@pytest.mark.parametrize("thinking", [False, True])
async def test_a_tool_round_is_one_row(world: World, said: Message, thinking: bool, stream: bool):
    async def run(task, model):
        given: dict[str, Any] = {"model": "policy", "max_tokens": 40, "tools": [TOOL]}
        given |= {"system": [{"type": "text", "text": "tools"}]}
        if thinking:
            given |= {"thinking": {"type": "enabled", "budget_tokens": 1024}}
        messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "red ?"}]}]
        async with connected(model) as client:
            if stream:
                async with client.messages.stream(**given, messages=messages) as events:
                    first = await events.get_final_message()
            else:
                first = await client.messages.create(**given, messages=messages)
            kinds = [block.type for block in first.content]
            assert ("thinking" in kinds) == (thinking and said is BOTH)
            assert first.stop_reason == "tool_use"
            calls = [block for block in first.content if block.type == "tool_use"]
            assert [(c.name, c.input) for c in calls] == [("say", {"word": "red"})] * len(calls)
            results = [
                {"type": "tool_result", "tool_use_id": call.id, "content": "done ."}
                for call in calls
            ]
            blocks = [block.model_dump(exclude_none=True) for block in first.content]
            messages.append({"role": "assistant", "content": blocks})
            messages.append({"role": "user", "content": results})
            counted = await client.messages.count_tokens(
                model="policy", messages=messages, tools=[TOOL], system="tools"
            )
            second = await client.messages.create(**given, messages=messages)
        assert counted.input_tokens == second.usage.input_tokens
        assert second.content[0].text == "blue"
        return 1

    played = await play(world, run, said, "blue", style="tools")
    assert (played.error, played.num_turns) == (None, 2)
    assert len(rows(played, 1.0)) == 1


async def test_results_and_text_of_a_turn_are_messages(world: World):
    async def run(task, model):
        blocks = [
            {"type": "tool_result", "tool_use_id": "t", "content": "grey .", "is_error": True},
            {"type": "text", "text": "red", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "blue"},
        ]
        call = {"type": "tool_use", "id": "t", "name": "say", "input": {}}
        messages = [*ASKED, {"role": "assistant", "content": [call]}]
        messages.append({"role": "user", "content": blocks})
        async with connected(model) as client:
            await client.messages.create(model="policy", max_tokens=16, messages=messages)
        return 1

    played = await play(world, run, "blue", style="tools")
    assert played.error is None
    given = [(s.message.role, s.message.content) for s in played.segments if not s.sampled]
    assert given[2:] == [("tool", "Error: grey ."), ("user", "red\nblue")]


async def test_counting_changes_nothing(world: World):
    """Under `strip` too, where the next call reads the last turn without its thinking."""

    async def run(task, model):
        async with connected(model) as client:
            given: dict[str, Any] = {"model": "policy", "messages": list(ASKED)}
            for _ in range(3):
                counted = await client.messages.count_tokens(**given)
                answer = await client.messages.create(**given, max_tokens=40)
                assert counted.input_tokens == answer.usage.input_tokens
                text = answer.content[0].text
                given["messages"] += [{"role": "assistant", "content": text}, *ASKED]
        return 1

    said = "<think>\nhm\n</think>\n\nblue"
    played = await play(world, run, said, style="think", thinking="strip")
    assert (played.error, played.num_turns) == (None, 3)
    assert all(segment.message is not None for segment in played.segments)


async def test_the_events_of_a_stream(world: World):
    async def run(task, model):
        async with connected(model) as client:
            stream = await client.messages.create(
                model="policy", max_tokens=40, messages=ASKED, tools=[TOOL], stream=True,
                thinking={"type": "enabled", "budget_tokens": 1024},
            )  # fmt: skip
            events = [event async for event in stream]
        start, delta, stop = (f"content_block_{kind}" for kind in ("start", "delta", "stop"))
        assert [event.type for event in events] == [
            "message_start", start, delta, delta, stop, *[start, delta, stop] * 3,
            "message_delta", "message_stop",
        ]  # fmt: skip
        assert events[-2].delta.stop_reason == "tool_use"
        assert events[-2].usage.output_tokens > 0
        return 1

    assert (await play(world, run, BOTH, style="tools")).error is None


async def test_why_a_turn_ended(world: World):
    async def run(task, model):
        async with connected(model) as client:
            given: dict[str, Any] = {"model": "policy", "messages": ASKED, "max_tokens": 40}
            answer = await client.messages.create(**given, stop_sequences=["red"])
            assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "red")
            assert answer.content[0].text.strip() == "blue"
            answer = await client.messages.create(
                model="policy", messages=[{"role": "user", "content": "grey"}], max_tokens=2
            )
            assert answer.stop_reason == "max_tokens"
        return 1

    from rollout_world import Scripted

    class Stopping(Scripted):
        """Ends at the call's limit of tokens."""

        async def sample(self, prompt_ids: Any, params: Any, *, session: str) -> Any:
            done = await super().sample(prompt_ids, params, session=session)
            if params.max_tokens < len(done.token_ids):
                del done.token_ids[params.max_tokens :], done.logprobs[params.max_tokens :]
                object.__setattr__(done, "finish_reason", "length")
            return done

    played = await play(world, run, sampler=Stopping(world.renderer(), "blue red grey"))
    assert played.status is Status.TRUNCATED_LENGTH


async def test_one_call_alone_where_parallel_use_is_off(world: World):
    async def run(task, model):
        async with connected(model) as client:
            choice = {"type": "any", "disable_parallel_tool_use": True}
            told = await client.messages.with_raw_response.create(
                model="policy", max_tokens=40, messages=ASKED, tools=[TOOL], tool_choice=choice,
                extra_body={"temperature": 1.0},
            )  # fmt: skip
            answer = await told.parse()
            assert sum(block.type == "tool_use" for block in answer.content) == 1
            assert told.headers["x-ludus-ignored"] == "temperature, tool_choice"
        return 1

    assert (await play(world, run, BOTH, style="tools")).error is None


def block(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [fields]}]}


SOURCE = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
BAD: list[tuple[dict[str, Any], int, str, str]] = [
    ({"model": "polcy"}, 404, "not_found_error", "did you mean policy"),
    ({"messages": []}, 400, "invalid_request_error", "messages"),
    ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
    ({"max_tokns": 3}, 400, "invalid_request_error", "max_tokns"),
    (block(type="image", source=SOURCE), 400, "invalid_request_error", "reads text only"),
    (block(type="text"), 400, "invalid_request_error", "messages.0.content.0.text"),
    (block(type="tool_result"), 400, "invalid_request_error", "tool_use_id"),
    (block(type="tool_use"), 400, "invalid_request_error", "belongs to the assistant"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, 400, "invalid_request_error",
     "tools.0"),
    ({"tools": [TOOL, TOOL]}, 400, "invalid_request_error", "'say' is there twice"),
    ({"tool_choice": {"type": "tool", "name": "say"}}, 400, "invalid_request_error",
     "tool_choice: no tool 'say'"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, 400,
     "invalid_request_error", "constrain"),
    ({"messages": [*ASKED, {"role": "assistant", "content": "I"}]}, 400, "invalid_request_error",
     "not continued"),
    ({"messages": [{"role": "user", "content": "red " * 400}]}, 400, "invalid_request_error",
     "prompt is too long"),
    ({"messages": [{"role": "user", "content": "x" * 5_000_000}]}, 413, "request_too_large",
     "bytes"),
]  # fmt: skip


async def test_bad_requests_are_refused_in_anthropics_form(world: World):
    async def run(task, model):
        headers = {"x-api-key": model.api_key}
        async with httpx.AsyncClient(base_url=model.base_url, headers=headers) as client:
            for changed, status, kind, told in BAD:
                body = {"model": "policy", "messages": ASKED, "max_tokens": 16, **changed}
                answer = await client.post("/messages", json=body)
                assert answer.status_code == status, (str(body)[:200], answer.text[:300])
                assert answer.json()["type"] == "error"
                assert answer.json()["error"]["type"] == kind, answer.text[:300]
                assert told in answer.text, (str(body)[:200], answer.text[:300])
            for answer in (
                await client.post("/messages", content=b"{not json"),
                await client.get("/messages"),
                await client.post("/messages/batches", json={}),
                await client.post("/messages", headers={"x-api-key": "sk-of-another"}, json={}),
            ):
                assert answer.is_client_error
                assert set(answer.json()) == {"type", "error"}, answer.text
        async with connected(model) as client:
            with pytest.raises(anthropic.NotFoundError, match="unknown model 'claude'"):
                await client.messages.create(model="claude", messages=ASKED, max_tokens=16)
        return float((await model.chat(ASKED)).content == "blue")

    played = await play(world, run, "blue")
    assert (played.error, played.reward, played.num_turns) == (None, 1.0, 1)
