"""A co-evolution's folder, written by the functions that the stages use, with made-up values."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ludus.coevolve.storage import Storage, write_rows
from ludus.core.types import Group, Task, Trajectory
from ludus.evaluate import summarise
from ludus.judges.proposals.select import Problem, select
from ludus.judges.proposals.votes import Vote
from ludus.telemetry.metrics import MetricsLog

EVIL = '<script>window.hacked = 1</script><img src=http://example.org/x.png onerror="hacked=1">'
RTL = "\u202eabc\u2066"
"""Marks that turn the direction of what follows."""

NAMES = "let a = {} + {} . what is a * {} ?", "what is {} * {} + {} ?", "solve {} * x + {} = {} ."


@dataclass(frozen=True)
class World:
    storage: Storage
    iterations: int

    @property
    def planned(self) -> list[str]:
        stages = ("curriculum", "generate", "score", "filter", "executor", "evaluate")
        rows = [f"iteration-{i}/{s}" for i in range(1, self.iterations + 2) for s in stages]
        return ["start", "iteration-0/evaluate", *rows]


def make_world(root: Path, iterations: int = 3, proposals: int = 80, k: int = 10) -> World:
    """Write a co-evolution whose problems get harder."""
    storage = Storage(root)
    root.mkdir(parents=True)
    storage.recipe.write_text(f"name: tiny # {EVIL}\niterations: {iterations + 1}\n")
    storage.record("start", {"run": "start-1", "steps": 300, "seconds": 92.3})
    evaluate(storage, 0)
    for iteration in range(1, iterations + 1):
        draw = random.Random(iteration)
        train(storage, iteration, draw)
        counts = questions(storage, iteration, draw, proposals, k)
        for stage, seconds in {"generate": 11.0, "score": 64.5, "filter": 0.2}.items():
            row = counts if stage == "filter" else {}
            storage.record(f"iteration-{iteration}/{stage}", {**row, "seconds": seconds})
        row = {"run": f"executor-{iteration}-1", "steps": 30, "seconds": 120.0}
        storage.record(f"iteration-{iteration}/executor", row)
        evaluate(storage, iteration)
    return World(storage, iterations)


def evaluate(storage: Storage, iteration: int) -> None:
    draw, chance = random.Random(7), (0.3, 0.5, 0.62, 0.71)[min(iteration, 3)]
    groups = [
        Group(f"t{i}", Task(id=f"t{i}"), [Trajectory("e", "g", f"t{i}", reward=float(won))])
        for i in range(200)
        for won in [draw.random() < chance]
    ]
    found = summarise(groups, label="heldout").model_dump(mode="json")
    record: dict[str, Any] = {"iteration": iteration}
    record["heldout"] = {**found, "tool_calls": 0.4 + 0.3 * iteration}
    if iteration:
        record["frontier"] = {
            "executor": "executor-1",
            "num_problems": 100,
            "num_scored": 100,
            "pass_rate": 0.7 - 0.07 * iteration,
            "tool_calls": 1.2 + 0.45 * iteration,
        }
    path = storage.evaluation(iteration)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record))
    result = {"heldout": found["success"]["value"], "seconds": 21.5}
    storage.record(f"iteration-{iteration}/evaluate", result)


def train(storage: Storage, iteration: int, draw: random.Random) -> None:
    for role in ("curriculum", "executor"):
        folder = storage.runs / f"{role}-{iteration}-1"
        folder.mkdir(parents=True)
        (folder / "report.html").write_text("a run")
        with MetricsLog(folder / "metrics.jsonl") as log:
            log.log("sft", 0, {"train/loss": 1.0})
            for step in range(20):
                log.log("rl", step, parts(draw, step) if role == "curriculum" else {
                    "rollout/success": 0.4 + 0.01 * step + draw.gauss(0, 0.02),
                    "rollout/groups_with_signal": 0.6,
                })  # fmt: skip
    row = {"run": f"curriculum-{iteration}-1", "steps": 20, "seconds": 140.0}
    storage.record(f"iteration-{iteration}/curriculum", row)


def parts(draw: random.Random, step: int) -> Mapping[str, float]:
    rising = 1 - 0.9 ** (step + 1)
    return {
        "rollout/reward": 0.3 + rising + draw.gauss(0, 0.05),
        "score/format": min(0.7 + 0.3 * rising, 1.0),
        "score/uncertainty": 0.3 + 0.4 * rising + draw.gauss(0, 0.04),
        "score/tool": 0.5 + 0.5 * rising,
        "score/repetition": 0.1 + draw.random() * 0.1,
        "score/consistency": 0.8 - 0.3 * rising,
    }


def questions(
    storage: Storage, iteration: int, draw: random.Random, proposals: int, k: int
) -> dict[str, int]:
    """Write proposals, answers and the filter's files; of every ten proposals one is no proposal,
    one repeats a question, one has no vote."""
    rows: list[dict[str, Any]] = []
    answered: dict[str, dict[str, Any]] = {}
    for number in range(proposals):
        key = f"generate-{iteration:06d}/g{number:04d}/e000"
        row: dict[str, Any] = {"id": key, "status": "completed", "reason": None}
        if number % 10 == 3:
            text = f"{EVIL} no question {RTL} \x1b[31m \ud800"
            reason = "no <question>...</question>"
            rows.append({**row, "text": text, "question": None, "claimed": None, "reason": reason})
            continue
        question = NAMES[number % 3].format(*(draw.randint(2, 999) for _ in range(3)))
        if number == 0:
            question = f"{EVIL} {RTL} {question}"
        if number % 10 == 6:
            question = str(rows[-1]["question"])
        claimed = str(draw.randint(2, 9999))
        text = f"<question>{question}</question> \\boxed{{{claimed}}}"
        rows.append({**row, "text": text, "question": question, "claimed": claimed})
        if question not in answered:
            vote = None if number % 10 == 8 else draw.choice((1, 3, 5, 5, 7, 10))
            answered[question] = answer(key, question, claimed, vote, k, draw)
    write_rows(storage.questions(iteration, "proposals"), rows)
    write_rows(storage.temporary(iteration, "answers"), answered.values())
    return filtered(storage, iteration, rows, answered)


def answer(
    key: str, question: str, claimed: str, votes: int | None, k: int, draw: random.Random
) -> dict[str, Any]:
    row: dict[str, Any] = {"id": key, "question": question, "claimed": claimed}
    calls = [draw.randint(0, 3) for _ in range(k)]
    texts: list[str | None] = [f"so \\boxed{{{n}}} {EVIL if n == 1 else ''}" for n in range(k)]
    texts[0] = "x" * 100_000 + " \\boxed{7}"
    texts[-1] = None
    row |= {"tool_calls": calls, "texts": texts}
    if votes is None:
        row |= {"statuses": ["error_timeout"] * k, "consistency": None}
        return row | {"reason": f"none of {k} episodes of the executor could be counted: {EVIL}"}
    votes = min(votes, k)
    others = max(min(votes - 1, k - votes - 1), 0)  # the rest is unread
    counts = [["7", votes], *([["8", others]] if others else [])]
    classes = [0] * votes + [1] * others + [None] * (k - votes - others)
    return row | {
        "statuses": ["completed"] * (k - 1) + ["truncated_length"],
        "consistency": votes / k,
        "answer": "7",
        "counts": counts,
        "classes": classes,
        "tie": False,
        "agrees": draw.random() < 0.6,
        "mean_tool_calls": sum(calls) / k,
        "reason": None,
    }


def filtered(
    storage: Storage, iteration: int, rows: list[dict[str, Any]], answered: dict[str, Any]
) -> dict[str, int]:
    problems = []
    for row in rows:
        found, vote = answered.get(row["question"]), None
        if found is not None and found["consistency"] is not None:
            counts = tuple((text, count) for text, count in found["counts"])
            vote = Vote(found["consistency"], "7", counts, tuple(found["classes"]))
        problems.append(Problem(row["id"], row["question"], vote))
    kept, rejected = select(problems)
    write_rows(
        storage.questions(iteration, "rejected"),
        [{"id": p.id, "question": p.question, "reason": str(why)} for p, why in rejected],
    )
    write_rows(
        storage.questions(iteration, "problems"),
        [{"id": p.id, "question": p.question, "answer": "7", "consistency": 0.5} for p in kept],
    )
    return {"kept": len(kept), "rejected": len(rejected)}
