"""A co-evolution of seconds: a model that has learned sums, some of them wrongly, by heart."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from harness import TIMEOUT_S, Ludus
from safetensors.torch import load_file

from ludus.coevolve.roles import merged
from ludus.core.types import Group
from ludus.store import RunStore
from ludus.train.checkpoint.state import raw

T = TypeVar("T")
Disturbed = Callable[[str], Ludus]

ROOT = "coevolve/sums"
PROMPT = "propose a sum"
SUMS = [(3, 4), (2, 5), (1, 3), (6, 2), (4, 4), (5, 1)]
ALL = (
    "start", "iteration-0/evaluate",
    "iteration-1/curriculum", "iteration-1/generate", "iteration-1/score",
    "iteration-1/filter", "iteration-1/executor", "iteration-1/evaluate",
    "iteration-2/curriculum", "iteration-2/generate", "iteration-2/score",
    "iteration-2/filter", "iteration-2/executor", "iteration-2/evaluate",
)  # fmt: skip
"""The stages of the recipe, in order."""

ARCHITECTURE = {
    "name": "qwen3",
    "args": {
        "hidden_size": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16,
        "intermediate_size": 64,
    },
}  # fmt: skip

LEARN = {"lr": 1.0e-4}

RECIPE: dict[str, Any] = {
    "name": "sums",
    "iterations": 2,
    "shared": {
        "model": {
            "architecture": ARCHITECTURE,
            "tokenizer": {"name": "words"},
            "chat_template": "plain",
            "context_length": 128,
        },
        "rollout": {"max_tokens_per_turn": 32, "concurrency": 16},
        "report": False,
        "threads": 1,
    },
    "start": {
        "judge": "answer",
        "tools": ["calculator"],
        "rollout": {"format": "code", "markers": {"tool": "calculator"}},
        "tasks": {"train": {"name": "json", "args": {"path": "prompts.jsonl", "answer": None}}},
        "sft": {
            "data": "taught.jsonl",
            "steps": 80,
            "episodes_per_step": 12,
            "optimizer": {"lr": 1.0e-2},
        },
    },
    "curriculum": {
        "tasks": {"train": {"name": "json", "args": {"path": "prompts.jsonl", "answer": None}}},
        "rl": {"steps": 2, "groups_per_step": 2, "group_size": 4, "optimizer": LEARN},
    },
    "executor": {
        "judge": "answer",
        "tools": ["calculator"],
        "rollout": {
            "format": "code",
            "markers": {"tool": "calculator"},
            "tool_calls": {"max_per_episode": 2, "max_result_tokens": 16},
        },
        "tasks": {"heldout": {"name": "json", "args": {"path": "held.jsonl"}}},
        "rl": {
            "algorithm": "adpo",
            "steps": 2,
            "groups_per_step": 2,
            "group_size": 4,
            "optimizer": LEARN,
        },
    },
    "answers": {"number": 4, "temperature": 1.0, "top_p": 1.0},
    "questions": {"proposals": 16, "min_consistency": 0, "max_consistency": 1, "chunk": 4},
    "frontier": {"num_tasks": 4},
}


def write_data(folder: Path) -> None:
    """The prompts, the conversations of the first run, and the held-out tasks.

    Half of the answers to a sum are right, some of them by the calculator; half are one too many.
    """
    taught = []
    for a, b in SUMS:
        ask = {"role": "user", "content": f"{a} + {b} ="}
        proposal = f"<question>{a} + {b} =</question> \\boxed{{{a + b}}}"
        taught.append([{"role": "user", "content": PROMPT}, _said(proposal)])
        result = {"role": "tool", "name": "calculator", "content": str(a + b)}
        code, answer = f"<code>{a} + {b}</code>", f"<answer>{a + b}</answer>"
        taught.append([ask, _said(code), result, _said(answer)])
        taught.append([ask, _said(f"<answer>{a + b + 1}</answer>")])
    _write(folder / "taught.jsonl", [{"messages": messages} for messages in taught])
    _write(folder / "prompts.jsonl", [{"prompt": PROMPT}] * 2)
    _write(
        folder / "held.jsonl",
        [{"prompt": f"{a} + {b} =", "answer": a + b} for a, b in [(5, 1), (4, 3), (1, 1)]],
    )


def write_recipe(folder: Path, name: str = "sums.yaml", **changes: Any) -> str:
    """Write the data, and the recipe with changed sections. Returns the file's name.

    `changes` are merged into RECIPE as a role's keys into the shared ones. Paths are relative, so
    that a copy of the folder is the same co-evolution.
    """
    write_data(folder)
    (folder / name).write_text(json.dumps(merged(RECIPE, changes)), encoding="utf-8")
    return name


def bits(root: Path) -> dict[str, Any]:
    """All that a co-evolution made, without times: equal for two that did the same."""
    found: dict[str, Any] = {}
    for path in sorted((root / "models").glob("*/*.safetensors")):
        tensors = load_file(path)
        found[str(path.relative_to(root))] = {
            key: raw(value).numpy().tobytes() for key, value in tensors.items()
        }
    for path in sorted((root / "generated_question").glob("*/*.jsonl")):
        found[str(path.relative_to(root))] = path.read_text()
    for path in sorted((root / "temp_results").glob("*/*.jsonl")):
        found[str(path.relative_to(root))] = path.read_text()
    for path in sorted((root / "evaluation").glob("*.json")):
        found[str(path.relative_to(root))] = timeless(json.loads(path.read_text()))
    stages = json.loads((root / "state.json").read_text())["stages"]
    return found | {"state": timeless(stages)}


def timeless(value: Any) -> Any:
    """A JSON value without the keys of times."""
    if isinstance(value, Mapping):
        return {k: timeless(v) for k, v in value.items() if not k.endswith("seconds")}
    return [timeless(part) for part in value] if isinstance(value, list) else value


def _said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def label_after(stage: str) -> str:
    """The folder of the copy that was made after a stage."""
    return stage.replace("/", "-")


def groups(ludus: Ludus, run: str) -> list[Group]:
    """All groups that a run of the co-evolution trained on."""
    with RunStore.open(None, ludus.cwd / ROOT / "runs", read_only=True) as store:
        return [g for row in store.steps(run) for g in store.groups(run, row.stage, row.step)]


def until(found: Callable[[], T | None]) -> T:
    """Wait until there is an answer, and return it."""
    deadline = time.monotonic() + TIMEOUT_S
    while not (answer := found()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return answer
