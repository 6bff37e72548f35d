"""AgentTraj: which turns train, malformed entries each on their own, and round trips."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.config.schema import RolloutConfig, RunConfig
from ludus.core.errors import ConfigError, DataError
from ludus.core.types import Message, Spec
from ludus.data.conversations import read_conversations as read_sft
from ludus.data.generation import GenerationRequest, TaskSelection, generate_dataset
from ludus.envs.textcraft.env import TextCraft
from ludus.tasks.agentgym import (
    conversations_of,
    messages_of,
    read_agentgym,
    read_conversations,
    read_trajectories,
)


def human(value: Any, **more: Any) -> dict[str, Any]:
    return {"from": "human", "loss": None, "value": value, **more}


def gpt(value: Any, loss: Any = True) -> dict[str, Any]:
    return {"from": "gpt", "loss": loss, "value": value}


def entry(*turns: Any, item_id: Any = "webshop_6") -> dict[str, Any]:
    return {"item_id": item_id, "conversations": list(turns)}


GOOD = entry(human("Goal."), gpt("Action: look"))


@pytest.mark.parametrize(
    ("loss", "trains"),
    [(True, True), (1, True), ("yes", True), (False, False), (None, False), (0, False)],
)
def test_a_turn_trains_where_its_loss_is_truthy(loss: Any, trains: bool) -> None:
    turns = [human("a"), gpt("b"), human("c"), gpt("d", loss), human("e"), gpt("f")]
    messages, trained = messages_of(turns)
    assert [m.content for m in messages] == list("abcdef")
    assert trained == [True, trains, True]
    del turns[3]["loss"]
    assert messages_of(turns)[1] == [True, False, True]


MALFORMED: list[tuple[Any, str]] = [
    (entry(gpt("first"), human("a"), gpt("b")), "turn 1 of gpt opens the conversation"),
    (entry(human("a"), gpt("b"), gpt("c")), "turn 3 of gpt follows another turn of gpt"),
    (entry(human("a"), gpt("b", None)), "no turn of the model with `loss: true`"),
    (entry(human("a", loss=True), gpt("b")), "turn 1 is from human, but has `loss`"),
    (entry(human(None), gpt("b")), "turn 1: value must be a text, got None"),
    (entry("hello", gpt("b")), "turn 1 must be from human or gpt, got 'hello'"),
    ({**GOOD, "item_id": None}, "item_id must be a text such as webshop_6, got None"),
    ({"conversations": GOOD["conversations"]}, "item_id must be a text"),
    ({"item_id": "webshop_6"}, "conversations must be a list of turns, got None"),
    (entry(human("a \ud800"), gpt("b")), r"has a lone surrogate, \ud800"),
    ([], "is not an object but list"),
    (7, "is not an object but int"),
]


@pytest.mark.parametrize("form", ["list", "lines"])
@pytest.mark.parametrize(("wrong", "reason"), MALFORMED, ids=[reason for _, reason in MALFORMED])
def test_a_malformed_entry_is_alone(wrong: Any, reason: str, form: str, tmp_path: Path) -> None:
    path = tmp_path / "traj.json"
    entries = [GOOD, wrong, GOOD]
    lines = "\n".join(map(json.dumps, entries))
    path.write_text(json.dumps(entries) if form == "list" else lines)
    kept, skipped = read_trajectories(str(path), "skip")
    assert [recorded.item_id for recorded in kept] == ["webshop_6", "webshop_6#2"]
    assert len(skipped) == 1
    assert skipped[0].startswith(f"{path}:2: ")
    assert reason in skipped[0]
    with pytest.raises(DataError) as error:
        read_trajectories(str(path), "refuse")
    assert f"{path}:2: " in str(error.value)


@pytest.mark.parametrize("broken", [b"{", b'{"item_id": "x"', b"\xff\xfe", b"NaN"])
def test_a_broken_line_is_alone(broken: bytes, tmp_path: Path) -> None:
    path = tmp_path / "traj.jsonl"
    good = json.dumps(GOOD).encode()
    path.write_bytes(b"\n".join([broken, b"", good, b""]))
    kept, skipped = read_trajectories(str(path), "skip")
    assert len(kept) == 1
    assert skipped[0].startswith(f"{path}:1: ")
    with pytest.raises(DataError, match=r"traj\.jsonl:1: "):
        read_trajectories(str(path), "refuse")
    # The run's own reader knows the format in spite of the first line.
    conversations, left_out = read_sft(sft_config(path, on_bad_line="skip"), [], [])
    assert (len(conversations), len(left_out)) == (1, 1)


def test_line_separators_inside_a_text_end_no_line(tmp_path: Path) -> None:
    path = tmp_path / "traj.jsonl"
    text = "one\u2028two\u2029three\x85four\x0bfive\x1csix\r\nseven"
    rows = [entry(human(text), gpt("a"), item_id=f"webshop_{i}") for i in range(2)]
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), "utf-8")
    kept, bad = read_conversations(path)
    assert not bad
    assert [r.messages[0].content for r in kept] == [text, text]


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40).filter(
    lambda text: "think>" not in text
)
USER = TEXT.map(lambda text: Message(role="user", content=text))
MODEL = st.builds(
    lambda text, thought: Message(role="assistant", content=text, thinking=thought),
    TEXT,
    st.none() | TEXT,
)


@given(
    system=st.none() | TEXT,
    turns=st.lists(st.tuples(USER, MODEL), min_size=1, max_size=4),
    last=st.none() | USER,
    lines=st.booleans(),
)
def test_what_is_written_is_read_again(
    system: str | None,
    turns: list[tuple[Message, Message]],
    last: Message | None,
    lines: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    opening = [] if system is None else [Message(role="system", content=system)]
    messages = [*opening, *(message for pair in turns for message in pair)]
    messages += [last] if last else []
    row = {"item_id": "babyai_3", "conversations": conversations_of(messages)}
    path = tmp_path_factory.getbasetemp() / "round.json"
    path.write_text(json.dumps(row if lines else [row], ensure_ascii=False), "utf-8")
    [found], bad = read_conversations(path)
    assert not bad
    assert found.messages == messages
    assert found.trained == [True] * len(turns)


def test_what_cannot_be_written() -> None:
    ask, say = Message(role="user", content="a"), Message(role="assistant", content="b")
    system = Message(role="system", content="s")
    for messages in ([say], [ask, say, say], []):
        if messages:
            with pytest.raises(ConfigError, match="a message before each turn of the model"):
                conversations_of(messages)
    assert messages_of(conversations_of([system, say]))[0] == [
        Message(role="user", content="s"),
        say,
    ]
    joined = messages_of(conversations_of([ask, say, ask, ask, say]))[0]
    assert [m.content for m in joined] == ["a", "b", "a\na", "b"]


def sft_config(path: Path, **tasks: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "env": "textcraft",
            "model": {"tokenizer": "words", "architecture": "qwen3"},
            "tasks": {"train": {"name": "env", "args": {"num_tasks": 2}}, **tasks},
            "sft": {"data": str(path), "steps": 1},
        }
    )


def test_untrained_turns_are_context(tmp_path: Path) -> None:
    path = tmp_path / "traj.json"
    turns = [human("a"), gpt("b", None), human("c"), gpt("d")]
    path.write_text(json.dumps([entry(*turns)]))
    [conversation], _ = read_sft(sft_config(path), [], [])
    assert conversation.trained == [False, True]
    assert [m.content for m in conversation.messages] == list("abcd")


def generated(folder: Path, selection: TaskSelection) -> Path:
    rollout = RolloutConfig(format="react")
    envs = [Spec(name="textcraft")]
    generate_dataset(GenerationRequest(envs, "expert", selection, rollout, workers=1), folder)
    return folder / "agenttraj.json"


def test_items_of_our_own_tasks_are_the_same_tasks(tmp_path: Path) -> None:
    path = generated(tmp_path / "first", TaskSelection(num_tasks=3, tiers=["depth-1"]))
    written = [row["item_id"] for row in json.loads(path.read_text())]
    assert written == [f"textcraft/depth-1/{seed}" for seed in range(3)]
    tasks = read_agentgym(str(path), name="textcraft", maker=TextCraft())
    assert tasks == [TextCraft.task("depth-1", seed) for seed in range(3)]
    assert generated(tmp_path / "second", TaskSelection(items=str(path))).read_bytes() == (
        path.read_bytes()
    )
    for foreign in ("babyai/GoToObj/3", "textcraft/depth-9/3", "textcraft/depth-1/x"):
        path.write_text(json.dumps([{"item_id": foreign}]))
        with pytest.raises(DataError, match=r"agenttraj\.json:1: .* is not an item of textcraft"):
            read_agentgym(str(path), maker=TextCraft())
