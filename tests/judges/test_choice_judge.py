"""Multiple choice. AS_MMLU_PRO: what MMLU-Pro's extraction of an answer finds, too."""

import pytest
from judged import said

from ludus.core.errors import Unscorable
from ludus.core.types import Task
from ludus.judges.choice import ChoiceJudge, chosen

AS_MMLU_PRO = {
    "The answer is (B).": "B",
    "The answer is B": "B",
    "the answer is **B**": "B",
    "Answer: B": "B",
    "answer:B": "B",
    "The best answer is (J). x": "J",
    "B": "B",
    "(C)": "C",
    "C. because": "C",
    "Option D is right": "D",
    "It is not A, so it is C.": "C",
    "\\boxed{B}": "B",
    "The answer is $\\boxed{D}$.": "D",
    "Answer: \\text{B}": "B",
    "I'm sure: E": "E",
    "The answer is: C": "C",
    "**Answer**: C": "C",
    "Therefore, the answer is option (B)": "B",
    "Answer: (B) 42 and more": "B",
    "The answer is A, because B is wrong": "A",
    "no letters": None,
}
OTHERWISE = {  # than MMLU-Pro's A, A, I, A, B
    "The answer is (A) or (B)": None,
    "The answer is A. No, the answer is (C).": "C",
    "I think so": None,
    "A dog has bitten.": None,
    "The correct answer is Blue": None,
}
CITIES = ["Rome", "Paris", "The Hague", "Rome"]


@pytest.mark.parametrize(("text", "letter"), [*AS_MMLU_PRO.items(), *OTHERWISE.items()])
def test_letters(text, letter):
    assert chosen(text, [""] * 10) == letter


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The answer is Paris.", "B"),
        ("\\boxed{\\text{the hague}}", "C"),
        ("paris", "B"),
        ("\\boxed{\\text{B. Paris}}", "B"),
        ("The answer is Rome.", None),  # two options have this text
        ("The answer is (E)", None),  # there are four options
        ("\\boxed{A, B}", None),
        ("\\boxed{}", None),
    ],
)
def test_texts_of_options(text, letter):
    assert chosen(text, CITIES) == letter


@pytest.mark.parametrize(
    ("answer", "options"), [("B", []), ("(b)", CITIES), (1, CITIES), ("Paris", CITIES), (1, [])]
)
async def test_the_tasks_answer(answer, options):
    task = Task(id="q", answer=answer, data={"options": options})
    assert (await ChoiceJudge()(task, said("It is \\boxed{B}"))).value == 1
    score = await ChoiceJudge()(task, said("It is \\boxed{C}"))
    assert (score.value, score.explanation) == (0, "C, expected B")
    score = await ChoiceJudge()(task, said("no idea"))
    assert score.parts == {"correct": 0, "found": 0}


@pytest.mark.parametrize("answer", [None, "", "E", 4, -1, True, 1.0, "Rome", ["A"], {"a": 1}])
async def test_an_answer_that_is_no_option_cannot_be_scored(answer):
    task = Task(id="q", answer=answer, data={"options": CITIES})
    with pytest.raises(Unscorable, match=r"task q: the answer .* is none of its options"):
        await ChoiceJudge()(task, said("B"))


async def test_options_that_are_no_list():
    task = Task(id="q", answer="A", data={"choices": "AB"})
    with pytest.raises(Unscorable, match=r"task q: data\['choices'\] has to be a list"):
        await ChoiceJudge("choices")(task, said("B"))


@pytest.mark.parametrize(
    "text",
    ["\ud800" * 9, "answer is " * 100_000, "(A" * 400_000, "\\boxed{" * 99_999, " " * 999_999],
)
def test_hostile_text_is_read_at_once(text):
    assert chosen(text, ["x", "y"]) in (None, "A")
