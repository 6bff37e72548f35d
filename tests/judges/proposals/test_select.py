"""The filter of proposals, and what it says when nothing is left."""

import pytest

from ludus.judges.proposals.select import (
    Problem,
    Reason,
    explain_empty,
    histogram,
    select,
)
from ludus.judges.proposals.votes import tally


def vote(agree, number):
    """`agree` answers 7, all others different."""
    return tally([str(i) for i in range(number)], [*[0] * agree, *range(1, number - agree + 1)])


def problem(agree, number, question=None):
    text = question or f"question {agree} of {number}"
    return Problem(f"p{agree}-{number}", text, vote(agree, number))


@pytest.mark.parametrize(
    ("number", "inside"),
    [(4, [1, 2, 3]), (8, [2, 3, 4, 5, 6]), (10, [3, 4, 5, 6, 7]), (2, [1]), (1, [])],
)
def test_the_band_with_its_edges(number, inside):
    problems = [problem(agree, number) for agree in range(1, number + 1)]
    kept, rejected = select(problems)
    assert [p.id for p in kept] == [f"p{agree}-{number}" for agree in inside]
    assert len(kept) + len(rejected) == number


@pytest.mark.parametrize(("low", "high"), [(0.3, 0.8), (0.5 - 0.2, 0.5 + 0.3), (1 - 0.7, 0.8)])
def test_a_band_of_inexact_numbers(low, high):
    problems = [problem(agree, 10) for agree in range(1, 11)]
    kept, _ = select(problems, min_consistency=low, max_consistency=high)
    assert [p.vote.p for p in kept] == [0.3, 0.4, 0.5, 0.6, 0.7, 0.8]


def test_reasons():
    problems = [
        Problem("a", None, None),
        Problem("b", "b?", None),
        Problem("c", "c?", tally([None, None], [None, None])),
        problem(1, 10),
        problem(9, 10),
        problem(5, 10, "Same  question?"),
        problem(6, 10, "Same question?\u200b"),
        Problem("d", "d?", tally(["1", "2"], [0, 1])),
    ]
    kept, rejected = select(problems)
    assert [p.id for p in kept] == ["p5-10", "d"]
    assert [reason for _, reason in rejected] == [
        Reason.UNREAD,
        Reason.NO_VOTE,
        Reason.NO_ANSWER,
        Reason.TOO_HARD,
        Reason.TOO_EASY,
        Reason.DUPLICATE,
    ]
    _, dropped = select(problems, ties="drop")
    assert dropped[-1] == (problems[-1], Reason.TIE)


def test_a_rejected_question_does_not_hide_a_later_one():
    kept, _ = select([problem(10, 10, "q?"), problem(5, 10, "q?")])
    assert [p.id for p in kept] == ["p5-10"]


def test_nothing_is_left():
    problems = [
        *(problem(10, 10, f"easy {i}") for i in range(4)),
        problem(1, 10),
        Problem("a", None, None),
    ]
    kept, rejected = select(problems)
    assert not kept
    assert explain_empty(rejected, 0.25, 0.75).splitlines() == [
        "the filter kept none of 6 proposals (0.25 <= p <= 0.75)",
        "       4  p is above the band",
        "       1  p is below the band",
        "       1  the text is no proposal",
        "p, the share of answers that agree with their majority:",
        "  0.0 to 0.1      0",
        "  0.1 to 0.2      1  ##########",
        *[f"  {i / 10:.1f} to {(i + 1) / 10:.1f}      0" for i in range(2, 9)],
        f"  0.9 to 1.0      4  {'#' * 40}",
        "The problems are too easy for the executor: raise `max_consistency` or the executor's "
        "temperature, or train the curriculum agent for more steps.",
    ]


def test_nothing_was_proposed():
    assert explain_empty([], 0.3, 0.8) == "the filter kept none of 0 proposals (0.3 <= p <= 0.8)"


def test_every_reason_has_advice():
    for reason in Reason:
        told = explain_empty([(problem(5, 10), reason)], 0.3, 0.8)
        assert told.splitlines()[-1].endswith("."), reason


def test_a_histogram_counts_inexact_tenths_where_they_belong():
    lines = histogram([i / 10 for i in range(11)])
    assert [int(line.split()[3]) for line in lines] == [1] * 9 + [2]
