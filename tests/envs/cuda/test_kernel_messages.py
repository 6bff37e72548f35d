"""The kernel in a message, and what its author is told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ludus.envs.cuda.languages import CudaSource, SourceError
from ludus.envs.cuda.messages import MAX_LINES, MAX_TEXT, kernel_of, message_of, report
from ludus.kernels.analysis.findings import Finding
from ludus.kernels.diagnostics import Diagnostic
from ludus.kernels.result import Compiled, CompileStatus
from ludus.kernels.verify.result import Speedups, Verified, VerifyStatus

CUDA = CudaSource()
KERNEL = "// launch: k<<<1, 32>>>(a, out)\n__global__ void k(const float *a, float *out) {}\n"


@pytest.mark.parametrize(
    "message",
    [
        KERNEL,
        f"```cuda\n{KERNEL}```",
        f"Here it is.\n\n```cpp\n{KERNEL}```\nIt is fast.",
        f"```\n{KERNEL}```",
        f"```CUDA title\n{KERNEL}```",
        f"```cuda\n{KERNEL}",  # not closed: the turn reached its limit
        f"```cuda\nint first;\n```\nBetter:\n```cuda\n{KERNEL}```",
        f"```cuda\n{KERNEL}```\n```python\nprint(1)\n```",
        f"```cuda\n{KERNEL}```\n```cuda\n\n```",
        f"```cuda\n{KERNEL}```\n```\nIt is just fast.\n```",
    ],
)
def test_the_last_block_of_the_language_is_the_kernel(message: str) -> None:
    assert kernel_of(message, CUDA) == KERNEL


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("", "no kernel"),
        ("I would use shared memory.", "no kernel: write it in a block ```cuda"),
        ("```python\nprint(1)\n```", "the code block is python"),
        ("```\n\n```", "the code block is empty"),
        ("go " * 350_000, "1,050,000 characters"),
    ],
)
def test_a_message_without_a_kernel_is_answered(message: str, told: str) -> None:
    with pytest.raises(SourceError, match=told):
        kernel_of(message, CUDA)


def test_a_message_of_many_fences_is_read_at_once() -> None:
    assert kernel_of("```cuda\nint x;\n```\n" * 9000, CUDA) == "int x;\n"


def test_the_experts_message_is_read_back() -> None:
    assert kernel_of(message_of(KERNEL, CUDA), CUDA) == KERNEL


def test_findings_are_short_and_few() -> None:
    errors = tuple(
        Diagnostic("error", f"identifier {'x' * 900} is undefined", line, 1)
        for line in range(1, 40)
    )
    compiled = Compiled(CompileStatus.ERROR, "sm_90", "NVRTC", errors)
    found = Verified(VerifyStatus.COMPILE_ERROR, "line 1: no", compiled=compiled)
    lines = report(found).splitlines()
    assert lines[0] == "compile_error: line 1: no"
    assert len(lines) == 1 + MAX_LINES + 1
    assert lines[-1] == f"- and {38 - MAX_LINES} more"
    assert max(map(len, lines)) <= MAX_TEXT + 2
    findings = (
        Finding(3, 1, "uncoalesced", "far apart"),
        Finding(3, 9, "uncoalesced", "far apart"),
    )
    text = report(Verified(VerifyStatus.WRONG, "trial 1 of 6: no", findings=findings))
    assert text.count("uncoalesced") == 1
    assert "line 3: uncoalesced: far apart; let threadIdx.x" in text


def test_a_speed_is_told_where_there_is_one() -> None:
    speedups = Speedups(kernel_s=1e-4, eager_s=2e-4, compiled_s=None, bandwidth=1e9)
    text = report(Verified(VerifyStatus.PASSED, "right", speedups=speedups))
    assert "speed-up 2.00 over eager PyTorch (100.0 us)" in text
    assert "torch.compile" not in text
    told = replace(speedups, bandwidth_share=0.4213, throughput=1.5e12)
    text = report(Verified(VerifyStatus.PASSED, "right", speedups=told))
    assert "(100.0 us, 42% of the memory's bandwidth, 1,500 Gflop/s)" in text
    assert "speed-up" not in report(Verified(VerifyStatus.PASSED, "right"))
