"""Generated kernel problems: a kind and a seed make the operation, its shapes and its reference.

    kind          tier      operation
    elementwise   easy      one or two functions of one or two tensors
    transpose     easy      a permutation of the axes of a matrix or a cube
    reduction     medium    sum, mean, maximum, ... of rows, of columns or of all
    matvec        medium    a matrix, or its transpose, by a vector
    matmul        medium    two matrices, either of them transposed; batches
    convolution   hard      in one or two dimensions, with stride and padding
    fused         hard      several of these in a row: bias and activation, softmax, layer norm, ...

The reference has KernelBench's form: a module with a class `Model` and the functions `get_inputs`
and `get_init_inputs`. `get_inputs` draws from torch's global generator: seed it for each trial.
All tensors are float32, contiguous, and of fixed shapes.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations
from math import prod
from typing import Annotated, Any, Literal

from pydantic import Field

from ludus.core.errors import DataError
from ludus.core.types import Task
from ludus.tasks.kernels.difficulty import EASY, HARD, MEDIUM
from ludus.tasks.readers import TaskList
from ludus.tasks.splits import Taken

Kind = Literal[
    "elementwise", "transpose", "reduction", "matvec", "matmul", "convolution", "fused"
]  # fmt: skip
Size = Literal["small", "large"]
Shape = tuple[int, ...]

MAX_TRIES = 2000
"""Seeds in a row that give no new problem of a kind."""


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation on named inputs: `expression` in torch, `title` in words.

    `flops`: each addition, multiplication, comparison and function of a number counts as 1; 0 where
    numbers only move.
    """

    title: str
    inputs: dict[str, Shape]
    expression: str
    output: Shape
    flops: int


@dataclass(frozen=True, slots=True)
class Draw:
    """Choices of one problem; the same for a kind, size and seed on every platform."""

    rng: random.Random
    large: bool

    def one_of(self, *choices: Any) -> Any:
        return choices[self.rng.randrange(len(choices))]

    def length(self) -> int:
        """Of a vector; not always a multiple of a warp or a block."""
        return self.rng.randrange(1 << 22, 1 << 24) if self.large else self.rng.randrange(64, 4096)

    def side(self) -> int:
        """Of a matrix."""
        return self.rng.randrange(1024, 4097) if self.large else self.rng.randrange(8, 97)

    def number(self) -> float:
        """A constant in an operation."""
        return self.rng.randrange(5, 31) / 10


UNARY = {
    "relu": "torch.relu({})",
    "sigmoid": "torch.sigmoid({})",
    "tanh": "torch.tanh({})",
    "gelu": "torch.nn.functional.gelu({})",
    "silu": "torch.nn.functional.silu({})",
    "absolute value": "torch.abs({})",
    "square": "torch.square({})",
    "softplus": "torch.nn.functional.softplus({})",
}
BINARY = {
    "sum": "{} + {}",
    "difference": "{} - {}",
    "product": "{} * {}",
    "maximum": "torch.maximum({}, {})",
    "minimum": "torch.minimum({}, {})",
}
UNBOUNDED = {name: form for name, form in UNARY.items() if name not in ("sigmoid", "tanh")}
"""Functions for products, which are large: a sigmoid of them is 0 or 1, which hides errors."""

REDUCED = {
    "sum": "torch.sum({}{})",
    "sum of squares": "torch.sum(torch.square({}){})",
    "L2 norm": "torch.sqrt(torch.sum(torch.square({}){}))",
    "maximum": "torch.amax({}{})",
    "minimum": "torch.amin({}{})",
}


def _elementwise(draw: Draw) -> Operation:
    shape: Shape = draw.one_of((draw.length(),), (draw.side(), draw.side()))
    (name, unary), constant = draw.one_of(*UNARY.items()), draw.number()
    if draw.one_of(True, False):
        expression = unary.format(f"{constant} * a")
        title = f"{name} of {constant} times a"
        return Operation(title, {"a": shape}, expression, shape, 2 * prod(shape))
    other, binary = draw.one_of(*BINARY.items())
    inner = binary.format("a", f"{constant} * b")
    title = f"{name} of the {other} of a and {constant} times b"
    inputs = {"a": shape, "b": shape}
    return Operation(title, inputs, unary.format(inner), shape, 3 * prod(shape))


def _transpose(draw: Draw) -> Operation:
    if draw.one_of(True, False):
        rows, columns = draw.side(), draw.side()
        return Operation(
            "transpose of a", {"a": (rows, columns)}, "a.t().contiguous()", (columns, rows), 0
        )
    side = draw.rng.randrange(64, 257) if draw.large else draw.rng.randrange(4, 25)
    shape = side, side + draw.rng.randrange(1, 8), side + draw.rng.randrange(8, 16)
    axes = draw.one_of(*list(permutations(range(3)))[1:])
    output = shape[axes[0]], shape[axes[1]], shape[axes[2]]
    title = f"a with its axes in the order {', '.join(map(str, axes))}"
    return Operation(title, {"a": shape}, f"a.permute{axes}.contiguous()", output, 0)


def _reduction(draw: Draw) -> Operation:
    rows, columns = draw.side(), draw.side()
    inputs: dict[str, Shape] = {"a": (rows, columns)}
    axis = draw.one_of(0, 1, None)
    if axis is None:  # of a million squares, the sum hardly differs from one input to another
        name, form = draw.one_of(
            ("maximum", "torch.amax(a)"),
            ("minimum", "torch.amin(a)"),
            ("sum, divided by the square root of the number of elements,", "torch.sum(a) / {:.6f}"),
        )
        expression = form.format((rows * columns) ** 0.5)
        expression = f"({expression}).reshape(1)"
        return Operation(f"{name} of all of a", inputs, expression, (1,), rows * columns)
    name, form = draw.one_of(*REDUCED.items())
    of, output = ("column", (columns,)) if axis == 0 else ("row", (rows,))
    expression, flops = form.format("a", f", dim={axis}"), rows * columns
    if "square" in form:
        flops *= 2
    return Operation(f"{name} of each {of} of a", inputs, expression, output, flops)


def _matvec(draw: Draw) -> Operation:
    rows, columns = draw.side(), draw.side()
    turned, bias = draw.one_of(True, False), draw.one_of(True, False)
    size_in, size_out = (rows, columns) if turned else (columns, rows)
    inputs: dict[str, Shape] = {"a": (rows, columns), "x": (size_in,)}
    expression = "a.t() @ x" if turned else "a @ x"
    title = f"{'the transpose of ' if turned else ''}a by the vector x"
    if bias:
        inputs["b"], expression, title = (size_out,), f"{expression} + b", f"{title}, plus b"
    flops = 2 * rows * columns + size_out * bias
    return Operation(title, inputs, expression, (size_out,), flops)


def _matmul(draw: Draw) -> Operation:
    rows, inner, columns = draw.side(), draw.side(), draw.side()
    if draw.one_of(True, False, False):
        batch = draw.rng.randrange(2, 9)
        shapes: dict[str, Shape] = {"a": (batch, rows, inner), "b": (batch, inner, columns)}
        title, output = "product of each matrix of a and of b", (batch, rows, columns)
        return Operation(title, shapes, "a @ b", output, 2 * inner * prod(output))
    first, second = draw.one_of(True, False), draw.one_of(True, False)
    shapes = {
        "a": (inner, rows) if first else (rows, inner),
        "b": (columns, inner) if second else (inner, columns),
    }
    expression = f"{'a.t()' if first else 'a'} @ {'b.t()' if second else 'b'}"
    title = f"{'transpose of a' if first else 'a'} by {'transpose of b' if second else 'b'}"
    return Operation(title, shapes, expression, (rows, columns), 2 * rows * inner * columns)


def _convolution(draw: Draw) -> Operation:
    dims, kernel, stride = draw.one_of(1, 2), draw.one_of(3, 5), draw.one_of(1, 2)
    padding, batch = draw.one_of(0, 1, 2), draw.rng.randrange(1, 5)
    depth_in, depth_out = draw.rng.randrange(1, 9), draw.rng.randrange(1, 9)
    if draw.large:
        batch, depth_in, depth_out = 16, 8 * depth_in, 8 * depth_out
    most = 1 << 16 if draw.large and dims == 1 else 256 if draw.large else 33
    sides = tuple(draw.rng.randrange(most // 2, most) for _ in range(dims))
    after = tuple((side + 2 * padding - kernel) // stride + 1 for side in sides)
    inputs: dict[str, Shape] = {
        "x": (batch, depth_in, *sides),
        "w": (depth_out, depth_in, *([kernel] * dims)),
    }
    settings = f"stride={stride}, padding={padding}"
    expression = f"torch.nn.functional.conv{dims}d(x, w, {settings})"
    title = f"convolution of x with w in {dims} dimension{'s' * (dims > 1)}, {settings}"
    output = (batch, depth_out, *after)
    flops = 2 * depth_in * kernel**dims * prod(output)
    return Operation(title, inputs, expression, output, flops)


def _fused(draw: Draw) -> Operation:
    rows, inner, columns = draw.side(), draw.side(), draw.side()
    (name, unary), constant = draw.one_of(*UNARY.items()), draw.number()
    product_name, product_form = draw.one_of(*UNBOUNDED.items())
    matrix: Shape = (rows, columns)
    dense: dict[str, Shape] = {"a": (rows, inner), "b": (inner, columns), "c": (columns,)}
    elements = rows * columns
    dense_flops = 2 * inner * elements
    return draw.one_of(  # type: ignore[no-any-return]
        Operation(
            f"{product_name} of a by b plus c",
            dense,
            product_form.format("a @ b + c"),
            matrix,
            dense_flops + 2 * elements,
        ),
        Operation(
            f"{product_name} of a by b, times {constant}, plus c",
            dense,
            f"{product_form.format('a @ b')} * {constant} + c",
            matrix,
            dense_flops + 3 * elements,
        ),
        Operation(
            f"softmax of each row of {constant} times a, times the length of a row",
            {"a": matrix},
            f"torch.softmax({constant} * a, dim=1) * {columns}",
            matrix,
            7 * elements,  # times, maximum, minus, exp, sum, divided, times
        ),
        Operation(
            "layer norm of each row of a (epsilon 1e-5), times b, plus c",
            {"a": matrix, "b": (columns,), "c": (columns,)},
            f"torch.nn.functional.layer_norm(a, ({columns},), b, c, 1e-5)",
            matrix,
            7 * elements,  # mean, minus, square, sum, times its root, times b, plus c
        ),
        Operation(
            f"sum of each row of the {name} of a minus b",
            {"a": matrix, "b": matrix},
            f"torch.sum({unary.format('a - b')}, dim=1)",
            (rows,),
            3 * elements,
        ),
        Operation(
            f"maximum of each row of the {product_name} of a by b",
            {"a": (rows, inner), "b": (inner, columns)},
            f"torch.amax({product_form.format('a @ b')}, dim=1)",
            (rows,),
            dense_flops + 2 * elements,
        ),
    )


KINDS: dict[str, tuple[str, Callable[[Draw], Operation]]] = {
    "elementwise": (EASY, _elementwise),
    "transpose": (EASY, _transpose),
    "reduction": (MEDIUM, _reduction),
    "matvec": (MEDIUM, _matvec),
    "matmul": (MEDIUM, _matmul),
    "convolution": (HARD, _convolution),
    "fused": (HARD, _fused),
}

REFERENCE = '''\
import torch


class Model(torch.nn.Module):
    """{title}."""

    def forward(self, {names}):
        return {expression}


def get_inputs():
    return [{tensors}]


def get_init_inputs():
    return []
'''


def operation_of(kind: str, seed: int, size: Size = "small") -> Operation:
    """The operation of a kind and a seed."""
    digest = hashlib.sha256(f"{kind}:{size}:{seed}".encode()).digest()
    return KINDS[kind][1](Draw(random.Random(digest), size == "large"))


def problem(kind: str, seed: int, size: Size = "small") -> Task:
    """The task of a kind and a seed.

    `data` has `kind`, `name`, `reference`, the shapes of `inputs` and `output`, `flops`, and
    `signature`: a kernel's parameters, if it is called without torch: the inputs in order, then the
    output.
    """
    made = operation_of(kind, seed, size)
    names = ", ".join(made.inputs)
    tensors = ", ".join(f"torch.randn{shape}" for shape in made.inputs.values())
    pointers = [f"const float* {name}" for name in made.inputs]
    data = {
        "kind": kind,
        "name": made.title,
        "reference": REFERENCE.format(
            title=made.title[0].upper() + made.title[1:],
            names=names,
            expression=made.expression,
            tensors=tensors,
        ),
        "inputs": {name: list(shape) for name, shape in made.inputs.items()},
        "output": list(made.output),
        "flops": made.flops,
        "signature": f"void kernel({', '.join([*pointers, 'float* out'])})",
    }
    return Task(id=f"kernel:{kind}/{size}/{seed}", data=data, tier=KINDS[kind][0])


def read_generated(
    num_problems: Annotated[int, Field(ge=1, le=1_000_000, description="Number of problems.")],
    kinds: Annotated[
        list[Kind] | None, Field(min_length=1, description="Kinds of problems; null: all.")
    ] = None,
    size: Annotated[
        Size, Field(description="small: milliseconds on a CPU; large: worth a GPU's time.")
    ] = "small",
    first_seed: Annotated[int, Field(ge=0, description="Seed of the first problem.")] = 0,
    taken: Taken | None = None,
) -> TaskList:
    """Generate kernel problems, kind by kind in turn, no two of them alike.

    A problem that an earlier seed, or training, has is left out for that of a further seed.

    Errors: DataError if a kind has no further problem.
    """
    chosen = list(dict.fromkeys(kinds or KINDS))
    seeds, seen, tasks = dict.fromkeys(chosen, first_seed), set[str](), list[Task]()
    for i in range(num_problems):
        kind = chosen[i % len(chosen)]
        for _ in range(MAX_TRIES):
            task = problem(kind, seeds[kind], size)
            seeds[kind] += 1
            reference = task.data["reference"]
            if reference not in seen and not (taken is not None and taken(task)):
                break
        else:
            raise DataError(
                f"kind {kind!r}: {MAX_TRIES} seeds in a row give no new problem: ask for fewer "
                "problems, or for more kinds"
            )
        seen.add(reference)
        tasks.append(task)
    return TaskList(tasks)
