"""Runs inside the jail: compiles a kernel with g++ and looks at the object; becomes the runner.

The source of this file becomes the module `ludus_shim` of the jail, so it imports the standard
library only. A program reads what `shim.files_of` writes, and ends with one of the codes below, or
with the runner's.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import struct
import subprocess
import time
from pathlib import Path
from typing import NoReturn

MODULE = "ludus_shim"
COMPILE_FAILED, FORBIDDEN, LINK_FAILED, TOO_SLOW, KILLED, BUILT = 50, 51, 52, 53, 54, 0
FLAGS = (
    "-std=c++17", "-O1", "-nostdinc", "-fPIC", "-fvisibility=hidden", "-fno-exceptions",
    "-fno-rtti", "-ffp-contract=off", "-fno-math-errno", "-fno-asynchronous-unwind-tables",
    "-fno-stack-protector", "-fno-strict-aliasing", "-fno-threadsafe-statics", "-fwrapv", "-w",
    "-fmax-errors=3", "-fdiagnostics-color=never", "-fno-diagnostics-show-caret",
    "-ftemplate-depth=512", "-Iheaders",
)  # fmt: skip
SHIM_NAMES = frozenset(
    [
        "ludus_barrier",
        "ludus_exchange",
        "ludus_lane",
        "ludus_fail",
        "ludus_dynamic",
        "threadIdx",
        "blockIdx",
        "blockDim",
        "gridDim",
        "_GLOBAL_OFFSET_TABLE_",
        "__start_ludus_shared",
        "__stop_ludus_shared",
        "memcpy",
        "memset",
        "memmove",
        "memcmp",
        "__extendhfsf2",
        "__truncsfhf2",
        "__truncdfhf2",
        "__extendhfdf2",
        "__floatsihf",
    ]
)
MATH = frozenset(
    [
        "sqrt",
        "cbrt",
        "exp",
        "exp2",
        "expm1",
        "log",
        "log2",
        "log10",
        "log1p",
        "sin",
        "cos",
        "tan",
        "asin",
        "acos",
        "atan",
        "sinh",
        "cosh",
        "tanh",
        "asinh",
        "acosh",
        "atanh",
        "erf",
        "erfc",
        "floor",
        "ceil",
        "trunc",
        "round",
        "rint",
        "nearbyint",
        "lgamma",
        "tgamma",
        "pow",
        "fmax",
        "fmin",
        "fmod",
        "atan2",
        "hypot",
        "copysign",
        "fdim",
        "remainder",
        "fma",
        "ldexp",
        "sincos",
    ]
)
ALLOWED = SHIM_NAMES | MATH | {f"{name}f" for name in MATH}
"""Names that an object may need. There is no system call among them."""
INITIALISERS = (".init", ".ctors", ".preinit", ".fini", ".dtors")
WAITING = frozenset({"ludus_barrier", "ludus_exchange"})


def needed_names(data: bytes) -> tuple[set[str], set[str]]:
    """The undefined symbols, and the sections, of an ELF object of 64 bits."""
    table, size, number, names_at = struct.unpack_from("<Q10xHHH", data, 40)
    heads = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * size) for i in range(number)]

    def name(section: int, offset: int) -> str:
        start = heads[section][4] + offset
        return data[start : data.index(b"\0", start)].decode("ascii", "replace")

    undefined = set()
    for head in heads:
        if head[1] != 2:  # the symbols
            continue
        for at in range(head[4] + 24, head[4] + head[5], 24):
            text, _, _, section = struct.unpack_from("<IBBH", data, at)
            if section == 0:
                undefined.add(name(head[6], text))
    return undefined, {name(names_at, head[0]) for head in heads}


def forbidden(data: bytes) -> tuple[str, bool]:
    """The names that an object must not need, or an empty text; True if its threads wait."""
    undefined, sections = needed_names(data)
    if extra := sorted(undefined - ALLOWED):
        return f"it needs {extra[0][:80]}, which no kernel has", False
    if any(section.startswith(INITIALISERS) for section in sections):
        return (
            "it runs code before the kernel: a variable has an initialiser that is no constant",
            False,
        )
    return "", bool(undefined & WAITING)


def _end(code: int, text: str) -> NoReturn:
    os.write(2, text.encode("utf-8", "replace")[:20_000])
    os._exit(code)


def _call(*command: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)


def build_runner() -> None:
    """Compile the runner; it is ludus' own, so that no source reaches this call."""
    done = _call("g++", "-O2", "-rdynamic", "-Wl,--no-as-needed", "-o", "runner", "runner.cpp",
                 "-ldl", "-lm")  # fmt: skip
    if done.returncode:
        _end(COMPILE_FAILED, done.stderr.decode("utf-8", "replace"))
    found = subprocess.run(["g++", "-print-libgcc-file-name"], capture_output=True, check=False)
    Path("libgcc.txt").write_bytes(found.stdout.strip())
    os._exit(BUILT)


def bound(cpu_s: int) -> None:
    """Bound the processor time of this process and of each that it starts."""
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))


def _failed(done: subprocess.CompletedProcess[bytes], code: int) -> NoReturn:
    """End with `code`, or with that of a compiler that a signal has ended; g++ names the signal
    of its parts."""
    ended = done.returncode
    if ended == -signal.SIGXCPU or b"CPU time limit exceeded signal term" in done.stderr:
        code = TOO_SLOW
    elif ended == -signal.SIGKILL or b"Killed signal terminated" in done.stderr:
        code = KILLED
    _end(code, done.stderr.decode("utf-8", "replace"))


def build(cpu_s: int) -> NoReturn:
    """Compile a kernel, look at the object, and link it; see the head of this file."""
    bound(cpu_s)
    began = time.monotonic()
    compile_ = ["g++", *FLAGS, "-include", "cuda.h", "-c", "kernel.cpp", "-o", "kernel.o"]
    done = _call(*compile_)
    if done.returncode and b"section type conflict" in done.stderr:
        done = _call(*compile_, "-DLUDUS_PLAIN_SHARED")
    if done.returncode:
        _failed(done, COMPILE_FAILED)
    problem, waits = forbidden(Path("kernel.o").read_bytes())
    if problem:
        _end(FORBIDDEN, problem)
    libgcc = Path("libgcc.txt").read_text(encoding="utf-8")
    done = _call("ld", "-shared", "-z", "noexecstack", "-o", "kernel.so", "kernel.o", libgcc)
    if done.returncode:
        _failed(done, LINK_FAILED)
    built = {"seconds": time.monotonic() - began, "waits": waits}
    Path("built.json").write_text(json.dumps(built), encoding="utf-8")
    os._exit(BUILT)


def run(waits: bool, cpu_s: int) -> NoReturn:
    """Become the runner of a kernel that is built."""
    bound(cpu_s)
    os.chmod("runner", 0o755)
    os.execv("./runner", ["runner", "./kernel.so", "1" if waits else "0"])
