"""Proposals: question and claimed answer from a curriculum agent's text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.judges.proposals.parse import (
    MAX_ANSWER,
    MAX_QUESTION,
    Proposal,
    Refused,
    parse_proposal,
    visible,
)

PARSED = {
    "words": ("<question> 3 + 4 </question> \\boxed{ 7 }", ("3 + 4", "7")),
    "braces": ("<question>q?</question>\\boxed{\\frac{1}{2}}", ("q?", "\\frac{1}{2}")),
    "set": ("<question>q?</question> \\boxed{\\{1,2\\}}", ("q?", "\\{1,2\\}")),
    "infinity": ("<question>q?</question> \\boxed{∞}", ("q?", "∞")),
    "thinking before": ("Let me see. 3 < 4.\n<question>q?</question>\n\\boxed{1}", ("q?", "1")),
    "the last draft": (
        "<question>a?</question> \\boxed{1}, no: <question>b?</question> \\boxed{2}",
        ("b?", "2"),
    ),
    "the last box": ("<question>q?</question> \\boxed{1}, no: \\boxed{2}.", ("q?", "2")),
    "a box inside": ("<question>x in \\boxed{5}?</question> \\boxed{6}", ("x in \\boxed{5}?", "6")),
    "lines": ("<question>\nq\n\nr?\n</question>\n\n\\boxed{1}", ("q\n\nr?", "1")),
    "chinese": ("<question>三加四等于多少</question> \\boxed{7}", ("三加四等于多少", "7")),
}  # fmt: skip


@pytest.mark.parametrize("kind", PARSED)
def test_a_proposal(kind):
    text, (question, answer) = PARSED[kind]
    assert parse_proposal(text) == Proposal(question, answer)


@pytest.mark.parametrize("answer", ["142", "x+10", "-0.25", "\\text{3 apples}", "(1, 12)"])
def test_known_defect_2_the_claimed_answer_is_whole(answer):
    """The released code keeps the last character: "142" becomes "2"."""
    assert parse_proposal(f"<question>q?</question> \\boxed{{{answer}}}") == Proposal("q?", answer)


NO_BOX = "no closed \\boxed{...} with an answer after </question>"
UNBALANCED = "<question> and </question> are unbalanced or nested"
REFUSED = {
    "nothing": ("", "no <question>...</question>"),
    "no question": ("\\boxed{7}", "no <question>...</question>"),
    "order of markers": ("</question>q?<question> \\boxed{7}", "no <question>...</question>"),
    "no end": ("<question>3 + 4 \\boxed{7}", "no <question>...</question>"),
    "no box": ("<question>3 + 4</question> 7", NO_BOX),
    "box before": ("\\boxed{7} <question>3 + 4</question>", NO_BOX),
    "empty box": ("<question>3 + 4</question> \\boxed{ }", NO_BOX),
    "open box": ("<question>3 + 4</question> \\boxed{7", NO_BOX),
    "a box without its end": ("<question>3 + 4</question> \\boxed{" + "{" * 100_000, NO_BOX),
    "nested": ("<question>a <question>b</question> c</question> \\boxed{7}", UNBALANCED),
    "twice open": ("<question><question>b</question> \\boxed{7}", UNBALANCED),
    "twice closed": ("<question>a</question>b</question> \\boxed{7}", UNBALANCED),
    "empty": ("<question> \n </question> \\boxed{7}", "the question has no letter and no digit"),
    "dots": ("<question> ... </question> \\boxed{7}", "the question has no letter and no digit"),
    "zero width": (
        "<question>\u200b\u2060</question> \\boxed{7}",
        "the question has no letter and no digit",
    ),
    "zero width answer": (
        "<question>a</question> \\boxed{\u200b}",
        "the answer has no letter and no digit",
    ),
    "null": (
        "<question>a\0</question> \\boxed{7}",
        "the question has the control character U+0000",
    ),
    "surrogate": (
        "<question>a\ud800</question> \\boxed{7}",
        "the question has the control character U+D800",
    ),
    "escape in the answer": (
        "<question>a</question> \\boxed{\x1b[2J}",
        "the answer has the control character U+001B",
    ),
    "100 KB": (
        f"<question>{'a ' * 50_000}</question> \\boxed{{7}}",
        f"the question has 99,999 characters, more than {MAX_QUESTION:,}",
    ),
    "characters that unfold": (
        "<question>" + "\ufdfa" * 7000 + "</question> \\boxed{7}",
        f"the question has 126,000 characters as it looks, more than {MAX_QUESTION:,}",
    ),
    "a long answer": (
        f"<question>a</question> \\boxed{{{'1' * 100_000}}}",
        f"the answer has 100,000 characters, more than {MAX_ANSWER:,}",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_no_proposal(kind):
    text, reason = REFUSED[kind]
    assert parse_proposal(text) == Refused(reason)


def test_markers_of_another_agent():
    assert parse_proposal("Q: 3 + 4 A: \\boxed{7}", ("Q:", "A:")) == Proposal("3 + 4", "7")
    assert parse_proposal(PARSED["words"][0], ("Q:", "A:")) == Refused("no Q:...A:")


PIECES = st.sampled_from(
    ["<question>", "</question>", "\\boxed{", "}", "{", "7", " ", "a", "\0", "\u200b", "\ud800"]
)


@given(st.lists(PIECES, max_size=30).map("".join))
def test_every_text_is_read_or_refused(text):
    found = parse_proposal(text)
    if isinstance(found, Proposal):
        assert found.question in text
        assert found.answer in text.rpartition("</question>")[2]
        assert "question>" not in found.question
        assert visible(found.question)
        assert visible(found.answer)
    else:
        assert found.reason
