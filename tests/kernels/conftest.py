"""A compiler and a verifier of the folder's tests."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from ludus.core.errors import ConfigError, MissingDependency
from ludus.kernels.compiler import CudaCompiler
from ludus.kernels.triton.compiler import require_interpreter
from ludus.kernels.verify.verifier import KernelVerifier
from ludus.sandbox.base import Limits

PATIENT = Limits(run_s=120.0, memory_mb=1024, num_processes=16)
"""Machines of tests are busy: only tests of the limits have short ones."""
RUN = Limits(run_s=20.0, memory_mb=1024, num_processes=16, disk_mb=64, output_bytes=100_000)


@pytest.fixture(scope="session")
def triton(layers: None) -> None:
    """Triton and its interpreter, in the sandbox; without one of them, the test is skipped."""
    try:
        require_interpreter()
    except (MissingDependency, ConfigError) as error:
        pytest.skip(str(error))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def compiler(nvrtc: None) -> AsyncIterator[CudaCompiler]:
    """One compiler for a file's tests: a source must not disturb the next."""
    async with CudaCompiler(PATIENT, parallel=1) as opened:
        yield opened


@pytest.fixture(scope="session")
def cpp(nvrtc: None) -> None:
    """g++, beside NVRTC; without it, the test is skipped."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed: apt install g++")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def verifier(cpp: None) -> AsyncIterator[KernelVerifier]:
    """One verifier for a file's tests: a kernel must not disturb the next."""
    async with KernelVerifier(parallel=1, run_limits=RUN) as opened:
        yield opened
