import pytest
from judged import said

from ludus.core.errors import ConfigError, Unscorable
from ludus.core.types import Message, Segment, Spec, Task
from ludus.judges import JUDGES
from ludus.judges.answer import AnswerJudge, extract_answer, parse_number


async def value(text, answer, **args):
    judge = JUDGES.build(Spec(name="answer", args=args))
    return (await judge(Task(id="q", answer=answer), said(text))).value


@pytest.mark.parametrize(
    ("text", "answer", "args"),
    [
        ("<answer>Paris</answer>", "Paris", {}),
        ("<answer> x^2 </answer> of 3 terms", "x^2", {}),
        ("No 7. <answer>42</answer> and 3 more", 42, {"extract": "number"}),
        ("<answer>1</answer> no, <answer>\\boxed{2}</answer>", 2, {}),
        ("[[Paris]]", "Paris", {"markers": ["[[", "]]"], "extract": "whole"}),
        ("<answer></answer> Answer: 42", 42, {}),
        ("</answer> Answer: 42", 42, {}),
    ],
)
async def test_the_answer_is_between_the_markers(text, answer, args):
    assert await value(text, answer, **args) == 1.0
    assert await value(text, f"{answer}0", **args) == 0.0


def test_wrong_markers_are_refused():
    with pytest.raises(ConfigError, match="markers"):
        JUDGES.build(Spec(name="answer", args={"markers": ["", "x"]}), "judge")


RIGHT = [
    ("The answer is 42.", 42),
    ("Answer: 42", "42"),
    ("**Answer:** 1,234 ", 1234),
    ("so $6 \\times 7 = \\boxed{42}$, not 43", 42),
    ("\\boxed{\\frac{3}{4}}", "0.75"),
    ("\\boxed{x^{2}}", "x^{2}"),
    ("\\boxed{1} no, \\boxed{2}", 2),
    ("It costs $1,250.50", "1250.5"),
    ("#### 18", "18"),
    ("minus five: −5", -5),
    ("3-4 gives one of 3 and 4", 4),
    ("0.3333333", "1/3"),
    ("Paris", "paris"),
    ("Answer: Paris.", "Paris"),
    ('"The  Hague"', "the hague"),
    ("Answer: blue", ["red", "blue"]),
    ("1e3", 1000),
    ("50%", "50 %"),
]
WRONG = [
    ("The answer is 43.", 42),
    ("1000001", 1000000),
    ("0.3334", "1/3"),
    ("Lyon", "Paris"),
    ("it might be Paris or Lyon", "Paris"),
    ("", 42),
    ("no number here", 42),
    ("Answer: green", ["red", "blue"]),
    ("\\boxed{42", "42 apples"),
    ("1/0", "1"),
]


@pytest.mark.parametrize(("text", "answer"), RIGHT)
async def test_right(text, answer):
    assert await value(text, answer) == 1.0


@pytest.mark.parametrize(("text", "answer"), WRONG)
async def test_wrong(text, answer):
    assert await value(text, answer) == 0.0


async def test_extraction_can_be_fixed():
    text = "Answer: 5 and \\boxed{6} then 7"
    assert [extract_answer(text, how) for how in ("boxed", "number", "whole")] == ["6", "7", text]
    assert extract_answer("Answer: 5\nthen 7", "answer") == "5"
    assert extract_answer("seven", "boxed") is None
    assert await value(text, 7, extract="number") == 1.0
    assert await value(text, 7, extract="boxed") == 0.0
    with pytest.raises(ConfigError, match="extract must be one of auto"):
        await value(text, 7, extract="regex")


async def test_tolerance_is_relative_and_for_fractions_only():
    assert await value("3.14", "3.14159", tolerance=1e-2) == 1.0
    assert await value("3.14", "3.14159") == 0.0
    assert await value("314", "315", tolerance=1e-2) == 0.0


async def test_the_score_says_why():
    score = await AnswerJudge()(Task(id="q", answer=42), said("Answer: 41"))
    assert score.parts == {"correct": 0.0, "found": 1.0}
    assert score.explanation == "'41', expected '42'"
    score = await AnswerJudge("boxed")(Task(id="q", answer=42), said("42"))
    assert score.parts == {"correct": 0.0, "found": 0.0}
    assert score.explanation == "no answer found, expected '42'"


async def test_the_last_assistant_message_of_the_last_branch_counts():
    trajectory = said("Answer: 1", "Answer: 2")
    told = Message(role="user", content="Answer: 1")
    trajectory.segments.append(Segment(2, [3], message=told))
    assert (await AnswerJudge()(Task(id="q", answer=2), trajectory)).value == 1.0


@pytest.mark.parametrize("answer", [None, "", [], {"a": 1}, ["a", None]])
async def test_a_task_without_an_answer_cannot_be_scored(answer):
    with pytest.raises(Unscorable, match="task q has"):
        await value("42", answer)


async def test_silence_cannot_be_scored():
    with pytest.raises(Unscorable, match="no assistant message"):
        await AnswerJudge()(Task(id="q", answer=1), said())


@pytest.mark.parametrize(
    "text",
    ["9" * 100_000, "1e99999999", "1," * 50_000, "\\boxed{" * 30_000, "answer " * 30_000],
)
async def test_hostile_text_is_wrong_not_slow(text):
    assert await value(text, 5) == 0.0


def test_numbers():
    assert parse_number("1e400") is None
    assert parse_number("12 apples") is None
    assert parse_number("-1,234.5") * 2 == -2469
