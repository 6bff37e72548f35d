"""The tokenizer of a first recipe."""

from __future__ import annotations

from ludus.core.types import Message, Spec, Task
from ludus.data.conversations import Conversation
from ludus.diagnostics.calibration.first import base, tokenizer_for, tokenizer_name
from ludus.diagnostics.calibration.subject import Subject

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
