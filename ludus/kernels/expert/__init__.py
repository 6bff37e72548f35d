"""An expert for generated problems: honest kernels, each way of writing one for many problems.

for source in kernels_for(task):        the ways that fit the task, 1 to 3 of them
    await verifier.verify(source, KernelProblem.of(task))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ludus.core.types import Task
from ludus.kernels.expert.fused import fused
from ludus.kernels.expert.products import convolution, matmul, matvec
from ludus.kernels.expert.simple import elementwise, reduction, transpose

WAYS: dict[str, Callable[[Task], Iterator[str]]] = {
    "elementwise": elementwise, "transpose": transpose, "reduction": reduction, "matvec": matvec,
    "matmul": matmul, "convolution": convolution, "fused": fused,
}  # fmt: skip
"""The kinds of generated problems."""


def kernels_for(task: Task) -> Iterator[str]:
    """The sources for a generated task. Errors: KeyError for a task of another kind."""
    return WAYS[task.data["kind"]](task)
