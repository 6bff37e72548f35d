"""The template language as a language of the environment; see `ludus.kernels.templates`."""

from __future__ import annotations

from collections.abc import Sequence

from ludus.core.errors import DataError
from ludus.core.types import Task
from ludus.envs.cuda.languages import SourceError
from ludus.kernels.templates.expand import expand
from ludus.kernels.templates.expert import expert_kernel
from ludus.kernels.verify.problem import Interface

GUIDE = """Write the kernel in a few lines, for example:

block 128 for i < out0
v = sum from 0 for j < a1: square(a[i, j])
out[i] = sqrt(v)

The first line has a template (thread, warp, block: one for each index of the loops; tile: a \
thread, in tiles of the last two loops), the threads of a block (of a side of a tile), and the \
loops. Then reductions may follow: sum, product, max or min, a start, loops, and a value. The last \
line writes out, and may have loops: for j < a1: out[i, j] = ... Sizes are a0, a1 (the shape of \
a). Functions: relu, sigmoid, tanh, gelu, silu, abs, square, softplus, sqrt, rsqrt, exp, log, max, \
min; pad(x[i, j - 1]) is 0 outside of x."""


class Templates:
    """Kernels of a few lines, which are expanded into CUDA C++."""

    label = ""
    fences: Sequence[str] = ("", "templates", "kernel", "text")
    needs = ""
    tables = False

    def opening(self, task: Task, interface: Interface, guide: bool) -> str:
        shapes = ", ".join(f"{name} {list(shape)}" for name, shape in interface.shapes.items())
        title = f"{task.data.get('name', task.id)}\n{shapes}"
        if not guide:
            return title
        reference = f"```python\n{task.data['reference'].strip()}\n```"
        text = "Write a kernel that computes the same as this reference."
        return "\n\n".join([text, reference, title, GUIDE])

    def expand(self, text: str, interface: Interface) -> str:
        try:
            return expand(text, interface.shapes)
        except DataError as error:
            raise SourceError(str(error)) from None

    def expert(self, task: Task) -> Sequence[str]:
        return (expert_kernel(task),) if "kind" in task.data else ()
