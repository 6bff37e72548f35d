"""Tokens of the shown episodes, and the sizes that follow."""

from __future__ import annotations

import pytest

from ludus.core.types import Message, Task
from ludus.data.conversations import Conversation
from ludus.diagnostics.calibration import tokens
from ludus.diagnostics.calibration.first import base, with_lengths
from ludus.diagnostics.calibration.subject import WHOLE, Subject
from ludus.diagnostics.calibration.warnings import of_lengths


def conversation(prompt: int, answer: int) -> Conversation:
    """A question and an answer of so many words."""
    messages = [
        Message(role="user", content=" ".join(["why"] * prompt)),
        Message(role="assistant", content=" ".join(["so"] * answer)),
    ]
    return Conversation(Task(id=f"{prompt}-{answer}"), messages, 1.0, True)


def test_one_long_row_among_many_sets_no_size() -> None:
    fields = {"path": "rows.jsonl"}
    subject = Subject("data", "rows.jsonl", "rows", reader="json", fields=fields, judge=WHOLE)
    config = base(subject, 0, None, "sft.jsonl", shows=True)
    short = [conversation(10 + n % 5, 2) for n in range(198)]
    made, lengths = with_lengths(config, subject, [1] * 198, short)
    same, with_long = with_lengths(config, subject, [1] * 200, [*short, conversation(9000, 3000)])
    assert same == made
    assert with_long.episode_max > 12000 > lengths.episode_max
    assert list(of_lengths(lengths, made.model.context_length)) == []
    (told,) = of_lengths(with_long, same.model.context_length)
    assert told.startswith("1 of 199 episodes of the expert exceeds the context of 128 tokens")


@pytest.mark.parametrize(("words", "width"), [(200, 64), (300, None)])
def test_heads_are_wide_where_episodes_are_short(words: int, width: int | None) -> None:
    """Attention takes most of a step of long episodes, and wider heads take twice as long."""
    fields = {"path": "rows.jsonl"}
    subject = Subject("data", "rows.jsonl", "rows", reader="json", fields=fields, judge=WHOLE)
    shown = [conversation(words, 2) for _ in range(8)]
    config = base(subject, 0, None, "sft.jsonl", shows=True)
    made, _ = with_lengths(config, subject, [1] * 8, shown)
    assert made.model.architecture is not None
    assert made.model.architecture.args.get("head_dim") == width
    assert made.model.architecture.args["induction_heads"] is True


def test_the_longest_of_few_or_of_similar_rows_counts() -> None:
    assert tokens.longest([5] * 98 + [500]) == 500
    assert tokens.longest([5] * 99 + [20]) == 20
    assert tokens.longest([5] * 99 + [21]) == 5
    assert tokens.longest([5] * 97 + [500] * 3) == 500
    assert tokens.longest([7]) == 7
