"""Ends of which the kernel is not to blame: killed from outside, or too little processor time."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator

import psutil
import pytest

from ludus.core.errors import ToolError
from ludus.kernels.verify.problem import KernelProblem
from ludus.kernels.verify.verifier import KernelVerifier
from ludus.sandbox.base import Limits
from tests.kernels.verify.cheats import HONEST, REFERENCE, body

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("cpp")]

PROBLEM = KernelProblem("2 * relu(a) + b", REFERENCE)
LIMITS = Limits(run_s=3.0, memory_mb=1024, num_processes=16, disk_mb=64, output_bytes=100_000)
ENDLESS = body("volatile int x = 1; while (x) { x = x | 1; }")


@pytest.fixture
async def brief() -> AsyncIterator[KernelVerifier]:
    async with KernelVerifier(parallel=1, run_limits=LIMITS) as opened:
        assert (await opened.verify(HONEST, PROBLEM, seed=1)).ok  # its runner is built
        yield opened


async def signalled(name: str, number: int) -> None:
    """Waits for a descendant whose program has this name, and sends it a signal."""
    while True:
        for child in psutil.Process().children(recursive=True):
            try:
                if child.name() == name:
                    child.send_signal(number)
                    return
            except psutil.Error:
                continue
        await asyncio.sleep(0.002)


@pytest.mark.parametrize("name", ["runner", "cc1plus"])
async def test_what_is_killed_from_outside_is_not_judged(brief: KernelVerifier, name: str) -> None:
    source = ENDLESS + f"// {name}"
    verifying = asyncio.create_task(brief.verify(source, PROBLEM, seed=1))
    await asyncio.wait_for(signalled(name, signal.SIGKILL), 60)
    with pytest.raises(ToolError, match="killed from outside"):
        await verifying
    found = await brief.verify(source, PROBLEM, seed=1)
    assert found.status == "time_limit", "the failure was not kept"


async def test_a_limit_is_one_of_processor_time(brief: KernelVerifier) -> None:
    found = await brief.verify(ENDLESS, PROBLEM, seed=1)
    assert found.status == "time_limit"
    assert found.message == "running takes more than 3 s of processor time"


async def test_a_process_that_is_paused_is_not_judged(brief: KernelVerifier) -> None:
    verifying = asyncio.create_task(brief.verify(ENDLESS, PROBLEM, seed=2))
    await asyncio.wait_for(signalled("runner", signal.SIGSTOP), 60)
    with pytest.raises(ToolError, match=r"got less than 3 s of the processor in 18 s"):
        await verifying
