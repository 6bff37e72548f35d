"""A game of three roles for tests: each says a number of words, the most different ones win."""

from __future__ import annotations

from typing import Any

from ludus import Message, Model, Outcome, Task

ROLES = ("red", "blue", "grey")


async def play(task: Task, model: Model) -> Outcome:
    said = {}
    for role in ROLES:
        first = (await model.role(role).chat([*task.prompt])).content.split()
        again = [*task.prompt, Message(role="assistant", content=" ".join(first))]
        again.append(Message(role="user", content="more ?"))
        second = (await model.role(role).chat(again)).content.split()
        said[role] = len({*first, *second})
    return Outcome(rewards={role: said[role] - max(said.values()) + 1 for role in ROLES})


def words(num_tasks: int, first: int = 0) -> list[Task]:
    prompts = [f"word {number % 10} {number // 10}" for number in range(first, first + num_tasks)]
    return [
        Task(id=text.replace(" ", "-"), prompt=[Message(role="user", content=f"{text} more ?")])
        for text in prompts
    ]


def recipe(**changes: Any) -> dict[str, Any]:
    """Sections of a recipe: `red` trains, `blue` trains a policy of its own, `grey` is an older
    version."""
    base: dict[str, Any] = {
        "agent": "duel:play",
        "roles": {"red": "policy", "blue": "rival", "grey": "old"},
        "policies": {"rival": {"model": "same"}, "old": {"past": {"every": 1, "most": 2}}},
        "tasks": {
            "train": {"name": "duel:words", "args": {"num_tasks": 20}},
            "heldout": {"name": "duel:words", "args": {"num_tasks": 4, "first": 50}},
        },
        # One episode at a time: batches, and so the bits, do not depend on time.
        "rollout": {"deterministic": False, "concurrency": 1, "max_tokens_per_turn": 6},
        "rl": {
            "algorithm": "grpo",
            "steps": 4,
            "groups_per_step": 2,
            "group_size": 4,
            "optimizer": {"lr": 1.0e-2},
        },
        "checkpoint": {"every": 1, "keep_last": 1, "keep_best": 0},
    }
    return base | changes
