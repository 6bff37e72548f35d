"""OpenAI's Responses API over a real socket: its client, and the Agents SDK."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from gateway_world import CALL, RED, play
from played_envs import SAY
from rollout_world import World

from ludus.core.types import Message, Status
from ludus.train.batches.samples import rows

TOOL = {"type": "function", **SAY.model_dump(), "strict": True}


async def test_a_text_and_its_usage(world: World):
    async def run(task, model):
        answer = await model.openai().responses.create(model=model.name, input="red ?")
        assert (answer.status, answer.output_text) == ("completed", "blue")
        assert answer.usage.output_tokens > 0
        assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
        return 1

    played = await play(world, run, "blue")
    assert (played.error, played.num_turns) == (None, 1)


def test_a_blocking_client(world: World):
    import asyncio

    def run(task, model):
        with openai.OpenAI(base_url=model.base_url, api_key=model.api_key) as client:
            return client.responses.create(model="policy", input="red ?").output_text == "blue"

    assert asyncio.run(play(world, run, "blue")).reward == 1.0


async def test_the_chat_api_gets_the_same_prompt(world: World):
    async def run(task, model):
        client = model.openai()
        chat = [{"role": "system", "content": "plain"}, {"role": "user", "content": "red ?"}]
        one = await client.chat.completions.create(model=model.name, messages=chat)
        two = await client.responses.create(model=model.name, instructions="plain", input="red ?")
        assert one.usage.prompt_tokens == two.usage.input_tokens
        items = [{"role": "user", "content": [{"type": "input_text", "text": "red ?"}]}]
        await client.responses.create(model=model.name, instructions="plain", input=items)
        return 1

    played = await play(world, run, "blue")
    assert played.error is None
    assert sum(not segment.sampled for segment in played.segments) == 2  # one context for all


async def tool_round(client: Any, sent_back: str, stream: bool) -> None:
    """A call of a tool and the answer after it; the turn goes back as the client has it."""
    given: dict[str, Any] = {"model": "policy", "tools": [TOOL], "instructions": "tools"}
    items: list[Any] = [{"role": "user", "content": "red ?"}]
    if stream:
        async with client.responses.stream(**given, input=items) as events:
            first = await events.get_final_response()
    else:
        first = await client.responses.create(**given, input=items)
    calls = [item for item in first.output if item.type == "function_call"]
    assert [(c.name, c.call_id) for c in calls] == [("say", calls[0].call_id)]
    result = {"type": "function_call_output", "call_id": calls[0].call_id, "output": "done ."}
    if sent_back == "previous_response_id":
        more = {"previous_response_id": first.id, "input": [result]}
    elif sent_back == "items":
        more = {"input": [*items, *(i.model_dump(exclude_none=True) for i in first.output), result]}
    else:  # without the ids of items, and with other JSON
        text = '{ "word" : "red" }'
        call = {"type": "function_call", "name": "say", "arguments": text}
        more = {"input": [*items, call | {"call_id": calls[0].call_id}, result]}
    second = await client.responses.create(**given, **more)
    assert second.output_text == "blue"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("sent_back", ["previous_response_id", "items", "without ids"])
async def test_a_tool_round_is_one_row(world: World, sent_back: str, stream: bool):
    async def run(task, model):
        await tool_round(model.openai(), sent_back, stream)
        return 1

    played = await play(world, run, CALL, "blue", style="tools")
    assert (played.error, played.num_turns) == (None, 2)
    assert len(rows(played, 1.0)) == 1


BOTH = Message(
    role="assistant", content="red blue", thinking="the colour is red", tool_calls=[RED, RED]
)


@pytest.mark.parametrize("order", ["as sent", "interleaved", "without ids"])
async def test_parallel_calls_with_text_and_thinking_are_one_turn(world: World, order: str):
    async def run(task, model):
        client = model.openai()
        given: dict[str, Any] = {"model": "policy", "tools": [TOOL]}
        items: list[Any] = [{"role": "user", "content": "red ?"}]
        first = await client.responses.create(**given, input=items)
        kinds = ["reasoning", "message", "function_call", "function_call"]
        assert [item.type for item in first.output] == kinds
        head, calls = first.output[:2], first.output[2:]
        assert head[0].content[0].text == "the colour is red"
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": "done ."}
            for call in calls
        ]
        sent = [item.model_dump(exclude_none=True) for item in (*head, *calls)]
        if order == "without ids":
            for item in sent:
                item.pop("id")
        pairs = [*sent[:2], sent[2], results[0], sent[3], results[1]]
        more = pairs if order == "interleaved" else [*sent, *results]
        await client.responses.create(**given, input=[*items, *more])
        return 1

    played = await play(world, run, BOTH, "blue", style="tools")
    assert (played.error, played.num_turns) == (None, 2)
    assert len(rows(played, 1.0)) == 1


async def test_two_turns_without_a_message_between_are_two(world: World):
    async def run(task, model):
        client = model.openai()
        items: list[Any] = [{"role": "user", "content": "red ?"}]
        for _ in range(3):
            answer = await client.responses.create(model="policy", input=items)
            items += [item.model_dump(exclude_none=True) for item in answer.output]
        return 1

    played = await play(world, run, "blue")
    assert (played.error, played.num_turns) == (None, 3)
    assert len(rows(played, 1.0)) == 1


async def test_one_call_alone_where_parallel_calls_are_off(world: World):
    async def run(task, model):
        client = model.openai()
        given: dict[str, Any] = {"model": "policy", "tools": [TOOL], "parallel_tool_calls": False}
        first = await client.responses.create(**given, input="red ?")
        (call,) = [item for item in first.output if item.type == "function_call"]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "done ."}
        await client.responses.create(**given, input=[result], previous_response_id=first.id)
        return 1

    played = await play(world, run, BOTH, "blue", style="tools")
    assert (played.error, len(rows(played, 1.0))) == (None, 1)


async def test_the_events_of_a_stream(world: World):
    async def run(task, model):
        stream = await model.openai().responses.create(
            model=model.name, input="red ?", tools=[TOOL], stream=True
        )
        events = [event async for event in stream]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        part = ["content_part.added", "TEXT.delta", "TEXT.done", "content_part.done"]
        arguments = ["function_call_arguments.delta", "function_call_arguments.done"]

        def item(inner: list[str], text: str = "") -> list[str]:
            inner = [kind.replace("TEXT", text) for kind in inner]
            return ["output_item.added", *inner, "output_item.done"]

        assert [event.type.removeprefix("response.") for event in events] == [
            "created", "in_progress", *item(part, "reasoning_text"), *item(part, "output_text"),
            *item(arguments), *item(arguments), "completed",
        ]  # fmt: skip
        assert events[-1].response.output_text == "red blue"
        return 1

    played = await play(world, run, BOTH, style="tools")
    assert played.error is None


async def test_a_turn_that_reaches_its_limit_is_incomplete(world: World):
    async def run(task, model):
        client = model.openai()
        answer = await client.responses.create(model=model.name, input="red ?")
        assert (answer.status, answer.incomplete_details.reason) == (
            "incomplete", "max_output_tokens"
        )  # fmt: skip
        stream = await client.responses.create(model=model.name, input="red ?", stream=True)
        assert [event.type async for event in stream][-1] == "response.incomplete"
        return 1

    played = await play(world, run, "blue ...")
    assert played.status is Status.TRUNCATED_LENGTH


async def test_logprobs(world: World):
    async def run(task, model):
        include = ["message.output_text.logprobs"]
        answer = await model.openai().responses.create(
            model=model.name, input="red ?", include=include
        )
        logprobs = answer.output[0].content[0].logprobs
        assert [entry.logprob for entry in logprobs] == [-0.5] * answer.usage.output_tokens
        return 1

    assert (await play(world, run, "blue")).error is None


async def test_the_agents_sdk_with_its_own_model(world: World):
    """Its default is this API; only the client is ours."""
    agents = pytest.importorskip("agents")
    heard: list[str] = []

    async def run(task, model):
        agents.set_tracing_disabled(True)
        chosen = agents.OpenAIResponsesModel(model.name, model.openai())

        @agents.function_tool
        def say(word: str) -> str:
            """Say a word."""
            heard.append(word)
            return "done ."

        agent = agents.Agent("sayer", instructions="tools", model=chosen, tools=[say])
        first = await agents.Runner.run(agent, "red ?")
        items = [*first.to_input_list(), {"role": "user", "content": "and now ?"}]
        streamed = agents.Runner.run_streamed(agent, items)
        async for _ in streamed.stream_events():
            pass
        return first.final_output == streamed.final_output == "blue"

    played = await play(world, run, CALL, "blue", CALL, "blue", style="tools")
    assert (played.error, played.reward, played.num_turns) == (None, 1.0, 4)
    assert heard == ["red", "red"]
    assert len(rows(played, 1.0)) == 1


def item(**fields: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": "red ?"}, fields]}


IMAGE = [{"type": "input_image", "image_url": "http://127.0.0.1/x.png"}]
BAD: list[tuple[dict[str, Any], int, str]] = [
    ({"model": "polcy"}, 404, "did you mean policy"),
    ({"input": None}, 400, "input"),
    ({"input": []}, 400, "input"),
    ({"max_tokens": 3}, 400, "max_tokens"),
    ({"background": True}, 400, "background: not supported"),
    ({"conversation": "c"}, 400, "conversation: not supported"),
    ({"truncation": "auto"}, 400, "truncation: not supported"),
    ({"tool_choice": {"type": "function", "name": "f"}}, 400, "tool_choice: no tool 'f'"),
    ({"tools": [{"type": "web_search"}]}, 400, "tools.0.type"),
    ({"tools": [TOOL, TOOL]}, 400, "'say' is there twice"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}}, 400, "constrain"),
    ({"text": {"format": {"type": "json_object"}}}, 400, "ask for JSON in the prompt"),
    ({"previous_response_id": "resp_x"}, 404, "no response of this episode"),
    (item(role="user", content=IMAGE), 400, "the model reads text only"),
    (item(type="item_reference", id="x"), 400, "input.1.type"),
    (item(type="function_call", name="f", call_id="c", arguments="[]"), 400, "input.1.arguments"),
    (item(type="function_call", name="f", arguments="{}"), 400, "input.1.call_id"),
    (item(type="function_call_output", call_id="c"), 400, "input.1.output"),
    (item(content="x"), 400, "input.1.role"),
    ({"input": "red " * 400}, 400, "context_length_exceeded"),
]


async def test_bad_requests_are_refused_by_name(world: World):
    async def run(task, model):
        headers = {"authorization": f"Bearer {model.api_key}"}
        async with httpx.AsyncClient(base_url=model.base_url, headers=headers) as client:
            for changed, status, told in BAD:
                body = {"model": "policy", "input": "red ?", **changed}
                answer = await client.post("/responses", json=body)
                assert answer.status_code == status, (str(body)[:200], answer.text[:300])
                assert told in answer.text, (str(body)[:200], answer.text[:300])
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        return float((await model.chat([{"role": "user", "content": "red ?"}])).content == "blue")

    played = await play(world, run, "blue")
    assert (played.error, played.reward, played.num_turns) == (None, 1.0, 1)


async def test_a_response_that_is_not_kept(world: World):
    async def run(task, model):
        client = model.openai()
        answer = await client.responses.create(model=model.name, input="red ?", store=False)
        with pytest.raises(openai.NotFoundError, match="no response of this episode"):
            await client.responses.create(
                model=model.name, input="and ?", previous_response_id=answer.id
            )
        return 1

    assert (await play(world, run, "blue")).error is None


async def test_what_has_no_effect_is_told(world: World):
    async def run(task, model):
        told = await model.openai().responses.with_raw_response.create(
            model=model.name, input="red ?", temperature=0, reasoning={"effort": "low"},
            tools=[TOOL], tool_choice="required",
        )  # fmt: skip
        assert told.headers["x-ludus-ignored"] == "temperature, reasoning, tool_choice"
        return 1

    assert (await play(world, run, "blue", style="tools")).error is None
