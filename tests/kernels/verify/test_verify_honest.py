"""Honest kernels pass, all of them."""

from __future__ import annotations

import pytest

from ludus.kernels.expert import WAYS, kernels_for
from ludus.kernels.verify.problem import KernelProblem
from ludus.kernels.verify.verifier import KernelVerifier
from ludus.tasks.kernels.generated import read_generated

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

NUMBER = {
    "elementwise": 30, "transpose": 13, "reduction": 30, "matvec": 20, "matmul": 20,
    "convolution": 10, "fused": 9,
}  # fmt: skip


@pytest.mark.parametrize("kind", WAYS)
async def test_every_honest_kernel_passes(verifier: KernelVerifier, kind: str) -> None:
    number = 0
    for task in read_generated(10, kinds=[kind]):  # type: ignore[list-item]
        for source in kernels_for(task):
            found = await verifier.verify(source, KernelProblem.of(task), seed=number)
            assert found.ok, f"{task.id}: {found.status}: {found.message}\n{source}"
            assert found.passed == found.trials == 6
            assert found.speedups is None
            number += 1
    assert number >= NUMBER[kind]
