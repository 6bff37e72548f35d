"""A game of one word that a tiny model learns in a few steps of a host's trainer."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from harness import Process

SAY = '''
from ludus import Env, Message, Observation, StepResult


class Say(Env):
    """Two turns; each earns half a point for the word `left`.

    Args:
        fault_every: every so many episodes, the second turn fails; 0: none does.
    """

    max_turns, success_at = 2, 0.9
    played = 0

    def __init__(self, fault_every: int = 0):
        self.fault_every = fault_every

    async def reset(self, task):
        self.turns = 0
        return Observation(messages=[Message(role="user", content="again")])

    async def step(self, action):
        self.turns += 1
        if self.turns == 2:
            Say.played += 1
            if self.fault_every and Say.played % self.fault_every == 0:
                raise RuntimeError("no more words")
        reward = 0.5 * (action.content.strip() == "left")
        reply = Message(role="user", content="again")
        return StepResult(messages=[reply], reward=reward, terminated=self.turns == 2)
'''

RECIPE: dict[str, Any] = {
    "name": "say",
    "model": {
        "architecture": {
            "name": "qwen3",
            "args": {
                "hidden_size": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1,
                "head_dim": 32, "intermediate_size": 128,
            },
        },
        "tokenizer": {"name": "words"},
        "chat_template": "plain",
        "context_length": 128,
    },
    "env": "say_env.py:Say",
    "tasks": {
        "train": {"name": "json", "args": {"path": "train.jsonl"}},
        "heldout": {"name": "json", "args": {"path": "heldout.jsonl"}},
    },
    "rollout": {"max_tokens_per_turn": 4},
    "sft": {"data": "sft.jsonl", "steps": 12, "episodes_per_step": 16, "optimizer": {"lr": 0.01}},
    "rl": {"steps": 8, "groups_per_step": 4, "group_size": 8, "optimizer": {"lr": 0.003}},
    "evaluate": {"every": 4},
    "checkpoint": {"every": 4},
    "threads": 1,
}  # fmt: skip


def write_files(folder: Path) -> None:
    words, draw = ("left", "right", "up", "down"), random.Random(0)

    def opening(split: str, number: int) -> str:
        return f"{split} {number} : again {' '.join(words)}"

    for split, size in {"train": 16, "heldout": 4}.items():
        tasks = [
            {"id": f"{split}-{n}", "prompt": opening(split, n), "answer": "left"}
            for n in range(size)
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(t) + "\n" for t in tasks))
    lines = []
    for number in range(64):
        messages = [("user", opening("train", number % 16)), ("user", "again")]
        messages += [("assistant", draw.choice(words)), ("user", "again")]
        messages += [("assistant", draw.choice(words))]
        turns = [{"role": role, "content": text} for role, text in messages]
        lines.append(json.dumps({"id": f"c{number}", "messages": turns}) + "\n")
    (folder / "sft.jsonl").write_text("".join(lines))
    (folder / "say_env.py").write_text(SAY)
    (folder / "say.yaml").write_text(json.dumps(RECIPE))


def said(process: Process) -> str:
    return process.stderr.read_text() if process.stderr.exists() else ""


def processes_of(run: Path) -> list[str]:
    """Processes that were started for a run."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            texts = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if str(run).encode() in texts:
            found.append(f"{entry.name} {(entry / 'cmdline').read_bytes()[:200]!r}")
    return found
