"""Seconds of a compilation of CUDA C++ in the sandbox: `python benchmarks/kernels_compile.py`.

The kernels of the tests (tests/kernels/analysis/honest.py) that need no host code, one after the
other on one core, each time with another comment, without the cache. `sandbox`: from the call to
the result; `program`: of it the compiler's process; then reads of the cache, and the analysis.
Then nvcc, and a kernel in Triton by stage, where they are installed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from ludus.core.errors import LudusError
from ludus.kernels.analysis import analyse
from ludus.kernels.cache import CompileCache
from ludus.kernels.compiler import CudaCompiler
from ludus.kernels.nvcc import NvccCompiler
from ludus.kernels.triton.verifier import TritonVerifier
from ludus.kernels.verify.problem import KernelProblem
from tests.kernels.analysis.honest import HONEST
from tests.kernels.in_triton.cheats import HONEST as IN_TRITON
from tests.kernels.verify.cheats import REFERENCE

LEFT_OUT = ("host code", "cooperative groups")
"""NVRTC compiles no host code; the headers of cooperative groups alone take a second."""


def row(name: str, seconds: list[float]) -> str:
    ordered = sorted(seconds)
    quantiles = [ordered[int(share * (len(ordered) - 1))] for share in (0, 0.5, 0.9)]
    cells = " | ".join(f"{1e3 * value:.1f}" for value in quantiles)
    return f"| {name} | {cells} | {60 / statistics.mean(seconds):.0f} |"


async def measure(rounds: int, architecture: str) -> None:
    sources = [source for name, source in HONEST.items() if name not in LEFT_OUT]
    sandbox, program, cached, analysed = [], [], [], []
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        cache = CompileCache(Path(folder))
        async with CudaCompiler(parallel=1) as compiler:
            await compiler.compile(sources[0], architecture)
            first = time.perf_counter() - began
            for number in range(rounds):
                for source in sources:
                    text = f"// {number}\n{source}"
                    began = time.perf_counter()
                    compiled = await compiler.compile(text, architecture)
                    sandbox.append(time.perf_counter() - began)
                    program.append(compiled.seconds)
                    assert compiled.ok, compiled.errors
            compiler._cache = cache
            for _ in range(2):
                for source in sources:
                    began = time.perf_counter()
                    if (await compiler.compile(source, architecture)).cached:
                        cached.append(time.perf_counter() - began)
            name = compiler.name
    rows = [*await measure_nvcc(architecture), *await measure_triton(rounds)]
    for source in HONEST.values():
        began = time.perf_counter()
        analyse(source)
        analysed.append(time.perf_counter() - began)
    print(f"{name}, {architecture}, load {os.getloadavg()[0]:.1f}; first: {first:.2f} s\n")
    print("| stage | least, ms | p50 | p90 | a minute |\n|---|---|---|---|---|")
    for title, seconds in (
        ("sandbox", sandbox),
        ("program", program),
        ("cache", cached),
        ("analysis", analysed),
        *rows,
    ):
        print(row(title, seconds))


async def measure_nvcc(architecture: str) -> list[tuple[str, list[float]]]:
    """The same kernels through nvcc; nothing where it is not installed."""
    found = []
    try:
        compiler = NvccCompiler(parallel=1)
    except LudusError as error:
        print(f"nvcc: {error}")
        return []
    async with compiler:
        for source in [source for name, source in HONEST.items() if name not in LEFT_OUT]:
            began = time.perf_counter()
            compiled = await compiler.compile(source, architecture)
            found.append(time.perf_counter() - began)
            assert compiled.ok, compiled.errors
    return [("nvcc", found[1:])]


async def measure_triton(rounds: int) -> list[tuple[str, list[float]]]:
    """An element-wise kernel in Triton, verified; nothing where it is not installed."""
    stages: dict[str, list[float]] = {}
    try:
        verifier = TritonVerifier(parallel=1)
    except LudusError as error:
        print(f"Triton: {error}")
        return []
    async with verifier:
        for number in range(-2, 4 * rounds):
            began = time.perf_counter()
            source = IN_TRITON + f"# {number}\n"
            found = await verifier.verify(source, KernelProblem("", REFERENCE), seed=1)
            assert found.ok, found.message
            if number >= 0:
                whole = time.perf_counter() - began
                for name, seconds in {**found.seconds, "verified": whole}.items():
                    stages.setdefault(name, []).append(seconds)
    return [(f"Triton: {name}", stages[name]) for name in ("analyse", "compile", "run", "verified")]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--architecture", default="sm_90")
    given = parser.parse_args()
    asyncio.run(measure(given.rounds, given.architecture))
