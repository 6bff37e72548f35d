"""Launch lines of Triton: `# launch: add[cdiv(n, 256)](a, b, out, n, BLOCK=256, num_warps=4)`."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ludus.core.errors import DataError, did_you_mean
from ludus.kernels.launches import (
    MAX_GRID,
    MAX_LAUNCHES,
    MAX_LINE,
    MAX_SCRATCH,
    Argument,
    Buffer,
    Dim3,
    LineReader,
    Shape,
)
from ludus.kernels.triton.source import EXAMPLE, TritonKernel

SIZES = {
    "float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int8": 1, "int16": 2, "int32": 4,
    "int64": 8, "uint8": 1, "bool": 1,
}  # fmt: skip
"""Bytes of the types of tensors; Triton needs their names."""
POINTERS = {
    "float32": "*fp32", "float64": "*fp64", "float16": "*fp16", "bfloat16": "*bf16", "int8": "*i8",
    "int16": "*i16", "int32": "*i32", "int64": "*i64", "uint8": "*u8", "bool": "*i1",
}  # fmt: skip
ALIGNED = 16
WARPS, STAGES = (1, 2, 4, 8, 16, 32), range(1, 9)
OPTIONS: Mapping[str, tuple[int, ...]] = {
    "num_warps": WARPS,
    "num_stages": tuple(STAGES),
    "maxnreg": tuple(range(16, 257)),
}
_LINE = re.compile(r"^[ \t]*#[ \t]*(launch|scratch)[ \t]*:(.*)$", re.M)


@dataclass(frozen=True, slots=True)
class TritonLaunch:
    """A launch; `arguments` by the kernel's parameters, in their order."""

    kernel: str
    grid: Dim3
    arguments: Mapping[str, Argument]
    constants: frozenset[str]
    options: Mapping[str, int]
    line: int


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """Launches in order; type and number of items of each scratch buffer."""

    launches: tuple[TritonLaunch, ...]
    scratch: Mapping[str, tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel for arguments of some types and values: what Triton compiles once."""

    kernel: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, int | float], ...]
    aligned: tuple[str, ...]
    options: tuple[tuple[str, int], ...]


def read_triton_launches(
    source: str,
    kernels: Mapping[str, TritonKernel],
    shapes: Mapping[str, Shape],
    numbers: Mapping[str, int | float] | None = None,
) -> TritonPlan:
    """The launches that a source asks for.

    Args:
        kernels: functions of the source, by name.
        shapes: of the inputs, the parameters and `out`, by name.
        numbers: the reference's inputs that are no tensors.

    Errors: DataError with the line, what is wrong, and what would be right.
    """
    given = dict(numbers or {})
    if "out" in shapes and "n" not in shapes:
        given.setdefault("n", math.prod(shapes["out"]))
    scratch: dict[str, tuple[str, int]] = {}
    launches: list[TritonLaunch] = []
    for match in _LINE.finditer(source):
        line = source.count("\n", 0, match.start()) + 1
        sizes = {name: SIZES[kind] * count for name, (kind, count) in scratch.items()}
        reader = LineReader(line, shapes, given, sizes)
        if len(match[2]) > MAX_LINE:
            raise reader.error(f"more than {MAX_LINE} characters: shorten it")
        if match[1] == "launch":
            launches.append(_launch(reader, match[2], kernels))
            if len(launches) > MAX_LAUNCHES:
                raise reader.error(f"at most {MAX_LAUNCHES} launches are possible")
            continue
        name, kind, count = reader.scratch(match[2], SIZES)
        scratch[name] = kind, count
        if sum(sizes.values()) + SIZES[kind] * count > MAX_SCRATCH:
            raise reader.error(f"scratch buffers have at most {MAX_SCRATCH >> 20} MB")
    if not launches:
        raise DataError(_no_launch(kernels, shapes))
    return TritonPlan(tuple(launches), scratch)


def _no_launch(kernels: Mapping[str, TritonKernel], shapes: Mapping[str, Shape]) -> str:
    if not kernels:
        return f"line 1: no launch line, and no kernel: write one, and a line such as {EXAMPLE}"
    kernel = list(kernels.values())[-1]
    names = ", ".join([*(name for name in shapes if name != "out"), "out", "n", "BLOCK=256"])
    return (
        f"line {kernel.line}: no launch line: add one such as "
        f"# launch: {kernel.name}[cdiv(n, 256)]({names})"
    )


def _launch(reader: LineReader, text: str, kernels: Mapping[str, TritonKernel]) -> TritonLaunch:
    node = reader.parsed(text)
    match node:
        case ast.Call(func=ast.Subscript(value=ast.Name(id=name), slice=grid)):
            pass
        case _:
            raise reader.error(f"a launch line has the form {EXAMPLE}")
    kernel = kernels.get(name)
    if kernel is None:
        known = ", ".join(kernels) or "none"
        hint = did_you_mean(name, kernels)
        raise reader.error(f"there is no kernel `{name}`{hint}: the kernels are {known}")
    if len(node.args) > len(kernel.parameters):
        raise reader.error(f"`{name}` has {len(kernel.parameters)} parameters: {kernel.parameters}")
    found: dict[str, ast.expr] = dict(zip(kernel.parameters, node.args, strict=False))
    options: dict[str, int] = {}
    for keyword in node.keywords:
        key = keyword.arg or "**"
        if key in OPTIONS and key not in kernel.parameters:
            options[key] = _option(reader, key, keyword.value)
        elif key in found or key not in kernel.parameters:
            known = ", ".join([*kernel.parameters, *OPTIONS])
            what = "is given twice" if key in found else f"is no parameter; there are {known}"
            raise reader.error(f"`{key}` {what}")
        else:
            found[key] = keyword.value
    arguments: dict[str, Argument] = {}
    for key in kernel.parameters:
        if key in found:
            arguments[key] = _argument(reader, key, found[key], key in kernel.constants)
        elif key in kernel.defaults:
            arguments[key] = kernel.defaults[key]
        else:
            raise reader.error(f"the parameter `{key}` of `{name}` has no argument")
    sizes = reader.dim3(grid, "grid", MAX_GRID)
    return TritonLaunch(name, sizes, arguments, kernel.constants, options, reader.line)


def _option(reader: LineReader, key: str, node: ast.expr) -> int:
    value = reader.integer(node)
    if value not in OPTIONS[key]:
        known = OPTIONS[key]
        raise reader.error(f"{key} is one of {known[0]} to {known[-1]}, and not {value}")
    return value


def _argument(reader: LineReader, key: str, node: ast.expr, constant: bool) -> Argument:
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        return node.value
    value = reader.argument(node)
    if constant and isinstance(value, Buffer):
        raise reader.error(f"`{key}` is a tl.constexpr, so its argument is a number")
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise reader.error(f"`{key}`: an integer has at most 64 bits")
    return value


def variant_of(launch: TritonLaunch, dtypes: Mapping[str, str]) -> Variant:
    """The kernel to compile for a launch, as Triton's own launcher would: pointers and integers
    that are multiples of 16 are told to the compiler, and integers of 1 are constants.

    `dtypes`: of all buffers.
    """
    signature, constants, aligned = [], [], []
    for name, value in launch.arguments.items():
        if name in launch.constants or (type(value) is int and value == 1):
            assert not isinstance(value, Buffer)
            signature.append((name, "constexpr"))
            constants.append((name, value))
            continue
        signature.append((name, type_of(value, dtypes)))
        if isinstance(value, Buffer) or (type(value) is int and value % ALIGNED == 0):
            aligned.append(name)
    return Variant(
        launch.kernel,
        tuple(signature),
        tuple(constants),
        tuple(aligned),
        tuple(sorted(launch.options.items())),
    )


def type_of(value: Argument, dtypes: Mapping[str, str]) -> str:
    """Triton's name of an argument's type."""
    if isinstance(value, Buffer):
        return POINTERS[dtypes[value.name]]
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
