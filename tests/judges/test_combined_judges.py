"""The judges `sum`, `first`, `format` and `overlong`."""

import asyncio

import pytest
from judged import said

from ludus.core.errors import ConfigError, Unscorable
from ludus.core.types import Score, Spec, Task
from ludus.judges import JUDGES
from ludus.judges.base import close_all

TASK = Task(id="q", answer="5")


class Fixed:
    def __init__(self, value: float, success: bool | None = None):
        self.value, self.success = value, success

    async def __call__(self, task, trajectory):
        part = {"part": self.value / 2}
        return Score(value=self.value, parts=part, explanation="fixed", success=self.success)


class Refuses:
    async def __call__(self, task, trajectory):
        raise Unscorable("no opinion")


class Meets:
    """Waits until both of its calls run."""

    barrier = None

    async def __call__(self, task, trajectory):
        await type(self).barrier.wait()
        return Score(value=1)


def fixed(value, **args):
    return Spec(name=f"{__name__}:Fixed", args={"value": value, **args})


REFUSES = Spec(name=f"{__name__}:Refuses")
MEETS = Spec(name=f"{__name__}:Meets")


def build(name, **args):
    return JUDGES.build(Spec(name=name, args=args))


async def test_a_sum_weighs_named_parts():
    judge = build("sum", parts={"a": fixed(1.0), "b": fixed(-0.5)}, weights={"b": 0.5})
    score = await judge(TASK, said("x"))
    assert score.value == 0.75
    assert score.parts == {"a": 1.0, "b": -0.5, "a/part": 0.5, "b/part": -0.25}
    assert score.explanation == "a 1: fixed\nb -0.5: fixed"
    assert not score.succeeded


async def test_the_success_of_a_sum_may_be_one_judges():
    parts = {"a": fixed(1.0), "b": fixed(-0.5)}
    assert (await build("sum", parts=parts, success="a")(TASK, said("x"))).succeeded
    assert not (await build("sum", parts=parts, success="b")(TASK, said("x"))).succeeded
    parts = {"a": fixed(1.0, success=False)}
    assert not (await build("sum", parts=parts, success="a")(TASK, said("x"))).succeeded


async def test_a_sum_asks_its_judges_at_the_same_time():
    Meets.barrier = asyncio.Barrier(2)
    assert (await build("sum", parts={"a": MEETS, "b": MEETS})(TASK, said("x"))).value == 2


async def test_a_sum_without_one_of_its_parts_is_no_score():
    judge = build("sum", parts={"a": fixed(1.0), "b": REFUSES})
    with pytest.raises(Unscorable, match="b: no opinion"):
        await judge(TASK, said("x"))


@pytest.mark.parametrize(
    ("values", "accept", "value", "asked"),
    [
        ((1.0, 0.0), 1.0, 1.0, {"0"}),
        ((0.0, 1.0), 1.0, 1.0, {"0", "1"}),
        ((0.0, 0.5), 1.0, 0.5, {"0", "1"}),
        ((0.0, 1.0), None, 0.0, {"0"}),
        ((None, 1.0), None, 1.0, {"1"}),
        ((None, 0.0), 1.0, 0.0, {"1"}),
    ],
)
async def test_the_first_that_is_content_decides(values, accept, value, asked):
    judges = {str(i): REFUSES if v is None else fixed(v) for i, v in enumerate(values)}
    score = await build("first", judges=judges, accept=accept)(TASK, said("x"))
    assert score.value == value
    assert {name for name in score.parts if "/" not in name} == asked


async def test_the_last_judge_decides_even_if_it_cannot_score():
    judge = build("first", judges={"rule": fixed(0.0), "model": REFUSES})
    with pytest.raises(Unscorable, match="model: no opinion"):
        await judge(TASK, said("x"))


async def test_maths_then_an_exact_text():
    judge = build("first", judges={"rule": "math", "text": "qa"})
    score = await judge(Task(id="q", answer="five"), said("<answer>The five.</answer>"))
    assert (score.value, score.parts["text"]) == (1, 1)


def test_wrong_arguments_name_their_place():
    with pytest.raises(ConfigError, match=r"weights: 'acuracy' is not in `parts`.*accuracy"):
        build("sum", parts={"accuracy": "math"}, weights={"acuracy": 1})
    with pytest.raises(ConfigError, match="success: 'b' is not in `parts`"):
        build("sum", parts={"a": "math"}, success="b")
    with pytest.raises(ConfigError, match=r"parts\.a\.args\.limit_s"):
        build("sum", parts={"a": {"name": "math", "args": {"limit_s": -1}}})
    inner = {"name": "sum", "args": {"parts": {"b": {"name": "math", "args": {"limit_s": -1}}}}}
    with pytest.raises(ConfigError, match=r"^judge\.args\.parts\.a\.args\.parts\.b\.args\.limit_s"):
        JUDGES.build(Spec(name="sum", args={"parts": {"a": inner}}), "judge")
    with pytest.raises(ConfigError, match=r"judges\.a\.name: 'maths' is not a known judge"):
        build("first", judges={"a": "maths"})
    with pytest.raises(ConfigError, match="buffer: 20 exceeds max_tokens, 10"):
        build("overlong", max_tokens=10, buffer=20)
    with pytest.raises(ConfigError, match="markers, pattern, thinking: set at least one"):
        build("format")
    with pytest.raises(ConfigError, match=r"pattern: '\(' is no regular expression"):
        build("format", pattern="(")


@pytest.mark.parametrize(
    ("num_tokens", "value"), [(1, 0), (16384, 0), (18432, -0.5), (20480, -1), (20481, -1)]
)
async def test_overlong_as_in_dapo(num_tokens, value):
    score = await build("overlong", max_tokens=20480, buffer=4096)(
        TASK, said("x", num_tokens=num_tokens)
    )
    assert score.value == value


async def test_overlong_needs_token_ids():
    with pytest.raises(Unscorable, match="no sampled token ids"):
        await build("overlong", max_tokens=2, buffer=1)(TASK, said("x", num_tokens=0))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("<a>1</a>", ""),
        ("1</a>", "'<a>' occurs 0 times, not once"),
        ("<a>1</a></a>", "'</a>' occurs 2 times, not once"),
        ("</a>1<a>", "'</a>' is out of order"),
    ],
)
async def test_markers(text, fault):
    score = await build("format", markers=["<a>", "</a>"])(TASK, said(text))
    assert (score.value, score.explanation) == (float(not fault), fault)
    assert score.parts == {"markers": score.value}


async def test_a_pattern_matches_the_whole_message():
    judge = build("format", pattern=r"<a>.*</a>\s*")
    assert (await judge(TASK, said("<a>1\n2</a>\n"))).value == 1
    assert (await judge(TASK, said("so <a>1</a>"))).value == 0
    assert (await judge(TASK, said("\ud800"))).value == 0


async def test_a_pattern_that_backtracks_for_ever_does_not_match():
    judge = build("format", pattern=r"(a|aa)+b")
    score = await judge(TASK, said("a" * 10_000))
    assert score.parts == {"pattern": 0}
    assert (await judge(TASK, said("ab"))).value == 1


@pytest.mark.parametrize("thinking", ["so", None, " "])
async def test_thinking(thinking):
    trajectory, there = said("x", thinking=thinking), thinking == "so"
    assert (await build("format", thinking="required")(TASK, trajectory)).value == there
    assert (await build("format", thinking="forbidden")(TASK, trajectory)).value == (not there)


async def test_a_judge_that_cannot_be_closed_stops_no_other(caplog):
    closed = []

    class Broken:
        async def close(self):
            raise AttributeError("no pool")

    class Fine:
        async def close(self):
            closed.append(self)

    await close_all([Broken(), Fine()])
    assert len(closed) == 1
    assert "a judge could not release what it holds" in caplog.text
