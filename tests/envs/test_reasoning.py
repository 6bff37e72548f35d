"""reasoning-gym: which data sets are offered, what an answer is, what a verifier may not run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from ludus.core.errors import ConfigError, EnvError
from ludus.core.types import Message, StepResult, Task, ToolCall

pytest.importorskip("reasoning_gym", reason="needs ludus-rl[reasoning]")

import reasoning_gym
from reasoning_gym.factory import DATASETS

from ludus.envs.reasoning import (
    EVALUATED,
    NO_ANSWER,
    QUICK,
    REFUSED,
    Reasoning,
    answer_in,
    generated,
)


async def answering(dataset: str, seed: int = 0, **args: Any) -> Reasoning:
    env = Reasoning(**args)
    await env.reset(Reasoning.task(dataset, seed))
    return env


async def say(env: Reasoning, text: str) -> StepResult:
    return await env.step(Message(role="assistant", content=text))


@pytest.mark.parametrize("seed", range(0, 400, 8))
async def test_the_steps_of_a_sum_are_its_running_totals(seed: int) -> None:
    env = await answering("chain_sum", seed)
    steps = str(env.expert_steps()).splitlines()

    def number(digits: str) -> int:
        return int(digits.removesuffix("-")[::-1]) * (-1 if digits.endswith("-") else 1)

    for line in steps:
        before, sign, term, _, after = line.split(" ")
        assert number(after) == number(before) + (1 if sign == "+" else -1) * number(term)
    assert [line.split()[0] for line in steps[1:]] == [line.split()[-1] for line in steps[:-1]]
    assert number(steps[-1].split()[-1]) == int(answer_in(env.expert_action()))


@pytest.mark.parametrize("seed", range(0, 400, 8))
async def test_the_steps_of_a_count_are_the_text_with_numbers(seed: int) -> None:
    env = await answering("letter_counting", seed)
    entry = env._entry or {}
    letter, text = entry["metadata"]["target_letter"], " ".join(entry["metadata"]["span"])
    steps, count = str(env.expert_steps()), 0
    for character in text:
        assert steps.startswith(character)
        steps = steps[1:]
        if character.lower() == letter:
            count += 1
            assert steps.startswith(str(count))
            steps = steps.removeprefix(str(count))
    assert (steps, str(count)) == ("", answer_in(env.expert_action()))


async def test_steps_can_be_left_out_and_other_data_sets_have_none() -> None:
    assert (await answering("chain_sum", 0, steps=False)).expert_steps() is None
    assert (await answering("gcd", 0)).expert_steps() is None
    assert Reasoning().expert_steps() is None


SAMPLE = """
import asyncio, hashlib, json, random
from ludus.core.types import Message
from ludus.envs.reasoning import Reasoning
async def main():
    env, found = Reasoning(), {}
    state = random.getstate()
    for name in Reasoning.tiers():
        opening = await env.reset(Reasoning.task(name, 11))
        action = env.expert_action()
        text = opening.messages[0].content + action
        result = await env.step(Message(role="assistant", content=action))
        found[name] = [hashlib.sha256(text.encode()).hexdigest(), result.reward]
    assert random.getstate() == state, "the global random generator was used"
    print(json.dumps(found))
asyncio.run(main())
"""


@pytest.mark.slow
def test_every_data_set_scores_its_own_answer_and_is_the_same_everywhere() -> None:
    """One task of each, in two processes of different hash seeds; nothing else is printed."""
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", SAMPLE],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for hash_seed in ("1", "2")
    ]
    first, second = (json.loads(run.communicate()[0]) for run in runs)
    assert set(first) == DATASETS.keys() - REFUSED.keys()
    assert [name for name, (_, reward) in first.items() if reward != 1.0] == []
    assert [name for name in first if first[name] != second[name]] == []


def test_what_is_refused_is_refused_for_what_it_does() -> None:
    assert REFUSED.keys() < DATASETS.keys()
    for name in (name for name, reason in REFUSED.items() if reason == NO_ANSWER):
        dataset = reasoning_gym.create_dataset(name, seed=1, size=1)
        entry = dataset[0]
        assert dataset.score_answer(entry["answer"], entry) < 1.0, name
    halting = reasoning_gym.create_dataset("game_of_life_halting", seed=1, size=8)
    entries = [halting[i] for i in range(8)]
    assert any(halting.score_answer("rubbish", entry) == 1.0 for entry in entries)


def test_refused_and_unknown_names_are_told() -> None:
    with pytest.raises(ConfigError, match="'rubiks_cube' of reasoning-gym is not supported: its"):
        Reasoning.task("rubiks_cube", 0)
    with pytest.raises(ConfigError, match="did you mean chain_sum"):
        Reasoning.task("chainsum", 0)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({}, "'None' is not a data set"),
        ({"dataset": "composite", "seed": 1}, "is not supported: it combines other data sets"),
        ({"dataset": "chain_sum"}, "data.seed is None"),
        ({"dataset": "chain_sum", "seed": -1}, "data.seed is -1"),
        ({"dataset": ["chain_sum"], "seed": 1}, "is not a data set"),
    ],
)
async def test_wrong_tasks_are_named(data: dict[str, Any], problem: str) -> None:
    with pytest.raises(EnvError, match=problem):
        await Reasoning().reset(Task(id="x", data=data))


async def test_an_episode_is_one_answer() -> None:
    env = Reasoning(guide=True)
    opening = await env.reset(Reasoning.task("chain_sum", 3))
    assert "<answer>...</answer>" in opening.messages[0].content
    right = answer_in(env.expert_action())
    result = await say(env, f"I think <answer>5</answer>, no: <answer> {right} </answer>.")
    assert (result.reward, result.terminated, result.info["success"]) == (1.0, True, True)
    assert result.messages[0].content == "correct."
    with pytest.raises(EnvError, match="call reset first"):
        await say(env, "1")


async def test_a_wrong_answer_is_told_its_score() -> None:
    env = await answering("chain_sum", 3)
    result = await say(env, "<answer>no idea</answer>")
    assert (result.reward, result.info["success"]) == (0.0, False)
    assert result.messages[0].content == "wrong. your score is 0.00."


async def test_the_whole_text_is_the_answer_where_no_tag_is() -> None:
    env = await answering("chain_sum", 3)
    right = answer_in(env.expert_action())
    assert (await say(env, f" {right}\n")).reward == 1.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>1</answer> <answer>2</answer>", "2"),
        ("<answer>1", "<answer>1"),
        ("1</answer>", "1</answer>"),
        ("</answer><answer>1</answer>", "1"),
        ("", ""),
    ],
)
def test_the_last_answer_counts(text: str, answer: str) -> None:
    assert answer_in(text) == answer


@pytest.mark.parametrize("dataset", sorted(EVALUATED))
async def test_verifiers_run_no_code_of_the_model(
    dataset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's verifier would; the answers end before it."""
    reached: list[int] = []
    monkeypatch.setattr(os, "getpid", lambda: reached.append(1) or 1)
    for attack in (
        "__import__('os').getpid()",
        "[__import__('os').getpid()]",
        "().__class__.__base__.__subclasses__()",
        "9**9**9**9",
        "2**99999999",
    ):
        env = await answering(dataset)
        assert (await say(env, f"<answer>{attack}</answer>")).reward in (0.0, 0.01, 0.05)
    assert not reached


async def test_what_a_verifier_cannot_read_is_wrong() -> None:
    for text in ("rubbish Ω [] 3", "x" * 30_000, "<answer></answer>"):
        env = await answering("prime_factorization")
        assert (await say(env, text)).reward in (0.0, 0.01)


async def test_a_level_by_data_set() -> None:
    env = Reasoning(level={"chain_sum": 0})
    for name, level in (("chain_sum", 0), ("gcd", None)):
        task = Reasoning.task(name, 3)
        opening = await env.reset(task)
        alone = await Reasoning(level=level).reset(task)
        assert opening == alone
    with pytest.raises(ConfigError, match=r"chain_summ.*did you mean chain_sum"):
        Reasoning(level={"chain_summ": 1})


def test_quick_data_sets_need_no_thread() -> None:
    """At the library's difficulty, and without a verifier that evaluates."""
    assert set(QUICK) <= set(Reasoning.tiers()) - EVALUATED.keys()
    task, slow = Reasoning.task("chain_sum", 0), Reasoning.task("sudoku", 0)
    assert not Reasoning.blocks(task)
    assert not Reasoning.blocks(task, level={"gcd": 2})
    assert Reasoning.blocks(task, level=2)
    assert Reasoning.blocks(task, level={"chain_sum": 2})
    assert Reasoning.blocks(slow)


async def test_the_episodes_of_a_group_generate_their_task_once() -> None:
    task = Reasoning.task("sudoku", 5)
    before = generated.cache_info().misses
    openings = [(await Reasoning().reset(task)).messages for _ in range(3)]
    assert openings[0] == openings[1] == openings[2]
    assert generated.cache_info().misses == before + 1


async def test_levels_are_the_librarys() -> None:
    sizes = []
    for level in (0, 3):
        env = Reasoning(level=level)
        texts = [
            (await env.reset(Reasoning.task("chain_sum", seed))).messages[0].content
            for seed in range(10)
        ]
        sizes.append(sum(map(len, texts)))
    assert sizes[0] < sizes[1]
    with pytest.raises(EnvError, match="acre has no difficulty levels"):
        await Reasoning(level=1).reset(Reasoning.task("acre", 0))
    with pytest.raises(EnvError, match="caesar_cipher has no level"):
        await Reasoning(level=9).reset(Reasoning.task("caesar_cipher", 0))


async def test_an_answer_can_be_a_tool_call() -> None:
    env = await answering("chain_sum", 3)
    call = ToolCall(name="answer", arguments={"text": answer_in(env.expert_action())}, id="c1")
    result = await env.step(Message(role="assistant", tool_calls=[call]))
    assert result.reward == 1.0
    assert result.messages[0].tool_call_id == "c1"
    with pytest.raises(ValueError, match="text is missing"):
        env.text_of(ToolCall(name="answer"))
