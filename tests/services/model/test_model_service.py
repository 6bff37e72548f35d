"""The model service through OpenAI's client, compared with the model itself."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from model_world import (
    ANSWERS,
    CALLS,
    CONTEXT,
    PLAIN,
    THINKS,
    TOOL,
    make_folder,
    make_run,
    served,
    slowly,
    taught,
)
from service_world import until

from ludus.core.errors import ConfigError, ContextOverflow, SamplerError
from ludus.core.types import Message
from ludus.core.versions import runs_of
from ludus.models.endpoint.client import Endpoint
from ludus.models.samplers.base import SamplingParams
from ludus.models.samplers.engine import InProcessSampler
from ludus.services.model import service
from ludus.services.model.engine import SCORED_TOKENS
from ludus.services.model.policy import ModelOverrides, Policy, load_policy

openai = pytest.importorskip("openai", reason="the openai client is not installed")

ADMIN = "an-administrators-token"
HEADERS = {"Authorization": f"Bearer {ADMIN}"}
ASKED = [{"role": "user", "content": "the door"}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "taught": taught(root / "taught"),
        "wild": make_folder(root / "wild", 1),
        "run": make_run(root / "run"),
    }


@pytest.fixture(scope="module")
def url(folders: dict[str, Path]) -> Iterator[str]:
    with served(folders["wild"], admin_token=ADMIN, max_turns=40) as address:
        yield address


@pytest.fixture(scope="module")
def client(url: str) -> Any:
    return client_of(url)


@pytest.fixture(scope="module")
def wild(folders: dict[str, Path]) -> Policy:
    return load_policy(str(folders["wild"]), "", ModelOverrides())


def client_of(url: str, token: str = "none") -> Any:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=token, max_retries=0, timeout=60)


def said(stream: Any, key: str = "content") -> str:
    deltas = [chunk.choices[0].delta for chunk in stream if chunk.choices]
    return "".join(getattr(delta, key, None) or "" for delta in deltas)


def ids_of(chunks: Any) -> list[int]:
    told = [chunk.choices[0].model_extra.get("token_ids", []) for chunk in chunks if chunk.choices]
    return [id for ids in told for id in ids]


def runs_in(chunks: Any) -> list[list[int]]:
    """`version_runs` of a streamed choice, joined."""
    told = [chunk.choices[0].model_extra for chunk in chunks if chunk.choices]
    versions = [v for more in told for v, n in more.get("version_runs", []) for _ in range(n)]
    return [list(run) for run in runs_of(versions)]


# Answers


def test_model_is_listed(client: Any) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.policy_version, model.max_model_len) == ("tiny", 0, CONTEXT)
    assert client.models.retrieve("tiny").checkpoint == model.checkpoint


def test_tokens_equal_the_engine(client: Any, wild: Policy) -> None:
    prompt = wild.renderer().open([Message(role="user", content="the door")])
    stop_ids = tuple(wild.renderer().stop_token_ids)
    params = SamplingParams(20, 0.9, top_p=0.95, top_k=50, stop_token_ids=stop_ids, seed=5)
    sampler = InProcessSampler(
        wild.model, context_length=CONTEXT, deterministic=False, tokenizer=wild.tokenizer
    )
    sampler.open("s")
    expected = asyncio.run(sampler.sample(prompt, params, session="s"))
    asked = {
        "model": "tiny",
        "messages": ASKED,
        "max_tokens": 20,
        "temperature": 0.9,
        "top_p": 0.95,
        "seed": 5,
        "logprobs": True,
        "extra_body": {"return_token_ids": True, "top_k": 50},
    }
    got = client.chat.completions.create(**asked)
    (choice,) = got.choices
    assert got.prompt_token_ids == prompt
    assert choice.token_ids == expected.token_ids
    assert [entry.logprob for entry in choice.logprobs.content] == expected.logprobs
    assert (got.policy_version, choice.policy_version, got.system_fingerprint) == (0, 0, "policy-0")
    assert got.usage.prompt_tokens == len(prompt)
    assert got.usage.completion_tokens == len(expected.token_ids)
    options = {"include_usage": True}
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options=options))
    parts = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert chunks[0].prompt_token_ids == prompt
    assert chunks[-1].usage == got.usage
    assert ids_of(chunks) == choice.token_ids
    entries = [entry for part in parts if part.logprobs for entry in part.logprobs.content]
    assert entries == choice.logprobs.content
    assert said(chunks) == choice.message.content
    assert {chunk.policy_version for chunk in chunks[:-1]} == {0}
    assert choice.version_runs == [[0, len(expected.token_ids)]]
    assert runs_in(chunks) == choice.version_runs


def test_alternatives_equal_the_model(client: Any, wild: Policy) -> None:
    got = client.chat.completions.create(
        model="tiny",
        messages=ASKED,
        max_tokens=3,
        temperature=2.0,
        seed=1,
        logprobs=True,
        top_logprobs=4,
        extra_body={"return_token_ids": True},
    )
    ids = torch.tensor([got.prompt_token_ids + got.choices[0].token_ids])
    with torch.inference_mode():
        logits = wild.model(ids).logits[0, len(got.prompt_token_ids) - 1 : -1].double()
    best = (logits / 2.0).log_softmax(-1).topk(4).values
    told = [[o.logprob for o in e.top_logprobs] for e in got.choices[0].logprobs.content]
    torch.testing.assert_close(torch.tensor(told, dtype=torch.float64), best, atol=1e-4, rtol=0)


@pytest.mark.parametrize("times", [1, 40])
def test_echo_scores_the_prompt(client: Any, wild: Policy, times: int) -> None:
    ids = wild.tokenizer("the door is open" * times)["input_ids"]
    assert (len(ids) > SCORED_TOKENS) == (times > 1)
    got = client.completions.create(
        model="tiny", prompt=ids, max_tokens=1, temperature=0, logprobs=1, echo=True
    )
    with torch.inference_mode():
        expected = wild.model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    told = got.choices[0].logprobs
    assert told.token_logprobs[0] is None
    assert len(told.tokens) == len(ids) + 1
    chosen = expected.gather(-1, torch.tensor(ids)[1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(told.token_logprobs[1:-1]), chosen, atol=1e-4, rtol=0)
    best = torch.tensor([max(top.values()) for top in told.top_logprobs[1:-1]])
    torch.testing.assert_close(best, expected.amax(-1), atol=1e-4, rtol=0)
    assert got.choices[0].text.startswith("the door is open")
    assert "".join(told.tokens) == got.choices[0].text
    alone = client.completions.create(model="tiny", prompt=ids, max_tokens=0, logprobs=1, echo=True)
    assert alone.choices[0].logprobs.token_logprobs == told.token_logprobs[:-1]


def test_several_prompts_and_choices(client: Any) -> None:
    got = client.completions.create(
        model="tiny", prompt=["the door", "go"], n=3, max_tokens=12, seed=7
    )
    texts = [choice.text for choice in sorted(got.choices, key=lambda c: c.index)]
    assert len(set(texts)) == 6
    alone = client.completions.create(model="tiny", prompt="the door", max_tokens=12, seed=7)
    assert alone.choices[0].text == texts[0]
    stream = client.completions.create(
        model="tiny", prompt=["the door", "go"], n=3, max_tokens=12, seed=7, stream=True
    )
    parts = [""] * 6
    for chunk in stream:
        parts[chunk.choices[0].index] += chunk.choices[0].text
    assert parts == texts


def test_concurrent_clients_do_not_affect_each_other(client: Any) -> None:
    def ask(seed: int) -> list[int]:
        got = client.chat.completions.create(
            model="tiny",
            messages=ASKED,
            max_tokens=30,
            seed=seed,
            extra_body={"return_token_ids": True},
        )
        ids: list[int] = got.choices[0].token_ids
        return ids

    alone = [ask(seed) for seed in range(6)]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, range(6))) == alone


def test_stop_string_is_left_out(client: Any) -> None:
    asked = {"model": "tiny", "prompt": "go", "max_tokens": 40, "seed": 3}
    whole = client.completions.create(**asked).choices[0].text
    stop = next(whole[i : i + 2] for i in range(5, len(whole)) if whole[i : i + 2].isascii())
    cut = client.completions.create(**asked, stop=stop).choices[0]
    assert (cut.text, cut.finish_reason) == (whole[: whole.index(stop)], "stop")
    stream = client.completions.create(**asked, stop=[stop], stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == cut.text


def test_thinking_and_tool_calls_are_fields(folders: dict[str, Path]) -> None:
    with served(folders["taught"]) as address:
        client = client_of(address)
        ask: dict[str, Any] = {"model": "tiny", "temperature": 0}
        for asked in (PLAIN, THINKS):
            messages = [{"role": "user", "content": [{"type": "text", "text": asked}]}]
            (choice,) = client.chat.completions.create(**ask, messages=messages).choices
            assert choice.finish_reason == "stop"
            assert choice.message.content == ANSWERS[asked].content
            thinking = ANSWERS[asked].thinking
            assert getattr(choice.message, "reasoning_content", None) == thinking
            chunks = list(client.chat.completions.create(**ask, messages=messages, stream=True))
            assert said(chunks) == choice.message.content
            assert said(chunks, "reasoning_content") == (thinking or "")
        _calls_a_tool(client, ask)


def _calls_a_tool(client: Any, ask: dict[str, Any]) -> None:
    messages: list[Any] = [{"role": "user", "content": CALLS}]
    ask = {**ask, "messages": messages, "tools": [TOOL]}
    (choice,) = client.chat.completions.create(**ask).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I press."
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("press", {"lever": "red"})
    chunks = list(client.chat.completions.create(**ask, stream=True))
    assert said(chunks).strip() == "I press."
    told = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or []]
    assert [c.function.arguments for c in told] == [call.function.arguments]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    # The conversation goes on with what the client sends back unchanged.
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "done"}]
    again = client.chat.completions.create(**ask, max_tokens=5)
    assert again.usage.completion_tokens > 0
    ask["tool_choice"] = "none"
    none = client.chat.completions.create(**{**ask, "messages": messages[:1]}, max_tokens=5)
    assert not none.choices[0].message.tool_calls


async def test_endpoint_client_gets_token_ids(url: str, wild: Policy) -> None:
    """The service returns all that `POST /rollouts` asks of an endpoint."""
    messages = [Message(role="user", content="the door")]
    params = SamplingParams(12, temperature=0.8, seed=3)
    async with Endpoint(f"{url}/v1", "tiny") as endpoint:
        reply = await endpoint.chat(messages, params)
        assert reply.prompt_ids == wild.renderer().open(messages)
        assert reply.token_ids is not None
        assert reply.message.content == wild.renderer().parse(reply.token_ids).message.content
        assert len(reply.logprobs or []) == len(reply.token_ids)
        with pytest.raises(ContextOverflow):
            await endpoint.chat(messages, SamplingParams(CONTEXT))


# Refusals


WRONG: list[tuple[str, dict[str, Any], int, str | None]] = [
    ("completions", {"prompt": [999]}, 400, "prompt"),
    ("completions", {"prompt": [-1]}, 400, None),
    ("completions", {"prompt": ""}, 400, "prompt"),
    ("completions", {"prompt": "a", "max_tokens": CONTEXT}, 400, "prompt"),
    ("completions", {"prompt": "a " * CONTEXT, "max_tokens": 1}, 400, "prompt"),
    ("completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
    ("completions", {"prompt": "a", "suffix": "b"}, 400, "suffix"),
    ("completions", {"prompt": "a", "best_of": 3}, 400, "best_of"),
    ("completions", {"prompt": "a", "temperature": -1}, 400, "temperature"),
    ("completions", {"prompt": "a", "top_p": 0}, 400, "top_p"),
    ("completions", {"prompt": "a", "n": 100}, 429, None),
    ("completions", {"prompt": "a", "tempurature": 1}, 400, "tempurature"),
    ("completions", {"prompt": "a", "model": "gpt-9"}, 404, "model"),
    ("chat/completions", {"messages": []}, 400, "messages"),
    ("chat/completions", {"messages": ASKED, "n": 0}, 400, "n"),
    ("chat/completions", {"messages": ASKED, "top_logprobs": 3}, 400, "top_logprobs"),
    ("chat/completions", {"messages": ASKED, "logit_bias": {"5": 1}}, 400, "logit_bias"),
    ("chat/completions", {"messages": ASKED, "tool_choice": "required"}, 400, "tool_choice"),
    ("chat/completions", {"messages": ASKED, "stream_options": {}}, 400, "stream_options"),
    ("chat/completions", {"messages": ASKED * CONTEXT}, 400, "messages"),
    (
        "chat/completions",
        {"messages": ASKED, "response_format": {"type": "regex"}},
        400,
        "response_format",
    ),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        400,
        None,
    ),
    (
        "chat/completions",
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{"}}],
                }
            ]
        },
        400,
        "messages.0.tool_calls.0.function.arguments",
    ),
]


@pytest.mark.parametrize(("path", "body", "status", "param"), WRONG)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_input_is_refused(
    url: str, path: str, body: dict[str, Any], status: int, param: str | None, stream: bool
) -> None:
    asked = {"model": "tiny", **({"stream": True} if stream else {}), **body}
    if stream and "stream_options" in body:
        return
    answer = httpx.post(f"{url}/v1/{path}", json=asked, timeout=60)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    if param is not None:
        assert error["param"] == param


def test_reading_a_long_text_does_not_block_others(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other requests are answered while a prompt is tokenized."""
    reading, answered = threading.Event(), threading.Event()
    tokenize = service.ModelService._ids

    def held(self: Any, prompt: Any) -> Any:
        reading.set()
        assert answered.wait(60)
        return tokenize(self, prompt)

    monkeypatch.setattr(service.ModelService, "_ids", held)
    body = {"model": "tiny", "prompt": "the door is open " * 40_000, "max_tokens": 1}
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=120)
        assert reading.wait(60)
        assert httpx.get(f"{url}/health", timeout=30).status_code == 200
        answered.set()
    assert waiting.result().json()["error"]["code"] == "context_length_exceeded"


def test_context_overflow_has_a_code(client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="a", max_tokens=CONTEXT)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("gpt-9")
    assert missing.value.code == "model_not_found"


def test_base_model_has_no_chat(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "base", 1)
    (folder / "chat_template.jinja").unlink()
    with served(folder) as address:
        client = client_of(address)
        got = client.completions.create(model="tiny", prompt="go", max_tokens=5)
        assert got.usage.completion_tokens > 0
        with pytest.raises(openai.BadRequestError, match="no chat template"):
            client.chat.completions.create(model="tiny", messages=ASKED)


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": 3},
        {"$ref": "http://127.0.0.1:9/x.json"},
        {"properties": {"a": {"items": [{"$ref": "file:///etc/hostname"}]}}},
    ],
)
def test_unusable_tools_are_refused(client: Any, parameters: dict[str, Any]) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with pytest.raises(openai.BadRequestError, match="f"):
        client.chat.completions.create(model="tiny", messages=ASKED, tools=[tool])


@pytest.mark.parametrize(
    ("content", "status"), [(b"{", 400), (b"[]", 400), (b"\xff\xfe", 400), (b"[" * 100_000, 400)]
)
def test_model_service_refuses_invalid_json(url: str, content: bytes, status: int) -> None:
    for path in ("chat/completions", "completions"):
        headers = {"content-type": "application/json"}
        answer = httpx.post(f"{url}/v1/{path}", content=content, headers=headers, timeout=60)
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_body_without_its_type_is_refused_with_the_header_to_send(url: str) -> None:
    answer = httpx.post(f"{url}/v1/chat/completions", content=b"{}", timeout=60)
    assert answer.status_code == 400
    assert "Content-Type: application/json" in answer.json()["error"]["message"]


def test_client_tokens_are_required(folders: dict[str, Path]) -> None:
    token = "a-clients-own-token"
    with served(folders["wild"], tokens=(token, ADMIN), admin_token=ADMIN) as address:
        with pytest.raises(openai.AuthenticationError):
            client_of(address).models.list()
        assert client_of(address, token).models.list().data
        body = {"checkpoint": str(folders["taught"])}
        theirs = {"Authorization": f"Bearer {token}"}
        assert httpx.post(f"{address}/admin/weights", json=body).status_code == 401
        swapped = httpx.post(f"{address}/admin/weights", json=body, headers=theirs)
        assert swapped.status_code == 403
        assert client_of(address, ADMIN).models.list().data[0].policy_version == 0


# Clients that leave, samplers that break


def turns(url: str) -> int:
    return int(httpx.get(f"{url}/health").json()["turns"])


def ended(url: str, how: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    name = f'ludus_model_turns_total{{end="{how}"}}'
    return next((float(line.split()[1]) for line in lines if line.startswith(name)), 0.0)


@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_cancels_generation(folders: dict[str, Path], stream: bool) -> None:
    asked = {
        "model": "tiny",
        "prompt": "go",
        "n": 2,
        "max_tokens": CONTEXT - 8,
        "ignore_eos": True,
        "stream": stream,
    }
    with served(folders["wild"], rigged=slowly) as url:
        if stream:
            with httpx.stream("POST", f"{url}/v1/completions", json=asked) as answer:
                lines = answer.iter_lines()  # forgotten, it would close the connection
                next(lines)
                assert turns(url) == 2
        else:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{url}/v1/completions", json=asked, timeout=0.3)
        until(lambda: turns(url) == 0)
        assert ended(url, "gone") == 2


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_broken_model_gives_server_errors(folders: dict[str, Path]) -> None:
    def ruin(policy: Policy, engine: Any) -> None:
        with torch.no_grad():
            policy.model.get_input_embeddings().weight.fill_(float("nan"))
        asyncio.run_coroutine_threadsafe(_refresh(engine), engine._loop).result()

    with served(folders["wild"], rigged=ruin, admin_token=ADMIN) as address:
        client = client_of(address)
        with pytest.raises(openai.InternalServerError, match="not finite"):
            client.chat.completions.create(model="tiny", messages=ASKED)
        with pytest.raises(openai.APIError, match="not finite"):
            list(client.chat.completions.create(model="tiny", messages=ASKED, stream=True))
        assert httpx.get(f"{address}/health").json()["turns"] == 0
        body = {"checkpoint": str(folders["taught"])}
        mended = httpx.post(f"{address}/admin/weights", json=body, headers=HEADERS, timeout=60)
        assert mended.status_code == 200, mended.text
        client.chat.completions.create(model="tiny", messages=ASKED, max_tokens=5)


async def _refresh(engine: Any) -> None:
    engine.sampler.publish(0)


def test_sampler_without_streaming(folders: dict[str, Path], wild: Policy) -> None:
    """Any `PolicySampler`, such as vLLM; here the exact sampler."""
    with served(folders["wild"], sampler="exact") as address:
        client = client_of(address)
        ask = {"model": "tiny", "messages": ASKED, "max_tokens": 6, "seed": 2, "logprobs": True}
        whole = client.chat.completions.create(**ask).choices[0]
        assert len(whole.logprobs.content) == 6
        chunks = list(client.chat.completions.create(**ask, stream=True))
        assert said(chunks) == whole.message.content
        with pytest.raises(openai.BadRequestError, match="top_logprobs"):
            client.chat.completions.create(**ask, top_logprobs=1)
        with pytest.raises(openai.BadRequestError, match="echo"):
            client.completions.create(model="tiny", prompt="a", echo=True)


def test_parameters_that_the_sampler_does_not_follow(folders: dict[str, Path]) -> None:
    def refuse(params: SamplingParams) -> None:
        if params.top_p < 1:
            raise ConfigError("top_p is refused")

    def limit(policy: Policy, engine: Any) -> None:
        engine.sampler.check_params = refuse

    with served(folders["wild"], rigged=limit) as address:
        client = client_of(address)
        ask = {"model": "tiny", "messages": ASKED, "max_tokens": 1}
        client.chat.completions.create(**ask)
        with pytest.raises(openai.BadRequestError, match="top_p is refused"):
            client.chat.completions.create(**ask, top_p=0.9)


def test_dead_sampler_gives_503(folders: dict[str, Path]) -> None:
    def kill(policy: Policy, engine: Any) -> None:
        def die(*_: Any) -> None:
            raise SamplerError("it died in the midst of a turn")

        engine.sampler._run = die

    with served(folders["wild"], rigged=kill) as address:
        with pytest.raises(openai.InternalServerError, match="generation failed") as caught:
            client_of(address).chat.completions.create(model="tiny", messages=ASKED)
        assert caught.value.status_code == 503


# Weights


def swap(url: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}/admin/weights", json=body, headers=HEADERS, timeout=60)


def _is_of_both(
    wild: Policy, taught: Path, prompt: list[int], ids: list[int], num_old: int
) -> None:
    """The first `num_old` tokens are the old weights' greedy tokens, the rest the new ones'."""
    agree = []
    for policy in (wild, load_policy(str(taught), "", ModelOverrides())):
        with torch.inference_mode():
            logits = policy.model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        agree.append((logits[:, : len(policy.tokenizer)].argmax(-1) == torch.tensor(ids)).tolist())
    old, new = agree
    assert len(ids) == 150
    assert all(old[:num_old] + new[num_old:])
    assert 0 < num_old < 150
    assert not all(old)
    assert not all(new)


def test_weights_are_swapped_during_a_turn(folders: dict[str, Path], wild: Policy) -> None:
    ask = {"model": "tiny", "messages": [{"role": "user", "content": PLAIN}], "temperature": 0}
    with served(folders["wild"], admin_token=ADMIN, rigged=slowly) as address:
        client = client_of(address)
        assert client.chat.completions.create(**ask, max_tokens=20).choices[0].message.content != (
            ANSWERS[PLAIN].content
        )
        stream = client.completions.create(
            model="tiny",
            prompt="go",
            max_tokens=150,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        chunks = [next(stream)]
        done = swap(address, checkpoint=str(folders["taught"]), policy_version=5)
        assert done.json() == {"checkpoint": str(folders["taught"]), "policy_version": 5}
        chunks += list(stream)
        assert {chunk.policy_version for chunk in chunks} == {0}  # that of the oldest token
        (_, num_old), (version, num_new) = runs_in(chunks)
        assert (version, num_old + num_new) == (5, 150)
        prompt = chunks[0].choices[0].prompt_token_ids
        _is_of_both(wild, folders["taught"], prompt, ids_of(chunks), num_old)
        got = client.chat.completions.create(**ask)
        assert got.choices[0].message.content == ANSWERS[PLAIN].content
        assert got.policy_version == 5
        model = client.models.retrieve("tiny")
        assert (model.policy_version, model.checkpoint) == (5, str(folders["taught"]))
        assert "ludus_model_policy_version 5.0" in httpx.get(f"{address}/metrics").text


def test_weights_of_a_run_and_unfitting_weights(folders: dict[str, Path], tmp_path: Path) -> None:
    make_run(tmp_path / "lora", lora={"rank": 2})
    make_run(tmp_path / "other", vocab_size=330)
    with served(folders["run"], admin_token=ADMIN, runs_dir=str(tmp_path)) as address:
        assert client_of(address).models.list().data[0].policy_version == 7
        assert swap(address, checkpoint="lora").json()["policy_version"] == 8
        named = str(folders["run"] / "checkpoints" / "sft-000001")
        assert swap(address, checkpoint=named).json()["policy_version"] == 9
        assert swap(address, checkpoint=named, policy_version=9).status_code == 409
        for wrong, why in (
            ("nowhere", "no run 'nowhere'"),
            (str(tmp_path), "neither a run"),
            ("other", "another tokenizer"),
        ):
            refused = swap(address, checkpoint=wrong)
            assert refused.status_code == 400, refused.text
            assert why in refused.json()["error"]["message"]
        damaged = tmp_path / "lora" / "checkpoints" / "sft-000001" / "model.safetensors"
        damaged.write_bytes(damaged.read_bytes()[:-1])
        assert swap(address, checkpoint="lora").status_code == 400
        cut = make_folder(tmp_path / "cut", 1) / "model.safetensors"
        cut.write_bytes(cut.read_bytes()[:1000])
        for odd in (str(cut.parent), "\0", "x" * 3000, "../" * 1000):
            refused = swap(address, checkpoint=odd)
            assert refused.status_code == 400, refused.text
            assert "\n" not in refused.json()["error"]["message"]
        assert client_of(address).models.list().data[0].policy_version == 9


def test_swap_needs_an_admin_token(folders: dict[str, Path]) -> None:
    with served(folders["wild"]) as address:
        refused = swap(address, checkpoint=str(folders["taught"]))
        assert refused.status_code == 403
        assert "LUDUS_ADMIN_TOKEN" in refused.json()["error"]["message"]


SCHEMA = {
    "type": "object",
    "properties": {"door": {"enum": ["open", "shut"]}, "steps": {"type": "integer"}},
    "required": ["door", "steps"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("stream", [False, True])
def test_answers_follow_a_schema(client: Any, stream: bool) -> None:
    pytest.importorskip("llguidance", reason="needs the extra agents")
    form = {"type": "json_schema", "json_schema": {"name": "door", "schema": SCHEMA}}
    given = {"model": "tiny", "messages": ASKED, "response_format": form, "max_tokens": 200}
    found = 0
    for seed in range(8):
        if stream:
            events = client.chat.completions.create(**given, seed=seed, stream=True)
            choices = [event.choices[0] for event in events if event.choices]
            text = "".join(choice.delta.content or "" for choice in choices)
            end = choices[-1].finish_reason
        else:
            answer = client.chat.completions.create(
                **given, seed=seed, logprobs=True, top_logprobs=3
            )
            text, end = answer.choices[0].message.content, answer.choices[0].finish_reason
            first = answer.choices[0].logprobs.content[0]
            assert first.token.startswith("{")
            assert first.logprob <= 0
            assert all(math.isfinite(other.logprob) for other in first.top_logprobs)
        if end == "stop":  # an integer may be long
            found += 1
            value = json.loads(text)
            assert (value["door"] in ("open", "shut"), type(value["steps"])) == (True, int)
    assert found > 2


@pytest.mark.parametrize(
    ("form", "told"),
    [
        ({"type": "json_schema", "json_schema": {"schema": {"type": "obj"}}}, "Invalid type: obj"),
        ({"type": "json_schema"}, "has to have a `schema`"),
    ],
)
def test_schemas_that_cannot_be_followed(url: str, form: dict[str, Any], told: str) -> None:
    pytest.importorskip("llguidance", reason="needs the extra agents")
    body = {"model": "tiny", "messages": ASKED, "response_format": form}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 400
    assert told in answer.json()["error"]["message"]
    body = {**body, "response_format": {"type": "json_object"}, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert "not with ignore_eos" in answer.json()["error"]["message"]


async def test_the_client_of_endpoints_asks_for_a_schema(url: str) -> None:
    pytest.importorskip("llguidance", reason="needs the extra agents")
    messages = [Message(role="user", content="the door is")]
    async with Endpoint(f"{url}/v1", "tiny", None) as endpoint:
        reply = await endpoint.chat(messages, SamplingParams(200, seed=3), (), SCHEMA)
    assert reply.message.content.startswith('{"door": ')
