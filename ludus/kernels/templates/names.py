"""Names in a kernel, and expressions of the template language in C."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from ludus.core.errors import did_you_mean
from ludus.kernels.launches import Shape
from ludus.kernels.templates.language import (
    OUT,
    Binary,
    Call,
    Element,
    Expression,
    Loop,
    Name,
    Number,
    Place,
    Reduction,
)

VARIABLE = re.compile(r"[a-z]\d*")
"""No word of C++, no function and no local of the expansion is such a name."""

JOINED = {
    "sum": "{} + {}", "product": "{} * {}", "max": "fmaxf({}, {})", "min": "fminf({}, {})",
}  # fmt: skip
CALLS = {
    "relu": "fmaxf({}, 0.0f)", "tanh": "tanhf({})", "abs": "fabsf({})", "sqrt": "sqrtf({})",
    "rsqrt": "rsqrtf({})", "exp": "expf({})", "log": "logf({})", "max": "fmaxf({}, {})",
    "min": "fminf({}, {})",
}  # fmt: skip
HELPERS = {
    "sigmoid": "1.0f / (1.0f + expf(-value))",
    "gelu": "0.5f * value * (1.0f + erff(value * 0.70710678f))",
    "silu": "value / (1.0f + expf(-value))",
    "square": "value * value",
    "softplus": "value > 20.0f ? value : log1pf(expf(value))",
}


class Writer:
    """Writes the C of a kernel's expressions, and notes what they need."""

    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        self._shapes = shapes
        self._sizes = {
            f"{name}{axis}": (name, axis)
            for name, shape in shapes.items()
            for axis in range(len(shape))
        }
        self._variables: dict[str, str] = {}
        self.tensors: dict[str, None] = {}
        self.sizes: dict[str, str] = {}
        self.numbers: list[str] = []
        self.helpers: dict[str, None] = {}
        self.num_reductions = 0

    # Names

    def define(self, name: str, kind: str, place: Place) -> None:
        """Define a loop variable or a reduction. Errors: DataError."""
        if not VARIABLE.fullmatch(name):
            raise place.error(f"{name!r} is no name: a small letter is, and digits may follow it")
        if name in self._shapes or name in self._sizes or name in self._variables:
            raise place.error(f"{name!r} is there already: take another letter")
        self._variables[name] = kind

    @contextmanager
    def scope(self, loops: Sequence[Loop]) -> Iterator[None]:
        """The variables of loops are known inside. Errors: DataError."""
        for loop in loops:
            self.whole(loop.bound)
            self.define(loop.name, "loop", loop.place)
        yield
        for loop in loops:
            del self._variables[loop.name]

    def _size(self, name: str) -> str:
        tensor, axis = self._sizes[name]
        named = f"{name_in_c(tensor)}{axis}"
        self.sizes[named] = f"{tensor}.shape[{axis}]"
        return named

    def _unknown(self, name: str, place: Place) -> str:
        known = [*self._variables, *self._sizes]
        if name in self._shapes:
            raise place.error(f"{name!r} is a tensor: an element of it is {self._example(name)}")
        raise place.error(
            f"{name!r} is not known{did_you_mean(name, known)}; there are {', '.join(known)}"
        )

    def _example(self, tensor: str) -> str:
        return f"{tensor}[{', '.join('ijklmnpq'[: len(self._shapes[tensor])])}]"

    # Expressions

    def launched(self, node: Expression) -> str:
        """A bound as a launch line has it."""
        match node:
            case Binary(operator, left, right):
                return f"({self.launched(left)} {operator} {self.launched(right)})"
            case Name(name) if name in self._sizes:
                tensor, axis = self._sizes[name]
                return f"{tensor}.shape[{axis}]"
            case Name(name, place):
                raise place.error(
                    f"the bound of a launched loop is made of sizes, and {name!r} is none"
                )
        return self.whole(node)

    def whole(self, node: Expression) -> str:
        """An index or a bound in C. Errors: DataError."""
        match node:
            case Number(text, place):
                if not text.isdecimal() or len(text) > 6:
                    raise place.error(f"{text} is no whole number of 6 digits at most")
                return str(int(text))
            case Binary(operator, left, right):
                return f"({self.whole(left)} {operator} {self.whole(right)})"
            case Name(name, place):
                if self._variables.get(name) == "loop":
                    return name
                if name in self._sizes:
                    return self._size(name)
                if name in self._variables:
                    raise place.error(f"{name!r} is a float: an index or a bound is whole")
                return self._unknown(name, place)
            case _:
                raise node.place.error(
                    "an index or a bound is made of loop variables, sizes, numbers and + - * / %"
                )

    def value(self, node: Expression, before: list[str]) -> str:
        """A value in C; what has to be computed first goes to `before`. Errors: DataError."""
        match node:
            case Number("inf"):
                return "INFINITY"
            case Number(text):
                self.numbers.append(text)
                return f"number{len(self.numbers) - 1}"
            case Name(name, place):
                if self._variables.get(name) == "float":
                    return name
                if name in self._variables or name in self._sizes:
                    return f"(float){self.whole(node)}"
                return self._unknown(name, place)
            case Element() as element:
                return self.element(element)
            case Call(function, arguments):
                values = [self.value(argument, before) for argument in arguments]
                if function in HELPERS:
                    self.helpers[function] = None
                    return f"{function}_of({values[0]})"
                return CALLS[function].format(*values)
            case Binary("%", place=place):
                raise place.error("% is for indices and bounds; values have + - * /")
            case Binary(operator, left, right):
                return f"({self.value(left, before)} {operator} {self.value(right, before)})"
            case Reduction() as inner:
                return self._inner(inner, before)

    def element(self, node: Element) -> str:
        """An element of a tensor. Errors: DataError."""
        if node.tensor not in self._shapes:
            hint = did_you_mean(node.tensor, self._shapes)
            known = ", ".join(self._shapes)
            raise node.place.error(f"{node.tensor!r} is no tensor{hint}; there are {known}")
        rank = len(self._shapes[node.tensor])
        if node.tensor == OUT and node.padded:
            raise node.place.error("out is written, and has no padding")
        if len(node.indices) != max(rank, 1):
            raise node.place.error(f"{node.tensor} has {rank} indices, not {len(node.indices)}")
        self.tensors[node.tensor] = None
        name = name_in_c(node.tensor)
        at, inside = "", []
        for axis, index in enumerate(node.indices):
            text = self.whole(index)
            size = self._size(f"{node.tensor}{axis}") if axis or node.padded else ""
            at = f"{at if axis == 1 else f'({at})'} * {size} + {text}" if axis else text
            inside.append(f"(unsigned){text} < (unsigned){size}")
        element = f"{name}[{at}]"
        return f"({' && '.join(inside)} ? {element} : 0.0f)" if node.padded else element

    def _inner(self, node: Reduction, before: list[str]) -> str:
        """A reduction inside of a value: loops of each thread."""
        name = f"inner{self.num_reductions}"
        self.num_reductions += 1
        with self.scope(node.loops):
            body: list[str] = []
            value = self.value(node.value, body)
            before.append(f"float {name} = {start_of(node)};")
            before += [f"{for_loop(loop, self.whole(loop.bound))} {{" for loop in node.loops]
            before += [*body, f"{name} = {JOINED[node.operator].format(name, value)};"]
            before += ["}"] * len(node.loops)
        return name


def name_in_c(tensor: str) -> str:
    """A tensor's name in C: longer names might be words of C++."""
    return tensor if len(tensor) == 1 or tensor == OUT else f"{tensor}_"


def start_of(node: Reduction) -> str:
    """The start of a reduction in C."""
    text = node.start
    return text.replace("inf", "INFINITY") if text.endswith("inf") else f"{float(text)!r}f"


def for_loop(loop: Loop, bound: str) -> str:
    """The head of a loop of one thread."""
    return f"for (int {loop.name} = 0; {loop.name} < {bound}; ++{loop.name})"
