"""`ludus augment` with a real HTTP endpoint: filters, reasons, resume, bad input."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_server import ChatServer, text
from main_here import exit_code
from service_world import until
from starlette.responses import Response

from ludus.core.types import Spec
from ludus.data.augmentation.duplicates import Questions
from ludus.tasks.readers import read_tasks

SEEDS = [
    {"prompt": "Anna has 3 apples and buys 4 more. How many apples has she?", "answer": 7},
    {"prompt": "A train drives 60 km in an hour. How far is it after 2 hours?", "answer": "120"},
    {"prompt": "What is the sum of 5 and 6?", "answer": 11},
    {"prompt": "A rope of 12 m is cut into 3 equal parts. How long is a part?", "answer": "4"},
]
FILES = ("tasks.jsonl", "rejected.jsonl", "card.json", "README.md")
NOUNS = ("pens", "books", "stones", "birds", "cups", "chairs", "plums", "coins", "maps", "nails")
VERBS = ("lost", "sold", "found", "painted", "hid", "broke", "won", "packed", "drew", "sent")


QUICK = ("--judge", "answer")
"""It needs no processes, as `math` does."""


def drawn(body: dict[str, Any]) -> random.Random:
    """Random numbers of a request: the same request gets the same answer."""
    identity = json.dumps([body["messages"], body["seed"]], sort_keys=True)
    return random.Random(hashlib.sha256(identity.encode()).hexdigest())


def proposal(question: str, answer: Any) -> dict[str, Any]:
    return text(f"Let me think. <question>{question}</question> \\boxed{{{answer}}}")


def is_solver(body: dict[str, Any]) -> bool:
    return "Write one new task" not in body["messages"][-1]["content"]


def writes(body: dict[str, Any]) -> dict[str, Any]:
    """A model that writes sums in many words, at times wrongly, and solves some."""
    draw = drawn(body)
    if is_solver(body):
        a, b = map(int, re.findall(r"\d+", body["messages"][-1]["content"]))
        return text(f"\\boxed{{{a + b if draw.random() < 0.5 else 0}}}")
    kind = draw.random()
    a, b = draw.randrange(2, 99), draw.randrange(2, 99)
    names = [draw.choice(VERBS), draw.choice(NOUNS), draw.choice(NOUNS), draw.choice(VERBS)]
    question = f"Someone {names[0]} {a} {names[1]}, and {b} {names[2]} were {names[3]}: how many?"
    if kind < 0.2:
        return text("I would rather not.")
    if kind < 0.3:
        return proposal(SEEDS[draw.randrange(4)]["prompt"], 1)
    if kind < 0.4:
        return proposal(question, "\\text{ }")
    return proposal(question, a + b)


@pytest.fixture
def augment(tmp_path: Path) -> Callable[..., int]:
    (tmp_path / "seeds.jsonl").write_text("".join(json.dumps(seed) + "\n" for seed in SEEDS))

    def call(url: str, *words: str, out: str = "out") -> int:
        return exit_code(*command(tmp_path, url, out, *words)[1:])

    return call


def command(folder: Path, url: str, out: str, *words: str) -> list[str]:
    ends = ["--model", "m", "--base-url", url, "--out", str(folder / out)]
    return ["ludus", "augment", str(folder / "seeds.jsonl"), *ends, *words]


def rows(folder: Path, name: str = "tasks.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def card(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "card.json").read_text())
    return found


def bits(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in FILES}


def test_new_tasks_are_valid_new_and_read_as_tasks(
    augment: Callable[..., int], tmp_path: Path, capsys: Any
) -> None:
    with ChatServer(writes) as server:
        assert augment(server.url, "--num-tasks", "24") == 0
    out = tmp_path / "out"
    assert capsys.readouterr().out.startswith("24 tasks: ")
    kept, others = rows(out), rows(out, "rejected.jsonl")
    tasks = read_tasks(Spec(name="json", args={"path": str(out / "tasks.jsonl"), "id": "id"}))
    assert [task.id for task in tasks] == [row["id"] for row in kept]
    for task in tasks:
        a, b = map(int, re.findall(r"\d+", task.prompt[0].content))
        assert task.answer == str(a + b)
    counts = card(out)
    assert (counts["kept"], counts["requests"]) == (24, 24 + len(others))
    assert sum(counts["rejected"].values()) == len(others)
    assert {"not a task", "the judge cannot score the answer"} <= set(counts["rejected"])
    assert all({"id", "reason"} <= row.keys() for row in others)
    assert counts["settings"]["max_similarity"] == 0.6
    assert counts["settings"]["model"] == "m"
    assert "| kept | 24 |" in (out / "README.md").read_text()
    prompt = server.bodies[0]["messages"][0]["content"]
    assert prompt.count("<question>") == 3 + 2  # three seeds, and the form twice
    assert len({row["id"] for row in [*kept, *others]}) == len(kept) + len(others)


def test_each_filter_counts_its_own(augment: Callable[..., int], tmp_path: Path) -> None:
    said = iter(
        [
            proposal(SEEDS[0]["prompt"], 7),
            proposal(str(SEEDS[0]["prompt"]).upper().replace(".", " !"), 7),
            proposal(f"{SEEDS[0]['prompt']} Tell me.", 7),
            text("<question>cut off", "length"),
            text("nothing"),
            proposal("Which word?", "I do not know."),
            proposal("How many legs have two spiders?", 16),
            proposal("How many legs have two spiders?", 16),
        ]
    )
    with ChatServer(lambda body: next(said)) as server:
        words = ("--num-tasks", "2", "--max-requests", "8", "--concurrency", "1")
        words += ("--judge", "answer", "--judge-arg", "extract=auto")
        assert augment(server.url, *words) == 0
    out = tmp_path / "out"
    assert [row["prompt"] for row in rows(out)] == ["How many legs have two spiders?"]
    found = [(row["reason"], row.get("nearest", "")[-2:]) for row in rows(out, "rejected.jsonl")]
    assert found == [
        ("equal to an earlier question", ":1"),
        ("equal but for case, spaces and punctuation", ":1"),
        ("a near duplicate", ":1"),
        ("cut at --max-tokens", ""),
        ("not a task", ""),
        ("the judge accepts any answer", ""),
        ("equal to an earlier question", "06"),
    ]
    near = rows(out, "rejected.jsonl")[2]
    assert near["detail"].endswith(f":1, similarity {near['similarity']:.2f}")
    assert 0.6 <= near["similarity"] < 1


def test_a_band_of_difficulty(augment: Callable[..., int], tmp_path: Path) -> None:
    """Tasks with a number that is divisible by 3 are never solved, by 5 always."""

    def say(body: dict[str, Any]) -> dict[str, Any]:
        if not is_solver(body):
            return writes(body)
        a, b = map(int, re.findall(r"\d+", body["messages"][-1]["content"]))
        right = a % 5 == 0 or (a % 3 != 0 and body["seed"] % 2 == 0)
        return text(f"\\boxed{{{a + b if right else -1}}}")

    with ChatServer(say) as server:
        words = (*QUICK, "--attempts", "8", "--min-solved", "0.1", "--max-solved", "0.9")
        assert augment(server.url, "--num-tasks", "10", *words) == 0
        solvers = [body for body in server.bodies if is_solver(body)]
        assert len({body["seed"] for body in solvers}) == len(solvers)
    out = tmp_path / "out"
    firsts = [int(re.findall(r"\d+", row["prompt"])[0]) for row in rows(out)]
    assert all(a % 5 and a % 3 for a in firsts)
    assert all(0 < row["solved"] < 1 and row["attempts"] == 8 for row in rows(out))
    rejected = card(out)["rejected"]
    assert {"too hard for the solver", "too easy for the solver"} <= set(rejected)
    assert "Share of solved attempts" in (out / "README.md").read_text()


@pytest.mark.slow
def test_the_files_do_not_depend_on_concurrency(
    augment: Callable[..., int], tmp_path: Path
) -> None:
    with ChatServer(writes) as server:
        for number in (1, 7, 64):
            words = (*QUICK, "--num-tasks", "9", "--attempts", "3", "--concurrency", str(number))
            assert augment(server.url, *words, out=f"out{number}") == 0
    assert bits(tmp_path / "out1") == bits(tmp_path / "out7") == bits(tmp_path / "out64")


@pytest.mark.slow
def test_a_killed_augmentation_continues_to_the_same_bits(
    augment: Callable[..., int], tmp_path: Path
) -> None:
    words = (*QUICK, "--num-tasks", "15", "--attempts", "2", "--concurrency", "4")
    with ChatServer(writes) as server:
        assert augment(server.url, *words, out="whole") == 0
        num_asked = len(server.bodies)
        for limit in (5, 25):
            before = len(server.bodies)
            line = command(tmp_path, server.url, "killed", *words)
            child = subprocess.Popen([sys.executable, "-m", *line])
            until(lambda before=before, limit=limit: len(server.bodies) >= before + limit)
            os.kill(child.pid, signal.SIGKILL)
            child.wait(30)
        journal = tmp_path / "killed" / "texts.jsonl"
        complete = journal.read_bytes().count(b"\n")
        journal.write_bytes(journal.read_bytes() + b'{"kind": "task", "num')  # cut in a line
        assert 0 < complete < num_asked
        before = len(server.bodies)
        assert augment(server.url, *words, out="killed") == 0
        assert len(server.bodies) - before == num_asked - complete
    assert bits(tmp_path / "whole") == bits(tmp_path / "killed")


def test_another_selection_of_the_same_texts(augment: Callable[..., int], tmp_path: Path) -> None:
    with ChatServer(writes) as server:
        assert augment(server.url, *QUICK, "--num-tasks", "8") == 0
        before = len(server.bodies)
        assert augment(server.url, *QUICK, "--num-tasks", "5", "--max-similarity", "0.9") == 0
        assert (len(server.bodies), len(rows(tmp_path / "out"))) == (before, 5)
        assert augment(server.url, *QUICK, "--num-tasks", "5", "--temperature", "0.5") == 1


def test_an_endpoint_that_fails_at_times(augment: Callable[..., int], tmp_path: Path) -> None:
    failing = True

    def say(body: dict[str, Any]) -> Any:
        if failing and drawn(body).random() < 0.3:
            return Response("{}", 404)
        return writes(body)

    with ChatServer(say) as server:
        words = (*QUICK, "--num-tasks", "6", "--concurrency", "2", "--attempts", "2")
        assert augment(server.url, *words) == 0
        assert "the model gave no text" in card(tmp_path / "out")["rejected"]
        failing = False
        assert augment(server.url, *words) == 0  # failures are asked for again
        assert "the model gave no text" not in card(tmp_path / "out")["rejected"]
        assert augment(server.url, *words, out="without") == 0
    assert bits(tmp_path / "out") == bits(tmp_path / "without")


def test_an_endpoint_that_is_down(augment: Callable[..., int], tmp_path: Path, capsys: Any) -> None:
    with ChatServer(lambda body: Response("{}", 404)) as server:
        assert augment(server.url, "--num-tasks", "50") == 1
    told = capsys.readouterr().err
    assert "m failed 8 times in a row" in told
    assert "the same command continues" in told
    assert not (tmp_path / "out" / "tasks.jsonl").exists()


def test_no_task_is_kept(augment: Callable[..., int], tmp_path: Path, capsys: Any) -> None:
    with ChatServer(lambda body: text("\ud800 no")) as server:
        assert augment(server.url, "--num-tasks", "1", "--max-requests", "3") == 1
    assert 'no task is kept: {"not a task": 3}; see rejected.jsonl' in capsys.readouterr().err
    assert len(rows(tmp_path / "out", "rejected.jsonl")) == 3


@pytest.mark.parametrize(
    ("seeds", "words", "said"),
    [
        (None, (), "seeds.jsonl does not exist"),
        ("", (), "gives no task"),
        ("{", (), "line 1 is not JSON"),
        ('{"prompt": "x"}', (), "no row has the field 'answer'"),
        ('{"prompt": "x", "answer": null}', (), "seeds.jsonl:1: the answer must be a text or a"),
        ('{"prompt": "a <question> b", "answer": 1}', (), "cannot be shown to the model"),
        ('{"prompt": "x", "answer": "}"}', (), "cannot be shown to the model"),
        ('{"prompt": "x", "answer": 7}', ("--judge", "choice"), "accepts the answer of no seed"),
        ("ok", ("--judge", "maths"), "'maths' is not a known judge (did you mean math"),
        ("ok", ("--judge-arg", "digist=3"), "digist"),
        ("ok", ("--base-url", "ftp://x"), "--base-url: 'ftp://x' must have the form"),
        ("ok", ("--solver-model", "s"), "--solver-model needs --attempts"),
        ("ok", ("--attempts", "2", "--min-solved", "0.9"), "--min-solved 0.9 is above"),
        ("ok", ("--judge", "curriculum"), "--judge"),
    ],
)
def test_wrong_input(
    augment: Callable[..., int],
    tmp_path: Path,
    capsys: Any,
    seeds: str | None,
    words: tuple[str, ...],
    said: str,
) -> None:
    path = tmp_path / "seeds.jsonl"
    if seeds is None:
        path.unlink()
    elif seeds != "ok":
        path.write_text(seeds)
    assert augment("http://127.0.0.1:9/v1", *words) in (1, 2)
    told = capsys.readouterr().err
    assert said in told
    assert "Traceback" not in told


def test_similarity_is_the_jaccard_index_of_word_3_grams() -> None:
    questions = Questions(0.5)
    questions.add("a", "one two three four five")
    same = questions.nearest("One  two three, four five!")
    assert (same.id, same.reason) == ("a", "equal but for case, spaces and punctuation")
    half = questions.nearest("one two three four six")  # 2 of 4 different 3-grams
    assert (half.id, half.similarity, half.reason) == ("a", 0.5, "a near duplicate")
    other = questions.nearest("one two three six seven")  # 1 of 5
    assert (other.similarity, other.reason) == (0.2, None)
    assert questions.nearest("short") == questions.nearest("nothing alike here at all")
    questions.add("b", "?!")
    assert questions.nearest("!?").reason is None
