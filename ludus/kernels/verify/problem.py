"""Problems: a reference in torch, and what is known of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ludus.core.errors import DataError
from ludus.core.types import Task


@dataclass(frozen=True, slots=True)
class KernelProblem:
    """A problem. `reference`: Python with `Model`, `get_inputs` and perhaps `get_init_inputs`, as
    in KernelBench; untrusted code. `flops`: its operations, where they are known."""

    name: str
    reference: str
    flops: float | None = None

    @classmethod
    def of(cls, task: Task) -> KernelProblem:
        """The problem of a task. Errors: DataError for a task of another kind."""
        reference, name = task.data.get("reference"), task.data.get("name", task.id)
        if not isinstance(reference, str) or not reference.strip():
            raise DataError(
                f"task {task.id}: data.reference is missing: use a reader of kernel problems "
                "(generated_kernels, kernelbench, cuda_engineer_archive)"
            )
        flops = task.data.get("flops")
        return cls(str(name), reference, float(flops) if isinstance(flops, int | float) else None)


@dataclass(frozen=True, slots=True)
class Interface:
    """Arguments of a problem's kernel: shape and type of the inputs, the parameters and `out`
    by name, and the numbers among the inputs."""

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    numbers: Mapping[str, int | float]
