"""Worker process of votes: groups answers into classes of equal mathematics, with math-verify."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

from ludus.judges.workers.equality import fast_verdict, is_small, read_integer
from ludus.judges.workers.math import plain_number, same_small_number
from ludus.judges.workers.pool import Record, restart_limit, serve

TOTAL = 4.0
"""CPU time of a request, as a multiple of a step's."""


def prepare() -> Callable[[Record], Iterator[Record]]:
    """Import math-verify; returns the function that groups."""
    import math_verify

    logging.disable()
    latex = math_verify.LatexExtractionConfig(boxed_match_priority=0)
    kinds = [latex, math_verify.ExprExtractionConfig()]
    zero = math_verify.parse("$0$", kinds, parsing_timeout=None)

    def parse(text: str, boxed: bool) -> list[Any]:
        if boxed and (integer := read_integer(text)) is not None:
            return integer
        source = f"\\boxed{{{plain_number(text)}}}" if boxed else text
        found = list(math_verify.parse(source, kinds, parsing_timeout=None))
        if not is_small(found):
            math_verify.verify(found, zero, timeout_seconds=None)  # one without end stops here
        return found

    def equal(a: list[Any], b: list[Any], digits: int) -> bool:
        if (found := fast_verdict(a, b)) is not None:
            return found
        options = {"float_rounding": digits, "timeout_seconds": None}
        return any(
            math_verify.verify(*pair, **options) and same_small_number(*pair, digits)
            for pair in ((a, b), (b, a))
        )

    def text_of(answer: list[Any]) -> str:
        """The text that math-verify read; it stands beside what became of it."""
        return next((part for part in reversed(answer) if isinstance(part, str)), str(answer[0]))

    def group(request: Record) -> Iterator[Record]:
        """Yields the step that begins, `[i]` or `[i, j]`, and what it found.

        Steps that ended an earlier worker are in `ended`: such an answer is unread, such a pair
        unequal. Each step has the limit of CPU time; all have TOTAL times as much.
        """
        ended = {tuple(step) for step in request["ended"]}
        end = time.process_time() + TOTAL * request["limit_s"]
        firsts: list[tuple[int, list[Any]]] = []

        def class_of(index: int, answer: list[Any]) -> Iterator[Record]:
            for number, (first, other) in enumerate(firsts):
                if (first, index) in ended:
                    continue
                if time.process_time() > end:
                    return
                restart_limit()
                yield {"step": [first, index]}
                if equal(other, answer, request["digits"]):
                    yield {"answer": index, "class": number, "text": text_of(answer)}
                    return
            firsts.append((index, answer))
            yield {"answer": index, "class": len(firsts) - 1, "text": text_of(answer)}

        for index, (text, boxed) in enumerate(request["answers"]):
            if (index,) in ended or time.process_time() > end:
                continue
            restart_limit()
            yield {"step": [index]}
            if answer := parse(text, boxed):
                yield from class_of(index, answer)

    request = {"answers": [("1/2", True), ("0.5", True)], "ended": [], "digits": 6, "limit_s": 60}
    list(group(request))
    return group


if __name__ == "__main__":
    serve(prepare)
