"""Exact match and F1. The expected numbers are those of SQuAD's evaluation script (version 1.1)."""

import pytest
from judged import said, score

from ludus.core.errors import ConfigError, Unscorable
from ludus.core.types import Task
from ludus.judges.qa import QAJudge

SQUAD = [
    ("Answer: The cat sat on a mat.", "cat sat on mat", 1, 1.0),
    ("Denver Broncos", ["Denver Broncos", "The Denver Broncos!", "Broncos"], 1, 1.0),
    ("Broncos of Denver", ["Denver Broncos", "Carolina"], 0, 0.8),
    ("the the the", "the", 1, 1.0),  # nothing is left of either
    ("cat cat cat", "cat", 0, 0.5),
    ("cat", "cat cat", 0, 2 / 3),
    ("U.S.", "US", 1, 1.0),
    ("an-other", "another", 1, 1.0),
    ("1,000 people", "1000", 0, 2 / 3),
    ("Super Bowl L", "L", 0, 0.5),
    ("Paris", "Rome", 0, 0.0),
    ("<answer>Rome</answer> no <answer> Paris </answer> done", "paris", 1, 1.0),
    ("\\boxed{Paris}", "Paris", 1, 1.0),
    ("", "Paris", 0, 0.0),
    ("\ud800", "Paris", 0, 0.0),
    ("\u0130stanbul", "\u0130stanbul", 1, 1.0),
]


@pytest.mark.parametrize(("text", "answer", "exact", "f1"), SQUAD)
async def test_as_squad(text, answer, exact, f1):
    result = await score("qa", text, answer)
    assert result.value == result.parts["exact_match"] == exact
    assert result.parts["f1"] == pytest.approx(f1)
    assert (await score("qa", text, answer, metric="f1")).value == pytest.approx(f1)


async def test_markers_of_its_own():
    result = await score("qa", "<a>Rome</a> <a>Paris</a>", "paris", markers=["<a>", "</a>"])
    assert result.value == 1


async def test_no_answer_is_found_in_an_empty_message():
    result = await score("qa", "", "Paris")
    assert result.parts == {"exact_match": 0, "f1": 0, "found": 0}
    assert result.explanation == "no answer found, expected 'Paris': F1 0"


async def test_a_task_without_an_answer_and_a_wrong_metric():
    with pytest.raises(
        Unscorable, match="task q has no answer; its judge compares with an answer that"
    ):
        await QAJudge()(Task(id="q"), said("Paris"))
    with pytest.raises(ConfigError, match="metric must be one of exact_match, f1"):
        await score("qa", "Paris", "Paris", metric="recall")


async def test_a_megabyte_is_compared_at_once():
    assert (await score("qa", "<answer>" * 65_000 + "</answer>" * 65_000, "Paris")).value == 0
