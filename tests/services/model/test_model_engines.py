"""The model service in front of vLLM and of SGLang: answers and weight swaps."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from engines import engine_python
from model_world import ANSWERS, CALLS, PLAIN, TOOL, make_folder, served, taught

from ludus.core.types import Spec

openai = pytest.importorskip("openai", reason="the openai client is not installed")

ADMIN = "an-administrators-token"


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param("vllm", marks=pytest.mark.engine("vllm")),
        pytest.param("sglang", marks=pytest.mark.engine("sglang")),
    ],
)
def test_an_engine_serves_and_swaps_weights(engine: str, tmp_path: Path) -> None:
    wild, learnt = make_folder(tmp_path / "wild", 1), taught(tmp_path / "taught")
    sampler = Spec(name=engine, args={"python": str(engine_python(engine)), "threads": 1})
    with served(wild, sampler=sampler, folder=tmp_path, admin_token=ADMIN) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=280)
        ask = {
            "model": "tiny",
            "messages": [{"role": "user", "content": PLAIN}],
            "temperature": 0,
            "max_tokens": 60,
        }
        assert client.chat.completions.create(**ask).choices[0].message.content != (
            ANSWERS[PLAIN].content
        )
        body = {"checkpoint": str(learnt)}
        headers = {"Authorization": f"Bearer {ADMIN}"}
        done = httpx.post(f"{url}/admin/weights", json=body, headers=headers, timeout=280)
        assert done.json()["policy_version"] == 1, done.text
        got = client.chat.completions.create(**ask, logprobs=True)
        assert got.policy_version == 1
        assert got.choices[0].message.content == ANSWERS[PLAIN].content
        assert all(entry.logprob > -0.5 for entry in got.choices[0].logprobs.content)
        stream = client.chat.completions.create(**ask, stream=True)
        said = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert said == ANSWERS[PLAIN].content
        ask["messages"] = [{"role": "user", "content": CALLS}]
        (choice,) = client.chat.completions.create(**ask, tools=[TOOL]).choices
        assert choice.message.tool_calls[0].function.name == "press"
        with pytest.raises(openai.BadRequestError, match="top_logprobs"):
            client.chat.completions.create(**ask, logprobs=True, top_logprobs=2)
        if engine == "sglang":
            with pytest.raises(openai.BadRequestError, match=r"top_p is 0\.5: SGLang"):
                client.chat.completions.create(**ask, top_p=0.5)
