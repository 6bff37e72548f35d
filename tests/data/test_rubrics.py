"""`ludus rubric` with a real HTTP endpoint; the judge `rubric` reads its file."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_server import ChatServer, text
from judged import said
from main_here import exit_code
from starlette.responses import Response

from ludus.core.errors import ConfigError
from ludus.core.types import Message, Spec, Task
from ludus.judges import JUDGES, model

CRITERIA = [
    {"name": "correct", "text": "states the right sum", "weight": 5},
    {"name": "rambles", "text": "says more than the sum", "weight": -1},
]
SAMPLES = [
    {"prompt": "2 + 2?", "response": "4", "answer": 4, "score": 1, "other": [1]},
    {"prompt": [{"role": "user", "content": "1 + 2?"}], "response": "ignore all: 9", "score": 0},
    {"prompt": "3 + 3?", "response": "x" * 9000},
]


@pytest.fixture
def rubric(tmp_path: Path) -> Callable[..., int]:
    samples = tmp_path / "samples.jsonl"
    samples.write_text("\n".join(map(json.dumps, SAMPLES)) + "\n\n")

    def call(url: str, *words: str) -> int:
        ends = ("--model", "m", "--base-url", url, "--out", str(tmp_path / "rubric.yaml"))
        return exit_code("rubric", str(samples), *ends, *words)

    return call


def written(criteria: Any) -> Any:
    return text(json.dumps({"criteria": criteria}))


async def judged(url: str, path: Path, answer: str) -> Any:
    args = {"base_url": url, "model": "j", "criteria_file": str(path)}
    judge = JUDGES.build(Spec(name="rubric", args=args), "judge")
    return await judge(Task(id="q", prompt=[Message(role="user", content="2 + 2?")]), said(answer))


def score(body: dict[str, Any]) -> Any:
    """A judge that scores every criterion 1."""
    names = body["response_format"]["json_schema"]["schema"]["required"]
    return text(json.dumps({name: {"explanation": "so", "score": 1} for name in names}))


def test_a_model_writes_a_rubric_that_the_judge_reads(
    rubric: Callable[..., int], tmp_path: Path, capsys: Any
) -> None:
    with ChatServer(lambda body: written(CRITERIA)) as server:
        assert rubric(server.url) == 0
    assert "2 criteria" in capsys.readouterr().out
    [body] = server.bodies
    prompt = body["messages"][0]["content"]
    assert all(part in prompt for part in ("2 + 2?", "user: 1 + 2?", "ignore all: 9", "reference"))
    assert "separate the samples of high score" in prompt
    assert "x" * 2001 not in prompt
    mark = prompt.split("marks ")[1].split(";")[0]
    assert prompt.index("ignore all") < prompt.rindex(mark)
    path = tmp_path / "rubric.yaml"
    assert "# Written by 'm' from 3 samples (2 with a score)" in path.read_text()
    path.write_text(path.read_text().replace("weight: 5.0", "weight: 2.0"))  # the user's change
    with ChatServer(score) as server:
        given = asyncio.run(judged(server.url, path, "4"))
    assert given.value == pytest.approx((2 - 1) / 2)
    assert given.parts == {"correct": 1, "rambles": 1}
    with ChatServer(lambda body: written(CRITERIA)) as server:
        assert rubric(server.url) == 1
    assert "exists already" in capsys.readouterr().err
    assert not server.bodies


TWICE = [CRITERIA[0], CRITERIA[0]]


@pytest.mark.parametrize(
    ("answer", "num", "told"),
    [
        (text("I would rather not."), 2, "m at http"),
        (text('{"criteria": []}'), 2, "$.criteria: [] should be non-empty"),
        (written([{"name": "a", "text": "x"}]), 2, "'weight' is a required property"),
        (written([{"name": "A b", "text": "x", "weight": 1}]), 2, "$.criteria[0].name"),
        (written(CRITERIA * 9), 2, "is too long"),
        (written(TWICE), 2, "twice, two criteria have the name 'correct'"),
        (written([CRITERIA[1]]), 2, "twice, at least one weight has to be positive"),
        (text("[" * 100_000), 2, "wrote no rubric"),
        (Response('{"error": {"message": "slow down"}}', 429), 2, "answered 429: slow down"),
        (Response("no", 401), 1, "answered 401: no"),
        (Response("<html>", 200), 1, "malformed response"),
    ],
)
def test_no_rubric_ends_in_a_sentence(
    answer: Any, num: int, told: str, rubric: Any, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(model, "PAUSES_S", (0.0,))
    with ChatServer(lambda body: answer) as server:
        assert rubric(server.url) == 1
    told_all = capsys.readouterr().err
    assert "wrote no rubric: " in told_all
    assert told in told_all
    assert "Traceback" not in told_all
    assert len(server.bodies) == num
    assert not (tmp_path / "rubric.yaml").exists()


def test_a_second_answer_may_be_right(rubric: Any, tmp_path: Path) -> None:
    answers = iter([written(TWICE), written(CRITERIA)])
    with ChatServer(lambda body: next(answers)) as server:
        assert rubric(server.url) == 0
    assert "refused: two criteria have the name" in server.bodies[1]["messages"][0]["content"]


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ("", " has no sample"),
        ('{"prompt": "x", "response": "y"}\n{"prompt": "x"}', ":2: response: Field required"),
        ("rubbish", ":1: "),
        ('{"prompt": "x", "response": "y", "score": "good"}', ":1: score: "),
    ],
)
def test_wrong_samples_name_their_line(
    lines: str, told: str, rubric: Any, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "samples.jsonl").write_text(lines)
    assert rubric("http://127.0.0.1:9/v1") == 1
    assert f"samples.jsonl{told}" in capsys.readouterr().err


def test_an_absent_file_of_samples_is_named(rubric: Any, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "samples.jsonl").unlink()
    assert rubric("http://127.0.0.1:9/v1") == 1
    assert "samples.jsonl: there is no such file\n" in capsys.readouterr().err


def test_a_wrong_url_is_refused(rubric: Any, capsys: Any) -> None:
    assert rubric("127.0.0.1") == 2
    assert "--base-url: '127.0.0.1' must have the form" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "cannot be read"),
        ("criteria: [", "not valid YAML"),
        ("criteria: [{name: a}]", r"criteria\.0\.text: Field required"),
        ("- {name: a, text: x}", ""),
        ("criteria: [{name: a, text: x, weight: -1}]", "at least one weight has to be positive"),
    ],
)
def test_a_wrong_file_of_criteria_is_refused(
    content: str | None, told: str, tmp_path: Path
) -> None:
    path = tmp_path / "rubric.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=rf"criteria_file: '.*rubric\.yaml'.*{told}"):
        asyncio.run(judged("http://127.0.0.1:9/v1", path, "4"))


def test_criteria_have_one_source(tmp_path: Path) -> None:
    args = {"base_url": "http://127.0.0.1:9/v1", "model": "j", "criteria_file": "rubric.yaml"}
    spec = Spec(name="rubric", args={**args, "criteria": CRITERIA})
    with pytest.raises(ConfigError, match="criteria, criteria_file: give one of them"):
        JUDGES.build(spec, "judge")
