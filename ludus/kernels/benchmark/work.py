"""Work of a device: cubins, and launches with their arguments as bytes.

No host code of a model is part of it: a launch is a line that ludus has parsed.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ludus.core.errors import DataError
from ludus.kernels.compiler import CudaCompiler
from ludus.kernels.cubin import variable
from ludus.kernels.launches import Argument, Buffer, Dim3, Plan
from ludus.kernels.result import Compiled
from ludus.kernels.triton.compiler import Image
from ludus.kernels.triton.launches import SIZES, TritonPlan, type_of, variant_of

POINTER, SIGNED, UNSIGNED, FLOAT, OTHER = range(5)
"""Kinds of parameters; a byte holds kind * 16 + size."""
FORMATS = {
    (SIGNED, 1): "b", (SIGNED, 2): "h", (SIGNED, 4): "i", (SIGNED, 8): "q", (UNSIGNED, 1): "B",
    (UNSIGNED, 2): "H", (UNSIGNED, 4): "I", (UNSIGNED, 8): "Q", (FLOAT, 4): "f", (FLOAT, 8): "d",
}  # fmt: skip
TRITON_FORMATS = {"i1": "b", "i32": "i", "i64": "q", "fp32": "f"}
END = 255
KINDS = """
template <class T> struct ludus_kind { static constexpr unsigned char of = 4 * 16; };
template <class T> struct ludus_kind<T *> { static constexpr unsigned char of = 8; };
#define LUDUS_KIND(T, kind) template <> struct ludus_kind<T> { \\
    static constexpr unsigned char of = kind * 16 + sizeof(T); };
LUDUS_KIND(char, 1) LUDUS_KIND(signed char, 1) LUDUS_KIND(short, 1) LUDUS_KIND(int, 1)
LUDUS_KIND(long, 1) LUDUS_KIND(long long, 1) LUDUS_KIND(bool, 2) LUDUS_KIND(unsigned char, 2)
LUDUS_KIND(unsigned short, 2) LUDUS_KIND(unsigned, 2) LUDUS_KIND(unsigned long, 2)
LUDUS_KIND(unsigned long long, 2) LUDUS_KIND(float, 3) LUDUS_KIND(double, 3)
template <class F> struct ludus_kinds;
template <class... A> struct ludus_kinds<void (*)(A...)> {
    struct list { unsigned char of[sizeof...(A) + 1]; };
    static __device__ constexpr list all() { return {{ludus_kind<A>::of..., 255}}; }
};
"""


@dataclass(frozen=True, slots=True)
class Parameter:
    """An argument of a launch: the address of a buffer, or bytes."""

    buffer: str | None
    data: bytes = b""


@dataclass(frozen=True, slots=True)
class Step:
    """A launch; `module`: the number of its cubin."""

    module: int
    symbol: str
    grid: Dim3
    block: Dim3
    shared_bytes: int
    parameters: tuple[Parameter, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Work:
    """Cubins, launches in order, and the bytes of each scratch buffer."""

    modules: tuple[bytes, ...]
    steps: tuple[Step, ...]
    scratch: Mapping[str, int]

    def header(self) -> dict[str, Any]:
        """The data that cross the pipe beside the cubins."""
        return {
            "scratch": dict(self.scratch),
            "steps": [
                {
                    "module": step.module,
                    "symbol": step.symbol,
                    "grid": step.grid,
                    "block": step.block,
                    "shared": step.shared_bytes,
                    "line": step.line,
                    "parameters": [
                        ["buffer", item.buffer] if item.buffer is not None
                        else ["bytes", item.data.hex()]
                        for item in step.parameters
                    ],
                }
                for step in self.steps
            ],
        }  # fmt: skip


def with_kinds(source: str, plan: Plan) -> str:
    """The source, and behind it the kinds of each kernel's parameters, as variables of the cubin:
    only the compiler knows how a kernel takes its numbers."""
    tables = [
        f'extern "C" __device__ ludus_kinds<decltype(&{name})>::list ludus_kinds_{i} = '
        f"ludus_kinds<decltype(&{name})>::all();"
        for i, name in enumerate(_names(plan))
    ]
    return "\n".join([source, '#line 1 "launch"', KINDS, *tables, ""])


def _names(plan: Plan) -> list[str]:
    return list(dict.fromkeys(launch.kernel for launch in plan.launches))


async def cuda_work(
    compiler: CudaCompiler, source: str, plan: Plan, architecture: str
) -> Work | Compiled:
    """Compile a source for a device; the compilation, where that fails.

    Errors: DataError for an argument that does not fit its parameter; those of the compiler.
    """
    names = _names(plan)
    compiled = await compiler.compile(with_kinds(source, plan), architecture, names=names)
    if not compiled.ok:
        return compiled
    tables = {name: variable(compiled.cubin, f"ludus_kinds_{i}") for i, name in enumerate(names)}
    steps = []
    for launch in plan.launches:
        kinds = tables[launch.kernel].partition(bytes([END]))[0]
        if len(kinds) != len(launch.arguments):
            raise DataError(
                f"line {launch.line}: `{launch.kernel}` has {len(kinds)} parameters, and the "
                f"launch gives {len(launch.arguments)}"
            )
        parameters = tuple(
            _packed(value, kind, f"line {launch.line}: argument {i + 1}")
            for i, (value, kind) in enumerate(zip(launch.arguments, kinds, strict=True))
        )
        symbol = compiled.symbols.get(launch.kernel, "")
        steps.append(
            Step(0, symbol, launch.grid, launch.block, launch.shared_bytes, parameters, launch.line)
        )
    return Work((compiled.cubin,), tuple(steps), dict(plan.scratch))


def _packed(value: Argument, code: int, place: str) -> Parameter:
    kind, size = divmod(code, 16)
    if isinstance(value, Buffer):
        if kind != POINTER:
            raise DataError(f"{place}: `{value.name}` is a buffer, and the kernel takes a number")
        return Parameter(value.name)
    form = FORMATS.get((kind, size))
    if form is None:
        what = "a pointer" if kind == POINTER else "a struct or a half: pass a float in its place"
        raise DataError(f"{place}: {value} is a number, and the kernel takes {what}")
    number: int | float = float(value) if kind == FLOAT else int(value)
    try:
        if kind != FLOAT:  # as C converts it
            number = int(number) % (1 << 8 * size)
            if kind == SIGNED and number >= 1 << (8 * size - 1):
                number -= 1 << 8 * size
        return Parameter(None, struct.pack(f"<{form}", number))
    except (struct.error, OverflowError):
        raise DataError(f"{place}: {value} does not fit its type") from None


def triton_work(images: Sequence[Image], plan: TritonPlan, dtypes: Mapping[str, str]) -> Work:
    """The work of a plan in Triton; `dtypes` of the buffers, scratch included.

    Errors: DataError for a kernel that needs what a launch here does not give.
    """
    index = {image.variant: number for number, image in enumerate(images)}
    steps = []
    for launch in plan.launches:
        variant = variant_of(launch, dtypes)
        image = images[index[variant]]
        if image.scratch:
            raise DataError(f"line {launch.line}: it needs scratch memory of Triton's own")
        constants = {name for name, _ in variant.constants}
        parameters = [
            _triton_packed(value, dtypes)
            for name, value in launch.arguments.items()
            if name not in constants
        ]
        parameters += [Parameter(None, bytes(8))] * 2  # Triton's scratch, and its profiler's
        steps.append(
            Step(
                index[variant], image.symbol, launch.grid, (32 * image.num_warps, 1, 1),
                image.shared_bytes, tuple(parameters), launch.line,
            )
        )  # fmt: skip
    scratch = {name: SIZES[kind] * count for name, (kind, count) in plan.scratch.items()}
    return Work(tuple(image.cubin for image in images), tuple(steps), scratch)


def _triton_packed(value: Argument, dtypes: Mapping[str, str]) -> Parameter:
    if isinstance(value, Buffer):
        return Parameter(value.name)
    return Parameter(None, struct.pack(f"<{TRITON_FORMATS[type_of(value, dtypes)]}", value))
