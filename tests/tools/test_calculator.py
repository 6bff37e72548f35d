"""The calculator: exact arithmetic, bounded size, nothing executed."""

from __future__ import annotations

import pytest

from ludus.core.types import ToolCall
from ludus.tools.toolbox import Toolbox


async def calculate(expression: str) -> tuple[str, bool]:
    async with await Toolbox.open(["calculator"]) as toolbox:
        call = ToolCall(name="calculator", arguments={"expression": expression})
        (result,) = await toolbox.call([call], "e")
    return result.content, result.failed


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * 4", "14"),
        ("(2 + 3) * 4", "20"),
        ("-2**2", "-4"),
        ("2^10", "1024"),
        ("0.1 + 0.2", "0.3"),
        ("1/3 + 1/6", "0.5"),
        ("1/3", "1/3 = 0.3333333333333333"),
        ("7 // 2", "3"),
        ("-7 % 3", "2"),
        ("2**-2", "0.25"),
        ("10**300 + 1 - 10**300", "1"),
        ("sqrt(16)", "4"),
        ("sqrt(2)", "1.4142135623730951"),
        ("sqrt(1/4)", "0.5"),
        ("8**(1/3)", "2"),
        ("factorial(20) / factorial(18)", "380"),
        ("comb(52, 5)", "2598960"),
        ("gcd(12, 18) + lcm(4, 6)", "18"),
        ("round(2.675, 2)", "2.68"),
        ("max(1, 2.5, -3)", "2.5"),
        ("sin(0) + cos(0)", "1"),
        ("log(8, 2)", "3"),
        ("3 × 4 ÷ 2 − 1", "5"),
        ("1" * 1000, "1" * 1000),
        ("2**-2000 * 2**-2000 * 2**4000", "1"),
        ("10**900 / 3", f"{10**900}/3"),
        ("3**-900", f"1/{3**900}"),
    ],
)
async def test_values(expression: str, value: str) -> None:
    assert await calculate(expression) == (value, False)


@pytest.mark.parametrize(
    ("expression", "told"),
    [
        ("9**9**9**9", "which is not computed"),
        ("9**9**9", "which is not computed"),
        ("2.5**(10**9)", "which is not computed"),
        ("factorial(10**9)", "is more than 500"),
        ("comb(10**9, 5*10**8)", "is more than 2000"),
        ("1e999999", "not a finite real number"),
        ("exp(10000)", "math range error"),
        ("-" * 150 + "1", "nested more than"),
        ("-" * 1900 + "1", "calculator: n"),
        ("(" * 1900, "not an arithmetic expression"),
        ("f(" * 90 + ")" * 90, "there is no 'f'"),
        ("1+" * 999 + "1", "nested more than"),
        ("1" * 3000, "at most 2000 are read"),
        ("1 / 0", "division by zero"),
        ("1 // 0", "division by zero"),
        ("0**-1", "division by zero"),
        ("sqrt(-1)", "sqrt: of a negative number"),
        ("(-8)**(1/3)", "a negative number to a power that is not whole"),
        ("log(0)", "log: "),
        ("0**-0.5", "calculator: "),
        ("factorial(1.5)", "1.5 is not a whole number"),
        ("2 +", "not an arithmetic expression (invalid syntax)"),
        ("", "not an arithmetic expression"),
        ("x + 1", "there is no 'x'; known: "),
        ("__import__('os').system('true')", "not arithmetic"),
        ("open('/etc/passwd')", "there is no 'open'"),
        ("(1).__class__", "not arithmetic"),
        ("[1, 2]", "not arithmetic"),
        ("a" + ".b" * 990, "not arithmetic: 'Attribute'"),
        ("'a' * 10**9", "not arithmetic"),
        ("True + 1", "not arithmetic"),
        ("2j", "not arithmetic"),
        ("sqrt(1, 2)", "sqrt takes 1 arguments, not 2"),
        ("\x00", "not an arithmetic expression"),
    ],
)
async def test_refused(expression: str, told: str) -> None:
    content, failed = await calculate(expression)
    assert failed
    assert told in content
