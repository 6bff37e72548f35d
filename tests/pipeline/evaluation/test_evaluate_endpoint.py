"""An endpoint's model is evaluated with the recipe's tools."""

import json
from pathlib import Path
from typing import Any

import pytest
from chat_server import ChatServer, call, num_turns, text

from ludus.config.load import load_config
from ludus.core.errors import ConfigError
from ludus.evaluate.episodes import EpisodeFile
from ludus.pipeline.evaluation.subjects import EndpointSubject, evaluate_subjects


def test_an_endpoints_model_calls_the_tools(tmp_path: Path) -> None:
    for name, question, answer in (("train", "1 + 1", "2"), ("heldout", "6 * 7", "42")):
        row = {"prompt": f"Compute {question}.", "answer": answer}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    config = load_config(
        {
            "model": {"architecture": "qwen3", "tokenizer": "bpe"},
            "judge": "answer",
            "tools": ["calculator"],
            "tasks": {
                name: {"name": "json", "args": {"path": str(tmp_path / f"{name}.jsonl")}}
                for name in ("train", "heldout")
            },
        }
    )

    def say(body: dict[str, Any]) -> Any:
        if "tools" not in body:  # the request that checks the endpoint
            return text("Hello")
        if num_turns(body) == 0:
            return call("calculator", '{"expression": "6 * 7"}')
        return text(f"Answer: {body['messages'][-1]['content']}")

    with ChatServer(say) as server:
        (result,) = evaluate_subjects(
            [EndpointSubject(url=server.url, model="m")],
            config,
            num_tasks=None,
            samples=1,
            temperature=0.0,
            out=tmp_path / "episodes.jsonl",
        )
    assert result.success.value == 1.0
    assert server.bodies[-1]["messages"][-1]["content"] == "42"
    (line,) = (tmp_path / "episodes.jsonl").read_text().splitlines()
    row = json.loads(line)
    assert (row["status"], row["reward"], row["answer"]) == ("completed", 1.0, "42")
    assert row["model"] == f"m@{server.url}"
    said = [(message["role"], message["content"]) for message in row["messages"]]
    assert said[-2:] == [("tool", "42"), ("assistant", "Answer: 42")]
    assert row["messages"][1]["tool_calls"][0]["arguments"] == {"expression": "6 * 7"}
    with pytest.raises(ConfigError, match="the file exists; name a new one"):
        EpisodeFile(tmp_path / "episodes.jsonl")
