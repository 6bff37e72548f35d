"""Launch lines: how a source asks to be launched, in comments, so that no host code is needed.

    // launch: kernel<<<(n + 255) / 256, 256>>>(a, b, out)
    // scratch: tmp float[1024]

Launches run in the order of their lines. Numbers are integer expressions of `+ - * / // %`, `min`,
`max`, `a.shape[0]`, `a.numel`, the reference's numbers by name, and `n`, the number of elements of
the output; `cdiv` and `next_power_of_2` are Triton's. They are parsed and computed here; nothing of
them is executed.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ludus.core.errors import DataError, did_you_mean
from ludus.core.sources import parse_expression
from ludus.kernels.occupancy import MAX_THREADS_PER_BLOCK

Shape = tuple[int, ...]
Dim3 = tuple[int, int, int]

MAX_LAUNCHES, MAX_ARGUMENTS, MAX_LINE = 32, 64, 1000
MAX_SHARED = 227 * 1024
MAX_SCRATCH = 256 << 20
"""Bytes of all scratch buffers together."""
MAX_GRID: Dim3 = (2**31 - 1, 65535, 65535)
MAX_BLOCK: Dim3 = (1024, 1024, 64)
MAX_NUMBER = 1 << 62
TYPES = {
    "float": 4, "double": 8, "int": 4, "unsigned": 4, "half": 2, "__half": 2, "bfloat16": 2,
    "__nv_bfloat16": 2, "char": 1, "int8_t": 1, "uint8_t": 1, "int32_t": 4, "uint32_t": 4,
    "int64_t": 8, "uint64_t": 8, "float2": 8, "float4": 16,
}  # fmt: skip
"""Bytes of the types of scratch buffers."""


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _next_power_of_2(a: int) -> int:
    return 1 << (min(a, MAX_NUMBER) - 1).bit_length() if a > 0 else 0


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "min": lambda *values: min(values), "max": lambda *values: max(values),
    "cdiv": _cdiv, "triton.cdiv": _cdiv,
    "next_power_of_2": _next_power_of_2, "triton.next_power_of_2": _next_power_of_2,
}  # fmt: skip
"""Functions of numbers, in launch lines."""
EXAMPLE = "// launch: kernel<<<(n + 255) / 256, 256>>>(a, out)"

_LINE = re.compile(r"^[ \t]*//[ \t]*(launch|scratch)[ \t]*:(.*)$", re.M)
_LAUNCH = re.compile(r"\s*([A-Za-z_][\w:]*(?:<[\w\s,:]*>)?)\s*<<<(.*)>>>\s*\((.*)\)\s*;?\s*")
_SCRATCH = re.compile(r"\s*([A-Za-z_]\w*)\s+(\w+)\s*\[(.*)\]\s*;?\s*")
_LAST_LINES = re.compile(r"\n(?:[ \t]*//[ \t]*launch[ \t]*:[\w \t.,:+\-*/%<>()\[\]]*\n*)+\Z", re.A)
_KERNEL = re.compile(
    r"__global__[^;{]*?\bvoid\b[^;{(]*?(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\("
)
_SUFFIX = re.compile(r"(?<![\w.])((?:\d+\.\d*|\.\d+|\d+)(?:[eE][-+]?\d+)?)[fF]\b")


@dataclass(frozen=True, slots=True)
class Buffer:
    """An argument: the address of an input, of a scratch buffer, or of `out`."""

    name: str


Argument = Buffer | int | float


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch; `line` of the source, from 1. `kernel` may have arguments of its template."""

    kernel: str
    grid: Dim3
    block: Dim3
    shared_bytes: int
    arguments: tuple[Argument, ...]
    line: int = 0

    @property
    def name(self) -> str:
        """The kernel's name without arguments of its template, and without namespaces."""
        return self.kernel.partition("<")[0].rpartition("::")[2]


@dataclass(frozen=True, slots=True)
class Plan:
    """Launches in order, and the bytes of each scratch buffer."""

    launches: tuple[Launch, ...]
    scratch: Mapping[str, int]


def read_launches(
    source: str, shapes: Mapping[str, Shape], numbers: Mapping[str, int | float] | None = None
) -> Plan:
    """The launches that a source asks for.

    Args:
        shapes: of the inputs, the parameters and `out`, by name.
        numbers: the reference's inputs that are no tensors.

    Errors: DataError with the line, what is wrong, and what would be right.
    """
    given = dict(numbers or {})
    if "out" in shapes and "n" not in shapes:
        given.setdefault("n", math.prod(shapes["out"]))
    scratch: dict[str, int] = {}
    launches: list[tuple[int, str]] = []
    for match in _LINE.finditer(source):
        line = source.count("\n", 0, match.start()) + 1
        if len(match[2]) > MAX_LINE:
            raise DataError(f"line {line}: more than {MAX_LINE} characters: shorten it")
        if match[1] == "launch":
            launches.append((line, match[2]))
            continue
        name, kind, count = LineReader(line, shapes, given, scratch).scratch(match[2])
        scratch[name] = count * TYPES[kind]
        if sum(scratch.values()) > MAX_SCRATCH:
            raise DataError(f"line {line}: scratch buffers have at most {MAX_SCRATCH >> 20} MB")
    if not launches:
        raise DataError(_no_launch(source, shapes))
    if len(launches) > MAX_LAUNCHES:
        line = launches[MAX_LAUNCHES][0]
        raise DataError(f"line {line}: at most {MAX_LAUNCHES} launches are possible")
    return Plan(
        tuple(LineReader(line, shapes, given, scratch).launch(text) for line, text in launches),
        scratch,
    )


def device_code(source: str) -> str:
    """A source without the plain launch lines at its end, which no compiler needs to see: sources
    that differ in them alone are the same to a compiler."""
    found = _LAST_LINES.search(source)
    if found is None or "*/" in found[0] or source[: found.start()].endswith(("\\", "??/")):
        return source
    return source[: found.start() + 1]


def _no_launch(source: str, shapes: Mapping[str, Shape]) -> str:
    found = _KERNEL.search(source)
    if found is None:
        return f"line 1: no launch line, and no kernel: write one, and a line such as {EXAMPLE}"
    names = ", ".join([*(name for name in shapes if name != "out"), "out"])
    line = source.count("\n", 0, found.start(1)) + 1
    return (
        f"line {line}: no launch line: add one such as "
        f"// launch: {found[1]}<<<(n + 255) / 256, 256>>>({names})"
    )


@dataclass(frozen=True, slots=True)
class LineReader:
    """Reads the text of one line. Its methods raise DataError with the line."""

    line: int
    shapes: Mapping[str, Shape]
    numbers: Mapping[str, int | float]
    scratches: Mapping[str, int]

    def error(self, text: str) -> DataError:
        return DataError(f"line {self.line}: {text}")

    def scratch(self, text: str, types: Mapping[str, int] = TYPES) -> tuple[str, str, int]:
        """Name, type and number of items of a scratch buffer; `types`: their bytes."""
        match = _SCRATCH.fullmatch(text)
        if match is None:
            raise self.error(f"a scratch line has the form scratch: tmp {next(iter(types))}[1024]")
        name, kind = match[1], match[2]
        if kind not in types:
            name, kind = kind, name  # as C has it
        if kind not in types:
            known = ", ".join(types)
            raise self.error(f"{match[2][:40]!r} is no type of a scratch buffer: {known}")
        if name in self.shapes or name in self.scratches or name in self.numbers:
            raise self.error(f"`{name}` is there already: give the scratch buffer another name")
        count = self.integer(self.parsed(match[3]))
        if not 1 <= count * types[kind] <= MAX_SCRATCH:
            raise self.error(f"a scratch buffer has 1 to {MAX_SCRATCH:,} bytes, not {count} items")
        return name, kind, count

    def launch(self, text: str) -> Launch:
        match = _LAUNCH.fullmatch(text)
        if match is None:
            raise self.error(f"a launch line has the form {EXAMPLE}")
        parts = self.listed(match[2])
        if len(parts) == 4:
            raise self.error("no stream can be chosen: write <<<grid, block, shared_bytes>>>")
        if len(parts) not in (2, 3):
            raise self.error("between <<< and >>> stand grid, block and perhaps shared_bytes")
        grid, block = self.dim3(parts[0], "grid", MAX_GRID), self.dim3(parts[1], "block", MAX_BLOCK)
        threads = math.prod(block)
        if threads > MAX_THREADS_PER_BLOCK:
            raise self.error(f"a block has at most {MAX_THREADS_PER_BLOCK} threads, not {threads}")
        shared = self.integer(parts[2]) if len(parts) == 3 else 0
        if not 0 <= shared <= MAX_SHARED:
            raise self.error(f"shared memory of a block is 0 to {MAX_SHARED} bytes, not {shared}")
        arguments = tuple(self.argument(item) for item in self.listed(match[3]))
        if len(arguments) > MAX_ARGUMENTS:
            raise self.error(f"at most {MAX_ARGUMENTS} arguments are possible")
        return Launch(match[1].replace(" ", ""), grid, block, shared, arguments, self.line)

    def parsed(self, text: str) -> ast.expr:
        text = _SUFFIX.sub(r"\1", text.strip())
        if not text.isascii():
            raise self.error("an expression has plain letters only")
        try:
            return parse_expression(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise self.error(f"{text[:60]!r} is no expression such as (n + 255) / 256") from None

    def listed(self, text: str) -> Sequence[ast.expr]:
        if not text.strip():
            return []
        found = self.parsed(f"[{text}]")
        if not isinstance(found, ast.List):  # the text closes the bracket and opens others
            raise self.error(f"{text.strip()[:60]!r} is no list such as a, out, n")
        return found.elts

    def dim3(self, node: ast.expr, what: str, most: Dim3) -> Dim3:
        items: Sequence[ast.expr] = [node]
        if isinstance(node, ast.Tuple):
            items = node.elts
        elif isinstance(node, ast.Call) and _named(node.func) == "dim3" and not node.keywords:
            items = node.args
        if not 1 <= len(items) <= 3:
            raise self.error(f"the {what} has 1 to 3 sizes, not {len(items)}")
        sizes = [self.integer(item) for item in items] + [1, 1]
        for size, limit, axis in zip(sizes, most, "xyz", strict=False):
            if not 1 <= size <= limit:
                raise self.error(f"the {what}'s {axis} is 1 to {limit}, not {size}")
        return sizes[0], sizes[1], sizes[2]

    def argument(self, node: ast.expr) -> Argument:
        if (name := _named(node)) in self.shapes or name in self.scratches:
            return Buffer(name)
        return self.number(node)

    def integer(self, node: ast.expr) -> int:
        value = self.number(node)
        if isinstance(value, float):
            raise self.error(f"{ast.unparse(node)[:60]} is {value:g}: a whole number is needed")
        return value

    def number(self, node: ast.expr, depth: int = 0) -> int | float:
        """The value of an expression; `/` of integers is a division as in C."""
        if depth > 50:
            raise self.error("the expression is nested too deep")
        value: int | float
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            value = node.value  # type: ignore[assignment]
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
            operand = self.number(node.operand, depth + 1)
            value = -operand if isinstance(node.op, ast.USub) else operand
        elif isinstance(node, ast.BinOp):
            value = self.computed(node, depth)
        elif isinstance(node, ast.Call) and (work := FUNCTIONS.get(ast.unparse(node.func)[:40])):
            value = self.called(node, work, depth)
        elif name := _named(node):
            value = self.named(name)
        else:
            value = self.of_shape(node, depth)
        if isinstance(value, float) and not math.isfinite(value):
            raise self.error("the number is not finite")
        if abs(value) > MAX_NUMBER:
            raise self.error("the number is too large")
        return value

    def called(self, node: ast.Call, work: Callable[..., Any], depth: int) -> int | float:
        values = [self.number(item, depth + 1) for item in node.args]
        try:
            if node.keywords or not values:
                raise TypeError
            value: int | float = work(*values)
        except (TypeError, ZeroDivisionError):
            raise self.error(f"{ast.unparse(node)[:60]} is not possible") from None
        return value

    def computed(self, node: ast.BinOp, depth: int) -> int | float:
        left, right = self.number(node.left, depth + 1), self.number(node.right, depth + 1)
        whole = isinstance(left, int) and isinstance(right, int)
        match node.op:
            case ast.Add():
                return left + right
            case ast.Sub():
                return left - right
            case ast.Mult():
                return left * right
            case ast.Div() | ast.FloorDiv() | ast.Mod() if right == 0:
                raise self.error(f"{ast.unparse(node)[:60]} divides by zero")
            case ast.Div():
                return left // right if whole else left / right
            case ast.FloorDiv():
                return left // right
            case ast.Mod():
                return left % right
        raise self.error(f"{ast.unparse(node)[:60]}: the operators are + - * / // %, min and max")

    def named(self, name: str) -> int | float:
        if name in self.numbers:
            return self.numbers[name]
        if name in self.shapes or name in self.scratches:
            raise self.error(f"`{name}` is a buffer: write {name}.numel or {name}.shape[0]")
        known = [*self.shapes, *self.scratches, *self.numbers]
        hint = did_you_mean(name, known)
        raise self.error(f"`{name}` is not known{hint}; there are {', '.join(known)}")

    def of_shape(self, node: ast.expr, depth: int) -> int:
        if isinstance(node, ast.Call) and not node.args and not node.keywords:
            node = node.func  # a.numel()
        attribute = node.value if isinstance(node, ast.Subscript) else node
        if isinstance(attribute, ast.Attribute):
            name = _named(attribute.value)
            shape = self.shapes.get(name)
            if shape is None:
                raise self.error(f"`{name}` has no shape; inputs are {', '.join(self.shapes)}")
            if isinstance(node, ast.Attribute) and attribute.attr == "numel":
                return math.prod(shape)
            if isinstance(node, ast.Subscript) and attribute.attr == "shape":
                index = self.number(node.slice, depth + 1)
                if not isinstance(index, int) or not -len(shape) <= index < len(shape):
                    sides = f"{len(shape)} dimension{'s' * (len(shape) != 1)}"
                    raise self.error(f"`{name}` has {sides}: {list(shape)}")
                return shape[index]
        raise self.error(
            f"{ast.unparse(node)[:60]}: an argument is a buffer's name, or a number made of "
            "integers, a.shape[0], a.numel, + - * / // %, min and max"
        )


def _named(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""
