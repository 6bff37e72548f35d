"""Scoring of proposals against plain rollouts of the same tasks: tokens per second.

    python benchmarks/coevolve_scoring.py [--threads 1] [--repeats 5] [--quick]

`score` is the stage of `ludus coevolve`: chunks, votes, files. `rollouts` plays the same tasks at
once, and nothing else: same model, collector, concurrency and seeds, so the same tokens. A policy
of 0.9 M parameters has learned answers by heart. It answers 1,024 problems 10 times each, 64
episodes at a time, in chunks of 512. Answers:

    numbers        sums: no process is needed
    polynomials    one problem in four: x + 57, which math-verify reads and ludus compares
    roots          one problem in four: \\sqrt{57}; math-verify reads them, and compares equal ones
    long roots     the same, after 240 tokens of reasoning; 128 problems

The sampler computes on one thread; the two processes of math-verify use what is left.
Processor time is that of the sampler's process; wall time includes the waits for votes. Both
include the opening of the model.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from common import arguments, machine, ratios, rounds, tabulate, write

from ludus.coevolve import questions
from ludus.coevolve.flow import Coevolution, storage_of
from ludus.coevolve.storage import read_rows, write_rows
from ludus.config.coevolve import CoevolveConfig
from ludus.core.types import Group, Trajectory
from ludus.pipeline.build import Player
from ludus.pipeline.monitoring.progress import Observer

TARGET = 0.9
ARCHITECTURE = {
    "hidden_size": 128, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32,
    "intermediate_size": 384,
}  # fmt: skip


class Counting(Observer):
    """Counts the sampled tokens."""

    def __init__(self) -> None:
        self.tokens = 0

    def episode(self, trajectory: Trajectory) -> None:
        self.tokens += sum(len(s.token_ids) for s in trajectory.segments if s.logprobs is not None)


SQRT = "\\sqrt {{ {} }}"
KINDS = {
    "numbers": ("{}", 1, 1024),
    "polynomials": ("x + {}", 1, 1024),
    "roots": (SQRT, 1, 1024),
    "long roots": (SQRT, 60, 128),
}
"""Form of an answer in four, length of the reasoning in steps of 4 tokens, number of problems."""


def recipe(folder: Path, kind: str) -> CoevolveConfig:
    """Write the data of the first run; returns the recipe."""
    form, steps, _ = KINDS[kind]
    rng = random.Random(0)
    taught = []
    for _ in range(256):
        a, b = rng.randrange(10, 100), rng.randrange(10, 100)
        total = a + b + rng.randrange(2)
        answer = (form if (a + b) % 4 == 0 else "{}").format(total)
        reasoning = " ".join(["let us step by"] * steps)
        text = f"{reasoning} {a} and {b} : <answer>{answer}</answer>"
        question = {"role": "user", "content": f"{a} + {b} ="}
        taught.append({"messages": [question, {"role": "assistant", "content": text}]})
    _lines(folder / "taught.jsonl", taught)
    _lines(folder / "prompts.jsonl", [{"prompt": "propose"}])
    prompts = {"name": "json", "args": {"path": str(folder / "prompts.jsonl"), "answer": None}}
    return CoevolveConfig.model_validate(
        {
            "storage": str(folder),
            "shared": {
                "model": {
                    "architecture": {"name": "qwen3", "args": ARCHITECTURE},
                    "tokenizer": {"name": "words"},
                    "chat_template": "plain",
                    "context_length": 384,
                },
                "rollout": {"max_tokens_per_turn": 320, "concurrency": 64},
                "report": False,
                "threads": 1,
            },
            "start": {
                "judge": "answer",
                "tasks": {"train": prompts},
                "sft": {
                    "data": str(folder / "taught.jsonl"),
                    "steps": 150,
                    "optimizer": {"lr": 5.0e-3},
                },
            },
            "curriculum": {"tasks": {"train": prompts}, "rl": {}},
            "executor": {"rl": {"algorithm": "adpo"}},
            "answers": {"number": 10},
        }
    )


def _lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


class Arena:
    """A co-evolution with a first model, and proposals to be scored."""

    def __init__(self, folder: Path, kind: str, proposals: int) -> None:
        config = recipe(folder, kind)
        self.storage = storage_of(config)
        flow = Coevolution(config, self.storage, Counting())
        flow.run("start")
        self.roles = flow.roles
        sums = random.Random(1).sample(
            [(a, b) for a in range(10, 100) for b in range(10, 100)], proposals
        )
        rows = [
            {"id": f"p{n}", "question": f"{a} + {b} =", "claimed": str(a + b)}
            for n, (a, b) in enumerate(sums)
        ]
        write_rows(self.storage.questions(1, "proposals"), rows)

    def rollouts(self) -> int:
        """Play all tasks at once. Returns the sampled tokens."""
        counting, judge = Counting(), self.roles.judge()
        rows = read_rows(self.storage.questions(1, "proposals"))
        tasks = [judge.task(row["id"], row["question"]) for row in rows]

        async def play(player: Player) -> list[Group]:
            return await player(tasks, "score", 1, self.roles.config.answers.number)

        Player.run_with(self.roles.answering(0, 1), play, counting.episode)
        return counting.tokens

    def score(self) -> int:
        """Run the stage. Returns the sampled tokens."""
        counting = Counting()
        for path in self.storage.temporary(1, "answers").parent.glob("answers*"):
            path.unlink()
        found = questions.score(self.roles, 1, counting)
        assert found["voted"] == found["problems"]
        return counting.tokens


def measure(kind: str, args: Any) -> list[dict[str, Any]]:
    """Returns the rows of both programs."""
    with tempfile.TemporaryDirectory() as folder:
        arena = Arena(Path(folder), kind, 32 if args.quick else KINDS[kind][2])
        programs = {"rollouts": arena.rollouts, "score": arena.score}
        times: dict[str, dict[str, list[float]]] = {
            name: {"cpu": [], "wall": []} for name in programs
        }
        tokens = set()
        for number, name in rounds(programs, args.repeats):
            cpu, wall = time.process_time(), time.perf_counter()
            tokens.add(programs[name]())
            if number >= 0:
                times[name]["cpu"].append(time.process_time() - cpu)
                times[name]["wall"].append(time.perf_counter() - wall)
    (count,) = tokens  # both played the same episodes
    return [
        {
            "kind": kind,
            "program": name,
            "tokens": count,
            "seconds": own,
            **{f"ratio_{key}": ratios(times["rollouts"][key], own[key]) for key in own},
        }
        for name, own in times.items()
    ]


def main() -> None:
    args = arguments(__doc__ or "")
    if hasattr(os, "sched_setaffinity"):  # the processes of math-verify use the other cores
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    facts = machine(args.threads) | {"clock": "processor and wall"}
    rows = [row for kind in KINDS for row in measure(kind, args)]
    text = tabulate(
        rows,
        ("answers", lambda row: row["kind"]),
        ("program", lambda row: row["program"]),
        ("tokens / s of processor time", lambda row: _speed(row, "cpu")),
        ("ratio", lambda row: row["ratio_cpu"].bold()),
        ("tokens / s of wall time", lambda row: _speed(row, "wall")),
        ("ratio", lambda row: row["ratio_wall"].bold()),
    )
    told = (__doc__ or "").partition("\n")[2].partition("[--quick]\n")[2]
    page = f"# Scoring of proposals\n\n{text}\n{told}\nThe target is a ratio of {TARGET}.\n"
    print(page)
    if not args.quick:
        page += f"\n    python benchmarks/coevolve_scoring.py --repeats {args.repeats}\n"
        write("coevolve-scoring", page, facts, rows)


def _speed(row: dict[str, Any], clock: str) -> str:
    return f"{row['tokens'] / statistics.median(row['seconds'][clock]):,.0f}"


if __name__ == "__main__":
    main()
