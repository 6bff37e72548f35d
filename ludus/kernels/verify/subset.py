"""Contents that a submission may have: rules for every source, and the subset of CUDA for the shim.

The source is read by a scanner of its own: comments and texts are left out, cut lines are joined.
Nothing here is the wall: the object that g++ makes is looked at, and runs in the jail.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import ludus.kernels.shim

SHIM = Path(ludus.kernels.shim.__file__).parent
HEADERS = frozenset(
    [
        "cuda.h",
        "cuda_runtime.h",
        "cuda_runtime_api.h",
        "device_launch_parameters.h",
        "cuda_fp16.h",
        "cuda_bf16.h",
        "math.h",
        "cmath",
        "math_constants.h",
        "stdint.h",
        "cstdint",
        "stdio.h",
        "cstdio",
        "stdlib.h",
        "cstdlib",
        "stddef.h",
        "cstddef",
        "string.h",
        "cstring",
        "float.h",
        "cfloat",
        "limits.h",
        "climits",
        "assert.h",
        "cassert",
        "vector_types.h",
        "vector_functions.h",
        "sm_20_intrinsics.h",
        "device_functions.h",
    ]
)
"""Headers whose names in the subset stand in the shim's own."""

UNSUPPORTED = {
    "asm": "inline PTX", "wmma": "wmma", "nvcuda": "wmma", "cub": "cub",
    "cooperative_groups": "cooperative groups", "clock": "clocks", "clock64": "clocks",
    "globaltimer": "clocks", "malloc": "memory of the device's heap", "new": "memory of the "
    "device's heap", "free": "memory of the device's heap", "delete": "memory of the device's heap",
    "cuda": "libcu++", "std": "the C++ library", "thrust": "Thrust", "texture": "textures",
    "cudaTextureObject_t": "textures", "cudaSurfaceObject_t": "surfaces", "curand": "cuRAND",
    "curandState": "cuRAND", "cudaLaunchKernel": "launches by the device", "alloca": "alloca",
    "long_double": "long double", "thread_local": "thread_local", "typeid": "typeid",
    "operator_new": "memory of the device's heap", "_Float16": "_Float16",
}  # fmt: skip
UNDERSCORED = frozenset(
    [
        "__activemask",
        "__nanosleep",
        "__asm__",
        "__asm",
        "__prof_trigger",
        "__cluster_dims__",
        "__dp4a",
        "__dp2a",
        "__match_all_sync",
        "__int128",
        "__managed__",
        "__cvta_generic_to_shared",
    ]
)
TORCH = re.compile(r"\b(torch|at|c10|ATen|PYBIND11_MODULE|TORCH_LIBRARY|pybind11|load_inline)\b")
_TORCH_CODE = re.compile(
    r"#\s*include\s*[<\"](torch|ATen|c10|pybind)|\btorch::|\bat::|^\s*import torch", re.M
)
KEYWORDS = frozenset(
    [
        "if",
        "else",
        "for",
        "while",
        "do",
        "return",
        "switch",
        "case",
        "default",
        "break",
        "continue",
        "goto",
        "int",
        "float",
        "double",
        "char",
        "long",
        "short",
        "void",
        "bool",
        "unsigned",
        "signed",
        "const",
        "static",
        "extern",
        "struct",
        "class",
        "union",
        "enum",
        "template",
        "typename",
        "namespace",
        "using",
        "public",
        "private",
        "protected",
        "virtual",
        "inline",
        "operator",
        "sizeof",
        "true",
        "false",
        "volatile",
        "auto",
        "register",
        "typedef",
        "this",
        "threadIdx",
        "blockIdx",
        "blockDim",
        "gridDim",
    ]
)
_TOKEN = re.compile(
    r"//[^\n]*|/\*.*?\*/|(?P<raw>\b(?:u8|u|U|L)?R\")|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])+'"
    r"|(?P<number>\.?\d(?:[eEpP][+-]|[\w.]|'(?=\w))*)|(?P<name>[A-Za-z_$]\w*)"
    r"|(?P<paste>\#\#|%:|\?\?)|(?P<open>/\*)|(?P<break>\n)",
    re.S,
)
_SHARED = re.compile(
    r"\b(?:extern\s+__shared__|__shared__\s+extern)\s+(?:__align__\s*\(\s*\w+\s*\)\s*)?"
    r"((?:const\s+|volatile\s+|unsigned\s+|long\s+)*[\w:]+)\s+(?:__align__\s*\(\s*\w+\s*\)\s*)?"
    r"(\w+)\s*\[\s*\]\s*;"
)


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that a submission may not hold. `refused`: no submission may; else the shim does
    not run it."""

    line: int
    reason: str
    refused: bool

    def __str__(self) -> str:
        return f"line {self.line}: {self.reason}"


@cache
def _known() -> frozenset[str]:
    """Names with two underscores that the shim has."""
    text = (SHIM / "cuda.h").read_text(encoding="utf-8")
    internal = {"__attribute__", "__builtin_memcpy", "__has_include", "__LINE__"}
    pasted = {
        "__half2float",
        "__float2half_rn",
        "__float2bfloat16_rn",
        "__restrict__",
        "__restrict",
    }
    names = {name for name in re.findall(r"\b__\w+", text) if not name.startswith("__builtin")}
    return frozenset((names - internal) | pasted | {"__inline__", "__builtin_align__"})


def problems(source: str) -> Iterator[Problem]:
    """Contents that a submission may not have, in the order of its lines; refusals of all kinds
    first come where they stand."""
    if (match := TORCH.search(_code(source))) and _TORCH_CODE.search(source):
        line = source[: source.find(match[0])].count("\n") + 1
        reason = "PyTorch code: write CUDA C++ device code, with launch lines"
        yield Problem(line, reason, True)
    yield from _directives(source)
    yield from _names(source)


def _joined(source: str) -> tuple[str, list[int]]:
    """The source without cut lines, and the line of each line that is left."""
    lines, numbers = [], []
    held, start = "", 1
    for number, line in enumerate(source.replace("\r\n", "\n").split("\n"), start=1):
        if not held:
            start = number
        if line.rstrip(" \t").endswith("\\"):
            held += line.rstrip(" \t")[:-1]
            continue
        lines.append(held + line)
        numbers.append(start)
        held = ""
    if held:
        lines.append(held)
        numbers.append(start)
    return "\n".join(lines), numbers


def _code(source: str) -> str:
    """The source without comments and texts, line by line."""

    def left(match: re.Match[str]) -> str:
        if match["name"] or match["number"] or match["paste"] or match["break"]:
            return match[0]
        return " " + "\n" * match[0].count("\n")

    return _TOKEN.sub(left, _joined(source)[0])


def _directives(source: str) -> Iterator[Problem]:
    text, numbers = _joined(source)
    code = _code(source).split("\n")
    defined = set(re.findall(r"^\s*#\s*define\s+(\w+)", "\n".join(code), re.M))
    for number, line, plain in zip(numbers, text.split("\n"), code, strict=False):
        match = re.match(r"\s*#\s*(\w+)(.*)", plain)
        if match is None:
            continue
        what, rest = match[1], match[2].strip()
        if what == "include":
            named = re.search(r"#\s*include\s*[<\"]([^>\"]*)[>\"]", line)
            name = named[1] if named else rest
            if name not in HEADERS:
                yield Problem(
                    number, f"the header {name[:60]!r} is not in the shim's subset", False
                )
        elif what == "define":
            name = re.split(r"\W", rest, maxsplit=1)[0]
            if name.startswith("__") or name in KEYWORDS or "ludus" in name:
                yield Problem(number, f"{name} may not be redefined: choose another name", True)
        elif what == "undef" and rest not in defined:
            yield Problem(number, f"{rest[:40]} is not this source's: remove #undef", True)
        elif what in ("if", "ifdef", "ifndef", "elif"):
            asked = set(re.findall(r"[A-Za-z_]\w*", rest)) - {
                "defined",
                "__CUDA_ARCH__",
                "__CUDACC__",
            }
            foreign = sorted(name for name in asked - defined if name.startswith("_"))
            if foreign and what != "ifndef":
                reason = f"{foreign[0][:40]} asks the host's compiler: it is not CUDA"
                yield Problem(number, reason, True)
        elif what == "pragma" and not re.match(r"(unroll|nounroll|once|nv_|diag_)", rest):
            yield Problem(number, "of the pragmas, unroll is allowed", True)
        elif what in ("line", "error", "import", "include_next", "ident", "embed"):
            yield Problem(number, f"#{what} is not allowed", True)


def _names(source: str) -> Iterator[Problem]:
    text, numbers = _joined(source)
    line = 0
    for match in _TOKEN.finditer(text):
        if match["name"] is None and "\n" in match[0]:
            line += match[0].count("\n")
            continue
        at = numbers[min(line, len(numbers) - 1)]
        if match["raw"]:
            yield Problem(at, "a raw string is not allowed", True)
            return
        if match["open"]:
            yield Problem(at, "a comment has no end", True)
            return
        if match["paste"]:
            yield Problem(at, f"{match[0]} builds names in the preprocessor: write them out", True)
        name = match["name"]
        if name is None:
            continue
        if "ludus" in name.lower():
            yield Problem(at, f"{name[:40]} is a name of the harness: choose another", True)
        elif name in UNSUPPORTED or name in UNDERSCORED:
            what = UNSUPPORTED.get(name, name)
            yield Problem(at, f"`{name}`: {what} is not in the shim's subset", False)
        elif re.match(
            r"__builtin|__attribute|__GNUC|__gnu|__has_|_Pragma|__asm|__linux|__x86|__file|"
            r"__FILE|__COUNTER|__BASE|__INCLUDE|__DATE|__TIME",
            name,
        ):
            yield Problem(at, f"{name[:40]} asks the host's compiler: it is not CUDA", True)
        elif name.startswith("__") and name not in _known():
            yield Problem(at, f"`{name[:40]}` is not in the shim's subset", False)
        elif re.match(r"_[A-Z]|\$", name) or "$" in name:
            yield Problem(at, f"{name[:40]} is reserved for compilers: choose another name", True)


def prepared(source: str) -> str:
    """The source for the shim: dynamic shared memory has an address; lines keep their numbers."""

    def address(match: re.Match[str]) -> str:
        breaks = "\n" * match[0].count("\n")
        return f"static {match[1]} *const {match[2]} = ({match[1]} *)ludus_dynamic;{breaks}"

    return _SHARED.sub(address, source)
