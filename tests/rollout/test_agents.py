"""Agents of the user: every call is recorded, equal to the built-in loop where they play alike."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
from dataclasses import replace
from typing import Any

import anyio
import pytest
from played_envs import SAY, task_of
from rollout_world import Scripted, World
from test_episode import check_rows

from ludus.core.errors import ContextOverflow, EnvError
from ludus.core.types import Message, Spec, Status, Task, ToolCall, Trajectory
from ludus.rollout.outcome import Outcome
from ludus.rollout.sessions.agent_session import AgentSession
from ludus.rollout.sessions.call_options import CallRefused
from ludus.rollout.workflow import Agent
from ludus.train.batches.samples import rows
from ludus.train.batches.tree import grow


def collector(world: World, agent: Any, style: str = "plain", thinking: str = "keep", **how: Any):
    how = {"max_retries": 0, **how}
    env = how.pop("env", "Say")
    how.setdefault("sampler", world.sampler(deterministic=False))
    own = world.collector(
        env, style, thinking, format="plain", system_prompt=None, deterministic=False, **how
    )
    if callable(agent):
        names = agent.__code__.co_varnames[: agent.__code__.co_argcount]
        agent = Agent(agent, frozenset(names), not inspect.iscoroutinefunction(agent))
    return replace(own, agent=agent)


async def play(world: World, agent: Any, *texts: Any, **how: Any) -> Trajectory:
    thinking = how.get("thinking", "keep")
    sampler = Scripted(world.renderer(how.get("style", "plain"), thinking), *texts)
    task = how.pop("task", task_of(0))
    (group,) = await collector(world, agent, sampler=sampler, **how).collect([task], 0, 1)
    assert sampler.sessions == set()
    check_rows(group.trajectories[0])
    return group.trajectories[0]


def mirror(style: str):
    """An agent that plays as the built-in agent does."""

    async def run(task, model, env):
        opening = await env.reset()
        system = Message(role="system", content=style)
        messages = [system, *task.prompt, *opening.messages]
        tools = [SAY] if style == "tools" else []
        for _ in range(12):
            (reply,) = await model.replies(messages, tools)
            messages.append(reply.message)
            if reply.finish_reason == "length":
                return
            error, calls = reply.error, reply.message.tool_calls
            if error is None and tools and len(calls) != 1:
                error = f"make exactly one tool call a turn, not {len(calls)}."
            if error is not None:
                role = "tool" if calls else "user"
                messages.append(Message(role=role, content=error))
                continue
            if tools:
                result = await env.call(calls[0])
            else:
                result = await env.step(reply.message.content.strip())
            if result.done:
                return
            messages += result.messages

    return run


def paths(trajectory: Trajectory) -> list[Any]:
    return [(row.token_ids, row.loss_mask, row.logprobs) for row in rows(trajectory, 1.0)]


@pytest.mark.parametrize(
    ("style", "thinking"),
    [("plain", "keep"), ("think", "keep"), ("think", "strip"), ("tools", "keep")],
)
async def test_an_agent_gets_the_tokens_of_the_built_in_loop(world: World, style, thinking):
    tasks = [task_of(100 + i) for i in range(6)]
    sampler = world.sampler(deterministic=False)
    own = world.collector(style=style, thinking=thinking, max_turns=12, sampler=sampler)
    built_in = await own.collect(tasks, 0, 4)
    mirrored = await collector(world, mirror(style), style, thinking).collect(tasks, 0, 4)
    pairs = zip(built_in, mirrored, strict=True)
    for one, other in [
        p for a, b in pairs for p in zip(a.trajectories, b.trajectories, strict=True)
    ]:
        assert [r[:2] for r in paths(one)] == [r[:2] for r in paths(other)]
        for a, b in zip(paths(one), paths(other), strict=True):
            assert a[2] == pytest.approx(b[2], abs=1e-6)
        assert one.reward == other.reward
    assert any(t.num_turns > 2 for g in mirrored for t in g.trajectories)


async def test_a_reward_of_the_agent(world: World):
    async def run(task, model):
        said = await model.chat([{"role": "user", "content": "red ?"}])
        assert said.content == "red"
        return Outcome(0.25, success=True, scores={"form": 1}, metrics={"calls": 1})

    played = await play(world, run, "red", env=None)
    assert (played.status, played.reward, played.scores) == (Status.COMPLETED, 0.25, {"form": 1.0})
    assert played.metrics["success"] == 1.0
    assert played.metrics["calls"] == 1.0


async def test_a_function_that_blocks(world: World):
    def run(task, model):
        return asyncio.run(model.chat([{"role": "user", "content": "red ?"}])).content == "red"

    played = await play(world, run, "red", env=None)
    assert played.reward == 1.0


def conversation(*texts: str) -> list[dict[str, str]]:
    roles = ["user", "assistant"]
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


async def test_calls_that_extend_one_another_are_one_row(world: World):
    async def run(task, model):
        for said in (["red"], ["red", "blue", "grey"], ["red", "blue", "grey", "blue", "red"]):
            await model.chat(conversation(*said))
        return 1

    played = await play(world, run, "blue", env=None)
    (row,) = rows(played, 1.0)
    assert sum(row.loss_mask) == played.num_sampled_tokens
    assert played.num_turns == 3


async def test_an_edited_history_forks_and_each_turn_trains_once(world: World):
    async def run(task, model):
        await model.chat(conversation("red"))
        await model.chat(conversation("red", "blue", "grey"))
        await model.chat(conversation("red", "blue", "other"))  # another result after the same turn
        await model.chat(conversation("red", "edited", "grey"))  # another turn than was sampled
        await model.chat(conversation("summary"))
        return 1

    played = await play(world, run, "blue", env=None)
    found = rows(played, 1.0)
    assert len(found) == 4
    assert played.num_turns == 5
    assert sum(sum(row.loss_mask) for row in found) == played.num_sampled_tokens


async def test_thirty_branches_cost_the_learner_their_unique_tokens(world: World):
    async def run(task, model):
        await model.chat(conversation("red"))
        for number in range(30):
            await model.chat(conversation("red", "blue", "grey " * (number + 1)))
        return 1

    played = await play(world, run, "blue", env=None)
    found = rows(played, 1.0)
    assert len(found) == 30
    (packed,) = grow([row.token_ids for row in found], 10_000)
    computed = sum(len(found[i].token_ids) - shared for i, shared in packed)
    assert computed <= played.num_tokens
    assert sum(sum(row.loss_mask) for row in found) == played.num_sampled_tokens


@pytest.mark.parametrize(
    ("stop", "said"), [((), "red blue"), ((" blue",), "red"), ((" blue",), "red blue")]
)
async def test_a_turn_without_space_around_it_or_with_its_stop_string_is_the_same(
    world: World, stop: tuple[str, ...], said: str
):
    """As smolagents writes its history: the text stripped, its stop string put back."""

    async def run(task, model):
        reply = await model.chat(conversation("red"), stop=stop)
        assert reply.content.strip() == ("red" if stop else "red blue")
        await model.chat(conversation("red", said, "grey"))
        return 1

    played = await play(world, run, " red blue\n", env=None)
    assert len(rows(played, 1.0)) == 1
    assert played.num_turns == 2


async def test_calls_at_the_same_time(world: World):
    async def run(task, model):
        one, two = conversation("red"), conversation("grey")
        said = await asyncio.gather(*(model.chat(m) for m in (one, two, one)))
        return float(len(said))

    played = await play(world, run, "blue", env=None)
    assert played.num_turns == 3
    assert len(rows(played, 1.0)) == 3


async def test_several_choices_of_a_call(world: World):
    async def run(task, model):
        return float(len(await model.replies(conversation("red"), n=3)))

    own = collector(world, run, env=None)
    (group,) = await own.collect([task_of(0)], 0, 1)
    assert group.trajectories[0].reward == 3
    assert group.trajectories[0].num_turns == 3


async def test_untrained_calls_have_no_loss(world: World):
    async def run(task, model):
        await model.untrained().chat(conversation("red"), temperature=0.0)
        await model.chat(conversation("grey"))
        return 1

    played = await play(world, run, "blue", env=None)
    assert len(rows(played, 1.0)) == 1
    assert played.num_turns == 1
    assert [s.message.content for s in played.segments if s.message.role == "assistant"] == [
        "blue", "blue"
    ]  # fmt: skip


async def fails(task, model):
    await model.chat(conversation("red"))
    raise RuntimeError("no such file")


async def silent(task, model):
    return 1.0


async def says(task, model):
    await model.chat(conversation("red"))
    return "well done"


async def hangs(task, model):
    await model.chat(conversation("red"))
    await asyncio.Event().wait()


async def loops(task, model):
    while True:
        await model.chat(conversation("red"))


async def overflows(task, model):
    await model.chat(conversation("red " * 20))
    with pytest.raises(ContextOverflow, match="the context has 256"):
        await model.chat(conversation("red " * 400))
    await model.chat(conversation("red " * 400))


async def nothing(task, model):
    await model.chat(conversation("red"))


@pytest.mark.parametrize(
    ("agent", "status", "error"),
    [
        (fails, Status.ERROR_ENV, "the agent raised RuntimeError: no such file"),
        (says, Status.UNSCORABLE, "the agent returned 'well done'"),
        (hangs, Status.ERROR_TIMEOUT, "the episode took longer"),
        (loops, Status.TRUNCATED_TURNS, "has made 5 calls; the limit is 5"),
        (overflows, Status.TRUNCATED_LENGTH, "the context has 256"),
        (nothing, Status.UNSCORABLE, "no reward"),
    ],
)
async def test_ends(world: World, agent, status, error):
    played = await play(world, agent, "blue", env=None, max_turns=5, episode_deadline_s=2.0)
    assert error in (played.error or "")
    assert played.status is status
    assert played.reward == (0.0 if status.trainable else None)


async def test_an_agent_that_never_calls_gives_no_row_and_says_why(world: World):
    played = await play(world, silent, "blue", env=None)
    assert played.dropped == "nothing was sampled: the agent made no call that trains"


async def test_a_call_after_the_end_is_refused(world: World):
    kept: list[Any] = []

    async def run(task, model):
        kept.append(model)
        await model.chat(conversation("red"))
        return 1

    await play(world, run, "blue", env=None)
    with pytest.raises(CallRefused, match="the episode has ended"):
        await kept[0].chat(conversation("red"))


async def test_a_call_that_the_end_overtakes_opens_no_session(world: World):
    sampler = Scripted(world.renderer(), "blue")
    own = collector(world, silent, env=None, sampler=sampler)
    session = own.episode(task_of(0), Trajectory("t", "g", "q")).session
    assert isinstance(session, AgentSession)
    session.start()
    late = asyncio.ensure_future(session.call([Message(role="user", content="red")]))
    await asyncio.sleep(0)  # admitted, and not yet sampled
    session.close()
    with pytest.raises(CallRefused, match="the episode has ended"):
        await late
    assert sampler.sessions == set()


async def test_a_connection_that_the_agent_drops_is_not_closed_as_garbage(world: World):
    """OpenAI's client closes it again later, by the number of its socket: of the agent's next
    connection by then, which would wait for ever."""
    numbers: list[int] = []

    async def run(task, model):
        await model.chat(conversation("red"))
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1")
        stream = await anyio.connect_tcp(*server.sockets[0].getsockname())
        numbers.append(stream.extra(anyio.abc.SocketAttribute.raw_socket).fileno())
        server.close()
        del stream
        await asyncio.sleep(0)  # the task that connected holds it
        gc.collect()
        os.fstat(numbers[0])  # is still open
        return 1

    assert (await play(world, run, "blue", env=None)).error is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(numbers[0])


async def test_connections_that_the_agent_leaves_open_end_with_it(world: World):
    left: list[asyncio.StreamWriter] = []

    async def run(task, model):
        await model.chat(conversation("red"))
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1")
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        left.append(writer)
        server.close()
        return 1

    assert (await play(world, run, "blue", env=None)).reward == 1.0
    assert left[0].is_closing()


async def test_a_failure_of_the_environment_ends_the_attempt_whatever_the_agent_does(world: World):
    """Frameworks catch the errors of their tools, and tell them to the model."""

    async def run(task, model, env):
        await env.reset()
        await model.chat(conversation("red"))
        with pytest.raises(EnvError):
            await env.step("red")
        return 1

    task = Task(id="t", prompt=[], data={"seed": 0, "fault": "raise"})
    played = await play(world, run, "red", env="Faulty", task=task)
    assert (played.status, played.reward) == (Status.ERROR_ENV, None)
    assert "the disk is full of eels" in (played.error or "")


async def test_steps_after_the_end_are_told_so(world: World):
    async def run(task, model, env):
        opening = await env.reset()
        await model.chat(opening.messages)
        while not env.done:
            await env.step("red")
        late = await env.step("red")
        assert (late.messages[0].content, late.done) == ("The episode is over.", True)
        late = await env.call(ToolCall(name="say", arguments={"word": "red"}))
        assert (late.messages[0].role, late.reward) == ("tool", None)

    played = await play(world, run, "red")
    assert (played.status, played.error) == (Status.COMPLETED, None)
    assert played.reward is not None


async def test_another_attempt_starts_anew(world: World):
    attempts: list[int] = []

    async def run(task, model):
        attempts.append(1)
        await model.chat(conversation("red"))
        if len(attempts) == 1:
            raise RuntimeError("once")
        return 1

    played = await play(world, run, "blue", env=None, max_retries=1)
    assert (played.status, played.num_turns, len(attempts)) == (Status.COMPLETED, 1, 2)


async def test_a_turn_keeps_the_cache_of_its_conversation(world: World):
    """No token of a conversation is prefilled twice."""
    sampler = world.sampler(deterministic=False)
    await collector(world, mirror("plain"), sampler=sampler).collect([task_of(1)], 0, 1)
    (prompts,) = sampler.turns.values()
    last, _ = prompts[-1]
    assert len(prompts) > 1
    assert sampler.num_prefill_tokens <= len(last)


def test_the_agent_of_a_configuration_is_checked():
    with pytest.raises(Exception, match="it has to take `task` and `model`"):
        Agent.build(Spec(name="played_envs:task_of"))
    with pytest.raises(Exception, match="no file"):
        Agent.build(Spec(name="nosuch.py:run"))


def test_task_is_a_copy():
    task = Task(id="q")
    assert task.model_copy(deep=True) is not task
