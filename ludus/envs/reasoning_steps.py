"""Steps that the expert of `reasoning` writes out before its answer, in a form that a small model
learns: each token follows from a few earlier ones.

    chain_sum         57 + 87 + 70     75 + 78 = 441        digits from the last to the first, as
                                       441 + 07 = 412       carries go
    letter_counting   "h" in a text    h1undred th2ousand   the text, with the count at each match
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any


def chain_sum(known: Mapping[str, Any]) -> str:
    """The running totals, their digits reversed and a minus behind them."""
    first, *terms = re.findall(r"[+-] \d+|\d+", known["expression"])
    total, lines = int(first), []
    for term in terms:
        before, total = total, total + int(term.replace(" ", ""))
        lines.append(f"{_reversed(before)} {term[0]} {term[:1:-1]} = {_reversed(total)}")
    return "\n".join(lines)


def letter_counting(known: Mapping[str, Any]) -> str:
    """The text, with the count so far behind each match."""
    count, written = 0, []
    for letter in " ".join(known["span"]):
        written.append(letter)
        if letter.lower() == known["target_letter"]:
            count += 1
            written.append(str(count))
    return "".join(written)


def _reversed(number: int) -> str:
    return str(abs(number))[::-1] + ("-" if number < 0 else "")


STEPS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "chain_sum": chain_sum,
    "letter_counting": letter_counting,
}
"""Writers of the steps, by data set; each receives the metadata of a task."""
