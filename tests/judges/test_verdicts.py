"""Verdicts of the judge `code` that are kept, and those that are not."""

import asyncio

import pytest
from judged import said
from plain_sandbox import PlainSandbox

from ludus.core.types import Spec, Task
from ludus.judges import JUDGES

ADD = "def add(a, b):\n    return a + b"
TESTS = {"test_list": ["assert add(1, 2) == 3"]}
CALLS = {"input_output": {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}}
OTHER = {"input_output": {"fn_name": "add", "inputs": [[1, 2]], "outputs": [4]}}


@pytest.fixture
async def judge(monkeypatch):
    runs = []
    run = PlainSandbox.run

    async def counted(self, code, limits=None, *, session=None):
        runs.append(code)
        return await run(self, code, limits, session=session)

    monkeypatch.setattr(PlainSandbox, "run", counted)
    args = {"sandbox": "plain_sandbox:PlainSandbox", "run_s": 20}
    made = JUDGES.build(Spec(name="code", args=args))

    async def judge(code, data, run_s=None):
        if run_s:
            monkeypatch.setattr(made, "_limits", type(made._limits)(run_s=run_s))
        return (await made(Task(id="q", data=data), said(f"```python\n{code}\n```"))).value

    judge.runs = runs
    yield judge
    await made.close()


async def test_the_same_program_in_the_same_test_runs_once(judge):
    for data in (TESTS, CALLS):
        judge.runs.clear()
        assert await asyncio.gather(*(judge(ADD, data) for _ in range(8))) == [1] * 8
        assert await judge(ADD, data) == 1
        assert len(judge.runs) == 1
        assert await judge(ADD + " + 1", data) == await judge(ADD + " + 1", data) == 0
        assert len(judge.runs) == 2
    assert await judge(ADD, OTHER) == 0  # same call, other expected value
    assert len(judge.runs) == 3


@pytest.mark.parametrize("code", ["import random\n" + ADD, "import os; os.kill(os.getpid(), 9)"])
async def test_a_program_that_may_end_otherwise_runs_each_time(judge, code):
    assert await judge(code, TESTS) == await judge(code, TESTS)
    assert len(judge.runs) == 2


async def test_the_verdict_of_a_time_limit_is_not_kept(judge):
    loop = "while True: pass"
    assert await asyncio.gather(*(judge(loop, TESTS, run_s=0.3) for _ in range(3))) == [0] * 3
    assert len(judge.runs) == 3
