"""No cheat in Triton passes; after them, the next kernel is judged as ever."""

from __future__ import annotations

import pytest

from ludus.kernels.triton.verifier import TritonVerifier
from ludus.kernels.verify.problem import KernelProblem
from tests.kernels.in_triton.cheats import CHEATS, HONEST
from tests.kernels.verify.cheats import REFERENCE

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

PROBLEM = KernelProblem("2 * relu(a) + b", REFERENCE)


@pytest.mark.parametrize("name", CHEATS)
async def test_no_cheat_passes(verifier: TritonVerifier, name: str) -> None:
    source, allowed = CHEATS[name]
    found = await verifier.verify(source, PROBLEM, seed=5)
    assert found.status in allowed, f"{found.status}: {found.message}"
    assert found.message
    assert "\n" not in found.message


async def test_the_next_kernel_after_the_cheats_passes(verifier: TritonVerifier) -> None:
    assert (await verifier.verify(HONEST, PROBLEM, seed=6)).ok
