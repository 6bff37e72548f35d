"""The tokenizer of a first recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from ludus.core.errors import ConfigError
from ludus.core.types import Message, Spec, Task
from ludus.data.conversations import Conversation
from ludus.diagnostics.calibration.conversations import of_heldout_levels
from ludus.diagnostics.calibration.first import base, tokenizer_for, tokenizer_name
from ludus.diagnostics.calibration.subject import Subject, for_training, open_subject

CONFIG = base(
    Subject("env", "babyai", "babyai", Spec(name="babyai"), ["GoToObj"]),
    0,
    None,
    "sft.jsonl",
    shows=True,
)


def conversations(*texts: str) -> list[Conversation]:
    return [
        Conversation(
            Task(id=text),
            [Message(role="user", content=text), Message(role="assistant", content="left")],
            None,
            None,
        )
        for text in texts
    ]


def test_words_of_held_out_levels_decide_on_the_kind_of_tokenizer() -> None:
    known = conversations(*(f"go to the {name}" for name in ("ball", "box", "key", "door") * 8))
    config, _, unknown = tokenizer_for(CONFIG, known, known)
    assert (tokenizer_name(config), unknown) == ("words", (0.0, 0.0))
    other = conversations("go to the 1732", "go to the 8809")
    config, size, unknown = tokenizer_for(CONFIG, known, known, other)
    assert (tokenizer_name(config), unknown) == ("bytes", (0.0, 0.0))
    rare = conversations(*["go to the ball"] * 300)
    rare[0].messages[1].content = "right"  # one word of 600 in a turn, in unseen training episodes
    assert tokenizer_name(tokenizer_for(CONFIG, known, rare)[0]) == "words"
    assert tokenizer_name(tokenizer_for(CONFIG, known, rare, other)[0]) == "bytes"
    same_size = tokenizer_for(CONFIG, known, other)[1]
    assert size == same_size, "their words are not learned"


def test_levels_that_are_held_out_are_not_trained_on() -> None:
    assert for_training(["a", "b", "a/dev", "a/test", "b/test"]) == ["a", "b"]
    assert for_training(["a", "b/test", "test"]) == ["a", "b/test", "test"]


def test_held_out_levels_that_do_not_open_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "env.py"
    file.write_text(
        """
import ludus
from ludus import Message, Observation, StepResult, Task


class Broken(ludus.Env):
    max_turns = 2

    @classmethod
    def tiers(cls):
        return ("near", "near/test")

    @classmethod
    def task(cls, tier, seed):
        return Task(id=f"{tier}/{seed}", tier=tier)

    async def reset(self, task):
        if task.tier.endswith("/test"):
            raise RuntimeError("no words file")
        return Observation([Message(role="user", content="go")])

    async def step(self, text):
        return StepResult(Observation([]), 1.0, True)

    def expert_action(self):
        return "go"
"""
    )
    subject = open_subject(f"{file}:Broken", {}, None)
    assert subject.tiers == ["near"]
    assert subject.heldout_tiers == ["near/test"]
    config = base(subject, 0, None, "sft.jsonl", shows=True)
    with pytest.raises(
        ConfigError, match=r"held-out levels near/test: none of 8 .* opened \(.*no words"
    ):
        of_heldout_levels(config, subject, subject.take(4, 0))
