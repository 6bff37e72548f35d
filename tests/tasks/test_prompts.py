"""The reader of constant prompts."""

from __future__ import annotations

from typing import Any

import pytest

from ludus.core.errors import ConfigError
from ludus.core.types import NO_ENV, Spec
from ludus.tasks.readers import read_tasks


def test_prompts_repeat_in_order_with_ids_of_their_own() -> None:
    args: dict[str, Any] = {"prompts": ["Write a sum.", "Write a product."], "num_tasks": 5}
    tasks = read_tasks(Spec(name="prompts", args=args), "tasks.train")
    texts = [task.prompt[0].content for task in tasks]
    assert texts == [*args["prompts"], *args["prompts"], "Write a sum."]
    assert [task.id for task in tasks] == [f"prompt:{i}" for i in range(5)]
    assert {task.prompt[0].role for task in tasks} == {"user"}
    assert all(task.answer is None and task.env == NO_ENV for task in tasks)


def test_one_task_a_prompt_is_the_default() -> None:
    spec = Spec(name="prompts", args={"prompts": ["a", "b", "c"]})
    assert len(read_tasks(spec)) == 3


@pytest.mark.parametrize(
    "args", [{}, {"prompts": []}, {"prompts": [""]}, {"prompts": ["a"], "num_tasks": 0}]
)
def test_wrong_arguments_are_refused(args: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"tasks\.train\.args\."):
        read_tasks(Spec(name="prompts", args=args), "tasks.train")
