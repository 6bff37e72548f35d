"""Generated tasks: programs that tests judge, facts that stand in documents."""

from __future__ import annotations

import pytest

from ludus.core.errors import EnvError
from ludus.core.types import Message, Segment, Spec, Task, ToolCall, Trajectory
from ludus.envs.checks.check import check_env
from ludus.envs.synthetic.facts import VALUES, Facts, documents, people
from ludus.envs.synthetic.programs import Programs
from ludus.judges.code import CodeJudge


@pytest.mark.parametrize("name", ["programs", "facts"])
async def test_it_conforms(name: str) -> None:
    assert await check_env(Spec(name=name)) == []


def answered(text: str) -> Trajectory:
    trajectory = Trajectory("t", "g", "task")
    message = Message(role="assistant", content=text)
    trajectory.segments.append(Segment(-1, [1], [-0.1], message))
    return trajectory


async def test_the_tests_of_a_program_accept_it_and_its_equals_and_refuse_others() -> None:
    sandbox = Spec(name="plain_sandbox:PlainSandbox")
    judge = CodeJudge(sandbox=sandbox)
    try:
        for seed in range(3):
            task = Programs.task("steps-3", seed)
            env = Programs()
            await env.reset(task)
            program = env.expert_action()
            assert (await judge(task, answered(program))).value == 1
            other = program.replace("return x", "y = x\n    return y")
            assert (await judge(task, answered(other))).value == 1
            wrong = program.replace("return x", "return x + 1")
            assert (await judge(task, answered(wrong))).value == 0
            result = await env.step(Message(role="assistant", content=other))
            assert result.reward == 0  # the environment knows its reference alone
    finally:
        await judge.close()


async def test_tasks_of_another_form_are_refused() -> None:
    for steps in (None, [], [["divide", 2]], [["add", "2"]], ["add"]):
        with pytest.raises(EnvError, match=r"programs: task 'x': data.steps is .* has to be"):
            await Programs().reset(Task(id="x", data={"steps": steps}))
    with pytest.raises(EnvError, match=r"'Ada Kernn'.*did you mean Ada Kern"):
        await Facts().reset(Task(id="x", data={"person": "Ada Kernn", "asks": "home"}))
    with pytest.raises(EnvError, match=r"data\.asks is 'age', not of home, work, animal"):
        await Facts().reset(Task(id="x", data={"person": "Ada Kern", "asks": "age"}))


async def test_the_first_passage_of_each_query_holds_the_answer() -> None:
    pytest.importorskip("bm25s", reason="needs ludus-rl[tools]")
    tool = documents(top_k=2)
    for seed in range(20):
        task = Facts.task(None, seed)
        env = Facts()
        await env.reset(task)
        query, answer = env.expert_code(), env.expert_action()
        found = await tool.call(ToolCall(name="search", arguments={"query": query}), "e")
        first = found.content.split("[2]")[0]
        assert answer in first
        kind = VALUES[task.data["asks"]]
        assert [word for word in first.split() if word in kind] == [task.answer]
    await tool.close()


def test_no_value_is_also_a_name() -> None:
    names = {word for person in people() for word in person.split()}
    values = [value for kind in VALUES.values() for value in kind]
    assert len(set(values)) == len(values)
    assert not names & set(values)
    assert len(people()) == 900
