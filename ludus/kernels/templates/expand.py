"""Expands a kernel of the template language into CUDA C++ with its launch line.

    template   runs                                             a reduction           block
    thread N   a thread for each index of the header's loops    a loop                N threads
    warp N     a warp for each index                            lanes and shuffles    N threads
    block N    a block for each index                           threads and a tree    N threads
    tile N     a thread for each index, in tiles of the last    a tiled product       N x N threads
               two loops

In `warp` and `block`, the loops of the output's line are shared among the threads, too. A tile
without a reduction computes in the order of the loops and writes in the other: a transpose. A tile
with a reduction has one, a sum over one loop of the product of two elements.

The device code depends on no size, no number and, but for `tile`, not on N: these are arguments. So
kernels that differ in them are the same to a cache of compilations. Reads have no bounds but those
of the loops: a wrong index reads wrong values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ludus.core.errors import DataError
from ludus.kernels.launches import Shape
from ludus.kernels.templates.language import (
    OUT,
    Binary,
    Element,
    Expression,
    Kernel,
    Loop,
    Name,
    Place,
    Reduction,
    read_kernel,
)
from ludus.kernels.templates.names import HELPERS, JOINED, Writer, for_loop, name_in_c, start_of

WARP = 32


def expand(text: str, shapes: Mapping[str, Shape]) -> str:
    """The CUDA C++ of a kernel.

    Args:
        shapes: of the inputs, the parameters and `out`, by name.

    Errors: DataError with the place, what is wrong, and what would be right.
    """
    kernel = read_kernel(text)
    if OUT not in shapes:
        raise DataError("the problem has no out")
    return _Expansion(kernel, shapes).source()


class _Expansion:
    """The C of one kernel."""

    def __init__(self, kernel: Kernel, shapes: Mapping[str, Shape]) -> None:
        self._kernel, self._writer = kernel, Writer(shapes)
        self._lines: list[str] = []
        self._shared = ""

    def source(self) -> str:
        kernel, writer = self._kernel, self._writer
        with writer.scope(kernel.loops):
            if kernel.template == "tile":
                self._tile()
            else:
                self._rows()
        bounds = [writer.launched(loop.bound) for loop in kernel.loops]
        grid, block = self._launch(bounds)
        names = [name for name in writer.tensors if name != OUT]
        parameters = [
            *(f"const float *__restrict__ {name_in_c(name)}" for name in names),
            "float *__restrict__ out",
            *(f"int {size}" for size in writer.sizes),
            *(f"float number{i}" for i in range(len(writer.numbers))),
        ]
        numbers = [repr(float(text)) for text in writer.numbers]
        arguments = ", ".join([*names, OUT, *writer.sizes.values(), *numbers])
        helpers = [
            f"__device__ __forceinline__ float {name}_of(float value) {{ return {HELPERS[name]}; }}"
            for name in writer.helpers
        ]
        return "\n".join(
            [
                "#include <math.h>",
                *helpers,
                f"__global__ void kernel({', '.join(parameters)}) {{",
                *_indented(self._lines),
                "}",
                f"// launch: kernel<<<{grid}, {block}{self._shared}>>>({arguments})",
                "",
            ]
        )

    def _launch(self, bounds: Sequence[str]) -> tuple[str, str]:
        size = self._kernel.size
        if self._kernel.template == "tile":
            rows, columns = (f"({bound} + {size - 1}) / {size}" for bound in bounds[-2:])
            outer = " * ".join(bounds[:-2]) or "1"
            return f"({columns}, {rows}, {outer})", f"({size}, {size})"
        total = " * ".join(bounds) or "1"
        if self._kernel.template == "block":
            return total, str(size)
        if self._kernel.template == "warp":
            total = f"{total} * {WARP}"
        return f"({total} + {size - 1}) / {size}", str(size)

    # thread, warp, block

    def _rows(self) -> None:
        kernel, lines = self._kernel, self._lines
        if kernel.template == "thread":
            lines.append("int item = blockIdx.x * blockDim.x + threadIdx.x;")
        elif kernel.template == "warp":
            lines.append("int item = (blockIdx.x * blockDim.x + threadIdx.x) / 32;")
            lines.append("int lane = threadIdx.x % 32;")
        else:
            lines.append("int item = blockIdx.x;")
            if kernel.reductions:
                lines.append("extern __shared__ float part[];")
                self._shared = f", {kernel.size} * 4"
        lines.append(f"if (item >= {self._product(kernel.loops)}) return;")
        self._decode(kernel.loops, "item")
        for name, reduction in kernel.reductions:
            self._reduce(name, reduction)
        self._write()

    def _reduce(self, name: str, reduction: Reduction) -> None:
        writer, lines = self._writer, self._lines
        lines.append(f"float {name} = {start_of(reduction)};")
        with writer.scope(reduction.loops):
            opened = self._shared_loops(reduction.loops)
            value = writer.value(reduction.value, lines)
            lines.append(f"{name} = {JOINED[reduction.operator].format(name, value)};")
            lines += ["}"] * opened
        writer.define(name, "float", reduction.place)
        if self._kernel.template == "warp":
            other = f"__shfl_xor_sync(0xffffffff, {name}, step)"
            lines.append("for (int step = 16; step > 0; step /= 2)")
            lines.append(f"    {name} = {JOINED[reduction.operator].format(name, other)};")
        elif self._kernel.template == "block":
            joined = JOINED[reduction.operator].format(
                "part[threadIdx.x]", "part[threadIdx.x + step]"
            )
            lines += [
                f"part[threadIdx.x] = {name};",
                "__syncthreads();",
                "for (int step = blockDim.x / 2; step > 0; step /= 2) {",
                f"if (threadIdx.x < step) part[threadIdx.x] = {joined};",
                "__syncthreads();",
                "}",
                f"{name} = part[0];",
                "__syncthreads();",
            ]

    def _write(self) -> None:
        kernel, writer, lines = self._kernel, self._writer, self._lines
        with writer.scope(kernel.output_loops):
            if kernel.output_loops:
                opened = self._shared_loops(kernel.output_loops)
            elif kernel.template == "thread":
                opened = 0
            else:
                lines.append(f"if ({_worker(kernel.template)} == 0) {{")
                opened = 1
            value = writer.value(kernel.value, lines)
            lines.append(f"{writer.element(kernel.output)} = {value};")
            lines += ["}"] * opened

    def _shared_loops(self, loops: Sequence[Loop]) -> int:
        """Open loops, shared among the threads of a warp or block; returns the braces to close."""
        writer = self._writer
        if self._kernel.template == "thread":
            self._lines += [f"{for_loop(loop, writer.whole(loop.bound))} {{" for loop in loops]
            return len(loops)
        step = "32" if self._kernel.template == "warp" else "blockDim.x"
        start, total = _worker(self._kernel.template), self._product(loops)
        if len(loops) == 1:
            name = loops[0].name
            self._lines.append(f"for (int {name} = {start}; {name} < {total}; {name} += {step}) {{")
        else:
            self._lines.append(f"for (int at = {start}; at < {total}; at += {step}) {{")
            self._decode(loops, "at")
        return 1

    def _product(self, loops: Sequence[Loop]) -> str:
        return " * ".join(self._writer.whole(loop.bound) for loop in loops) or "1"

    def _decode(self, loops: Sequence[Loop], item: str) -> None:
        """Loop variables of a flat number."""
        for i, loop in enumerate(loops):
            inner = self._product(loops[i + 1 :])
            inner = f"({inner})" if "*" in inner else inner
            text = item if i == len(loops) - 1 else f"{item} / {inner}"
            if i:
                text = f"{text} % {self._writer.whole(loop.bound)}"
            self._lines.append(f"int {loop.name} = {text};")

    # tile

    def _tile(self) -> None:
        kernel = self._kernel
        if len(kernel.loops) < 2:
            raise Place(1, 1).error(
                "tile has two loops at least, as in tile 16 for i < out0, j < out1"
            )
        if kernel.output_loops:
            raise kernel.output_loops[0].place.error("in tile, the line of out has no loops")
        self._decode(kernel.loops[:-2], "blockIdx.z")
        rows, columns = kernel.loops[-2:]
        self._lines += [
            f"int {rows.name} = blockIdx.y * {kernel.size} + threadIdx.y;",
            f"int {columns.name} = blockIdx.x * {kernel.size} + threadIdx.x;",
        ]
        if kernel.reductions:
            self._tiled_product()
        else:
            self._transposed()

    def _inside(self, *loops: Loop) -> str:
        return " && ".join(f"{loop.name} < {self._writer.whole(loop.bound)}" for loop in loops)

    def _transposed(self) -> None:
        kernel, writer, size = self._kernel, self._writer, self._kernel.size
        rows, columns = kernel.loops[-2:]
        body: list[str] = []
        value = writer.value(kernel.value, body)
        self._lines += [
            f"__shared__ float tile[{size}][{size} + 1];",
            f"if ({self._inside(rows, columns)}) {{",
            *body,
            f"tile[threadIdx.y][threadIdx.x] = {value};",
            "}",
            "__syncthreads();",
            f"{rows.name} = blockIdx.y * {size} + threadIdx.x;",
            f"{columns.name} = blockIdx.x * {size} + threadIdx.y;",
            f"if ({self._inside(rows, columns)}) "
            f"{writer.element(kernel.output)} = tile[threadIdx.x][threadIdx.y];",
        ]

    def _tiled_product(self) -> None:
        kernel, writer, size = self._kernel, self._writer, self._kernel.size
        rows, columns = kernel.loops[-2:]
        name, reduction = kernel.reductions[0]
        left, right = _factors(kernel)
        inner = reduction.loops[0]
        for factor, other in ((left, columns), (right, rows)):
            if other.name in _names(factor.indices):
                raise factor.place.error(
                    f"in tile, this factor is the same for every {other.name}: use {rows.name} in "
                    f"the first one only, {columns.name} in the second"
                )
        with writer.scope(reduction.loops):
            bound = writer.whole(inner.bound)
            first, second = writer.element(left), writer.element(right)
        self._lines += [
            f"__shared__ float left[{size}][{size} + 1], right[{size}][{size} + 1];",
            f"float {name} = {start_of(reduction)};",
            f"for (int first = 0; first < {bound}; first += {size}) {{",
            f"int {inner.name} = first + threadIdx.x;",
            f"left[threadIdx.y][threadIdx.x] = {self._inside(rows)} && {inner.name} < {bound} "
            f"? {first} : 0.0f;",
            f"{inner.name} = first + threadIdx.y;",
            f"right[threadIdx.y][threadIdx.x] = {self._inside(columns)} && {inner.name} < {bound} "
            f"? {second} : 0.0f;",
            "__syncthreads();",
            f"for (int at = 0; at < {size}; ++at)",
            f"    {name} += left[threadIdx.y][at] * right[at][threadIdx.x];",
            "__syncthreads();",
            "}",
        ]
        writer.define(name, "float", reduction.place)
        body: list[str] = []
        value = writer.value(kernel.value, body)
        written = f"{writer.element(kernel.output)} = {value};"
        self._lines += [f"if ({self._inside(rows, columns)}) {{", *body, written, "}"]


def _factors(kernel: Kernel) -> tuple[Element, Element]:
    """The two elements of a tiled product. Errors: DataError."""
    _, reduction = kernel.reductions[0]

    def error(place: Place) -> DataError:
        return place.error(
            "tile has one reduction: a sum over one loop of the product of two elements, as in "
            "sum from 0 for k < a1: a[i, k] * b[k, j]"
        )

    if len(kernel.reductions) > 1:
        raise error(kernel.reductions[1][1].place)
    if reduction.operator != "sum" or len(reduction.loops) != 1:
        raise error(reduction.place)
    match reduction.value:
        case Binary("*", Element() as left, Element() as right):
            return left, right
        case other:
            raise error(other.place)


def _names(nodes: Sequence[Expression]) -> set[str]:
    """The names in indices."""
    found: set[str] = set()
    for node in nodes:
        match node:
            case Name(name):
                found.add(name)
            case Binary(_, left, right):
                found |= _names((left, right))
    return found


def _worker(template: str) -> str:
    """A thread's number among those that share a loop."""
    return "lane" if template == "warp" else "threadIdx.x"


def _indented(lines: Sequence[str]) -> list[str]:
    """Lines with four spaces for each open brace."""
    depth, result = 1, []
    for line in lines:
        depth -= line.startswith("}")
        result.append("    " * depth + line)
        depth += line.endswith("{")
    return result
