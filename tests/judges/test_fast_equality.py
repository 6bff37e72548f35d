"""The fast comparison gives math-verify's verdicts."""

from __future__ import annotations

from itertools import combinations_with_replacement

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

math_verify = pytest.importorskip("math_verify", reason="needs math-verify: make setup")

from ludus.judges.workers.equality import (  # noqa: E402
    fast_verdict,
    is_small,
    read_integer,
)


def parse(text: str) -> list:
    kinds = [
        math_verify.LatexExtractionConfig(boxed_match_priority=0),
        math_verify.ExprExtractionConfig(),
    ]
    return list(math_verify.parse(f"\\boxed{{{text}}}", kinds, parsing_timeout=None))


def verdict(a: list, b: list) -> bool:
    return any(math_verify.verify(*pair, timeout_seconds=None) for pair in ((a, b), (b, a)))


ATOM = st.one_of(
    st.integers(0, 12).map(str),
    st.sampled_from(["x", "y", "n", "2x", "xy", "x^2", "x^{3}", "\\frac{1}{2}", "\\frac{x}{3}"]),
    st.sampled_from(["x/2", "0.5", "2^3", "x_1", "e", "i", "\\pi", "x^{-1}", "x^n", "\\sqrt{x}"]),
    st.integers(1, 3).map(lambda n: f"(x+{n})"),
    st.integers(1, 3).map(lambda n: f"3(y-{n})^2"),
)
EXPRESSION = st.lists(
    st.tuples(st.sampled_from([" + ", " - ", " \\cdot ", "*"]), ATOM), min_size=1, max_size=3
).map(
    lambda parts: "".join(sign + part for sign, part in parts).lstrip(" +*").removeprefix("\\cdot ")
)


@given(EXPRESSION, EXPRESSION)
@settings(deadline=None, max_examples=150)
def test_verdicts_are_those_of_math_verify(a, b):
    first, second = parse(a), parse(b)
    if (found := fast_verdict(first, second)) is not None:
        assert found == verdict(first, second), (a, b)


SAME = [
    ("x+1", "1 + x"),
    ("(x+1)^2", "x^2 + 2x + 1"),
    ("\\frac{1}{2}x + 0", "\\frac{1}{2}x"),
    ("x-x", "0"),
    ("-(1-x)", "x - 1"),
    ("7", "7"),
]
DIFFERENT = [("x+1", "x+2"), ("xy", "x+y"), ("x+1", "y+1"), ("2x", "2"), ("7", "8")]


@pytest.mark.parametrize(("a", "b"), SAME + DIFFERENT)
def test_polynomials_are_decided_here(a, b):
    assert fast_verdict(parse(a), parse(b)) is ((a, b) in SAME)
    assert verdict(parse(a), parse(b)) is ((a, b) in SAME)


CONSTANTS = [
    "\\sqrt{2}", "\\sqrt{8}", "2\\sqrt{2}", "2^{3/2}", "\\pi", "\\pi^2", "e", "3^{2^2}", "81",
    "1+\\sqrt{2}", "\\sqrt{2}+1", "\\frac{\\sqrt{3}}{2}", "1/3", "0.333", "3.14159", "10\\%",
    "0.1", "i", "\\sqrt{-1}", "5!", "\\infty", "x", "(1,2)", "10^{-5}", "\\sqrt{10^{-10}}",
]  # fmt: skip


def test_constants_far_apart_are_told_apart_as_by_math_verify():
    read = {text: parse(text) for text in CONSTANTS}
    decided = 0
    for a, b in combinations_with_replacement(CONSTANTS, 2):
        if (found := fast_verdict(read[a], read[b])) is not None:
            assert found == verdict(read[a], read[b]), (a, b)
            decided += 1
    assert decided > 100


LEFT = ["x", "yes", "0.5", "1/3", "x=5", "\\sqrt{2}", "(1,2)", "5\\%", "2^3", "\\frac{x}{2}"]


@pytest.mark.parametrize("text", LEFT)
def test_all_else_is_left_to_math_verify(text):
    assert fast_verdict(parse(text), parse(text)) is None


@pytest.mark.parametrize("text", ["0", "7", "-12", " 345 ", "999999999999999"])
def test_integers_are_read_as_math_verify_reads_them(text):
    assert read_integer(text) == parse(text)


@pytest.mark.parametrize(
    "text", ["007", "-0", "1.0", "1e3", "1,000", "9" * 16, "٣", "x", "", "7\n8"]
)
def test_other_texts_are_no_integers(text):
    assert read_integer(text) is None


@pytest.mark.parametrize("text", ["(a+b+c+d)^8", "((x+1)^8+1)^8 \\cdot (y+1)^8", "x^{99999}"])
def test_large_expansions_are_not_begun(text):
    found = parse(text)
    assert not is_small(found)
    assert fast_verdict(found, found) is None
