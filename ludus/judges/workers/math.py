"""Worker process of the judge `math`: math-verify on one answer after the other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from decimal import Decimal
from functools import lru_cache
from typing import Any

from ludus.judges.base import last_boxed
from ludus.judges.workers.equality import fast_verdict, is_small, read_integer
from ludus.judges.workers.pool import Record, serve

TAIL = 4000
"""Characters at the end of a message in which an answer without a box is looked for."""

MAX_CHARACTERS = 10_000
"""Limit of an answer's length."""


def prepare() -> Callable[[Record], Iterable[Record]]:
    """Import math-verify; returns the function that compares.

    Its own time limits are off: they are signals to Python code, and do not end a long operation
    in C. The timer of `serve` does.
    """
    import math_verify

    logging.disable()
    latex = math_verify.LatexExtractionConfig(boxed_match_priority=0)
    kinds = [latex, math_verify.ExprExtractionConfig()]

    def parse(text: str) -> list[Any]:
        return list(math_verify.parse(text, kinds, parsing_timeout=None))

    @lru_cache(maxsize=256)
    def parse_gold(text: str) -> list[Any]:
        marked = any(mark in text for mark in ("$", "\\boxed", "\\(", "\\["))
        gold = parse(text if marked else f"\\boxed{{{text}}}")
        if not is_small(gold):
            math_verify.verify(gold, parse("$0$"), timeout_seconds=None)  # one without end stops
        return gold

    def equal(gold: list[Any], answer: list[Any], digits: int) -> bool:
        if (found := fast_verdict(gold, answer)) is not None:
            return found
        same = math_verify.verify(gold, answer, float_rounding=digits, timeout_seconds=None)
        return same and same_small_number(gold, answer, digits)

    def compare(request: Record) -> Iterable[Record]:
        golds = [parse_gold(text) for text in request["golds"]]
        unread = [text for text, gold in zip(request["golds"], golds, strict=True) if not gold]
        yield {"unread": unread}
        text, box = request["text"], last_boxed(request["text"])
        if box is not None:
            text = f"\\boxed{{{plain_number(box)}}}"
        elif request["extract"] == "boxed":
            text = ""
        else:
            text = text[-TAIL:]
        if len(text) > MAX_CHARACTERS:
            fault = f"{len(box or text):,} characters"
            yield {"answer": text[:80], "correct": False, "fault": fault}
            return
        answer = (read_integer(box or "") or parse(text)) if text.strip() else []
        correct = any(equal(gold, answer, request["digits"]) for gold in golds)
        shown = None if not answer else text[-200:] if box is None else box[:200]
        yield {"answer": shown, "correct": correct}

    list(compare({"golds": ["1/2"], "text": "\\boxed{0.5}", "extract": "boxed", "digits": 6}))
    return compare


def plain_number(answer: str) -> str:
    """A number such as 1e-05 with all its digits: LaTeX reads `e` as Euler's number."""
    try:
        number = Decimal(answer)
    except ArithmeticError:
        return answer
    small = number.is_finite() and abs(number.adjusted()) < 400
    return format(number, "f") if "e" in answer.lower() and small else answer


def same_small_number(gold: list[Any], answer: list[Any], digits: int) -> bool:
    """False for two numbers that agree only because the first has no digit but zeros where they are
    compared: 1.3e-9 and 2.6e-9. True for all else."""
    try:
        expected, given = float(gold[0]), float(answer[0])
    except (ArithmeticError, IndexError, TypeError, ValueError):
        return True
    if expected == 0 or abs(expected) >= 0.5 * 10.0**-digits:
        return True
    return abs(given - expected) <= 10.0**-digits * abs(expected)


if __name__ == "__main__":
    serve(prepare)
