"""Spans of the episode driver: attempts, completions, tool calls, errors."""

from __future__ import annotations

from typing import Any

from otlp_receiver import Received, Receiver, receiving
from played_envs import task_of
from rollout_world import Scripted, World

from ludus.config.schema import TracesConfig
from ludus.core.types import Message, Status, ToolCall
from ludus.telemetry.span_export import exported


def children(receiver: Receiver, parent: Received) -> list[Received]:
    return [span for span in receiver.spans if span.parent == parent.id]


async def played(world: World, receiver: Receiver, sampler: Any, **how: Any) -> Any:
    collector = world.collector(sampler=sampler, **how)
    traces = TracesConfig(endpoint=receiver.url, content=True)
    with exported(traces, run="tiny-1", model="qwen3"):
        [group] = await collector.collect([task_of(3)], 0, 1)
    return group.trajectories[0]


async def test_an_episode_is_a_tree_of_spans(world: World) -> None:
    call = Message(role="assistant", tool_calls=[ToolCall(name="say", arguments={"word": "red"})])
    sampler = Scripted(world.renderer("tools"), call)
    with receiving() as receiver:
        trajectory = await played(world, receiver, sampler, style="tools", max_turns=3)
    [agent] = receiver.named("invoke_agent agent")
    assert agent.attributes["gen_ai.conversation.id"] == trajectory.id
    assert agent.attributes["ludus.task"] == trajectory.task_id
    assert agent.attributes["ludus.status"] == trajectory.status.value
    assert agent.events[0][1]["gen_ai.evaluation.score.value"] == trajectory.reward
    below = children(receiver, agent)
    turns = [span for span in below if span.name == "chat qwen3"]
    calls = [span for span in below if span.name == "execute_tool say"]
    assert len(turns) == len(sampler.turns[trajectory.id]) == trajectory.num_turns
    assert len(calls) == trajectory.num_turns
    for span, (prompt, completion) in zip(turns, sampler.turns[trajectory.id], strict=True):
        assert span.attributes["gen_ai.usage.input_tokens"] == len(prompt)
        assert span.attributes["gen_ai.usage.output_tokens"] == len(completion.token_ids)
        assert span.attributes["gen_ai.response.finish_reasons"] == ["stop"]
        assert span.attributes["gen_ai.request.max_tokens"] == 40
    assert '"tool_call"' in turns[0].attributes["gen_ai.output.messages"]
    assert '"role": "system"' in turns[0].attributes["gen_ai.input.messages"]
    assert calls[0].attributes["gen_ai.tool.call.arguments"] == '{"word": "red"}'


async def test_each_attempt_is_a_span_with_its_error(world: World) -> None:
    sampler = Scripted(world.renderer(), "red")
    with receiving() as receiver:
        trajectory = await played(world, receiver, sampler, env="Unmakeable", max_retries=1)
    assert trajectory.status is Status.ERROR_ENV
    attempts = receiver.named("invoke_agent")
    assert sorted(span.attributes["ludus.attempt"] for span in attempts) == [1, 2]
    assert {span.attributes["error.type"] for span in attempts} == {"EnvError"}


async def test_spans_change_no_token(world: World) -> None:
    sampler = Scripted(world.renderer(), "red", "green")
    plain = await world.collector(sampler=sampler).collect([task_of(3)], 0, 1)
    with receiving() as receiver:
        traced = await played(world, receiver, Scripted(world.renderer(), "red", "green"))
    same = plain[0].trajectories[0]
    assert [s.token_ids for s in traced.segments] == [s.token_ids for s in same.segments]
