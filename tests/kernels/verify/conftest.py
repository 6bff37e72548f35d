"""A verifier of the folder's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from ludus.kernels.verify.verifier import KernelVerifier
from ludus.sandbox.base import Limits

RUN = Limits(run_s=20.0, memory_mb=1024, num_processes=16, disk_mb=64, output_bytes=100_000)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def verifier(cpp: None) -> AsyncIterator[KernelVerifier]:
    """One verifier for a file's tests: a kernel must not disturb the next."""
    async with KernelVerifier(parallel=1, run_limits=RUN) as opened:
        yield opened
