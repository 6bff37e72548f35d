# ruff: noqa: E501 - faults stand in a line each
"""Kernels of the template language, verified as any CUDA: the fields decide."""

from __future__ import annotations

import re

import pytest

from ludus.core.types import Task
from ludus.kernels.templates.expand import expand
from ludus.kernels.templates.expert import expert_kernel, shapes_of
from ludus.kernels.verify.problem import KernelProblem
from ludus.kernels.verify.result import Verified, VerifyStatus
from ludus.kernels.verify.verifier import KernelVerifier
from ludus.tasks.kernels.generated import KINDS, read_generated

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


def task_of(kind: str, title: str) -> Task:
    """The first generated problem of a kind with this in its title."""
    tasks = read_generated(200, kinds=[kind])  # type: ignore[list-item]
    return next(task for task in tasks if re.search(title, task.data["name"]))


async def verified(verifier: KernelVerifier, task: Task, text: str) -> Verified:
    source = expand(text, shapes_of(task))
    return await verifier.verify(source, KernelProblem.of(task), seed=3)


@pytest.mark.parametrize("kind", KINDS)
async def test_every_kernel_of_the_expert_passes(verifier: KernelVerifier, kind: str) -> None:
    templates = set()
    for task in read_generated(12, kinds=[kind]):  # type: ignore[list-item]
        for seed in range(2):
            text = expert_kernel(task, seed)
            templates.add(text.split()[0])
            found = await verified(verifier, task, text)
            assert found.ok, f"{task.id}: {found.status}: {found.message}\n{text}"
    assert templates <= {"thread", "warp", "block", "tile"}


ROWS = "block 128 for i < out0\nv = sum from 0 for p < a1: square(a[i, p])\nout[i] = sqrt(v)"
CONVOLUTION = (
    "thread 64 for i < out0, j < out1, k < out2, l < out3\n"
    "v = sum from 0 for p < w1, q < w2, r < w3: "
    "pad(x[i, p, 2 * k + q - 1, 2 * l + r - 1]) * w[j, p, q, r]\n"
    "out[i, j, k, l] = v"
)
MATMUL = (
    "tile 16 for i < out0, j < out1\n"
    "v = sum from 0 for p < a1: a[i, p] * b[p, j]\n"
    "out[i, j] = gelu(v + c[j])"
)
SOFTMAX = (
    "warp 64 for i < out0\n"
    "v = max from -inf for p < a1: NUMBER * a[i, p]\n"
    "u = sum from 0 for p < a1: exp(NUMBER * a[i, p] - v)\n"
    "for p < a1: out[i, p] = exp(NUMBER * a[i, p] - v) / u * a1"
)
PROBLEMS = {
    "rows": ("reduction", "L2 norm of each row", ROWS),
    "convolution": ("convolution", "2 dimensions, stride=2, padding=1", CONVOLUTION),
    "matmul": ("fused", "^gelu of a by b plus c", MATMUL),
    "softmax": ("fused", "softmax", SOFTMAX),
}
WRONG = {
    "operator": ("rows", "sum", "max"),
    "start": ("rows", "from 0", "from 1"),
    "bound too small": ("rows", "p < a1", "p < a1 - 1"),
    "bound too large": ("rows", "p < a1", "p < a1 + 1"),
    "index": ("rows", "a[i, p]", "a[p, i]"),
    "function": ("rows", "square(a[i, p])", "abs(a[i, p])"),
    "no epilogue": ("rows", "sqrt(v)", "v"),
    "block that is no power of two": ("rows", "128", "96"),
    "outer bound too small": ("rows", "i < out0", "i < out0 - 1"),
    "outer bound too large": ("rows", "i < out0", "i < out0 + 1"),
    "stride": ("convolution", "2 * k", "k"),
    "padding": ("convolution", "q - 1", "q"),
    "no padding": ("convolution", "pad(x[i, p, 2 * k + q - 1, 2 * l + r - 1])", "x[i, p, 2 * k + q - 1, 2 * l + r - 1]"),
    "kernel size": ("convolution", "r < w3", "r < w3 - 1"),
    "transposed factor": ("matmul", "b[p, j]", "b[j, p]"),
    "no bias": ("matmul", "gelu(v + c[j])", "gelu(v)"),
    "bias of the rows": ("matmul", "c[j]", "c[i]"),
    "no scale": ("softmax", " / u * a1", " / u"),
    "no sum": ("softmax", " / u * a1", " * a1"),
    "lanes that are absent": ("softmax", "64", "48"),
}  # fmt: skip


def written(name: str) -> tuple[Task, str]:
    """A problem and a right kernel of it."""
    kind, title, text = PROBLEMS[name]
    task = task_of(kind, title)
    number = re.search(r"of (\d\.\d) times a", task.data["name"])
    return task, text.replace("NUMBER", number[1] if number else "1")


@pytest.mark.parametrize("name", PROBLEMS)
async def test_the_right_fields_pass(verifier: KernelVerifier, name: str) -> None:
    found = await verified(verifier, *written(name))
    assert found.ok, found.message


@pytest.mark.parametrize("fault", WRONG)
async def test_a_wrong_field_has_wrong_values(verifier: KernelVerifier, fault: str) -> None:
    name, right, wrong = WRONG[fault]
    task, text = written(name)
    assert right in text
    found = await verified(verifier, task, text.replace(right, wrong))
    assert found.status in (VerifyStatus.WRONG, VerifyStatus.CRASHED), f"{fault}: {found.message}"


@pytest.mark.parametrize(
    ("name", "right", "text"),
    [("rows", "block 128", "block 2048"), ("matmul", "tile 16", "tile 64"), ("rows", "block 128", "block 0")],
)  # fmt: skip
async def test_a_block_that_no_device_has_is_a_bad_launch(
    verifier: KernelVerifier, name: str, right: str, text: str
) -> None:
    task, kernel = written(name)
    found = await verified(verifier, task, kernel.replace(right, text))
    assert found.status is VerifyStatus.BAD_LAUNCH, found.message


async def test_kernels_that_share_their_code_are_compiled_and_built_once(
    verifier: KernelVerifier,
) -> None:
    first, second = read_generated(2, kinds=["transpose"], first_seed=1)[0], None
    text = "thread 64 for i < out0, j < out1\nout[i, j] = a[j, i]"
    second = task_of("transpose", "^transpose of a$")
    assert first.data["name"] == second.data["name"]
    assert (await verified(verifier, first, text)).ok
    found = await verified(verifier, second, text.replace("64", "256"))
    assert found.ok
    assert found.seconds["build"] == 0.0
