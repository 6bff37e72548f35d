"""A verifier of the folder's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from ludus.kernels.triton.verifier import TritonVerifier
from ludus.sandbox.base import Limits

COMPILE = Limits(run_s=15.0, memory_mb=4096, num_processes=32, disk_mb=64)
RUN = Limits(run_s=6.0, memory_mb=1024, num_processes=16, disk_mb=64, output_bytes=100_000)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def verifier(triton: None) -> AsyncIterator[TritonVerifier]:
    """One verifier for a file's tests: a kernel must not disturb the next."""
    async with TritonVerifier(parallel=1, compile_limits=COMPILE, run_limits=RUN) as opened:
        yield opened
