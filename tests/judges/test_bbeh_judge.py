"""BIG-Bench Extra Hard's extraction and comparison."""

import pytest
from judged import score

from ludus.core.errors import Unscorable

SAME = [
    ("So. The answer is: 42", "42"),
    ("The answer is: 42.", "42"),
    ("The answer is: 42.0", "42"),
    ("The final answer is: Yes", "yes"),
    ("The answer is yes\nbecause so", "yes"),
    ("The answer is: no. The answer is: yes", "yes"),
    ("The answer is: (A)", "a"),
    ("The answer is: A", "(a)"),
    ("The answer is: $\\boxed{7}$", "7"),
    ("The answer is: \\text{left}", "left"),
    ("The answer is: **b, c**", "b,c"),
    ("The answer is: it's", "its"),
    ("The answer is: [1, 2]", "1,2"),
    ("The answer is: who?", "who"),
    ("42", "42"),
]
OTHER = [
    ("The answer is: 41", "42"),
    ("It is 42, I think", "42"),
    ("The answer is: (A) and (B)", "(A)"),
    ("the answer is: yes", "yes"),
    ("The answer is: ", "0"),
]


@pytest.mark.parametrize(("text", "target"), SAME)
async def test_equal_answers(text: str, target: str) -> None:
    assert (await score("bbeh", text, target)).value == 1.0


@pytest.mark.parametrize(("text", "target"), OTHER)
async def test_other_answers(text: str, target: str) -> None:
    assert (await score("bbeh", text, target)).value == 0.0


async def test_parts_and_explanation() -> None:
    told = await score("bbeh", "I do not know", "4")
    assert told.parts == {"correct": 0.0, "found": 0.0}
    assert told.explanation == "no `The answer is:`, expected '4'"
    with pytest.raises(Unscorable, match="has no answer"):
        await score("bbeh", "The answer is: 4", None)
