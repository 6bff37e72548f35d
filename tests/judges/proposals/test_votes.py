"""Votes by mathematical equivalence, with the real math-verify in real worker processes."""

import asyncio
import os
import signal
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from judged import said
from variants import variants

from ludus.core.errors import Unscorable
from ludus.core.types import Segment, Status, Task, Trajectory
from ludus.judges.proposals.votes import (
    Answer,
    Answered,
    Voter,
    exact_number,
    mean_tool_calls,
    numbers_only,
    read_answer,
    tally,
)


@pytest.fixture(scope="module")
def voter():
    return Voter(limit_s=0.5, workers=1)


def boxed(*answers):
    return [said("I cannot say." if a is None else f"So \\boxed{{{a}}}") for a in answers]


async def classes(voter, *answers):
    """The classes of answers, numbered as they come."""
    found = await voter.group([None if a is None else Answer(a, True) for a in answers])
    return [number for _, number in found]


async def test_a_vote_by_hand():
    voter = Voter(extract="boxed", workers=1)
    vote = await voter(boxed("1/2", "0.5", "3", None, "0.50"), ["2/4", "3", "\\frac{", "half"])
    assert (vote.p, vote.answer) == (0.6, "1/2")
    assert vote.counts == (("1/2", 3), ("3", 1))
    assert vote.classes == (0, 0, 1, None, 0)
    assert (vote.num_answers, vote.num_unparsed, vote.tie) == (5, 1, False)
    assert vote.claims[:2] == (True, False)
    assert vote.claims[3] is False


EQUAL = [
    ("0.5", "\\frac12"),
    ("x^2+1", "1+x^{2}"),
    ("\\{1,2,3\\}", "\\{3,2,1\\}"),
    ("\\infty", "\\infty"),
    ("x=5", "5"),
    ("5", "x=5"),
    ("2\\sqrt{2}", "\\sqrt{8}"),
    ("1{,}234", "1234"),
    ("5\\text{ cm}", "5"),
    ("7", "7.0"),
    ("1e-5", "0.00001"),
    ("3e2", "300"),
    ("0.333333", "1/3"),
    ("1/3", "0.333333"),
    ("\\frac{2}{6}", "1/3"),
]  # fmt: skip
UNEQUAL = [
    ("142", "2"),
    ("7", "8"),
    ("(1,2)", "(2,1)"),
    ("[1,2)", "[1,2]"),
    ("\\infty", "-\\infty"),
    ("x", "y"),
    ("123456789012345678901", "123456789012345678902"),
    ("1/3", "0.33"),
    ("0.1", "0.10001"),
    ("1.3e-9", "2.6e-9"),
]  # fmt: skip


@pytest.mark.parametrize(("a", "b"), EQUAL)
async def test_equal_answers_are_one_class(voter, a, b):
    assert await classes(voter, a, b) == [0, 0]


@pytest.mark.parametrize(("a", "b"), UNEQUAL)
async def test_unequal_answers_are_two_classes(voter, a, b):
    assert await classes(voter, a, b) == [0, 1]


NUMBER = st.one_of(
    st.integers(-30, 30).map(str),
    st.decimals(-3, 3, places=2).map(lambda d: f"{d:f}"),
    st.decimals(-1, 1, places=7).map(lambda d: f"{d:f}"),
    st.tuples(st.integers(-9, 9), st.integers(1, 9)).map(lambda p: f"{p[0]}/{p[1]}"),
    st.tuples(st.integers(0, 9), st.integers(1, 9)).map(lambda p: f"\\frac{{{p[0]}}}{{{p[1]}}}"),
)


@given(st.lists(NUMBER, min_size=2, max_size=5, unique=True))
@settings(deadline=None, max_examples=60)
def test_numbers_are_grouped_here_as_math_verify_groups_them(voter, answers):
    exact = [Answer(answer, True) for answer in answers]
    if (here := numbers_only(exact, 6)) is not None:
        assert asyncio.run(voter._by_math(exact)) == here


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        (" -7 ", -7),
        ("007", 7),
        ("0.50", Fraction(1, 2)),
        ("-3/4", Fraction(-3, 4)),
        ("\\dfrac{6}{8}", Fraction(3, 4)),
        ("1/0", None),
        ("\\frac{1}{0}", None),
        ("1e5", None),
        ("1,000", None),
        ("9" * 16, None),
        ("٣", None),
        ("7\n8", None),
        ("", None),
    ],
)
def test_exact_numbers(text, value):
    found = exact_number(text)
    assert (None if found is None else found[0]) == value


BOMBS = {
    "tower": "10^{10^{10}}",
    "deeper tower": "9^{9^{9^9}}",
    "factorial": "(10^{10})!",
    "brackets": "(" * 400 + "1" + ")" * 400,
    "fractions": "\\frac{1}{" * 100 + "1" + "}" * 100,
}


@pytest.mark.parametrize("kind", variants(BOMBS, ["tower", "fractions"]))
async def test_known_defect_7_a_grader_that_hangs_costs_one_answer_and_no_vote(kind):
    """A tower of powers hangs symbolic comparison, and with it the released code's grading."""
    voter = Voter(limit_s=0.5, workers=1)
    vote = await voter(boxed("\\frac{1}{2}", BOMBS[kind], "0.5", "x"))
    assert (vote.p, vote.answer, vote.classes) == (0.5, "\\frac{1}{2}", (0, None, 0, 1))


async def test_several_bombs_in_one_vote_and_in_the_claim(voter):
    tower = BOMBS["tower"]
    vote = await voter(boxed(tower, "x", BOMBS["deeper tower"], tower, "x"), [tower])
    assert (vote.p, vote.answer, vote.claims) == (0.4, "x", (None,))
    assert vote.classes == (None, 0, None, None, 0)
    assert (await voter(boxed(tower, tower))).answer is None


async def test_a_bomb_is_remembered(voter):
    await classes(voter, BOMBS["factorial"], "x")
    worker = voter._workers._idle[0].pid
    assert await classes(voter, "y", BOMBS["factorial"], "x") == [0, None, 1]
    assert voter._workers._idle[0].pid == worker, "the worker died of it again"


@pytest.mark.parametrize(
    "answer",
    ["1" * 100_000, "1+" * 50_000, "\\ud800", "\0", "$$", "}" * 50, "\\frac{", "%", "\\boxed{}"],
)
async def test_hostile_answers_do_not_disturb_a_vote(voter, answer):
    vote = await voter(boxed("\\frac{1}{2}", answer, "0.5"))
    assert (vote.p, vote.answer) == (2 / 3, "\\frac{1}{2}")


async def test_a_killed_worker_is_replaced(voter):
    await classes(voter, "x", "y")
    os.kill(voter._workers._idle[0].pid, signal.SIGKILL)
    assert await classes(voter, "x", "y", "x+1", "1+x") == [0, 1, 2, 2]


async def test_known_defect_6_votes_are_taken_at_the_same_time():
    """The released code scores proposals one after the other."""
    voter = Voter(workers=2)
    votes = [classes(voter, f"x+{i}", f"{i}+x", "y") for i in range(1, 21)]
    assert await asyncio.gather(*votes) == [[0, 0, 1]] * 20
    assert len(voter._workers._idle) == 2, "a worker was idle while another vote waited"


def test_tally_ties_and_edges():
    tie = tally(["1", "2", "2", "1"], [0, 1, 1, 0])
    assert (tie.p, tie.answer, tie.tie) == (0.5, "1", True)
    later = tally([None, "2", "1"], [None, 5, 3])
    assert (later.answer, later.tie, later.classes) == ("2", True, (None, 0, 1))
    one = tally(["7"], [0])
    assert (one.p, one.answer, one.tie) == (1.0, "7", False)
    none = tally([None, None], [None, None], [0, None])
    assert (none.p, none.answer, none.counts, none.claims) == (0.0, None, (), (False, None))


def test_the_label_is_the_most_frequent_text_of_its_class():
    assert tally(["0.5", "1/2", "1/2"], [0, 0, 0]).answer == "1/2"


async def test_only_the_infrastructures_failures_are_not_counted(voter):
    played = boxed("7", "8", "8", "9")
    played[1] = replace(played[1], status=Status.ERROR_TOOL, error="gone")
    played[3] = replace(played[3], status=Status.TRUNCATED_TURNS)
    vote = await voter(played)
    assert (vote.num_answers, vote.tie, vote.answer, vote.p) == (3, True, "7", 1 / 3)
    played[0] = replace(played[0], status=Status.ERROR_TIMEOUT, error="late")
    assert (await voter(played)).num_answers == 2
    played[2] = replace(played[2], status=Status.ABORTED, error=None)
    with pytest.raises(Unscorable, match=r"1 of 4 .* fewer than half: aborted; gone; late"):
        await voter(played)
    with pytest.raises(Unscorable, match=r"0 of 0 .* none was played"):
        await voter([])


@pytest.mark.parametrize(
    ("text", "status", "extract", "expected"),
    [
        ("So \\boxed{\\frac{1}{2}}.", "completed", "boxed", Answer("\\frac{1}{2}", True)),
        ("So \\boxed{7}", "truncated_turns", "auto", Answer("7", True)),
        ("\\boxed{1} then <answer> 7 </answer>", "completed", "boxed", Answer("7", True)),
        ("<answer>\\boxed{7} cm</answer>", "completed", "auto", Answer("7", True)),
        ("It is 7.", "completed", "auto", Answer("It is 7.", False)),
        ("It is 7.", "completed", "boxed", None),
        ("First, 7 and", "truncated_length", "auto", None),
        (" ", "completed", "auto", None),
        ("\\boxed{\ud800}", "completed", "auto", Answer("?", True)),
    ],
)
def test_the_answer_of_an_episode(text, status, extract, expected):
    trajectory = replace(said(text), status=Status(status))
    assert read_answer(trajectory, extract) == expected


async def test_messages_that_are_numbers_take_no_worker():
    voter = Voter()
    vote = await voter([said("42"), said(" 42 "), said("84/2"), said("-3")], ["42"])
    assert (vote.p, vote.answer, vote.classes, vote.claims) == (0.75, "42", (0, 0, 0, 1), (True,))
    assert not voter._workers._idle


def test_an_episode_without_a_message_has_no_answer():
    assert read_answer(Trajectory("t", "g", "q")) is None
    assert read_answer(Trajectory("t", "g", "q", [Segment(-1, [1])])) is None


async def test_answers_in_words_are_found_as_the_judge_math_finds_them(voter):
    played = [said("So the answer is $\\frac{14}{2}$."), said("it is 7"), said("\\boxed{7}")]
    vote = await voter(played)
    assert (vote.p, vote.classes) == (1.0, (0, 0, 0))


async def test_the_judge_of_played_questions():
    judge = Answered()
    assert (await judge(Task(id="q"), said("\\boxed{7}"))).value == 1
    assert (await judge(Task(id="q"), said(" "))).value == 0


def test_mean_tool_calls():
    played = boxed("7", "8", "9")
    for trajectory, calls in zip(played, (3.0, 1.0, 50.0), strict=True):
        trajectory.metrics["tool_calls"] = calls
    played[2].status = Status.ERROR_TOOL
    assert mean_tool_calls(played) == 2.0
    assert mean_tool_calls([]) == 0.0
    assert mean_tool_calls([said("no tools")]) == 0.0
