"""The judge `code`, on tests in the forms of TACO, LiveCodeBench, HumanEval and MBPP."""

import base64
import json
import os
import pickle
import zlib

import pytest
from judged import said

from ludus.core.errors import ToolError, Unscorable
from ludus.core.types import Spec, Task
from ludus.judges import JUDGES
from ludus.judges.code import last_code
from ludus.judges.code_tests import read_tests, same_output, same_value


async def judged(code, sandbox="PlainSandbox", fenced=True, answer=None, **data):
    judge = JUDGES.build(Spec(name="code", args={"sandbox": f"plain_sandbox:{sandbox}", **ARGS}))
    text = f"So:\n```python\n{code}\n```\nDone." if fenced else code
    try:
        return await judge(Task(id="q", answer=answer, data=data), said(text))
    finally:
        await judge.close()


ARGS = {"reward": "share", "run_s": 20}
SUM = "a, b = map(int, input().split())\nprint(a + b)"
ADD = "def add(a, b):\n    return a + b"
STDIN = {"inputs": ["1 2\n", ["3 4"], "5 5\n"], "outputs": ["3\n", ["7"], "11\n"]}
CALLS = {"fn_name": "add", "inputs": [[1, 2], [[1], [2]]], "outputs": [[3], [1, 2]]}
STDIN_CASES = [{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]
CALL_CASES = [{"input": "1\n2", "output": "3", "testtype": "functional"}]


def private(cases):
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases)))).decode()


async def test_taco_on_stdin():
    score = await judged(SUM, input_output=json.dumps(STDIN))
    assert score.value == pytest.approx(2 / 3)
    assert score.parts == {"passed": score.value, "all": 0, "found": 1}
    assert score.explanation == ("2 of 3 tests passed; test 3 of 3: printed '10', expected '11'")


async def test_taco_calls_a_function_or_a_method():
    method = "class Solution:\n    def add(self, a, b):\n        return a + b"
    assert (await judged(ADD, answer={"input_output": CALLS})).value == 1
    assert (await judged(method, answer={"input_output": CALLS})).value == 1
    future = "from __future__ import annotations\n"
    assert (await judged(future + ADD, answer={"input_output": CALLS})).value == 1
    wrong = await judged(ADD.replace("+", "-"), answer={"input_output": CALLS})
    assert wrong.value == 0
    assert "test 1 of 2: returned -1, expected [3]" in wrong.explanation


async def test_livecodebench_public_and_private():
    cases = {
        "public_test_cases": json.dumps(STDIN_CASES),
        "private_test_cases": private(STDIN_CASES),
    }
    assert len(read_tests(Task(id="q", data=cases))) == 2
    assert (await judged(SUM, **cases)).value == 1
    metadata = json.dumps({"func_name": "add"})
    calls = {"public_test_cases": CALL_CASES, "private_test_cases": private(CALL_CASES)}
    assert (await judged(ADD, **calls, metadata=metadata)).value == 1


HUMANEVAL = {
    "prompt": 'from typing import List\n\ndef add(a: List, b) -> int:\n    """Add."""\n',
    "entry_point": "add",
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
}


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("def add(a: List, b):\n    return a + b", 1),  # `List` is of the prompt
        ("    return a + b", 1),  # the continuation
        ("def add(a, b):\n    return a - b", 0),
        ("import os\ndef add(a, b):\n    os._exit(0)", 0),
        ("def sub(a, b):\n    return 3", 0),
    ],
)
async def test_humaneval(code, value):
    assert (await judged(code, **HUMANEVAL)).value == value


async def test_mbpp():
    tests = ["assert add(1, 2) == 3", "assert add(0, 0) == 1"]
    score = await judged(ADD, test_list=tests)
    assert (score.value, score.explanation) == (
        0.5,
        "1 of 2 tests passed; test 2 of 2: AssertionError",
    )


async def test_all_or_nothing_stops_at_the_first_failure(monkeypatch):
    monkeypatch.setitem(ARGS, "reward", "all")
    score = await judged("print(0)", input_output=STDIN)
    assert (score.value, score.parts["all"]) == (0, 0)
    assert score.explanation == "test 1 of 3: printed '0', expected '3'"
    assert (await judged(SUM, input_output={"inputs": ["1 2"], "outputs": ["3"]})).value == 1


async def test_code_that_loops_fails_its_test(monkeypatch):
    monkeypatch.setitem(ARGS, "run_s", 0.5)
    score = await judged("while True: pass", public_test_cases=STDIN_CASES)
    assert score.value == 0
    assert score.explanation == "0 of 1 tests passed; test 1 of 1: stopped, time limit"


@pytest.mark.usefixtures("layers")
async def test_in_the_jail():
    args = {"reward": "share", "run_s": 5, "sandbox": {"name": "jail", "args": {"packages": []}}}
    judge = JUDGES.build(Spec(name="code", args=args))
    spy = f"try:\n    open({__file__!r})\n    print(0)\nexcept OSError:\n    pass\n{SUM}"
    try:
        for code, data in ((SUM, {"input_output": STDIN}), (spy, {"input_output": STDIN})):
            score = await judge(Task(id="q", data=data), said(f"```python\n{code}\n```"))
            assert score.value == pytest.approx(2 / 3), score.explanation
        score = await judge(Task(id="q", answer={"input_output": CALLS}), said(f"```\n{ADD}\n```"))
        assert score.value == 1, score.explanation
    finally:
        await judge.close()


async def test_a_lost_sandbox_is_no_score():
    with pytest.raises(ToolError, match="no worker is left"):
        await judged(SUM, sandbox="LostSandbox", input_output=STDIN)


@pytest.mark.parametrize("text", ["no code", "```json\n{}\n```", "```python\nopen", "\ud800", ""])
async def test_a_message_without_code_scores_zero(text):
    score = await judged(text, fenced=False, input_output=STDIN)
    assert score.parts == {"passed": 0, "all": 0, "found": 0}
    assert score.explanation == "no code found"


async def test_code_with_lone_surrogates_fails():
    assert (await judged("print('\ud800')", fenced=True, input_output=STDIN)).value == 0


class Evil:
    def __reduce__(self):
        return os.system, ("touch evil",)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ({}, "task q has no tests: give input_output"),
        ({"input_output": "{"}, "tests cannot be read"),
        ({"input_output": {"inputs": ["1"], "outputs": []}}, "tests cannot be read .ValueError"),
        ({"input_output": {"inputs": []}}, "KeyError: 'outputs'"),
        ({"public_test_cases": CALL_CASES}, "no func_name"),
        ({"private_test_cases": "!!!"}, "tests cannot be read"),
        ({"private_test_cases": base64.b64encode(zlib.compress(pickle.dumps(Evil()))).decode()},
         r"pickled with posix\.system"),
        ({"test": "def check(c): pass", "entry_point": "a b"}, "'a b' is no name"),
    ],
)  # fmt: skip
async def test_tests_that_cannot_be_read(data, match):
    with pytest.raises(Unscorable, match=match):
        await judged(SUM, **data)
    assert not os.path.exists("evil")


def test_the_last_closed_block_counts():
    assert last_code("```python\na\n```\n```py\nb\n```\n```json\n{}\n```") == "b\n"
    assert last_code("```\na\n```\n```python\nb") == "a\n"
    assert last_code("~~~") is None
    assert last_code("```python\n```") is None


@pytest.mark.parametrize(
    ("given", "expected", "same"),
    [
        ("1 2 \n3\n\n", "1 2\n3", True),
        ("0.30000000000000004", "0.3", True),
        ("0.31", "0.3", False),
        ("1\n2", "1 2", False),
        ("1000000", "1000001", False),
        ("1.0", "1", True),
        ("YES", "yes", False),
        ("", "", True),
        ("nan", "nan", True),
        ("0.", "x.", False),
    ],
)
def test_outputs(given, expected, same):
    assert same_output(given, expected) is same


@pytest.mark.parametrize(
    ("given", "expected", "same"),
    [
        ([1, [2.0000001]], [1, [2]], True),
        ([1], [1, 2], False),
        ({"a": 1}, {"a": 1}, True),
        ({"a": 1}, {"b": 1}, False),
        (10**20, 10**20 + 1, False),
        (10**400, 1.5, False),
        ("1", 1, False),
        (None, None, True),
    ],
)
def test_values(given, expected, same):
    assert same_value(given, expected) is same
