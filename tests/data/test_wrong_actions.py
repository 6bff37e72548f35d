"""Demonstrations with mistakes: played, answered by the environment, and not trained."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from ludus.config.schema import RolloutConfig, RunConfig
from ludus.core.types import Spec
from ludus.data.conversations import read_conversations
from ludus.data.demonstrations import generate_demonstrations, load_demonstrations
from ludus.data.expert import mistaken, run_expert
from ludus.envs.textcraft.env import TextCraft

TASKS = [TextCraft.task("depth-2", seed) for seed in range(40)]


def test_a_number_is_changed_for_a_number_and_a_word_for_a_word() -> None:
    texts = ["craft 4 oak planks using 1 oak logs", "get 2 oak log"]
    seen = {mistaken("get 2 oak log", texts, Random(seed)) for seed in range(60)}
    assert "get 2 oak log" not in seen
    assert {"get 4 oak log", "get 2 planks log", "craft 2 oak log"} <= seen
    assert mistaken("...", [], Random(0)) == "..."


@pytest.mark.parametrize("format", ["plain", "tools"])
async def test_the_expert_goes_on_after_its_mistakes(format: str) -> None:
    num_mistakes = 0
    for task in TASKS:
        demo = await run_expert(TextCraft(num_distractors=2), task, format, 0.4)  # type: ignore[arg-type]
        assert demo.success
        turns = [message for message in demo.messages if message.role == "assistant"]
        assert len(turns) == demo.num_turns
        assert demo.num_turns - 1 not in demo.mistakes
        assert not {turn + 1 for turn in demo.mistakes} & set(demo.mistakes)  # never twice in a row
        num_mistakes += len(demo.mistakes)
    assert num_mistakes > 40


async def test_without_mistakes_nothing_is_written_of_them() -> None:
    demo = await run_expert(TextCraft(), TASKS[0])
    assert demo.mistakes == []
    assert "mistakes" not in demo.model_dump_json(exclude_defaults=True)


def test_mistakes_are_not_trained_and_the_file_has_them_again(tmp_path: Path) -> None:
    path = tmp_path / "demonstrations.jsonl"
    env = Spec(name="textcraft", args={"num_distractors": 1})
    files = []
    for workers in (1, 2):
        generate_demonstrations(env, TASKS, path, num_workers=workers, mistakes=0.4)
        files.append(path.read_bytes())
    assert files[0] == files[1]
    demos = list(load_demonstrations(path))
    config = RunConfig.model_construct(sft=None, rollout=RolloutConfig())
    conversations, _ = read_conversations(config, demos, TASKS)
    for demo, conversation in zip(demos, conversations, strict=True):
        untrained = [i for i, trained in enumerate(conversation.trained or []) if not trained]
        assert untrained == demo.mistakes
