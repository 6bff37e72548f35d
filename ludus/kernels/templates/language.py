"""Reads the template language.

    block 128 for i < out0
    v = sum from 0 for j < a1: square(a[i, j])
    out[i] = sqrt(v)

    kernel      header, up to 4 reductions, output; a line each
    header      TEMPLATE SIZE [for LOOPS]            template: thread, warp, block or tile
    reduction   NAME = OPERATOR from NUMBER for LOOPS: VALUE    operator: sum, product, max, min
    output      [for LOOPS:] out[INDEX, ...] = VALUE
    loops       i < BOUND, j < BOUND, ...            from 0, in steps of 1, the last one fastest

A bound and an index are whole: loop variables, sizes (`a0` is a.shape[0]), numbers, `+ - * / %`. A
value is a float: tensors' elements, numbers, reductions, sizes, loop variables, `+ - * /`, and
functions. `pad(x[i, j])` is 0 outside of x. A reduction in parentheses, or as an argument, is a
loop of its own in each thread.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ludus.core.errors import DataError, did_you_mean

TEMPLATES = ("thread", "warp", "block", "tile")
OPERATORS = ("sum", "product", "max", "min")
FUNCTIONS = {
    "relu": 1, "sigmoid": 1, "tanh": 1, "gelu": 1, "silu": 1, "abs": 1, "square": 1, "softplus": 1,
    "sqrt": 1, "rsqrt": 1, "exp": 1, "log": 1, "max": 2, "min": 2,
}  # fmt: skip
"""Number of arguments."""
MAX_TEXT, MAX_DEPTH, MAX_LOOPS, MAX_REDUCTIONS, MAX_DIGITS = 2000, 20, 8, 4, 6
OUT = "out"

MAX_NUMBER = 3e38  # of a float
_TOKEN = re.compile(r"(\d+(?:\.\d+)?(?:e-?\d+)?)|([A-Za-z_]\w*)|([-+*/%(),:<=\[\]])")


@dataclass(frozen=True, slots=True)
class Place:
    """Line and column, from 1."""

    line: int
    column: int

    def error(self, text: str) -> DataError:
        return DataError(f"line {self.line}, column {self.column}: {text}")


@dataclass(frozen=True, slots=True)
class Number:
    """A number as it is written, or `inf`."""

    text: str
    place: Place


@dataclass(frozen=True, slots=True)
class Name:
    """A loop variable, a size, or the result of a reduction."""

    name: str
    place: Place


@dataclass(frozen=True, slots=True)
class Element:
    """An element of a tensor; `padded`: 0 outside of it."""

    tensor: str
    indices: tuple[Expression, ...]
    padded: bool
    place: Place


@dataclass(frozen=True, slots=True)
class Call:
    """A function of values."""

    function: str
    arguments: tuple[Expression, ...]
    place: Place


@dataclass(frozen=True, slots=True)
class Binary:
    """An operation of two; a negative value is `0 - value`."""

    operator: str
    left: Expression
    right: Expression
    place: Place


@dataclass(frozen=True, slots=True)
class Loop:
    """A variable from 0 to below its bound."""

    name: str
    bound: Expression
    place: Place


@dataclass(frozen=True, slots=True)
class Reduction:
    """All values of the loops, joined. `start` is where each thread starts."""

    operator: str
    start: str
    loops: tuple[Loop, ...]
    value: Expression
    place: Place


Expression = Number | Name | Element | Call | Binary | Reduction


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel of the template language."""

    template: str
    size: int
    loops: tuple[Loop, ...]
    reductions: tuple[tuple[str, Reduction], ...]
    output: Element
    output_loops: tuple[Loop, ...]
    value: Expression


def read_kernel(text: str) -> Kernel:
    """Read a kernel. Names and ranks of tensors are checked by `expand`.

    Errors: DataError with line, column, what is wrong, and what would be right.
    """
    if len(text) > MAX_TEXT:
        raise DataError(f"the kernel has {len(text):,} characters; {MAX_TEXT:,} are read at most")
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if len(lines) < 2:
        raise Place(1, 1).error(
            "a kernel has a line such as `thread 128 for i < out0`, and one for out"
        )
    if len(lines) > MAX_REDUCTIONS + 2:
        raise Place(lines[-1][0], 1).error(f"a kernel has {MAX_REDUCTIONS + 2} lines at most")
    template, size, loops = _Line(*lines[0]).header()
    reductions = tuple(_Line(*line).reduction_line() for line in lines[1:-1])
    output_loops, output, value = _Line(*lines[-1]).output()
    return Kernel(template, size, loops, reductions, output, output_loops, value)


class _Line:
    """The tokens of a line, read from left to right."""

    def __init__(self, number: int, text: str) -> None:
        self._number, self._at, self._depth = number, 0, 0
        self._tokens: list[tuple[str, int]] = []
        column = 0
        while column < len(text):
            if text[column].isspace():
                column += 1
                continue
            match = _TOKEN.match(text, column)
            if match is None or not match[0].isascii():
                raise Place(number, column + 1).error(
                    f"{text[column]!r} is no sign of the language"
                )
            self._tokens.append((match[0], column + 1))
            column = match.end()
        self._end = len(text) + 1

    # Tokens

    @property
    def _next(self) -> str:
        return self._tokens[self._at][0] if self._at < len(self._tokens) else ""

    @property
    def _place(self) -> Place:
        at = self._tokens[self._at][1] if self._at < len(self._tokens) else self._end
        return Place(self._number, at)

    def _take(self) -> str:
        token = self._next
        self._at += 1
        return token

    def _expect(self, *tokens: str) -> None:
        for token in tokens:
            if self._next != token:
                found = f"not {self._next!r}" if self._next else "not the end of the line"
                raise self._place.error(f"here stands {token!r}, {found}")
            self._at += 1

    def _one_of(self, choices: Sequence[str], what: str) -> str:
        if self._next not in choices:
            found = repr(self._next) if self._next else "the end of the line"
            hint = did_you_mean(self._next, choices)
            raise self._place.error(f"{found} is no {what}{hint}: {', '.join(choices)}")
        return self._take()

    def _identifier(self, what: str) -> str:
        if not self._next.isidentifier():
            raise self._place.error(
                f"here stands {what}, not {self._next or 'the end of the line'!r}"
            )
        return self._take()

    def _whole(self, what: str) -> str:
        if not (self._next.isdecimal() and len(self._next) <= MAX_DIGITS):
            found = self._next or "the end of the line"
            raise self._place.error(
                f"{what} is a whole number of {MAX_DIGITS} digits at most, not {found!r}"
            )
        return self._take()

    def _ended(self) -> None:
        if self._next:
            raise self._place.error(f"{self._next!r} is one too many: the line ends before it")

    # Lines

    def header(self) -> tuple[str, int, tuple[Loop, ...]]:
        template = self._one_of(TEMPLATES, "template")
        size = int(self._whole("the size"))
        loops: tuple[Loop, ...] = ()
        if self._next:
            self._expect("for")
            loops = self._loops()
        self._ended()
        return template, size, loops

    def reduction_line(self) -> tuple[str, Reduction]:
        name = self._identifier("the name of a reduction")
        if name == OUT:
            raise Place(self._number, 1).error("the line of out is the last one")
        self._expect("=")
        found = self._reduction()
        self._ended()
        return name, found

    def output(self) -> tuple[tuple[Loop, ...], Element, Expression]:
        loops: tuple[Loop, ...] = ()
        if self._next == "for":
            self._take()
            loops = self._loops()
            self._expect(":")
        place = self._place
        self._expect(OUT)
        output = Element(OUT, self._indices(), False, place)
        self._expect("=")
        value = self._sum()
        self._ended()
        return loops, output, value

    def _loops(self) -> tuple[Loop, ...]:
        loops: list[Loop] = []
        while not loops or self._next == ",":
            if loops:
                self._take()
            place = self._place
            name = self._identifier("a loop variable")
            self._expect("<")
            loops.append(Loop(name, self._sum(), place))
            if len(loops) > MAX_LOOPS:
                raise place.error(f"{MAX_LOOPS} loops are possible at most")
        return tuple(loops)

    def _reduction(self) -> Reduction:
        place = self._place
        operator = self._one_of(OPERATORS, "operator of a reduction")
        self._expect("from")
        sign = self._take() if self._next == "-" else ""
        start = sign + self._number_text()
        self._expect("for")
        loops = self._loops()
        self._expect(":")
        return Reduction(operator, start, loops, self._sum(), place)

    # Expressions

    def _sum(self) -> Expression:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._place.error("the expression is nested too deep")
        if self._next in OPERATORS and self._following == "from":
            return self._closed(self._reduction())
        left = self._product()
        while self._next in ("+", "-"):
            place, operator = self._place, self._take()
            left = Binary(operator, left, self._product(), place)
        return self._closed(left)

    def _closed(self, found: Expression) -> Expression:
        self._depth -= 1
        return found

    @property
    def _following(self) -> str:
        return self._tokens[self._at + 1][0] if self._at + 1 < len(self._tokens) else ""

    def _product(self) -> Expression:
        left = self._factor()
        while self._next in ("*", "/", "%"):
            place, operator = self._place, self._take()
            left = Binary(operator, left, self._factor(), place)
        return left

    def _factor(self) -> Expression:
        place = self._place
        if self._next == "-":
            self._take()
            self._depth += 1
            if self._depth > MAX_DEPTH:
                raise place.error("the expression is nested too deep")
            return self._closed(Binary("-", Number("0", place), self._factor(), place))
        if self._next == "(":
            self._take()
            found = self._sum()
            self._expect(")")
            return found
        if self._next == "inf" or self._next[:1].isdecimal():
            return Number(self._number_text(), place)
        name = self._identifier("a value")
        if self._next == "[":
            return Element(name, self._indices(), False, place)
        if self._next == "(":
            return self._call(name, place)
        return Name(name, place)

    def _number_text(self) -> str:
        if not (self._next == "inf" or self._next[:1].isdecimal()):
            raise self._place.error(
                f"here stands a number, not {self._next or 'the end of the line'!r}"
            )
        if self._next != "inf" and float(self._next) > MAX_NUMBER:
            raise self._place.error(f"a number is at most {MAX_NUMBER:g}, or inf")
        return self._take()

    def _indices(self) -> tuple[Expression, ...]:
        self._expect("[")
        indices = [self._sum()]
        while self._next == ",":
            self._take()
            indices.append(self._sum())
        self._expect("]")
        return tuple(indices)

    def _call(self, name: str, place: Place) -> Expression:
        self._take()
        arguments = [self._sum()]
        while self._next == ",":
            self._take()
            arguments.append(self._sum())
        self._expect(")")
        if name == "pad":
            if len(arguments) != 1 or not isinstance(first := arguments[0], Element):
                raise place.error("pad has one element, as in pad(x[i, j])")
            return Element(first.tensor, first.indices, True, first.place)
        if name not in FUNCTIONS:
            hint = did_you_mean(name, FUNCTIONS)
            raise place.error(f"{name!r} is no function{hint}: {', '.join([*FUNCTIONS, 'pad'])}")
        if len(arguments) != FUNCTIONS[name]:
            raise place.error(f"{name} has {FUNCTIONS[name]} arguments, not {len(arguments)}")
        return Call(name, tuple(arguments), place)
