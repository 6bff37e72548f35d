"""Structured output: over each API, an answer is JSON of the schema, and its tokens train."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from gateway_world import ASKED, TOOL, play
from rollout_world import World

from ludus.core.types import Group, Status, Task, Trajectory
from ludus.models.vocabulary import Vocabulary
from ludus.train.batches.samples import rows
from ludus.train.forward import Forward
from ludus.train.scoring import Scorer

pytest.importorskip("llguidance", reason="needs the extra agents")

SCHEMA = {
    "type": "object",
    "properties": {"word": {"enum": ["red", "blue"]}},
    "required": ["word"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "name": "answer", "schema": SCHEMA}


async def of_chat(model: Any, client: httpx.AsyncClient, **more: Any) -> str:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    body = {"model": model.name, "messages": ASKED, "response_format": form, **more}
    answer = (await client.post("/chat/completions", json=body)).raise_for_status()
    return str(answer.json()["choices"][0]["message"]["content"])


async def of_responses(model: Any, client: httpx.AsyncClient) -> str:
    body = {"model": model.name, "input": "red ?", "text": {"format": FORM}}
    answer = (await client.post("/responses", json=body)).raise_for_status()
    return str(answer.json()["output"][0]["content"][0]["text"])


async def of_messages(model: Any, client: httpx.AsyncClient) -> str:
    given = {"model": model.name, "max_tokens": 40, "messages": ASKED}
    body = {**given, "output_config": {"format": FORM}}
    answer = (await client.post("/messages", json=body)).raise_for_status()
    return str(answer.json()["content"][0]["text"])


async def of_model(model: Any, client: httpx.AsyncClient) -> str:
    return str((await model.chat(ASKED, schema=SCHEMA)).content)


def agent(ask: Any, texts: list[str], **more: Any) -> Any:
    async def run(task: Any, model: Any) -> float:
        headers = {"authorization": f"Bearer {model.api_key}"}
        async with httpx.AsyncClient(base_url=model.base_url, headers=headers) as client:
            texts.append(await ask(model, client, **more))
        return 1.0

    return run


def check_scores(world: World, played: Trajectory) -> None:
    """The learner's log-probabilities are the sampler's."""
    vocabulary = Vocabulary.of(world.tokenizer)
    forward = Forward(world.model, context_length=256, vocabulary=vocabulary)
    scorer = Scorer(forward, 4096, 0)
    [group] = scorer([Group("g", Task(id="t"), [played])], "learner_logprobs")
    for before, after in zip(played.segments, group.trajectories[0].segments, strict=True):
        if before.sampled:
            assert after.learner_logprobs == pytest.approx(before.logprobs, abs=1e-4)


@pytest.mark.parametrize("ask", [of_chat, of_responses, of_messages, of_model])
async def test_an_answer_is_json_of_the_schema_and_trains(world: World, ask: Any) -> None:
    texts: list[str] = []
    sampler = world.sampler(tokenizer=world.tokenizer, deterministic=False)
    played = await play(world, agent(ask, texts), style="tools", sampler=sampler)
    assert played.error is None
    assert json.loads(texts[0])["word"] in ("red", "blue")
    (row,) = rows(played, 1.0)
    (constraint,) = row.constraints
    assert constraint[1] - constraint[0] == row.num_loss_tokens == played.num_sampled_tokens
    check_scores(world, played)


async def test_a_tool_may_be_called_instead(world: World) -> None:
    found = set()
    for seed in range(12):
        sampler = world.sampler(tokenizer=world.tokenizer, deterministic=False)
        run = agent(of_chat, [], tools=[TOOL], seed=seed)
        played = await play(world, run, style="tools", sampler=sampler, temperature=3.0)
        (turn,) = [s for s in played.segments if s.sampled]
        text = world.tokenizer.decode(turn.token_ids)
        calls = text.startswith("<tool_call>")
        if played.status is not Status.COMPLETED:  # arguments of any length
            assert calls
            continue
        found.add(calls)
        assert turn.message is not None
        if calls:
            assert {call.name for call in turn.message.tool_calls} == {"say"}
        else:
            assert json.loads(turn.message.content)["word"] in ("red", "blue")
    assert found == {True, False}


BAD: list[tuple[Any, str]] = [
    ({"type": "json_schema"}, "has to have a `schema`"),
    ({"type": "json_schema", "json_schema": {"schema": []}}, "has to have a `schema`"),
    ({"type": "json_schema", "json_schema": {"schema": {"type": "obj"}}}, "Invalid type: obj"),
    ({"type": "grammar", "grammar": "x"}, "'grammar': not supported"),
    (
        {"type": "json_schema", "json_schema": {"schema": {"description": "x" * 200_000}}},
        "at most 100,000",
    ),
    ({"type": "json_schema", "json_schema": {"schema": {"$ref": "http://[::1]/x"}}}, "followed"),
]


async def test_schemas_that_cannot_be_followed_are_refused_and_the_episode_goes_on(
    world: World,
) -> None:
    async def run(task: Any, model: Any) -> float:
        headers = {"authorization": f"Bearer {model.api_key}"}
        async with httpx.AsyncClient(base_url=model.base_url, headers=headers) as client:
            for form, told in BAD:
                body = {"model": "policy", "messages": ASKED, "response_format": form}
                answer = await client.post("/chat/completions", json=body)
                assert answer.status_code == 400, answer.text[:300]
                assert told in answer.text, answer.text[:300]
                assert answer.json()["error"]["param"] == "response_format"
        await model.chat(ASKED)
        return 1.0

    sampler = world.sampler(tokenizer=world.tokenizer, deterministic=False)
    played = await play(world, run, sampler=sampler)
    assert (played.error, played.num_turns) == (None, 1)


async def test_a_sampler_that_does_not_constrain_refuses(world: World) -> None:
    async def run(task: Any, model: Any) -> float:
        headers = {"authorization": f"Bearer {model.api_key}"}
        async with httpx.AsyncClient(base_url=model.base_url, headers=headers) as client:
            form = {"type": "json_object"}
            body = {"model": "policy", "messages": ASKED, "response_format": form}
            answer = await client.post("/chat/completions", json=body)
        assert answer.status_code == 400
        assert "response_format: the sampler Scripted does not constrain" in answer.text
        await model.chat(ASKED)
        return 1.0

    assert (await play(world, run, "blue")).error is None
