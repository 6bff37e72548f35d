"""`ludus evaluate` of a run, a folder and a served model: the same tasks and result."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from chat_server import ChatServer, text
from harness import BABYAI, Ludus
from model_world import served
from starlette.responses import JSONResponse


@pytest.fixture(scope="module")
def exported(reference: Ludus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported") / "hf"
    reference("checkpoint", "export", "tiny-1", path).ok()
    return path


def row(out: str) -> str:
    """Tasks, success and score of all tasks, with their intervals."""
    found = re.search(r"^ +all +(.*?) *$", out, re.M)
    assert found, out
    return found[1]


def test_run_folder_and_served_model_agree(reference: Ludus, exported: Path) -> None:
    """Greedy decoding of the same weights, by three ways."""
    recipe = ("--recipe", BABYAI)
    own = reference("evaluate", "tiny-1").ok().out
    folder = reference("evaluate", exported, *recipe).ok().out
    assert row(folder) == row(own)
    assert "sampled tokens each" in folder
    with served(exported) as address:
        named = ("--endpoint", f"{address}/v1", "--model", "tiny")
        done = reference("evaluate", *named, *recipe, "--against", "tiny-1/latest").ok().out
    assert row(done) == row(own)
    assert f"tiny@{address}/v1 against tiny-1/rl-000005, 8 tasks" in done
    assert "better on 0 tasks, worse on 0" in done
    assert "Bonett-Price" in done
    assert "turns each" in done, "text has no number of tokens"


def test_two_of_any_kind_are_compared(reference: Ludus, exported: Path, tmp_path: Path) -> None:
    done = reference("evaluate", "tiny-1/sft-000024", "--against", exported).ok().out
    assert "tiny-1/sft-000024" in done, "the tasks are the run's"
    assert f"against {exported}" in done.replace("\n", " ")
    twin = shutil.copytree(exported, tmp_path / "twin")
    done = reference("evaluate", exported, "--against", twin, "--recipe", BABYAI).ok().out
    assert "better on 0 tasks, worse on 0" in done


@pytest.mark.slow
def test_failures_of_an_endpoint_are_left_out(reference: Ludus) -> None:
    openings: list[str] = []

    def say(body: dict[str, Any]) -> Any:
        openings.append(str(body["messages"][:2]))
        if openings.index(openings[-1]) == 1:  # that of the first episode
            return JSONResponse({"error": {"message": "out of memory"}}, 500)
        return text("turn left")

    with ChatServer(say) as server:
        done = reference("evaluate", f"m@{server.url}", "--recipe", BABYAI, "--num-tasks", 4)
    assert "Traceback" not in done.all
    assert "left out" in done.out or "none of them scored" in done.err, done.all
    assert "error_sampler" in done.all


def test_what_cannot_be_evaluated_is_refused(reference: Ludus, exported: Path) -> None:
    evaluate, recipe = "evaluate", ("--recipe", BABYAI)
    reference(evaluate, exported).refused(2, "nothing names the held-out tasks", "--recipe")
    reference(evaluate, "http://127.0.0.1:9/v1", *recipe).refused(2, "MODEL@http://127.0.0.1:9/v1")
    reference(evaluate, "m@http://127.0.0.1:9/v1", *recipe).refused(
        1, "m@http://127.0.0.1:9/v1 cannot be evaluated", "cannot be reached"
    )
    reference(evaluate, *recipe).refused(2, "--endpoint and --model")
    reference(evaluate, "--endpoint", "http://127.0.0.1:9/v1").refused(2, "--model")
    reference(evaluate, "tony-1").refused(2, "tony-1", "tiny-1", "Hugging Face folder", "MODEL@URL")
    reference(evaluate, "tiny-1", "--against", "rl-7").refused(2, "no checkpoint 'rl-7'")
    with ChatServer(lambda _: JSONResponse({"error": {"message": "no such model"}}, 404)) as server:
        reference(evaluate, f"x@{server.url}", *recipe).refused(1, "answered 404: no such model")


def test_a_folder_without_a_tokenizer(reference: Ludus, exported: Path, tmp_path: Path) -> None:
    shutil.copytree(exported, tmp_path / "bare")
    for path in (tmp_path / "bare").glob("tokenizer*"):
        path.unlink()
    reference("evaluate", tmp_path / "bare", "--recipe", BABYAI).refused(2, "tokenizer")
