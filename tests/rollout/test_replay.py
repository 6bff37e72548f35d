"""Demonstrations are rendered exactly as rollouts are."""

from __future__ import annotations

from typing import Any

import pytest
from played_envs import task_of
from rollout_world import STYLES, Scripted, World, demonstration

from ludus.core.errors import DataError
from ludus.core.types import Message, Task, Trajectory
from ludus.models.chat.renderer import Renderer
from ludus.rollout.replay import ReplaySource, replay
from ludus.rollout.sessions.session import with_system_prompt
from ludus.tasks.curriculum import TaskSampler
from ludus.train import ALGORITHMS
from ludus.train.batches.samples import rows, to_samples


def shape(trajectory: Trajectory) -> list[tuple[Any, ...]]:
    """Everything of a tree but log-probabilities and versions."""
    return [
        (s.parent, s.token_ids, s.sampled, s.message and (s.message.role, s.message.content))
        for s in trajectory.segments
    ]


@pytest.mark.parametrize("thinking", ["keep", "strip"])
@pytest.mark.parametrize("style", STYLES)
async def test_a_demonstration_is_what_the_rollout_would_have_built(
    world: World, style: str, thinking: str
):
    renderer = world.renderer(style, thinking)
    seed = next(s for s in range(99) if all(m.content != "say grey ." for m in shown("plain", s)))
    messages = shown(style, seed)
    turns = [m for m in messages if m.role == "assistant"]
    collector = world.collector(style=style, thinking=thinking, sampler=Scripted(renderer, *turns))
    (group,) = await collector.collect([task_of(seed)], 0, 1)
    (played,) = group.trajectories
    assert played.reward == 3.0
    replayed = replay(with_system_prompt(messages, style), renderer, Trajectory("", "", ""))
    assert shape(replayed) == shape(played)
    assert [r.loss_mask for r in rows(replayed, 1.0)] == [r.loss_mask for r in rows(played, 1.0)]
    assert {s.policy_version for s in replayed.segments} == {None}
    assert {p for s in replayed.segments if s.logprobs for p in s.logprobs} == {0.0}


def shown(style: str, seed: int) -> list[Message]:
    import asyncio
    import threading

    found: list[list[Message]] = []
    thread = threading.Thread(target=lambda: found.append(demonstration(style, seed)))
    thread.start()  # the expert plays in a loop of its own
    thread.join()
    assert asyncio.get_running_loop()
    return found[0]


def user(content: str) -> Message:
    return Message(role="user", content=content)


def said(content: str, thinking: str | None = None) -> Message:
    return Message(role="assistant", content=content, thinking=thinking)


def test_forbidden_thinking_is_left_out(world: World):
    renderer = world.renderer(thinking="forbid")
    trajectory = replay(
        [user("say red ."), said("red", "the colour is red")], renderer, Trajectory("", "", "")
    )
    (segment,) = [s for s in trajectory.segments if s.sampled]
    assert world.tokenizer.decode(segment.token_ids) == "red<|end|>"
    assert segment.message == said("red")


def test_an_untrained_turn_is_context(world: World):
    renderer = world.renderer()
    messages = [user("say red ."), said("red"), user("say blue ."), said("blue")]
    all_trained = replay(messages, renderer, Trajectory("", "", ""))
    second = replay(messages, renderer, Trajectory("", "", ""), trained=[False, True])
    assert second.token_ids() == all_trained.token_ids()
    assert [s.message for s in second.segments if s.sampled] == [said("blue")]
    assert [m for r in rows(second, 1.0) for m in r.loss_mask].count(True) == 2


def test_a_turn_that_nothing_answers_is_as_in_a_silent_environment(world: World):
    renderer = world.renderer()
    trajectory = replay(
        [user("say red ."), said("red"), said("blue")], renderer, Trajectory("", "", "")
    )
    text = world.tokenizer.decode(trajectory.token_ids())
    assert text == "<|user|>say red .<|assistant|>red<|end|><|assistant|>blue<|end|>"
    assert [m for r in rows(trajectory, 1.0) for m in r.loss_mask].count(True) == 4


def test_the_system_prompt_stands_first_and_once():
    system, asked = Message(role="system", content="be brief"), user("say red .")
    assert with_system_prompt([asked], "be brief") == [system, asked]
    assert with_system_prompt([system, asked], "be brief") == [system, asked]
    assert with_system_prompt([asked], None) == with_system_prompt([asked], "") == [asked]
    other = Message(role="system", content="be long")
    assert with_system_prompt([other, asked], "be brief") == [system, other, asked]
    assert with_system_prompt([], "be brief") == [system]


@pytest.mark.parametrize(
    "messages", [[], [user("say red .")], [said("red")], [said("red"), user("say red .")]]
)
def test_a_malformed_conversation_is_refused(world: World, messages: list[Message]):
    with pytest.raises(DataError, match="line 3: a conversation needs messages before"):
        replay(messages, world.renderer(), Trajectory("", "", ""), "line 3: ")


def test_a_conversation_that_the_template_refuses(world: World):
    template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}"
        "{% endif %}<|{{ m.role }}|>{{ m.content }}{% if m.role == 'assistant' %}<|end|>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer = world.tokenizer
    before, tokenizer.chat_template = tokenizer.chat_template, template
    try:
        renderer = Renderer(tokenizer)
    finally:
        tokenizer.chat_template = before
    messages = [user("say red ."), said("red"), Message(role="tool", content="x"), said("red")]
    with pytest.raises(DataError, match=r"line 7: model.chat_template: .*no tools here"):
        replay(messages, renderer, Trajectory("", "", ""), "line 7: ")


async def test_collecting_demonstrations(world: World):
    renderer = world.renderer()
    known = [
        replay([user("say red ."), said(c)], renderer, Trajectory("", "", c, reward=3.0))
        for c in ("red", "blue")
    ]
    tasks = [Task(id="blue"), Task(id="red"), Task(id="blue")]
    groups = await ReplaySource(TaskSampler(tasks, shuffle=False), known).take(3, 4, 0)
    assert [g.id for g in groups] == [f"sft-000004/g000{i}" for i in range(3)]
    assert [t.id for g in groups for t in g.trajectories] == [f"{g.id}/e000" for g in groups]
    assert [t.task_id for g in groups for t in g.trajectories] == ["blue", "red", "blue"]
    samples = to_samples(ALGORITHMS.build("sft").assign(groups))
    assert [world.tokenizer.decode(s.token_ids).split("<|assistant|>")[1] for s in samples] == [
        "blue<|end|>",
        "red<|end|>",
        "blue<|end|>",
    ]
    assert all(t.dropped is None for t in known)
