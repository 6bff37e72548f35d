"""Equality of small polynomials, integers and roots, without sympy's `simplify`.

math-verify simplifies the difference of two expressions, which takes some milliseconds. For
polynomials it is enough to expand it, and constants that differ do so in their first digits. The
verdicts are the same, which a test compares.
"""

from __future__ import annotations

import re
from typing import Any

MAX_TERMS = 200
"""Terms that the expansion of a polynomial may have."""

MAX_EXPONENT = 8
MAX_NUMERATOR = 10**15
MAX_DENOMINATOR = 1000
"""Coefficients that differ do so by more than math-verify's tolerance."""

MIN_GAP = 1e-3
"""Difference of constants; where it is smaller, math-verify decides."""

MAX_NODES = 50

_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,14}")


def read_integer(text: str) -> list[Any] | None:
    """An integer as math-verify reads it: its value and its text; None for all else."""
    import sympy

    text = text.strip()
    return [sympy.Integer(text), text] if _INTEGER.fullmatch(text) else None


def is_small(answer: list[Any]) -> bool:
    """Returns whether an answer, as math-verify has read it, is a small polynomial or number."""
    return _polynomial(answer) is not None


def fast_verdict(a: list[Any], b: list[Any]) -> bool | None:
    """Returns whether two answers are equal; None where math-verify has to decide."""
    first, second = _polynomial(a), _polynomial(b)
    if first is None or second is None:
        return False if _far_apart(a, b) else None
    symbols = first.free_symbols | second.free_symbols
    if not symbols and not (first.is_Integer and second.is_Integer):
        return None  # fractions may be equal by rounding
    if first == second or not symbols:
        return bool(first == second)
    return bool(_expanded(first, symbols) == _expanded(second, symbols))


def _polynomial(answer: list[Any]) -> Any:
    """The only expression of an answer, if it is a small polynomial; else None.

    A single symbol is none: math-verify compares words letter by letter.
    """
    if len(answer) != 2 or not isinstance(answer[1], str):
        return None
    expression = answer[0]
    if getattr(expression, "is_Symbol", True):
        return None
    return None if _num_terms(expression) > MAX_TERMS else expression


def _num_terms(expression: Any) -> int:
    """Upper bound of the terms of an expanded polynomial; MAX_TERMS + 1 for all else."""
    none = MAX_TERMS + 1
    if expression.is_Symbol:
        return 1
    if expression.is_Rational:
        small = abs(expression.p) <= MAX_NUMERATOR and expression.q <= MAX_DENOMINATOR
        return 1 if small else none
    if expression.is_Pow:
        base, exponent = expression.args
        if not (base.free_symbols and exponent.is_Integer and 0 <= exponent <= MAX_EXPONENT):
            return none
        return int(min(_num_terms(base) ** int(exponent), none))
    if expression.is_Add or expression.is_Mul:
        total = 0 if expression.is_Add else 1
        for part in expression.args:
            terms = _num_terms(part)
            total = total + terms if expression.is_Add else total * terms
            if total > MAX_TERMS:
                return none
        return total
    return none


def _expanded(expression: Any, symbols: Any) -> Any:
    import sympy

    return sympy.Poly(expression, *sorted(symbols, key=str), domain="QQ")


def _far_apart(a: list[Any], b: list[Any]) -> bool:
    """Returns whether two constants, such as roots, differ by more than rounding could."""
    first, second = _constant(a), _constant(b)
    if first is None or second is None:
        return False
    gap = (first - second).evalf(15)
    return bool(gap.is_number and abs(gap) > MIN_GAP)


def _constant(answer: list[Any]) -> Any:
    """The only expression of an answer, if it is built of integers, pi and e; else None."""
    if len(answer) != 2 or not isinstance(answer[1], str) or "%" in answer[1]:
        return None
    expression, left = answer[0], MAX_NODES
    parts = [expression]
    while parts and left:
        part, left = parts.pop(), left - 1
        if not hasattr(part, "is_NumberSymbol"):  # a matrix
            return None
        if part.is_Rational or part.is_NumberSymbol:
            continue
        if not (part.is_Add or part.is_Mul or part.is_Pow):
            return None
        parts += part.args
    return expression if left else None
