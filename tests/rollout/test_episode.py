"""The episode driver with a token session: tokens, statuses, formats, thinking, judges."""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random
from typing import Any

import pytest
from played_envs import COLOURS, Shouts, task_of
from rollout_world import STYLES, Scripted, World

from ludus.core.types import Message, Score, Spec, Status, Task, ToolCall, Trajectory
from ludus.judges import JUDGES
from ludus.train import ALGORITHMS
from ludus.train.batches.samples import rows, to_samples

STYLES_AND_THINKING = [
    *((style, "keep") for style in STYLES),
    ("think", "strip"),
    ("think", "forbid"),
]


def check_tokens(trajectory: Trajectory, turns: list[tuple[list[int], Any]]) -> None:
    """Invariants 1 and 2: the tree holds the prompt and sampled tokens of the sampler."""
    sampled = [i for i, segment in enumerate(trajectory.segments) if segment.sampled]
    assert len(sampled) == len(turns) == trajectory.num_turns
    for index, (prompt, completion) in zip(sampled, turns, strict=True):
        segment = trajectory.segments[index]
        assert segment.token_ids == completion.token_ids
        assert segment.logprobs == completion.logprobs
        assert segment.policy_version == completion.policy_version
        assert trajectory.token_ids(index) == prompt + completion.token_ids


def check_rows(trajectory: Trajectory) -> None:
    """Each sampled token has a loss in exactly one row, with its own log-probability."""
    trained: Counter[int] = Counter()
    expected: Counter[int] = Counter()
    pairs = []
    for segment in trajectory.segments:
        if segment.logprobs is not None:
            expected.update(segment.token_ids)
            pairs += list(zip(segment.token_ids, segment.logprobs, strict=True))
    seen = []
    for row in rows(trajectory, 1.0):
        for token, mask, logprob in zip(row.token_ids, row.loss_mask, row.logprobs, strict=True):
            if mask:
                trained[token] += 1
                seen.append((token, logprob))
    assert trained == expected
    assert sorted(seen) == sorted(pairs)


@pytest.mark.parametrize(("style", "thinking"), STYLES_AND_THINKING)
async def test_tokens_in_are_tokens_out(world: World, style: str, thinking: str):
    sampler = world.sampler()
    collector = world.collector(style=style, thinking=thinking, sampler=sampler)
    groups = await collector.collect([task_of(100 + i) for i in range(6)], 0, 4)
    played = [t for group in groups for t in group.trajectories]
    for trajectory in played:
        check_tokens(trajectory, sampler.turns[trajectory.id])
        check_rows(trajectory)
    assert max(t.num_turns for t in played) >= 3
    assert sampler.open_sessions == []


async def test_sampled_ids_are_never_retokenised(world: World):
    """`re` + `d` reads as `red`, but trains as the two tokens that were sampled."""
    tokenizer = world.tokenizer
    ids = tokenizer.convert_tokens_to_ids(["red", " ", " "])
    scripted = Scripted(world.renderer(), "x")

    async def sample(prompt: list[int], params: Any, *, session: str) -> Any:
        completion = await Scripted.sample(scripted, prompt, params, session=session)
        completion.token_ids[:] = [*ids, world.renderer().stop_token_ids[0]]
        completion.logprobs[:] = [-0.5] * 4
        return completion

    scripted.sample = sample  # type: ignore[method-assign]
    assert tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) == ids
    (group,) = await world.collector(sampler=scripted, max_turns=3).collect([task_of(0)], 0, 1)
    trajectory = group.trajectories[0]
    check_tokens(trajectory, scripted.turns[trajectory.id])


async def play(world: World, *texts: Any, task: Task | None = None, **how: Any) -> Trajectory:
    """Play one episode with a model that samples `texts`."""
    style, thinking = how.get("style", "plain"), how.get("thinking", "keep")
    context = how.pop("context_length", 256)
    sampler = Scripted(world.renderer(style, thinking), *texts, context_length=context)
    collector = world.collector(sampler=sampler, **how)
    (group,) = await collector.collect([task or task_of(0)], 0, 1)
    (trajectory,) = group.trajectories
    check_tokens(trajectory, sampler.turns.get(trajectory.id, []))
    check_rows(trajectory)
    assert sampler.sessions == set()
    return trajectory


def replies_of(trajectory: Trajectory) -> list[str]:
    """The environment's messages after the opening."""
    found = [s.message for s in trajectory.segments if s.message and not s.sampled]
    return [m.content for m in found if m.role in ("user", "tool")][1:]


def wanted(seed: int) -> list[str]:
    """The colours that `Say` asks for."""
    rng = Random(seed)
    return [rng.choice(COLOURS) for _ in range(3)]


def seed_without_grey() -> int:
    return next(seed for seed in range(100) if "grey" not in wanted(seed))


async def test_completed_with_the_rewards_of_its_steps(world: World):
    task = task_of(seed_without_grey())
    right = wanted(task.data["seed"])
    trajectory = await play(world, *right, task=task)
    assert (trajectory.status, trajectory.reward) == (Status.COMPLETED, 3.0)
    assert [s.reward for s in trajectory.segments if s.sampled] == [1.0, 1.0, 1.0]
    assert trajectory.metrics["success"] == 1.0
    assert replies_of(trajectory)[-1] == "done ."
    assert trajectory.segments[-1].token_ids == [], "the last message has no ids: no turn follows"
    half = await play(world, right[0], "purple", right[1], "nothing", right[2], task=task)
    assert (half.reward, half.metrics["success"]) == (3.0, 1.0)


async def test_truncated_turns_keep_their_rewards(world: World):
    right = wanted(0)
    trajectory = await play(world, right[0], *["purple"] * 3, max_turns=4)
    assert trajectory.status is Status.TRUNCATED_TURNS
    assert (trajectory.reward, trajectory.num_turns) == (1.0, 4)
    assert trajectory.segments[-1].sampled, "the last turn has no reply"


async def test_the_environments_turn_limit_applies(world: World):
    trajectory = await play(world, "purple")
    assert (trajectory.status, trajectory.num_turns) == (Status.TRUNCATED_TURNS, 5)
    assert trajectory.reward == 0.0


async def test_a_turn_over_the_token_limit_is_truncated(world: World):
    trajectory = await play(world, wanted(0)[0], "red red red...")
    assert (trajectory.status, trajectory.num_turns) == (Status.TRUNCATED_LENGTH, 2)
    assert trajectory.reward == 1.0


async def test_a_full_context_ends_the_episode(world: World):
    """The environment's reply fills the context: earned rewards count."""
    trajectory = await play(
        world, "red", task=task_of(0, fault="long"), env="Faulty", context_length=100
    )
    assert (trajectory.status, trajectory.num_turns) == (Status.TRUNCATED_LENGTH, 1)
    assert trajectory.reward == 0.5
    assert "model.context_length is 100" in (trajectory.error or "")


async def test_a_turn_ends_at_the_context_limit(world: World):
    sampler = world.sampler(context_length=24)
    collector = world.collector(sampler=sampler, max_tokens_per_turn=40)
    groups = await collector.collect([task_of(i) for i in range(4)], 0, 2)
    for trajectory in (t for group in groups for t in group.trajectories):
        check_tokens(trajectory, sampler.turns[trajectory.id])
        assert max(len(p) + len(c.token_ids) for p, c in sampler.turns[trajectory.id]) <= 24


async def test_an_opening_longer_than_the_context_never_trains(world: World):
    long = Task(id="long", prompt=[Message(role="user", content="say red . " * 100)])
    long.data["seed"] = 0
    collector = world.collector()
    groups = await collector.collect([long, task_of(1)], 0, 4)
    for trajectory in groups[0].trajectories:
        assert (trajectory.status, trajectory.reward) == (Status.TRUNCATED_LENGTH, None)
        assert "success" not in trajectory.metrics
    assigned = ALGORITHMS.build("grpo").assign(groups)
    assert {sample.group_id for sample in to_samples(assigned)} == {groups[1].id}
    reason = assigned.excluded[groups[0].trajectories[0].id]
    assert "the conversation has 309 tokens" in reason
    assert "before turn 1; model.context_length is 256" in reason


@pytest.mark.parametrize("judged", [True, False])
async def test_an_opening_too_long_for_a_task_without_environment(world: World, judged: bool):
    long = Task(id="long", prompt=[Message(role="user", content="red " * 300)], answer="red")
    judge = JUDGES.build("answer", "judge") if judged else None
    (group,) = await world.collector(env=None, judge=judge).collect([long], 0, 1)
    (trajectory,) = group.trajectories
    assert (trajectory.status, trajectory.reward) == (Status.TRUNCATED_LENGTH, None)
    assert "model.context_length is 256" in (trajectory.dropped or "")


async def test_unscorable_without_reward_and_judge(world: World):
    silent = await play(world, "red", env="Faulty", task=task_of(0, fault="never scored"))
    assert (silent.status, silent.reward) == (Status.UNSCORABLE, None)
    assert "no `judge` is configured" in (silent.error or "")
    asked = Task(id="q", prompt=[Message(role="user", content="say red .")])
    assert (await play(world, "red", env=None, task=asked)).status is Status.UNSCORABLE
    dropped = (await play(world, "red...", env=None, task=asked)).status
    assert dropped is Status.UNSCORABLE


async def test_a_truncated_episode_without_rewards_earned_0(world: World):
    trajectory = await play(world, "red", env="Cut")
    assert (trajectory.status, trajectory.reward) == (Status.TRUNCATED_TURNS, 0.0)


# Formats


async def test_react_parses_the_text_after_action(world: World):
    right = wanted(0)
    trajectory = await play(
        world, *(f"the colour is {c}\nAction: {c}" for c in right), style="react"
    )
    assert (trajectory.status, trajectory.reward) == (Status.COMPLETED, 3.0)


@pytest.mark.parametrize("text", ["red", "Action:", "Action: red\nAction: red"])
async def test_a_react_error_is_replied_and_costs_a_turn(world: World, text: str):
    right = wanted(0)
    turns = [text, *(f"Action: {c}" for c in right)]
    trajectory = await play(world, *turns, style="react", max_turns=3)
    assert (trajectory.status, trajectory.num_turns) == (Status.TRUNCATED_TURNS, 3)
    assert "Action:" in replies_of(trajectory)[0]
    assert [s.reward for s in trajectory.segments if s.sampled] == [None, 1.0, 1.0]
    assert trajectory.reward == 2.0


def called(word: str) -> Message:
    return Message(role="assistant", tool_calls=[ToolCall(name="say", arguments={"word": word})])


async def test_tool_calls_get_a_tool_reply(world: World):
    seed = seed_without_grey()
    right = wanted(seed)
    trajectory = await play(world, *map(called, right), style="tools", task=task_of(seed))
    assert (trajectory.status, trajectory.reward) == (Status.COMPLETED, 3.0)
    answers = [s.message for s in trajectory.segments if s.message and s.message.role == "tool"]
    assert [(m.name, m.content) for m in answers] == [
        ("say", f"say {right[1]} ."),
        ("say", f"say {right[2]} ."),
        ("say", "done ."),
    ]


@pytest.mark.parametrize(
    ("turn", "role", "error"),
    [
        ("red", "user", "make exactly one tool call a turn, not 0."),
        (
            Message(role="assistant", tool_calls=called("red").tool_calls * 2),
            "tool",
            "make exactly one tool call a turn, not 2.",
        ),
        ('<tool_call>{"name": "shout", "arguments": {}}</tool_call>', "user", "no tool 'shout'"),
        ('<tool_call>{"name": "say", "arguments": {}}</tool_call>', "user", "'word' is a required"),
        ('<tool_call>{"name": "say"', "user", ""),
        (called("grey"), "tool", "say: grey is not for calling ."),
        (called("purple"), "tool", "that is no colour ."),
    ],
)
async def test_an_invalid_call_is_replied_and_costs_a_turn(
    world: World, turn: Any, role: str, error: str
):
    trajectory = await play(world, turn, style="tools", max_turns=2)
    assert (trajectory.status, trajectory.num_turns) == (Status.TRUNCATED_TURNS, 2)
    assert trajectory.reward == 0.0
    (answer,) = [s.message for s in trajectory.segments[2:] if s.message and not s.sampled]
    assert (answer.role, error in answer.content) == (role, True), answer


async def test_the_environments_message_objects_are_not_modified(world: World):
    await play(world, called("red"), style="tools", env="Shouts")
    assert Message(role="user", content="that is no colour .") == Shouts.ANSWER


async def test_an_exception_in_text_of_is_an_environment_error(world: World):
    trajectory = await play(world, called("red"), style="tools", env="BrokenCalls", max_retries=0)
    assert trajectory.status is Status.ERROR_ENV
    assert "ZeroDivisionError: calls are broken" in (trajectory.error or "")


# Thinking


async def test_thinking_is_kept_in_a_chain(world: World):
    right = wanted(0)
    turns = [Message(role="assistant", content=c, thinking="the colour is red") for c in right]
    trajectory = await play(world, *turns, style="think")
    assert (trajectory.status, trajectory.reward) == (Status.COMPLETED, 3.0)
    assert len(trajectory.leaves()) == 1
    assert len(rows(trajectory, 1.0)) == 1


async def test_stripped_thinking_branches_and_trains_once(world: World):
    right = wanted(0)
    turns = [Message(role="assistant", content=c, thinking="the colour is red") for c in right]
    trajectory = await play(world, *turns, style="think", thinking="strip")
    assert (trajectory.status, trajectory.reward) == (Status.COMPLETED, 3.0)
    assert len(trajectory.leaves()) == 3
    found = rows(trajectory, 1.0)
    think = world.tokenizer.convert_tokens_to_ids("<think>")
    assert [row.token_ids.count(think) for row in found] == [1, 1, 1]
    for row, colour in zip(found, right, strict=True):
        said = [t for t, mask in zip(row.token_ids, row.loss_mask, strict=True) if mask]
        expected = f"<think>the colour is red</think>{colour}<|end|>"
        assert world.tokenizer.decode(said) == expected


async def test_forbidden_thinking_is_replied_and_costs_a_turn(world: World):
    right = wanted(0)
    thinks = f"<think>the colour is red</think>{right[0]}"
    trajectory = await play(world, thinks, *right, style="think", thinking="forbid", max_turns=4)
    assert (trajectory.status, trajectory.reward) == (Status.COMPLETED, 3.0)
    assert "Thinking is not allowed" in replies_of(trajectory)[0]
    assert len(trajectory.leaves()) == 1


# Judges


async def test_a_judge_scores_a_task_without_environment(world: World):
    judge = JUDGES.build(Spec(name="answer"), "judge")
    task = Task(id="q", prompt=[Message(role="user", content="say red .")], answer="red")
    right = await play(world, "red", env=None, judge=judge, task=task)
    wrong = await play(world, "blue", env=None, judge=judge, task=task)
    assert [(t.status, t.reward, t.num_turns, t.metrics["success"]) for t in (right, wrong)] == [
        (Status.COMPLETED, 1.0, 1, 1.0),
        (Status.COMPLETED, 0.0, 1, 0.0),
    ]
    assert right.scores == {"correct": 1.0, "found": 1.0}
    assert (right.explanation, wrong.explanation) == (
        "'red', equal to 'red'",
        "'blue', expected 'red'",
    )
    no_answer = task.model_copy(update={"answer": None})
    unscored = await play(world, "red", env=None, judge=judge, task=no_answer)
    assert (unscored.status, unscored.reward) == (Status.UNSCORABLE, None)


async def test_a_judge_overrides_the_environments_rewards(world: World):
    async def half(task: Task, trajectory: Trajectory) -> Score:
        return Score(value=0.5, parts={"style": 0.5})

    trajectory = await play(world, *wanted(0), judge=half)
    assert (trajectory.reward, trajectory.metrics["success"]) == (0.5, 0.0)


@pytest.mark.parametrize(
    ("verdict", "error"),
    [
        (ValueError("no idea"), "the judge raised ValueError: no idea"),
        (SystemExit(0), "the judge raised SystemExit: 0"),
        (asyncio.CancelledError(), "the judge raised CancelledError"),
        (Score(value=1e300), "has to return a finite Score"),
        (Score(value=float("nan")), "has to return a finite Score"),
        (None, "the judge returned None"),
        (Score(value=1, parts={"\ud800": 1}), "half a surrogate pair"),
        (Score(value=1, explanation="\ud800"), "half a surrogate pair"),
    ],
)
async def test_a_failing_judge_makes_the_episode_unscorable(world: World, verdict: Any, error: str):
    async def judge(task: Task, trajectory: Trajectory) -> Any:
        if isinstance(verdict, BaseException):
            raise verdict
        return verdict

    trajectory = await play(world, *wanted(0), judge=judge)
    assert (trajectory.status, trajectory.reward) == (Status.UNSCORABLE, None)
    assert error in (trajectory.error or "")
