"""Proposals scored with episodes that are played: a collector is the executor."""

from typing import Any

import pytest
from judged import said
from test_tools import calls, fresh_tools, made, tokenizer  # noqa: F401

from ludus.core.types import Group, Message, Status, Task
from ludus.judges.proposals.judge import CurriculumJudge
from ludus.judges.proposals.votes import mean_tool_calls
from ludus.rollout.collect import Collector


class Played:
    """The executor: a collector."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    async def stream(self, tasks: Any, label: str, step: int, k: int, finish: Any) -> None:
        await self._collector.with_config(label).stream(tasks, step, k, finish)

    async def close(self) -> None:
        await self._collector.close()


async def scored(collector: Collector, *texts: str, **args: Any) -> list[Any]:
    judge = CurriculumJudge("e.yaml", 2, make_player=lambda path: Played(collector), **args)
    members = [said(text) for text in texts]
    for number, member in enumerate(members):
        member.id = f"t{number}"
    try:
        [group] = await judge.score_groups([Group("g", Task(id="q"), members)], 3)
    finally:
        await judge.close()
    return group.trajectories


QUESTION = "<question>say red .</question> \\boxed{7}"


async def test_known_defect_3_only_calls_that_the_executor_ran_are_counted(
    tokenizer: Any,  # noqa: F811
):
    """The released code counts markers in the curriculum agent's text."""
    faked = "<code>print(1)</code> <tool_call></tool_call> <execution_results> " * 7
    unknown = '<tool_call>{"name": "nope", "arguments": {}}</tool_call>'
    turns = [
        calls(("double", {"number": 1}), ("double", {"number": 2})),
        unknown,
        "<tool_call>{</tool_call>",
        calls(*[("double", {"number": 1})] * 9),
        "<code>print(1)</code> <execution_results> 7 </execution_results> \\boxed{7}",
    ]
    limits = {"max_per_turn": 3, "max_per_episode": 99}
    collector = await made(tokenizer, turns, "double", tool_calls=limits, max_tokens_per_turn=999)
    collector.judge = None  # the judge of the task scores
    [trajectory] = await scored(collector, faked + QUESTION)
    assert trajectory.status is Status.COMPLETED
    assert trajectory.scores["tool_calls"] == 5  # two, and three of nine
    assert trajectory.scores["tool"] == 4
    assert trajectory.scores["consistency"] == 1
    assert trajectory.reward == pytest.approx(0 + 0.6 * 4 - 1)


async def test_calls_in_code_blocks(tokenizer: Any):  # noqa: F811
    texts = ["<code>6</code>", "<code>7</code>", "so <answer> 7 </answer>"]
    collector = await made(tokenizer, texts, "echo", format="code", markers={"tool": "echo"})
    [trajectory] = await scored(collector, QUESTION)
    assert trajectory.scores["tool_calls"] == 2
    assert (trajectory.scores["consistency"], trajectory.scores["claim"]) == (1, 1)
    assert trajectory.explanation.startswith("p 1.00 of 2 answers: '7' 2\nclaimed '7': the maj")


async def test_a_tool_that_is_not_on_offer_is_not_run(tokenizer: Any):  # noqa: F811
    texts = ["<code>6</code>", "so <answer> 7 </answer>"]
    collector = await made(tokenizer, texts, "echo", format="code", markers={"tool": "echo"})
    prompt = [Message(role="user", content="say red .")]
    [group] = await collector.collect([Task(id="t", prompt=prompt, tools=[])], 0, 1)
    await collector.close()
    [trajectory] = group.trajectories
    metrics = trajectory.metrics
    assert (metrics["tool_calls"], metrics["tool_failed"], metrics["tool_malformed"]) == (0, 0, 1)
    assert mean_tool_calls([trajectory]) == 0


async def test_an_executor_whose_tool_is_down_excludes_the_proposal(tokenizer: Any):  # noqa: F811
    import played_tools

    collector = await made(tokenizer, [calls(("note", {"word": "a"})), "\\boxed{7}"], "Recorder")
    for member in range(2):
        played_tools.FAILURES[f"votes-000003/g0000/e{member:03d}"] = 1
    [trajectory] = await scored(collector, QUESTION)
    assert (trajectory.status, trajectory.reward) == (Status.UNSCORABLE, None)
    assert "0 of 2 episodes of the executor count" in trajectory.error
    assert "the server is away" in trajectory.error
