"""Arithmetic and small algebra: problems to solve, and the language that they are written in.

    tier       question                                                     calculations
    sum        what is 12 + 7 - 30 ?                                        12 + 7 - 30
    product    what is 41 * 318 ?                                           41 * 318
    brackets   what is ( 12 + 7 ) * 3 ?                                     ( 12 + 7 ) * 3
    equation   solve 3 * x + 4 = 19 .                                       ( 19 - 4 ) / 3
    long       what is 12 + 7 - 30 + 4 + 118 ?                              12 + 7 - 30 + 4 + 118
    steps-2    let a = 12 * 7 . what is a + 30 ?                            12 * 7, 84 + 30
    steps-3    let a = 12 * 7 . let b = a + 30 . what is b * 2 ?            12 * 7, 84 + 30, 114 * 2

Each calculation of the tiers `steps-N` needs the result of the one before it. The expert makes one
call of the tool `calculator` for each. Numbers have one to four digits.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Annotated, ClassVar, NamedTuple

from pydantic import Field

from ludus.core.errors import ConfigError, EnvError
from ludus.core.sources import parse_expression
from ludus.core.types import NO_ENV, Message, Observation, StepResult, Task
from ludus.envs.base import Env, NoExpert
from ludus.judges.answer import parse_number

MAX_CHARS = 400
"""A longer question has no answer here."""

MAX_DIGITS = 12
"""A question with a longer number has no answer here."""

MAX_TRIES = 1000
"""Seeds in a row that may repeat a question."""

_SIDE = r"(?:[\d +*/()-]|\b[a-z]\b)+"
_LET = re.compile(rf"let ([a-z]) = ({_SIDE}) \. ")
_ASKED = re.compile(rf"what is ({_SIDE}) \?|solve ({_SIDE}) = ({_SIDE}) \.")
_INVERSE = {"+": "-", "-": "+"}
_LINEAR = re.compile(r"(\d+) \* x ([+-]) (\d+) = (\d+)")
_QUOTIENT = re.compile(r"x / (\d+) ([+-]) (\d+) = (\d+)")


class Linear(NamedTuple):
    """The value `slope * x + constant`."""

    slope: Fraction
    constant: Fraction


class Read(NamedTuple):
    """A question: the definitions of its letters in order, and what it asks for: one side
    (`what is`), or the two sides of an equation in x (`solve`)."""

    lets: list[tuple[str, str]]
    sides: tuple[str, ...]


def read(question: str) -> Read | None:
    """Returns the parts of a question; None where it is not of the language."""
    text = " ".join(question.split())
    if len(text) > MAX_CHARS or re.search(rf"\d{{{MAX_DIGITS + 1}}}", text):
        return None
    lets = []
    while found := _LET.match(text):
        lets.append((found[1], found[2]))
        text = text[found.end() :]
    asked = _ASKED.fullmatch(text)
    return Read(lets, tuple(side for side in asked.groups() if side)) if asked else None


def true_answer(question: str) -> Fraction | None:
    """Returns the answer of a question of the language; None for any other text, and where there
    is no single answer. For measurements only: nothing is trained with it."""
    if (parts := read(question)) is None:
        return None
    known = {"x": Linear(Fraction(1), Fraction(0))} if len(parts.sides) == 2 else {}
    try:
        for letter, side in parts.lets:
            known[letter] = _value(side, known)
        values = [_value(side, known) for side in parts.sides]
    except (ValueError, ZeroDivisionError):
        return None
    if len(values) == 1:
        return None if values[0].slope else values[0].constant
    slope = values[0].slope - values[1].slope
    return (values[1].constant - values[0].constant) / slope if slope else None


def calculations(question: str) -> list[str]:
    """Returns the expressions that the expert computes, one after another.

    Errors: ValueError for an equation of another form than the tier's, and for another text.
    """
    if (parts := read(question)) is None:
        raise ValueError(f"not a question of the language: {question!r:.80}")
    known: dict[str, Fraction] = {}
    done = []
    for letter, side in parts.lets:
        done.append(_substituted(side, known))
        known[letter] = _value(done[-1], {}).constant
    asked = " = ".join(_substituted(side, known) for side in parts.sides)
    if len(parts.sides) == 1:
        return [*done, asked]
    if linear := _LINEAR.fullmatch(asked):
        factor, sign, shift, right = linear.groups()
        return [*done, f"( {right} {_INVERSE[sign]} {shift} ) / {factor}"]
    if quotient := _QUOTIENT.fullmatch(asked):
        divisor, sign, shift, right = quotient.groups()
        return [*done, f"( {right} {_INVERSE[sign]} {shift} ) * {divisor}"]
    raise ValueError(f"an equation of another form: {question!r:.80}")


def _substituted(side: str, known: Mapping[str, Fraction]) -> str:
    return " ".join(str(known.get(word, word)) for word in side.split())


def _value(side: str, known: Mapping[str, Linear]) -> Linear:
    """The value of an expression. Errors: ValueError, ZeroDivisionError."""
    try:
        return _of_node(parse_expression(side.strip()), known)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"not an expression: {side!r:.80}") from error


def _of_node(node: ast.expr, known: Mapping[str, Linear]) -> Linear:
    match node:
        case ast.Constant(value=int(value)):
            return Linear(Fraction(0), Fraction(value))
        case ast.Name(id=name) if name in known:
            return known[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            slope, constant = _of_node(operand, known)
            return Linear(-slope, -constant)
        case ast.BinOp(left=left, op=op, right=right):
            one, other = _of_node(left, known), _of_node(right, known)
            match op:
                case ast.Add():
                    return Linear(one.slope + other.slope, one.constant + other.constant)
                case ast.Sub():
                    return Linear(one.slope - other.slope, one.constant - other.constant)
                case ast.Mult() if not (one.slope and other.slope):
                    factor, rest = (one, other) if not one.slope else (other, one)
                    return Linear(factor.constant * rest.slope, factor.constant * rest.constant)
                case ast.Div() if not other.slope:
                    return Linear(one.slope / other.constant, one.constant / other.constant)
    raise ValueError("not linear arithmetic")


def number(rng: random.Random, digits: int) -> int:
    """A number of one to `digits` digits, each length as likely; from 2 on."""
    length = rng.randint(1, digits)
    return rng.randint(max(2, 10 ** (length - 1)), 10**length - 1)


def _sum(rng: random.Random, terms: int) -> str:
    digits = rng.randint(1, 4)
    text = str(number(rng, digits))
    for _ in range(terms - 1):
        text += f" {rng.choice('+-')} {number(rng, digits)}"
    return f"what is {text} ?"


def _product(rng: random.Random) -> str:
    factors = [number(rng, rng.randint(1, 4)), number(rng, rng.randint(1, 3))]
    rng.shuffle(factors)
    return "what is {} * {} ?".format(*factors)


def _brackets(rng: random.Random) -> str:
    digits = rng.randint(1, 3)
    first, second = number(rng, digits), number(rng, digits)
    inner, factor = f"( {first} {rng.choice('+-')} {second} )", number(rng, rng.randint(1, 2))
    return (
        f"what is {inner} * {factor} ?" if rng.random() < 0.5 else f"what is {factor} * {inner} ?"
    )


def _equation(rng: random.Random) -> str:
    digits = rng.randint(1, 3)
    factor, x, shift = number(rng, min(digits, 2)), number(rng, digits), number(rng, digits)
    if rng.random() < 0.3:
        if x > shift and rng.random() < 0.5:
            return f"solve x / {factor} - {shift} = {x - shift} ."
        return f"solve x / {factor} + {shift} = {x + shift} ."
    if factor * x > shift and rng.random() < 0.5:
        return f"solve {factor} * x - {shift} = {factor * x - shift} ."
    return f"solve {factor} * x + {shift} = {factor * x + shift} ."


def _steps(rng: random.Random, count: int) -> str:
    digits = rng.randint(1, 3)
    before, value, texts = "", 0, []
    for step in range(count):
        sign, other = rng.choice("+-*"), number(rng, digits)
        if not before:
            value, before = number(rng, digits), ""
        if sign == "*":
            other = min(other, rng.randint(2, 9)) if before else other
        elif sign == "-" and other >= value:
            sign = "+"
        texts.append(f"{before or value} {sign} {other}")
        value = {"+": value + other, "-": value - other, "*": value * other}[sign]
        before = "abcdefgh"[step]
    lets = [
        f"let {letter} = {text} . " for letter, text in zip("abcdefgh", texts[:-1], strict=False)
    ]
    return "".join(lets) + f"what is {texts[-1]} ?"


TIERS: dict[str, Callable[[random.Random], str]] = {
    "sum": lambda rng: _sum(rng, rng.randint(2, 3)),
    "product": _product,
    "brackets": _brackets,
    "equation": _equation,
    "long": lambda rng: _sum(rng, rng.randint(4, 6)),
    "steps-2": lambda rng: _steps(rng, 2),
    "steps-3": lambda rng: _steps(rng, 3),
    "steps-4": lambda rng: _steps(rng, 4),
}
"""By tier, the function that draws a question."""


class Problems(Env):
    """A problem; the answer is a number. The tier is the kind of problem.

    A task's data is `{"question": "what is 12 + 7 ?"}`. Reward 1 for the right number, with a
    fraction as `3/4` or `0.75`.
    """

    blocking: ClassVar[bool] = False
    cheap_reset: ClassVar[bool] = True
    max_turns: ClassVar[int] = 1

    def __init__(self) -> None:
        self._question: str | None = None

    async def reset(self, task: Task) -> Observation:
        question = task.data.get("question")
        if not isinstance(question, str) or true_answer(question) is None:
            raise EnvError(
                f"problems: task {task.id!r}: data.question is {question!r:.80}; it has to be a "
                "question with an answer, such as 'what is 12 + 7 ?' or 'solve 3 * x + 4 = 19 .'"
            )
        self._question = question
        return Observation(messages=[Message(role="user", content=question)])

    async def step(self, action: Message) -> StepResult:
        expected, self._question = true_answer(self._asked()), None
        hit = parse_number(action.content[:MAX_CHARS]) == expected
        reply = Message(role="user", content="correct." if hit else "wrong.")
        return StepResult(messages=[reply], reward=float(hit), terminated=True)

    async def close(self) -> None:
        self._question = None

    def expert_code(self) -> list[str]:
        """The calculations, with spaces as in a text."""
        try:
            return [f" {text} " for text in calculations(self._asked())]
        except ValueError as error:
            raise NoExpert(f"problems: {error}") from None

    def expert_action(self) -> str:
        return f" {true_answer(self._asked())} "

    def _asked(self) -> str:
        if self._question is None:
            raise EnvError("problems: the episode is over, or was never reset; call reset first")
        return self._question

    @classmethod
    def tiers(cls) -> Sequence[str]:
        return tuple(TIERS)

    @classmethod
    def task(cls, tier: str | None, seed: int) -> Task:
        """The seed draws the problem; without a tier, the kinds of problems take turns."""
        tier = tier or cls.tiers()[seed % len(TIERS)]
        cls.check_tier(tier)
        question = TIERS[tier](random.Random(f"problems/{tier}/{seed}"))
        return Task(
            id=f"problems/{tier}/{seed}",
            data={"question": question},
            answer=str(true_answer(question)),
            tier=tier,
            source="problems",
        )


def read_problems(
    num_tasks: Annotated[int, Field(ge=1, description="Number of problems.")],
    tiers: Annotated[
        list[str] | None, Field(min_length=1, description="Kinds of problems; null: all.")
    ] = None,
    first_seed: Annotated[int, Field(ge=0, description="Seed of the first problem.")] = 0,
) -> list[Task]:
    """Different problems as tasks without an environment: question and answer, for a judge.

    The reader `{name: "ludus.envs.synthetic.problems:read_problems"}`. Tiers take turns.

    Errors: ConfigError for an unknown tier, and where a tier has too few problems.
    """
    chosen = tiers or list(TIERS)
    found: dict[str, Task] = {}
    seeds = dict.fromkeys(chosen, first_seed)
    for number in range(num_tasks):
        tier = chosen[number % len(chosen)]
        for seed in range(seeds[tier], seeds[tier] + MAX_TRIES):
            task = Problems.task(tier, seed)
            if (question := task.data["question"]) not in found:
                break
        else:
            raise ConfigError(f"num_tasks: {num_tasks} is too many for the tier {tier}")
        seeds[tier] = seed + 1
        prompt = [Message(role="user", content=question)]
        found[question] = task.model_copy(update={"prompt": prompt, "data": {}, "env": NO_ENV})
    return list(found.values())
