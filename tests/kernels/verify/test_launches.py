"""Launch lines: what they mean, and errors with line and remedy."""

from __future__ import annotations

import pytest

from ludus.core.errors import DataError
from ludus.kernels.launches import Buffer, read_launches
from ludus.kernels.verify.result import Speedups, Verified, VerifyStatus
from ludus.kernels.verify.scores import fast_p

SHAPES = {"a": (10, 30), "fc_weight": (4,), "out": (300,)}


def test_launches_in_order() -> None:
    plan = read_launches(
        "// scratch: tmp float[2 * n]\n"
        "// launch: first<<<dim3(a.shape[1], 2), (32, 4), 4 * 32>>>(a, tmp, n, -1.5f, 7 / 2)\n"
        "//launch: ns::second<8, float><<<(n + 255) / 256, min(256, a.numel)>>>(tmp, out);\n",
        SHAPES,
    )
    first, second = plan.launches
    assert plan.scratch == {"tmp": 2400}
    assert (first.grid, first.block, first.shared_bytes) == ((30, 2, 1), (32, 4, 1), 128)
    assert first.arguments == (Buffer("a"), Buffer("tmp"), 300, -1.5, 3)
    assert (second.name, second.grid, second.block) == ("second", (2, 1, 1), (256, 1, 1))
    assert second.line == 3


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("k<<<1, 32>>>(b)", "`b` is not known"),
        ("k<<<1, 32>>>(a, 1 << 3)", "operators are"),
        ("k<<<1, 32>>>(a.data)", "an argument is"),
        ("k<<<1, 32, 0, 2>>>(a)", "no stream"),
        ("k<<<0, 32>>>(a)", "grid's x is 1 to"),
        ("k<<<1, (64, 64)>>>(a)", "at most 1024 threads"),
        ("k<<<1.5, 32>>>(a)", "whole number"),
        ("k<<<a, 32>>>(a)", "is a buffer"),
        ("k<<<a.shape[2], 32>>>(a)", "2 dimensions"),
        ("k<<<1, 32>>>(2 ** 100000)", "operators are"),
        ("k<<<1 / 0, 32>>>(a)", "divides by zero"),
        ("k<<<1] + [2, 32>>>(a)", "is no list"),
        ("k<<<1, 32>>>(a] , [out)", "is no list"),
        ("k<<<1, 32>>>(x for x in a)", "is no list"),
        ("k<<<1, 32, 10000000>>>(a)", "shared memory"),
        ("k(1)", "has the form"),
        ("k<<<1, 32>>>(" + "(" * 300 + "1" + ")" * 300 + ")", "expression"),
        ("k<<<1, 32>>>(" + "-" * 300 + "1)", "nested"),
    ],
)
def test_errors(line: str, message: str) -> None:
    with pytest.raises(DataError, match=f"^line 2: .*{message}"):
        read_launches(f"\n// launch: {line}\n", SHAPES)


def test_a_missing_line_is_shown() -> None:
    source = 'extern "C" __global__ void __launch_bounds__(256) mine(float *a) {}'
    with pytest.raises(
        DataError, match=r"add one such as // launch: mine<<<.*\(a, fc_weight, out\)"
    ):
        read_launches(source, SHAPES)


def test_fast_p_is_strict() -> None:
    def timed(status: VerifyStatus, kernel_s: float | None) -> Verified:
        speed = None if kernel_s is None else Speedups(kernel_s, 2.0, None, 1.0)
        return Verified(status, "", speedups=speed)

    passed, wrong = VerifyStatus.PASSED, VerifyStatus.WRONG
    results = [timed(passed, 2.0), timed(passed, 1.0), timed(wrong, 0.5), timed(passed, None)]
    assert [fast_p(results, p) for p in (-1, 0, 0.99, 1, 2)] == [0.75, 0.5, 0.5, 0.25, 0]
    with pytest.raises(ValueError, match="at least one"):
        fast_p([], 1)
