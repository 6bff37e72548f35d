"""An expert of generated problems: reads the reference's expression, and writes a right kernel.

    torch.sum(torch.square(a), dim=1)      warp 128 for i < out0
                                           v = sum from 0 for p < a1: square(a[i, p])
                                           out[i] = v

Templates and sizes are drawn among those that fit, so that demonstrations differ.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Mapping, Sequence

from ludus.core.errors import DataError
from ludus.core.sources import parse_expression
from ludus.core.types import Task
from ludus.kernels.launches import Shape

OUTER, INNER, RESULTS = "ijkl", "pqr", "vu"
SIZES: Mapping[str, Sequence[int]] = {
    "thread": (64, 128, 256), "warp": (64, 128), "block": (64, 128, 256), "tile": (8, 16),
}  # fmt: skip
UNARY = {
    "relu": "relu", "sigmoid": "sigmoid", "tanh": "tanh", "gelu": "gelu", "silu": "silu",
    "abs": "abs", "square": "square", "softplus": "softplus", "sqrt": "sqrt",
}  # fmt: skip
BINARY = {"maximum": "max", "minimum": "min"}
REDUCED = {"sum": ("sum", "0"), "amax": ("max", "-inf"), "amin": ("min", "inf")}
SIGNS: Mapping[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}

_TILED = re.compile(r"sum from 0 for \w < \w+: \w\[[^]]*\] \* \w\[[^]]*\]$")
_RETURNED = re.compile(r"return (.*)\n\n\ndef get_inputs")


def shapes_of(task: Task) -> dict[str, Shape]:
    """Shapes of the inputs and `out` of a generated problem."""
    shapes = {name: tuple(shape) for name, shape in task.data["inputs"].items()}
    return {**shapes, "out": tuple(task.data["output"])}


def expert_kernel(task: Task, seed: int = 0) -> str:
    """A right kernel of a generated problem; another seed may give another.

    Errors: DataError for a problem that is not generated.
    """
    found = _RETURNED.search(str(task.data.get("reference")))
    if found is None or "inputs" not in task.data or "output" not in task.data:
        raise DataError(f"task {task.id}: the expert knows the problems of generated_kernels only")
    rng = random.Random(f"kernel-expert:{task.id}:{seed}")
    try:
        return _Author(shapes_of(task), rng).kernel(parse_expression(found[1]))
    except (KeyError, ValueError) as error:
        raise DataError(f"task {task.id}: the expert does not know {error}") from None


class _Author:
    """Writes a kernel; `lines` are its reductions."""

    def __init__(self, shapes: Mapping[str, Shape], rng: random.Random) -> None:
        self._shapes, self._rng = shapes, rng
        self._lines: list[str] = []
        self._inner, self._results = iter(INNER), iter(RESULTS)
        self._nested = False

    def kernel(self, node: ast.expr) -> str:
        """The text of a kernel for a torch expression. Errors: KeyError, ValueError."""
        rank = len(self._shapes["out"])
        if isinstance(node, ast.Call) and _method(node) in ("contiguous", "reshape"):
            node = _owner(node)
        if isinstance(node, ast.Call) and _function(node) == "layer_norm":
            return self._layer_norm()
        if _softmax(node) is not None:
            return self._softmax(node)
        index = list(OUTER[:rank])
        moved = isinstance(node, ast.Call) and _method(node) in ("t", "permute")
        whole = self._shapes["out"] == (1,)
        value = self.value(node, [] if whole else index)
        place = "0" if whole else ", ".join(index)
        if whole:
            return self._text("block", "", f"out[{place}] = {value}")
        loops = ", ".join(f"{name} < out{axis}" for axis, name in enumerate(index))
        return self._text(self._template(moved), loops, f"out[{place}] = {value}")

    def _template(self, moved: bool) -> str:
        """A template that fits the lines."""
        if not self._lines:
            return self._one_of("thread", "tile") if moved else "thread"
        if len(self._shapes["out"]) == 1:
            return self._one_of("thread", "warp", "block")
        return self._one_of("thread", "tile") if _TILED.search(self._lines[0]) else "thread"

    def _text(self, template: str, loops: str, output: str) -> str:
        size = self._rng.choice(SIZES[template])
        head = f"{template} {size}" + (f" for {loops}" if loops else "")
        return "\n".join([head, *self._lines, output])

    def _one_of(self, *choices: str) -> str:
        return self._rng.choice(choices)

    # Values

    def value(self, node: ast.expr, index: Sequence[str]) -> str:
        """The value of an expression at an index; trailing axes, as torch broadcasts."""
        match node:
            case ast.Constant(float(number)):
                return repr(number)
            case ast.Name(name):
                rank = len(self._shapes[name])
                return f"{name}[{', '.join(index[len(index) - rank :])}]"
            case ast.BinOp(left, ast.MatMult(), right):
                return self._product(left, right, index)
            case ast.BinOp(left, operator, right):
                return self._operation(left, operator, right, index)
            case ast.Call():
                return self._call(node, index)
        raise ValueError(ast.unparse(node))

    def _operation(
        self, left: ast.expr, operator: ast.operator, right: ast.expr, index: Sequence[str]
    ) -> str:
        sign = SIGNS[type(operator)]
        first = self.value(left, index)
        if isinstance(operator, ast.Div) and isinstance(right, ast.Constant) and not index:
            return f"{first} / sqrt(a0 * a1)"
        return f"{first} {sign} {self.value(right, index)}"

    def _call(self, node: ast.Call, index: Sequence[str]) -> str:
        if (method := _method(node)) == "t":
            return self.value(_owner(node), index[::-1])
        if method == "permute":
            axes = [int(ast.unparse(axis)) for axis in node.args]
            return self.value(_owner(node), [index[axes.index(i)] for i in range(len(axes))])
        function = _function(node)
        if function in UNARY:
            value = self.value(node.args[0], index)
            bare = value.startswith("(") and _is_product(node.args[0])
            return f"{UNARY[function]}{value if bare else f'({value})'}"
        if function in BINARY:
            first, second = (self.value(argument, index) for argument in node.args)
            return f"{BINARY[function]}({first}, {second})"
        if function in ("conv1d", "conv2d"):
            return self._convolution(node, index)
        return self._reduction(function, node, index)

    def _reduced(self, reduction: str) -> str:
        """A reduction, in a line of its own or, inside of another one, in its place."""
        if self._nested:
            return f"({reduction})"
        name = next(self._results)
        self._lines.append(f"{name} = {reduction}")
        return name

    def _product(self, left: ast.expr, right: ast.expr, index: Sequence[str]) -> str:
        inner = next(self._inner)
        vector = isinstance(right, ast.Name) and len(self._shapes[right.id]) == 1
        if vector:
            first, second = [index[0], inner], [inner]
        else:
            first, second = [*index[:-1], inner], [*index[:-2], inner, index[-1]]
        one, two = self.value(left, first), self.value(right, second)
        bound = f"{one[0]}{one[2:-1].split(', ').index(inner)}"
        return self._reduced(f"sum from 0 for {inner} < {bound}: {one} * {two}")

    def _reduction(self, function: str, node: ast.Call, index: Sequence[str]) -> str:
        operator, start = REDUCED[function]
        dims = [int(ast.unparse(word.value)) for word in node.keywords if word.arg == "dim"]
        full, loops = list(index), []
        for axis in dims or range(2):
            name = next(self._inner)
            full.insert(axis, name)
            bound = self._bound(node.args[0], axis)
            loops.append(f"{name} < {bound}")
        self._nested = True
        value = self.value(node.args[0], full)
        self._nested = False
        return self._reduced(f"{operator} from {start} for {', '.join(loops)}: {value}")

    def _bound(self, node: ast.expr, axis: int) -> str:
        """The size of an axis of an expression, by the tensor that has it."""
        return f"{'b' if any(map(_is_product, ast.walk(node))) else 'a'}{axis}"

    def _convolution(self, node: ast.Call, index: Sequence[str]) -> str:
        settings = {word.arg: int(ast.unparse(word.value)) for word in node.keywords}
        stride, padding = settings["stride"], settings["padding"]
        batch, channel, *places = index
        depth, *taps = (next(self._inner) for _ in range(len(places) + 1))
        times, less = f"{stride} * " * (stride > 1), f" - {padding}" * (padding > 0)
        at = [f"{times}{place} + {tap}{less}" for place, tap in zip(places, taps, strict=True)]
        read = f"x[{', '.join([batch, depth, *at])}]"
        read = f"pad({read})" if padding else read
        weight = f"w[{', '.join([channel, depth, *taps])}]"
        loops = [f"{name} < w{i}" for i, name in enumerate([depth, *taps], start=1)]
        return self._reduced(f"sum from 0 for {', '.join(loops)}: {read} * {weight}")

    # Several reductions of a row

    def _softmax(self, node: ast.expr) -> str:
        scaled = _softmax(node)
        assert scaled is not None
        value = self.value(scaled, ["i", "p"])
        top = f"exp({value} - v)"
        self._lines += [
            f"v = max from -inf for p < a1: {value}",
            f"u = sum from 0 for p < a1: {top}",
        ]
        written = f"for p < a1: out[i, p] = {top} / u * a1"
        return self._text(self._one_of("warp", "block"), "i < out0", written)

    def _layer_norm(self) -> str:
        self._lines += [
            "v = sum from 0 for p < a1: a[i, p] / a1",
            "u = sum from 0 for p < a1: square(a[i, p] - v)",
        ]
        written = "for p < a1: out[i, p] = (a[i, p] - v) * rsqrt(u / a1 + 1e-5) * b[p] + c[p]"
        return self._text(self._one_of("warp", "block"), "i < out0", written)


def _function(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else ""


def _method(node: ast.Call) -> str:
    """The name of a tensor's method, or an empty text for a function of torch."""
    owner = node.func.value if isinstance(node.func, ast.Attribute) else None
    return (
        ""
        if owner is None or ast.unparse(owner).startswith("torch.nn")
        else (_function(node) if ast.unparse(owner) != "torch" else "")
    )


def _owner(node: ast.Call) -> ast.expr:
    assert isinstance(node.func, ast.Attribute)
    return node.func.value


def _is_product(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult)


def _softmax(node: ast.expr) -> ast.expr | None:
    """The argument of a softmax, if the expression is one times a number."""
    match node:
        case ast.BinOp(ast.Call(args=[scaled, *_]) as call) if _function(call) == "softmax":
            return scaled
    return None
