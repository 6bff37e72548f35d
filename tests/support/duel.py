"""A game of three roles for tests: each says a number of words, the most different ones win."""

from __future__ import annotations

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
