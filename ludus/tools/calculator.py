"""A calculator: one arithmetic expression in, its value out.

Expressions are Python's, read by its parser and evaluated here; nothing is executed. Whole numbers
and fractions are exact: `1/3 + 1/6` is `1/2`. The size of every number is bounded before it is
computed, so `9**9**9**9` is refused and not tried.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Annotated

from pydantic import Field

from ludus.core.sources import parse_expression
from ludus.tools.base import ToolResult

MAX_CHARS = 2_000
MAX_DEPTH = 100
MAX_BITS = 4_096
"""Bits of a number, or of a fraction's numerator or denominator: about 1,200 digits."""

Number = Fraction | float


class Refused(ValueError):
    """An expression that is not evaluated; the message is for the model."""


def calculator(
    expression: Annotated[
        str, Field(description="For example `(3 + 4) * 2`, `2**10 % 7`, `sqrt(2) * pi`.")
    ],
) -> ToolResult:
    """Compute the value of an arithmetic expression.

    Operators: + - * / // % ** and brackets. Functions: abs, ceil, comb, cos, exp, factorial,
    floor, gcd, lcm, log, log10, log2, max, min, perm, round, sin, sqrt, tan and more. Constants:
    pi, e, tau.
    """
    try:
        return ToolResult(content=_shown(evaluate(expression)))
    except ZeroDivisionError:
        return ToolResult(content="calculator: division by zero", failed=True)
    except (ValueError, OverflowError) as error:
        return ToolResult(content=f"calculator: {error}", failed=True)


def evaluate(expression: str) -> Number:
    """The value of an expression; exact where it can be.

    Errors: Refused, ZeroDivisionError, OverflowError.
    """
    text = expression.strip().replace("^", "**").replace("×", "*").replace("÷", "/")
    text = text.replace("−", "-")
    if len(text) > MAX_CHARS:
        raise Refused(f"the expression has {len(text)} characters; at most {MAX_CHARS} are read")
    try:
        node = parse_expression(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError, SystemError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else type(error).__name__
        raise Refused(f"not an arithmetic expression ({reason}): {text[:80]!r}") from None
    return _value(node, 0)


def _value(node: ast.expr, depth: int) -> Number:
    if depth > MAX_DEPTH:
        raise Refused(f"nested more than {MAX_DEPTH} deep")
    match node:
        case ast.Constant(value=bool()):
            pass
        case ast.Constant(value=int(value)):
            return _bounded(Fraction(value))
        case ast.Constant(value=float(value)):
            source = Fraction(str(value)) if math.isfinite(value) else value
            return _bounded(source) if _exact(source) else _bounded(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, depth + 1)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand, depth + 1)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            operands = _value(left, depth + 1), _value(right, depth + 1)
            return _bounded(OPERATORS[type(op)](*operands))
        case ast.Name(id=name) if name in CONSTANTS:
            return CONSTANTS[name]
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS:
            least, most, function = FUNCTIONS[name]
            if not least <= len(args) <= most:
                wanted = f"{least}" if least == most else f"{least} to {most}"
                raise Refused(f"{name} takes {wanted} arguments, not {len(args)}")
            try:
                return _bounded(function(*(_value(arg, depth + 1) for arg in args)))
            except (Refused, ZeroDivisionError, OverflowError):
                raise
            except (TypeError, ValueError) as error:
                raise Refused(f"{name}: {error}") from None
        case ast.Name(id=name) | ast.Call(func=ast.Name(id=name)):
            known = ", ".join(sorted([*FUNCTIONS, *CONSTANTS]))
            raise Refused(f"there is no {name!r:.40}; known: {known}")
    try:
        shown = ast.unparse(node)[:80]
    except RecursionError:
        shown = type(node).__name__
    raise Refused(f"not arithmetic: {shown!r}")


def _bounded(value: Number) -> Number:
    if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
        raise Refused("the value is not a finite real number")
    if (
        isinstance(value, Fraction)
        and max(_bits(value.numerator), _bits(value.denominator)) > MAX_BITS
    ):
        raise Refused(f"a number of more than {MAX_BITS} bits, which is not computed")
    return value


def _bits(value: int) -> int:
    return value.bit_length()


def _exact(value: object) -> bool:
    return isinstance(value, Fraction) and _bits(value.denominator) <= MAX_BITS


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(exponent, Fraction) and exponent.denominator == 1:
        if isinstance(base, Fraction):
            size = max(_bits(base.numerator), _bits(base.denominator))
            if abs(base) not in (0, 1) and size * abs(exponent) > MAX_BITS * 2:
                raise Refused(f"a power of more than {MAX_BITS} bits, which is not computed")
        power: Number = base ** int(exponent)
        return power
    if float(base) < 0:
        raise Refused("a negative number to a power that is not whole")
    return math.pow(float(base), float(exponent))


OPERATORS: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda left, right: Fraction(left // right),
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
CONSTANTS: dict[str, Number] = {"pi": math.pi, "e": math.e, "tau": math.tau}


def _whole(value: Number, limit: int | None = None) -> int:
    if value != int(value):
        raise ValueError(f"{_shown(value)} is not a whole number")
    if limit is not None and abs(int(value)) > limit:
        raise Refused(f"{_shown(value)} is more than {limit}, for which it is not computed")
    return int(value)


def _integers(function: Callable[..., int], limit: int | None = None) -> Callable[..., Number]:
    return lambda *values: Fraction(function(*(_whole(value, limit) for value in values)))


def _floats(function: Callable[..., float]) -> Callable[..., Number]:
    return lambda *values: function(*map(float, values))


def _sqrt(value: Number) -> Number:
    if value < 0:
        raise ValueError("of a negative number")
    if isinstance(value, Fraction):
        root = Fraction(math.isqrt(value.numerator), math.isqrt(value.denominator))
        if root * root == value:
            return root
    return math.sqrt(value)


def _round(value: Number, digits: Number = Fraction(0)) -> Number:
    return Fraction(round(Fraction(value), _whole(digits, 100)))


FUNCTIONS: dict[str, tuple[int, int, Callable[..., Number]]] = {
    "abs": (1, 1, abs),
    "ceil": (1, 1, lambda value: Fraction(math.ceil(value))),
    "floor": (1, 1, lambda value: Fraction(math.floor(value))),
    "round": (1, 2, _round),
    "min": (1, 100, lambda *values: min(values)),
    "max": (1, 100, lambda *values: max(values)),
    "gcd": (1, 100, _integers(math.gcd)),
    "lcm": (1, 100, _integers(math.lcm)),
    "factorial": (1, 1, _integers(math.factorial, 500)),
    "comb": (2, 2, _integers(math.comb, 2_000)),
    "perm": (1, 2, _integers(math.perm, 500)),
    "sqrt": (1, 1, _sqrt),
    **{
        name: (1, 1, _floats(getattr(math, name)))
        for name in (
            "exp", "log2", "log10", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh",
            "tanh", "degrees", "radians", "cbrt",
        )
    },
    "log": (1, 2, _floats(math.log)),
    "ln": (1, 1, _floats(math.log)),
    "atan2": (2, 2, _floats(math.atan2)),
    "hypot": (1, 100, _floats(math.hypot)),
}  # fmt: skip
"""Fewest and most arguments, and the function."""


def _shown(value: Number) -> str:
    """`6`, `1/3 = 0.3333333333333333`, `0.25`, `1.4142135623730951`."""
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
    if value.denominator == 1:
        return str(value.numerator)
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    try:
        near = repr(float(value))
    except OverflowError:
        near = "0.0"
    if near.strip("-") == "0.0":  # too large or too small for a float
        return str(value)
    return near if rest == 1 and Fraction(near) == value else f"{value} = {near}"
