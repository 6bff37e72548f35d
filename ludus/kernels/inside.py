"""Runs inside the jail: NVRTC, loaded and warmed up once in the zygote; a program compiles once.

The source of this file becomes the module `ludus_nvrtc` of the jail, so it imports the standard
library only, and nothing at all happens where it is imported elsewhere. A program reads
`kernel.cu` and `options.json` (a list), prints NVRTC's log, writes `kernel.cubin`, and ends with
code 0, FAILED plus NVRTC's code, or TOO_LARGE for a cubin that the working folder cannot hold.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

MODULE = "ludus_nvrtc"
FAILED, TOO_LARGE = 100, 99
SOURCE, OPTIONS, CUBIN = "kernel.cu", "options.json", "kernel.cubin"
NAMES, SYMBOLS = "names.json", "symbols.json"
"""Kernels that shall be in the cubin, such as `tile<64>`, and their symbols there."""

INTEGERS = """#pragma once
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
typedef long long intptr_t;
typedef unsigned long long uintptr_t;
"""
LIMITS = """#pragma once
#define CHAR_BIT 8
#define SCHAR_MAX 127
#define UCHAR_MAX 255
#define SHRT_MAX 32767
#define USHRT_MAX 65535
#define INT_MAX 2147483647
#define INT_MIN (-INT_MAX - 1)
#define UINT_MAX 4294967295u
#define LONG_MAX 9223372036854775807l
#define LONG_MIN (-LONG_MAX - 1)
#define ULONG_MAX 18446744073709551615ul
#define LLONG_MAX 9223372036854775807ll
#define LLONG_MIN (-LLONG_MAX - 1)
#define ULLONG_MAX 18446744073709551615ull
"""
FLOATS = """#pragma once
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.192092896e-7f
#define DBL_MAX 1.7976931348623158e+308
#define DBL_MIN 2.2250738585072014e-308
#define DBL_EPSILON 2.2204460492503131e-16
"""
MATHS = """#pragma once
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)
#define HUGE_VALF INFINITY
#endif
#define M_E 2.7182818284590452354
#define M_LOG2E 1.4426950408889634074
#define M_LN2 0.69314718055994530942
#define M_PI 3.14159265358979323846
#define M_SQRT2 1.41421356237309504880
#define M_SQRT1_2 0.70710678118654752440
"""
HEADERS = {
    "stdint.h": INTEGERS, "cstdint": INTEGERS, "limits.h": LIMITS, "climits": LIMITS,
    "float.h": FLOATS, "cfloat": FLOATS, "math.h": MATHS, "cmath": MATHS, "stdio.h": "",
    "cstdio": "", "stddef.h": "", "cstddef": "", "assert.h": "", "cassert": "", "stdlib.h": "",
    "cstdlib": "", "string.h": "", "cstring": "",
}  # fmt: skip
"""The host's headers that kernels often include. NVRTC has the functions of the empty ones."""

QUICKER = "--minimal"
"""Leaves textures and the device's runtime out of what NVRTC declares: a sixth of its time."""

WARM_UP = """extern "C" __global__ void warm_up(const float *x, float *y, int n) {
    __shared__ float tile[32][33];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    tile[threadIdx.y][threadIdx.x] = i < n ? sqrtf(x[i]) : 0.0f;
    __syncthreads();
    if (i < n) y[i] = tile[threadIdx.x][threadIdx.y];
}"""


class Nvrtc:
    """The functions of NVRTC that a compilation needs.

    Errors: OSError for a library that cannot be loaded; RuntimeError from a call that fails.
    """

    def __init__(self, nvidia: Path) -> None:
        """Load the library below `nvidia`, the folder of NVIDIA's packages."""
        [builtins, *_] = _libraries(nvidia, "libnvrtc-builtins.so.*")
        [library, *_] = _libraries(nvidia, "libnvrtc.so.*")
        self._builtins = ctypes.CDLL(str(builtins))  # NVRTC finds it by name once it is loaded
        self._lib = ctypes.CDLL(str(library))
        include = library.parents[1] / "include"
        self._folders = [f"-I{include}", f"-I{include / 'cccl'}"]

    def architectures(self) -> list[int]:
        """The compute capabilities that this version compiles for, such as 90."""
        number = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(number))
        found = (ctypes.c_int * number.value)()
        self._call("nvrtcGetSupportedArchs", found)
        return list(found)

    def compile(
        self, source: bytes, options: Sequence[str], symbols: dict[str, str] | None = None
    ) -> tuple[int, bytes, bytes]:
        """Returns NVRTC's code, its log, and the cubin (empty where the code is not 0). The names
        in `symbols` get their symbols."""
        program = ctypes.c_void_p()
        names = (ctypes.c_char_p * len(HEADERS))(*[name.encode() for name in HEADERS])
        texts = (ctypes.c_char_p * len(HEADERS))(*[text.encode() for text in HEADERS.values()])
        given = (source, SOURCE.encode(), len(HEADERS), texts, names)
        self._call("nvrtcCreateProgram", ctypes.byref(program), *given)
        for name in symbols or ():
            self._call("nvrtcAddNameExpression", program, name.encode())
        all_options = [option.encode() for option in (*options, *self._folders)]
        array = (ctypes.c_char_p * len(all_options))(*all_options)
        code: int = self._lib.nvrtcCompileProgram(program, len(all_options), array)
        log = self._text(program, "ProgramLog").replace(b"\0", b"")  # one after each part
        cubin = self._text(program, "CUBIN") if code == 0 else b""
        if symbols and code == 0:
            for name in symbols:
                found = ctypes.c_char_p()
                given_name = name.encode()
                self._call("nvrtcGetLoweredName", program, given_name, ctypes.byref(found))
                symbols[name] = (found.value or b"").decode()
        self._call("nvrtcDestroyProgram", ctypes.byref(program))
        return code, log, cubin

    def _text(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        data = ctypes.create_string_buffer(max(size.value, 1))
        self._call(f"nvrtcGet{what}", program, data)
        return data.raw[: size.value]

    def _call(self, name: str, *arguments: object) -> None:
        if code := self._lib[name](*arguments):
            raise RuntimeError(f"{name} failed with code {code}")


def _libraries(nvidia: Path, pattern: str) -> list[Path]:
    found = [path for path in sorted(nvidia.rglob(pattern)) if ".alt." not in path.name]
    if not found:
        raise OSError(f"{nvidia} has no {pattern}")
    return found


def prepare() -> Nvrtc:
    """Load NVRTC, and compile once, so that its tables are in the memory that programs share."""
    nvrtc = Nvrtc(Path("/packages/nvidia"))
    options = [f"--gpu-architecture=sm_{nvrtc.architectures()[0]}"]
    code, log, _ = nvrtc.compile(WARM_UP.encode(), [QUICKER, *options])
    if code:
        raise RuntimeError(f"NVRTC does not compile: {log[:500]!r}")
    return nvrtc


def run(cpu_s: int) -> NoReturn:
    """Compile what lies in the working folder, in at most `cpu_s` seconds of processor time; see
    the head of this file."""
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    assert NVRTC is not None
    options = json.loads(Path(OPTIONS).read_text(encoding="utf-8"))
    source = Path(SOURCE).read_bytes()
    symbols: dict[str, str] = {}
    if Path(NAMES).exists():
        symbols = dict.fromkeys(json.loads(Path(NAMES).read_text(encoding="utf-8")), "")
    code, log, cubin = NVRTC.compile(source, [QUICKER, *options], symbols)
    if code:  # perhaps for a name that was left out
        code, log, cubin = NVRTC.compile(source, options, symbols)
    if symbols:
        Path(SYMBOLS).write_text(json.dumps(symbols), encoding="utf-8")
    if code == 0:
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # an error in its place
            Path(CUBIN).write_bytes(cubin)
        except OSError:
            os._exit(TOO_LARGE)
    left = memoryview(log)
    while left:
        left = left[os.write(1, left) :]
    if code:
        names = " ".join(f"sm_{number}" for number in NVRTC.architectures())
        os.write(2, names.encode())
    os._exit(FAILED + code if code else 0)


NVRTC = prepare() if __name__ == MODULE else None
