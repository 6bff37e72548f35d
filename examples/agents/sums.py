"""Sums for the agents beside this file: tasks from seeds."""

from random import Random

from ludus import Message, Task


def sums(num_tasks: int, first_seed: int = 0) -> list[Task]:
    """Tasks such as `What is 12 * 7 + 5 ?`, one a seed."""
    return [_sum(seed) for seed in range(first_seed, first_seed + num_tasks)]


def _sum(seed: int) -> Task:
    a, b, c = Random(seed).sample(range(10, 100), 3)
    question = Message(role="user", content=f"What is {a} * {b} + {c} ?")
    return Task(id=f"sum-{seed}", prompt=[question], answer=str(a * b + c), source="sums")
