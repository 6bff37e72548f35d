"""Majority votes over a model's answers to one question, by mathematical equivalence."""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Literal

from pydantic import Field

from ludus.config.sections import Markers
from ludus.core.errors import Unscorable
from ludus.core.modules import require
from ludus.core.types import Score, Status, Task, Trajectory
from ludus.judges.base import final_answer, last_boxed, last_tagged
from ludus.judges.proposals.parse import MAX_ANSWER
from ludus.judges.workers.math import TAIL
from ludus.judges.workers.pool import Crashed, TooLong, Workers
from ludus.judges.workers.votes import TOTAL

Extract = Literal["auto", "boxed"]
ANSWER_MARKERS = ("<answer>", "</answer>")
MAX_ENDED = 4096
"""Answers without end that are remembered."""

_NUMBER = re.compile(
    r"(-?)(?:([0-9]{1,15})(?:\.([0-9]{1,15}))?|\\[dt]?frac\{([0-9]{1,15})\}"
    r"\{([0-9]{1,15})\}|([0-9]{1,15})/([0-9]{1,15}))"
)


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer in a message: `exact` if it stood in a box or between markers, else the text in
    which math-verify looks for one."""

    text: str
    exact: bool


@dataclass(frozen=True, slots=True)
class Vote:
    """The majority of k answers.

    For the answers 1/2, 0.5, 3, none, 0.50 with the claimed answers 2/4 and 3:

        p = 0.6    answer = "1/2"    counts = (("1/2", 3), ("3", 1))
        classes = (0, 0, 1, None, 0)    claims = (True, False)

    Args:
        p: answers in the largest class, divided by all answers.
        answer: the most frequent text of the largest class; None: no answer was read.
        counts: the classes of equal answers: a text, and the number of answers; largest first.
        classes: for each answer its index in `counts`; None: not read.
        tie: whether another class is as large; the class of the earliest answer wins.
        claims: for each claimed answer whether it equals the majority's; None: not read.
    """

    p: float
    answer: str | None
    counts: tuple[tuple[str, int], ...]
    classes: tuple[int | None, ...]
    tie: bool = False
    claims: tuple[bool | None, ...] = ()

    @property
    def num_answers(self) -> int:
        return len(self.classes)

    @property
    def num_unparsed(self) -> int:
        return self.classes.count(None)


def counted(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """The episodes whose answers count: one that the infrastructure failed is no wrong answer."""
    return [t for t in trajectories if t.status.trainable]


def mean_tool_calls(trajectories: Sequence[Trajectory]) -> float:
    """Executed tool calls of an episode that counts. Calls that were refused or cannot be parsed
    were not executed, and the text of a message is not looked at."""
    calls = [t.metrics.get("tool_calls", 0.0) for t in counted(trajectories)]
    return sum(calls) / len(calls) if calls else 0.0


def read_answer(
    trajectory: Trajectory, extract: Extract = "auto", markers: Markers = ANSWER_MARKERS
) -> Answer | None:
    r"""The answer of an episode; None: it has none.

    It is what stands between the last two markers of the last message, or in its last
    `\boxed{...}`. Without these, `auto` returns the last characters of a message, if the episode
    was not cut short: what math-verify finds there is the answer, unless the message is a number.
    """
    try:
        text = final_answer(trajectory).content.encode("utf-8", "replace").decode()
    except Unscorable:
        return None
    tagged = last_tagged(text, markers)
    exact = last_boxed(text if tagged is None else tagged) or tagged
    if exact is not None:
        return Answer(exact, True)
    if extract == "boxed" or trajectory.status is not Status.COMPLETED or not text.strip():
        return None
    return Answer(text[-TAIL:], exact_number(text) is not None)


def tally(
    texts: Sequence[str | None],
    classes: Sequence[int | None],
    claims: Sequence[int | None] = (),
) -> Vote:
    """The vote over answers, of which texts and classes are known.

    A claim is the class of a claimed answer. It has no voice.
    """
    sizes = Counter(found for found in classes if found is not None)
    order = {found: number for number, (found, _) in enumerate(sizes.most_common())}
    counts = []
    for found, size in sizes.most_common():
        own = [text for text, c in zip(texts, classes, strict=True) if c == found]
        counts.append((Counter(own).most_common(1)[0][0] or "", size))
    return Vote(
        p=counts[0][1] / len(classes) if counts else 0.0,
        answer=counts[0][0] if counts else None,
        counts=tuple(counts),
        classes=tuple(None if found is None else order[found] for found in classes),
        tie=len(counts) > 1 and counts[0][1] == counts[1][1],
        claims=tuple(None if c is None else order.get(c, -1) == 0 for c in claims),
    )


class Voter:
    """Takes votes, many at the same time.

    Plain numbers are compared here, exactly; all other answers by math-verify, in `workers`
    processes. An answer that takes longer than `limit_s` of CPU time to read, or to compare with
    itself, is unread; the other answers of its vote are not concerned. Each answer is compared with
    the first of each class, in both directions.
    """

    def __init__(
        self,
        extract: Extract = "auto",
        markers: Markers = ANSWER_MARKERS,
        digits: int = 6,
        limit_s: float = 1.0,
        workers: int = 2,
        memory_mb: int = 2048,
    ) -> None:
        require("math_verify", "coevolve", "a vote on answers")
        self._extract, self._markers = extract, markers
        self._digits, self._limit_s = digits, limit_s
        module = "ludus.judges.workers.votes"
        self._workers = Workers(module, workers, limit_s, memory_mb, num_limits=TOTAL)
        self._endless: OrderedDict[Answer, None] = OrderedDict()

    async def __call__(
        self, trajectories: Sequence[Trajectory], claims: Sequence[str] = ()
    ) -> Vote:
        """The vote of episodes of one task.

        Errors: Unscorable if fewer than half of the episodes count, or the workers cannot start.
        """
        episodes = counted(trajectories)
        if 2 * len(episodes) < max(len(trajectories), 1):
            failed = (t for t in trajectories if not t.status.trainable)
            reasons = sorted({str(t.error or t.status.value) for t in failed})
            raise Unscorable(
                f"{len(episodes)} of {len(trajectories)} episodes of the executor count, fewer "
                f"than half: {'; '.join(reasons)[:400] or 'none was played'}"
            )
        answers = [read_answer(t, self._extract, self._markers) for t in episodes]
        answers += [Answer(claim, True) for claim in claims]
        found = await self.group(answers)
        texts, classes = [text for text, _ in found], [number for _, number in found]
        n = len(episodes)
        return tally(texts[:n], classes[:n], classes[n:])

    async def group(self, answers: Sequence[Answer | None]) -> list[tuple[str | None, int | None]]:
        """For each answer its text and the number of its class; (None, None): not read."""
        read = [a for a in answers if a is not None and len(a.text) <= _limit(a)]
        different = list(dict.fromkeys(a for a in read if a not in self._endless))
        found = numbers_only(different, self._digits)
        if found is None:
            found = await self._by_math(different)
        return [(None, None) if a is None else found.get(a, (None, None)) for a in answers]

    async def _by_math(self, answers: list[Answer]) -> dict[Answer, tuple[str | None, int | None]]:
        ended: list[list[int]] = []
        request = {
            "answers": [(answer.text, answer.exact) for answer in answers],
            "ended": ended,
            "digits": self._digits,
            "limit_s": self._limit_s,
        }
        while True:
            try:
                records = await self._workers.ask(request)
                break
            except (TooLong, Crashed) as error:
                steps = [record["step"] for record in error.answers if "step" in record]
                if not steps:
                    raise Unscorable(str(error)) from error
                ended.append(steps[-1])
                if len(steps[-1]) == 1 and isinstance(error, TooLong):
                    self._remember(answers[steps[-1][0]])
        found: dict[Answer, tuple[str | None, int | None]] = {}
        for record in records:
            if "class" in record:
                answer = answers[record["answer"]]
                shown = answer.text if answer.exact else record["text"]
                found[answer] = shown, record["class"]
        return found

    def _remember(self, answer: Answer) -> None:
        self._endless[answer] = None
        if len(self._endless) > MAX_ENDED:
            self._endless.popitem(last=False)


def _limit(answer: Answer) -> int:
    return MAX_ANSWER if answer.exact else TAIL


def numbers_only(
    answers: Sequence[Answer], digits: int
) -> dict[Answer, tuple[str | None, int | None]] | None:
    """The classes of answers that are all plain numbers; None where math-verify has to decide.

    Integers and fractions are equal if they are exactly. A decimal number has to agree in `digits`
    decimal places: rounding, where that decides, is left to math-verify.
    """
    found: dict[Answer, tuple[str | None, int | None]] = {}
    firsts: list[tuple[Fraction, bool]] = []
    for answer in answers:
        number = exact_number(answer.text) if answer.exact else None
        if number is None:
            return None
        value, decimal = number
        for index, (first, other) in enumerate(firsts):
            gap = abs(first - value)
            if gap == 0:
                found[answer] = answer.text, index
                break
            if (decimal or other) and gap <= Fraction(1, 10**digits):
                return None
        else:
            firsts.append((value, decimal))
            found[answer] = answer.text, len(firsts) - 1
    return found


def exact_number(text: str) -> tuple[Fraction, bool] | None:
    r"""The exact value of `-12`, `0.5`, `3/4` or `\frac{3}{4}`, and whether it is a decimal."""
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        return None
    sign, whole, decimals, *parts = match.groups()
    if whole is not None:
        value = Fraction(f"{whole}.{decimals or 0}")
    else:
        top, bottom = (int(part) for part in parts if part is not None)
        if bottom == 0:
            return None
        value = Fraction(top, bottom)
    return (-value if sign else value), decimals is not None


class Answered:
    """Scores 1 if the last message has an answer, else 0: for episodes on which is voted.

    A question of a curriculum agent has no answer to be compared with.
    """

    def __init__(
        self,
        extract: Annotated[
            Extract, Field(description="Part of the last message to take.")
        ] = "auto",
        markers: Annotated[
            Markers, Field(description="Start and end of an answer.")
        ] = ANSWER_MARKERS,
    ) -> None:
        self._extract, self.markers = extract, markers

    async def __call__(self, task: Task, trajectory: Trajectory) -> Score:
        found = read_answer(trajectory, self._extract, self.markers)
        return Score(value=float(found is not None), parts={"found": float(found is not None)})
