"""Tasks of constant prompts: what a curriculum agent is asked, again and again."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ludus.core.types import NO_ENV, Message, Task
from ludus.tasks.readers import TaskList


def read_prompts(
    prompts: Annotated[
        list[Annotated[str, Field(min_length=1)]],
        Field(min_length=1, description="Texts of the user's message."),
    ],
    num_tasks: Annotated[
        int | None, Field(ge=1, description="Number of tasks; null: one a prompt.")
    ] = None,
) -> TaskList:
    """Make tasks without answer: task i has prompt i mod n, for n prompts."""
    number = len(prompts) if num_tasks is None else num_tasks
    return TaskList(
        Task(
            id=f"prompt:{i}",
            prompt=[Message(role="user", content=prompts[i % len(prompts)])],
            env=NO_ENV,
            source="prompts",
        )
        for i in range(number)
    )
