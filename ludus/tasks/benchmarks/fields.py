r"""The fields of a benchmark's row -> question, options and answer.

    Fields(question=("problem",))                     {"problem": "1 + 1?", "answer": "2"}
    Fields(question=("question",), gold=after_hashes) {"question": "1 + 1?", "answer": "... #### 2"}
    Fields(question=("question",), options=("options",), answer=("answer_letter",), gold=letter)

Several names of a field are those of the data set's copies on the hub; the first one that a row has
counts.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

from ludus.core.errors import did_you_mean
from ludus.tasks.readers import check_unicode

Row = Mapping[str, Any]
Names = tuple[str, ...]

MAX_OPTIONS = 26


@dataclass(frozen=True, slots=True)
class Item:
    """A row as read. With `options`, `answer` is the letter of one; else it is a text."""

    question: str
    answer: str
    options: tuple[str, ...] = ()
    category: str | None = None
    id: str | None = None


def plain(value: Any) -> str:
    """The answer as a text. Errors: ValueError unless it is a text or a finite number."""
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        value = int(value)  # 27.0, as AMC's copies on the hub write it
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"must be a text or a number, got {value!r:.80}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"must be a finite number, got {value}")
    if not (text := str(value).strip()):
        raise ValueError("is empty")
    return text


def after_hashes(value: Any) -> str:
    """GSM8K: the number after the last `####` of the solution."""
    text = plain(value)
    _, hashes, answer = text.rpartition("####")
    if not hashes or not answer.strip():
        raise ValueError(f"has no `#### ANSWER` at its end: {text[-60:]!r}")
    return answer.strip()


def joined(value: Any) -> str:
    """OlympiadBench: a list of answers, all of them asked for; one answer as a text."""
    if not isinstance(value, list):
        return plain(value)
    if not value:
        raise ValueError("is an empty list")
    parts = [plain(part) for part in value]
    return parts[0] if len(parts) == 1 else ", ".join(part.strip("$") for part in parts)


def letter(value: Any) -> str:
    """The letter of an option: `B`, `(B)`."""
    text = plain(value).strip("().").upper()
    if len(text) != 1 or text not in ascii_uppercase:
        raise ValueError(f"must be the letter of an option, got {value!r:.80}")
    return text


@dataclass(frozen=True, slots=True)
class Fields:
    """The names of a benchmark's fields, and the reading of its answers.

    One name in `options` is that of a list. Several are those of the right answer and of the wrong
    ones (GPQA): they are shuffled, by a seed from the question, so each question has the same order
    in every run.
    """

    question: Names
    answer: Names = ("answer",)
    gold: Callable[[Any], str] = plain
    options: Names = ()
    category: Names = ()
    id: Names = ()

    def read(self, row: Row) -> Item:
        """Returns the item of a row. Errors: ValueError with the field and what is wrong."""
        question = _text(row, self.question)
        category = _optional(row, self.category)
        id = _optional(row, self.id)
        if len(self.options) > 1:
            options, answer = self._shuffled(row, question)
        else:
            name, value = _value(row, self.answer)
            options, answer = self._listed(row), _read(name, self.gold, value)
        if options and answer not in ascii_uppercase[: len(options)]:
            raise ValueError(
                f"the answer {answer} is none of its {len(options)} options, A to "
                f"{ascii_uppercase[len(options) - 1]}"
            )
        check_unicode([question, answer, *options, category, id])
        return Item(question, answer, options, category, id)

    def _listed(self, row: Row) -> tuple[str, ...]:
        if not self.options:
            return ()
        name, value = _value(row, self.options)
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise ValueError(f"field {name!r} must be a list of texts, got {value!r:.80}")
        options = tuple(text.strip() for text in value if text.strip() != "N/A")  # MMLU-Pro
        if not 2 <= len(options) <= MAX_OPTIONS:
            raise ValueError(f"field {name!r} must hold 2 to {MAX_OPTIONS} options")
        return options

    def _shuffled(self, row: Row, question: str) -> tuple[tuple[str, ...], str]:
        texts = [_text(row, (name,)) for name in self.options]
        order = list(range(len(texts)))
        digest = hashlib.sha256(question.encode("utf-8", "surrogatepass")).digest()
        random.Random(digest).shuffle(order)
        return tuple(texts[i] for i in order), ascii_uppercase[order.index(0)]


def _value(row: Row, names: Names) -> tuple[str, Any]:
    for name in names:
        if name in row:
            return name, row[name]
    raise ValueError(f"has no field {names[0]!r}{did_you_mean(names[0], row)}")


def _read(name: str, gold: Callable[[Any], str], value: Any) -> str:
    try:
        return gold(value)
    except ValueError as error:
        raise ValueError(f"field {name!r} {error}") from None


def _text(row: Row, names: Names) -> str:
    name, value = _value(row, names)
    if not isinstance(value, str):
        raise ValueError(f"field {name!r} must be a text, got {value!r:.80}")
    if not value.strip():
        raise ValueError(f"field {name!r} is empty")
    return value.strip()


def _optional(row: Row, names: Names) -> str | None:
    """The text of a field that only names the row; None where the copy has no such field."""
    value = next((row[name] for name in names if row.get(name) is not None), None)
    text = str(value).strip() if isinstance(value, str | int) else ""
    return text or None
