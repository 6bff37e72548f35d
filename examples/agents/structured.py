"""An agent whose answers follow a JSON schema: it names the colour that the user asks for."""

import json

from ludus.core.types import Message, Task
from ludus.rollout.workflow import Model

COLOURS = ["red", "green", "blue", "grey"]
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": COLOURS}, "sure": {"type": "boolean"}},
    "required": ["colour", "sure"],
    "additionalProperties": False,
}


def tasks(num_tasks: int, first: int = 0) -> list[Task]:
    return [
        Task(
            id=f"t{n}",
            prompt=[
                Message(role="user", content=f"{COLOURS[n % 4]} please , for the time number {n}")
            ],
            answer=COLOURS[n % 4],
        )
        for n in range(first, first + num_tasks)
    ]


async def run(task: Task, model: Model) -> float:
    reply = await model.chat(task.prompt, schema=SCHEMA)
    try:
        return float(json.loads(reply.content)["colour"] == task.answer)
    except ValueError:  # the turn reached its limit of tokens
        return 0.0
