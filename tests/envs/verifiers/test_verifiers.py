"""Tasksets of verifiers as environments."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import engine_python
from service_world import alive, until

from ludus.core.errors import ConfigError, EnvError, EnvLost
from ludus.core.types import Message, Spec, StepResult, Task, ToolCall
from ludus.envs import ENVS
from ludus.envs.checks.check import check_env
from ludus.envs.verifiers import process
from ludus.envs.verifiers.env import Verifiers
from ludus.rollout.hosts.host import HostedEnv
from ludus.rollout.hosts.threads import EnvThread

SUPPORT = Path(__file__).parents[2] / "support"
TASKSETS = SUPPORT / "vf_tasksets.py"
PYTHON = str(engine_python("verifiers"))

needs_verifiers = pytest.mark.engine("verifiers")


@pytest.fixture(autouse=True, scope="module")
def stopped() -> Iterator[None]:
    """The processes of this module's tests end with them."""
    yield
    for running in process._PROCESSES.values():
        running.stop()
    process._PROCESSES.clear()


def made(taskset: str, **args: Any) -> Verifiers:
    return Verifiers(taskset=f"{TASKSETS}:{taskset}", python=PYTHON, **args)


def say(text: str) -> Message:
    return Message(role="assistant", content=text)


def texts(messages: list[Message]) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in messages]


async def hosted(env: Verifiers, *calls: ToolCall) -> list[StepResult]:
    """The results of tool calls, made as a rollout does."""
    host = HostedEnv(lambda: env, EnvThread(), 120, blocking=False)
    await host.reset(Verifiers.task(None, 2))
    return [await host.call(call) for call in calls]


@needs_verifiers
async def test_an_episode_of_one_turn() -> None:
    env = made("Sums")
    opening = await env.reset(Verifiers.task(None, 2))
    assert texts(opening.messages) == [("system", "Be brief."), ("user", "What is 2 + 1?")]
    result = await env.step(say("3"))
    assert (result.reward, result.terminated, result.truncated) == (1.0, True, False)
    assert result.messages == []
    assert env.scores() == {"right": 1.0, "short": 1.0, "num_chars": 1.0}
    with pytest.raises(EnvError, match="call reset first"):
        await env.step(say("3"))
    await env.reset(Verifiers.task(None, 2))
    result = await env.step(say("that is 3"))
    assert (result.reward, env.scores()["short"]) == (0.75, 0.0)


@needs_verifiers
async def test_arguments_of_a_taskset_and_many_episodes_at_once() -> None:
    async def play(number: int) -> float:
        env = made("Sums", taskset_args={"step": 5})
        opening = await env.reset(Verifiers.task(None, number))
        assert opening.messages[-1].content == f"What is {number} + 5?"
        return (await env.step(say(f"{number + 5}"))).reward or 0.0

    rewards = await asyncio.gather(*(play(number % 8) for number in range(40)))
    assert rewards == [1.0 if number % 8 + 5 < 1000 else 0.75 for number in range(40)]


@needs_verifiers
async def test_the_environment_passes_the_checks() -> None:
    args = {"taskset": f"{TASKSETS}:Sums", "python": PYTHON}
    spec = Spec(name="verifiers", args=args)
    findings = await check_env(spec, num_tasks=2, timeout_s=60)
    assert [f for f in findings if f.severity == "error"] == []


@needs_verifiers
async def test_tools_and_an_answer_in_words() -> None:
    env = made("Calculator", score_range=(0, 2))
    assert [tool.name for tool in env.tools()] == ["add", "answer"]
    assert env.tools()[0].description == "Add two numbers."
    assert set(env.tools()[0].parameters["properties"]) == {"a", "b"}
    add = ToolCall(name="add", arguments={"a": 2, "b": 10}, id="7")
    wrong = ToolCall(name="add", arguments={"a": "x"})
    unknown = ToolCall(name="divide", arguments={})
    answer = ToolCall(name="answer", arguments={"text": "12"})
    results = await hosted(env, add, wrong, unknown, ToolCall(name="answer"), answer)
    told = [[(m.role, m.content[:28], m.tool_call_id) for m in r.messages] for r in results]
    assert told == [
        [("tool", "12", "7")],
        [("tool", "Error executing tool add: 2 ", None)],
        [("tool", "error: unknown tool 'divide'", None)],
        [("tool", "answer: the argument text is"[:28], None)],
        [],
    ]
    assert (results[-1].reward, results[-1].terminated) == (2.0, True)
    assert env.scores() == {"right": 1.0, "short": 1.0, "used": 1.0, "num_chars": 2.0}


@needs_verifiers
async def test_calls_as_text_and_several_calls_in_a_turn() -> None:
    env = made("Calculator", score_range=(0, 2), max_turns=3)
    await env.reset(Verifiers.task(None, 2))
    call = env.call_of('{"name": "add", "arguments": {"a": 1, "b": 1}}')
    result = await env.step(say(env.text_of(call)))
    assert texts(result.messages) == [("tool", "2")]
    both = [call, call.model_copy(update={"arguments": {"a": 2, "b": 2}})]
    result = await env.step(Message(role="assistant", tool_calls=both))
    assert texts(result.messages) == [("tool", "2"), ("tool", "4")]
    result = await env.step(say(env.text_of(call)))  # the last turn
    assert (result.terminated, result.truncated, result.reward) == (False, True, 1.25)


@needs_verifiers
async def test_an_environment_of_several_turns() -> None:
    env = Verifiers(taskset=f"{SUPPORT / 'vf_guess.py'}:Guess", python=PYTHON, max_turns=4)
    await env.reset(Verifiers.task(None, 5))
    assert texts((await env.step(say("2"))).messages) == [("user", "higher")]
    assert texts((await env.step(say("7"))).messages) == [("user", "lower")]
    result = await env.step(say("5"))
    assert (result.reward, result.terminated) == (1.0, True)
    await env.reset(Verifiers.task(None, 5))
    results = [await env.step(say("0")) for _ in range(4)]
    assert [r.done for r in results] == [False, False, False, True]
    assert (results[-1].reward, results[-1].truncated) == (0.0, True)


@needs_verifiers
async def test_tasks_by_position() -> None:
    env = made("Endless")
    opening = await env.reset(Verifiers.task(None, 1_000))
    assert opening.messages[0].content == "Say 1000"
    await env.close()
    with pytest.raises(EnvError, match="there is no task 8: the taskset has 8 tasks"):
        await made("Sums").reset(Verifiers.task(None, 8))
    with pytest.raises(EnvError, match="has no index in its data"):
        await made("Sums").reset(Task(id="a"))


@needs_verifiers
@pytest.mark.parametrize(
    ("index", "said"),
    [
        (0, "TaskError: .*setup is broken"),
        (1, "TaskError: .*the reward is broken"),
        (2, "the task's rewards sum to nan"),
    ],
)
async def test_a_failing_task_is_no_reward_of_0(index: int, said: str) -> None:
    env = made("Faulty")
    with pytest.raises(EnvError, match=said):
        await _play(env, index)


async def _play(env: Verifiers, index: int) -> None:
    await env.reset(Verifiers.task(None, index))
    await env.step(say("x"))


@needs_verifiers
async def test_a_lost_process_is_replaced() -> None:
    env = made("Faulty", max_turns=7)  # a process of its own
    with pytest.raises(EnvLost, match="the process of verifiers ended"):
        await _play(env, 3)
    with pytest.raises(EnvError, match="the reward is broken"):
        await _play(env, 1)


@needs_verifiers
async def test_an_episode_can_be_given_up() -> None:
    env = made("Sums")
    for _ in range(3):
        await env.reset(Verifiers.task(None, 1))
        await env.close()
        await env.close()
    host = HostedEnv(lambda: made("Faulty", max_turns=8), EnvThread(), 60, blocking=False)
    await host.reset(Verifiers.task(None, 4))
    hanging = asyncio.ensure_future(host.step(say("x")))
    await asyncio.sleep(0.2)
    hanging.cancel()
    await host.close()


@needs_verifiers
@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"taskset": "no_such_package"}, "taskset 'no_such_package' not found"),
        ({"taskset": "no_such_module:X"}, "No module named 'no_such_module'"),
        ({"taskset": f"{TASKSETS}:Sum"}, "Sum is not a Taskset of verifiers; its tasksets are"),
        ({"taskset": f"{TASKSETS}:Unreadable"}, "OSError: the data set is gone"),
        ({"taskset": f"{TASKSETS}:Images"}, "sends image_url: ludus' models read text only"),
        ({"taskset": f"{TASKSETS}:Sums", "taskset_args": {"stpe": 1}}, "stpe"),
        (
            {"taskset": f"{TASKSETS}:Sums", "harness": "bash"},
            "runs the model's code on this machine",
        ),
        ({"taskset": f"{TASKSETS}:Sums", "harness": "moon"}, "harness 'moon' not found"),
        ({"taskset": f"{TASKSETS}:Sums", "agent": "king"}, "king"),
    ],
)
async def test_wrong_arguments(args: dict[str, Any], said: str) -> None:
    env = Verifiers(**args, python=PYTHON)
    with pytest.raises(EnvError, match=said):
        await env.reset(Verifiers.task(None, 0))


@needs_verifiers
async def test_the_process_ends_with_its_parent() -> None:
    code = (
        "from ludus.envs.verifiers.process import process_of\n"
        f"p = process_of({PYTHON!r}, {json.dumps(made('Sums')._arguments)!r} and "
        f"__import__('json').loads({json.dumps(json.dumps(made('Sums')._arguments))}))\n"
        "print(p.ask('describe')['num_tasks'], p.pid, flush=True)\n"
        "import os; os.kill(os.getpid(), 9)\n"
    )
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await child.communicate()
    num_tasks, pid = map(int, out.split())
    assert num_tasks == 8
    until(lambda: not alive(pid))


# Without verifiers.


def test_an_absent_interpreter_names_the_command() -> None:
    env = Verifiers(taskset="x", python="no/such/python")
    with pytest.raises(ConfigError, match="there is no no/such/python; `make verifiers` creates"):
        env.tools()


async def test_an_interpreter_without_verifiers_names_the_command() -> None:
    env = Verifiers(taskset="x", python=sys.executable)
    with pytest.raises(EnvError, match="has no verifiers; `make verifiers`"):
        await env.reset(Verifiers.task(None, 0))


def test_a_text_is_a_call_only_if_it_is_its_json() -> None:
    env = Verifiers(taskset="x")
    for text in ("{", '{"name": "a"}', "[1]", '{"name": 1, "arguments": {}}', "a", "{" * 100_000):
        assert env.call_of(text) == ToolCall(name="answer", arguments={"text": text})
    call = env.call_of(' {"name": "a", "arguments": {}}\n')
    assert call == ToolCall(name="a", arguments={})
    assert env.call_of(env.text_of(call)) == call
    with pytest.raises(ConfigError, match="score_range"):
        ENVS.build(Spec(name="verifiers", args={"taskset": "x", "score_range": [1, 1]}), "env")
