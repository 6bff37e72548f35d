"""Generating data: expert, rejection sampling, mixed; stopped and taken up again; the card."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from chat_server import ChatServer, num_turns, text
from starlette.responses import Response

from ludus.config.schema import RolloutConfig, RunConfig
from ludus.core.errors import ConfigError, DataError
from ludus.core.types import Message, Spec
from ludus.data import options
from ludus.data.cards import KeepRule, select
from ludus.data.conversations import read_conversations as read_sft
from ludus.data.expert import run_expert
from ludus.data.generation import EndpointModel, GenerationRequest, TaskSelection, generate_dataset
from ludus.data.journal import JOURNAL, Record
from ludus.envs.textcraft.env import TextCraft
from ludus.tasks.agentgym import messages_of, read_agentgym, read_conversations

TEXTCRAFT = [Spec(name="textcraft")]
SELECTION = TaskSelection(num_tasks=4, tiers=["depth-1"])


def request(source: str, selection: TaskSelection = SELECTION, **given: Any) -> GenerationRequest:
    settings = {"format": "react", "max_retries": 0, **given.pop("rollout", {})}
    return GenerationRequest(
        TEXTCRAFT,
        source,  # type: ignore[arg-type]
        selection,
        RolloutConfig(**settings),
        workers=1,
        **given,
    )


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "data.jsonl").read_text().splitlines()]


def card(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "card.json").read_text())["envs"]["textcraft"]  # type: ignore[no-any-return]


EXPERT: dict[str, tuple[int, list[str]]] = {}
"""First observation of a task to its number and the expert's actions."""


def script() -> dict[str, tuple[int, list[str]]]:
    for seed in () if EXPERT else range(4):
        played = asyncio.run(run_expert(TextCraft(), TextCraft.task("depth-1", seed)))
        actions = [m.content for m in played.messages if m.role == "assistant"]
        EXPERT[played.messages[0].content] = (seed, actions)
    return EXPERT


class Learned:
    """A model that solves some tasks, at some of its tries: `solves(task, try)`."""

    def __init__(self, solves: Any) -> None:
        self.solves = solves
        script()  # here: it cannot run in the server's event loop
        self.tries: dict[int, int] = {}

    def __call__(self, body: dict[str, Any]) -> Any:
        shown = next(m["content"] for m in body["messages"] if m["role"] == "user")
        seed, actions = script()[shown]
        if not num_turns(body):
            self.tries[seed] = self.tries.get(seed, 0) + 1
        said = self.solves(seed, self.tries[seed])
        if isinstance(said, Response):
            return said
        turn = num_turns(body)
        action = actions[turn] if said and turn < len(actions) else "inventory"
        return text(f"Thought: try {self.tries[seed]}\n\nAction: {action}")


def test_the_experts_data(tmp_path: Path) -> None:
    num_kept = generate_dataset(request("expert", rollout={"system_prompt": "Craft."}), tmp_path)
    assert num_kept == 4
    found = rows(tmp_path)
    assert [row["task_id"] for row in found] == [f"textcraft/depth-1/{i}" for i in range(4)]
    for row in found:
        assert row["messages"][0] == {"role": "system", "content": "Craft."}
        assert row["messages"][2]["content"].startswith("Action: ")
        assert (row["reward"], row["success"], row["source"]) == (1.0, True, "expert")
    told = card(tmp_path)
    assert told["success"] == {"expert": 1.0}
    assert (told["kept"], told["tiers"]) == (4, {"depth-1": 4})
    assert told["turns"]["max"] == max(row["num_turns"] for row in found)
    assert "## textcraft" in (tmp_path / "README.md").read_text()


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    selection = TaskSelection(ids=[3, "textcraft_40"])
    generate_dataset(request("expert", selection, rollout={"system_prompt": "Craft."}), tmp_path)
    path = tmp_path / "agenttraj.json"
    [first, second], bad = read_conversations(path)
    assert not bad
    assert [first.item_id, second.item_id] == ["textcraft_3", "textcraft_40"]
    ours = [Message(**m) for m in rows(tmp_path)[0]["messages"]]
    assert first.messages == ours
    tasks = read_agentgym(str(path), maker=TextCraft())
    assert [t.data["goal"] for t in tasks] == [
        TextCraft.task(None, i).data["goal"] for i in (3, 40)
    ]


def test_rejection_sampling_keeps_the_best_of_those_that_succeed(tmp_path: Path) -> None:
    model = Learned(lambda seed, attempt: seed < 2 and attempt > 1)
    with ChatServer(model) as server:
        generation = request(
            "model",
            model=EndpointModel("m", server.url, samples=3),
            keep=2,
            rollout={"concurrency": 1, "max_turns": 8},
        )
        generate_dataset(generation, tmp_path)
    told = card(tmp_path)
    assert told["played"] == told["scored"] == {"model": 12}
    assert told["success"] == {"model": pytest.approx(4 / 12)}
    assert (told["kept"], told["tasks_kept"], told["tasks_played"]) == (4, 2, 4)
    assert told["left_out"] == {"the score is too low": 8}
    assert {row["success"] for row in rows(tmp_path)} == {True}


def test_mixed_takes_the_expert_where_the_model_fails(tmp_path: Path) -> None:
    with ChatServer(Learned(lambda seed, _: seed == 1)) as server:
        generation = request(
            "mixed", model=EndpointModel("m", server.url, samples=1), rollout={"max_turns": 8}
        )
        generate_dataset(generation, tmp_path)
    assert [row["source"] for row in rows(tmp_path)] == ["expert", "model", "expert", "expert"]
    assert card(tmp_path)["kept_by"] == {"expert": 3, "model": 1}


def test_a_run_that_was_stopped_goes_on(tmp_path: Path) -> None:
    broken = Response('{"error": "overloaded"}', 500)
    failing = Learned(lambda seed, _: broken if seed > 1 else True)
    with ChatServer(failing) as server:
        settings: dict[str, Any] = {"model": EndpointModel("m", server.url, samples=1)}
        generate_dataset(request("mixed", **settings), tmp_path)
        # The model could not be asked: that is no failure of its own, and no expert stands in.
        assert [row["task_id"][-1] for row in rows(tmp_path)] == ["0", "1"]
        assert card(tmp_path)["left_out"] == {"error_sampler": 2}
        with (tmp_path / JOURNAL).open("ab") as file:
            file.write(b'{"env": "textcraft", "task_')  # the process was killed here
        num_asked = len(server.bodies)
        failing.solves = lambda seed, _: True
        generate_dataset(request("mixed", **settings), tmp_path)
        asked = {body["messages"][0]["content"] for body in server.bodies[num_asked:]}
        assert {script()[shown][0] for shown in asked} == {2, 3}
        assert [row["source"] for row in rows(tmp_path)] == ["model"] * 4
        num_asked = len(server.bodies)
        generate_dataset(request("mixed", **settings), tmp_path)
        assert len(server.bodies) == num_asked
        with pytest.raises(DataError, match=r"written with temperature = 1\.0, this run has 0\.5"):
            generate_dataset(request("mixed", rollout={"temperature": 0.5}, **settings), tmp_path)


def test_an_endpoint_that_gives_nothing_is_an_error(tmp_path: Path) -> None:
    with ChatServer(lambda _: Response("{}", 200)) as server:
        generation = request("mixed", model=EndpointModel("m", server.url, samples=1))
        with pytest.raises(DataError, match=r"gave no episode: error_sampler: .*malformed"):
            generate_dataset(generation, tmp_path)
    assert not (tmp_path / "data.jsonl").exists()


def record(task: str, said: str, score: float | None, sample: int = 0, turns: int = 1) -> Record:
    messages = [Message(role="user", content="q"), Message(role="assistant", content=said)]
    reason = "error_env: x" if score is None else None
    return Record(
        env="e", task_id=task, source="model", sample=sample, messages=messages, reward=score,
        score=score, success=score == 1.0, num_turns=turns, reason=reason,
    )  # fmt: skip


def test_what_is_chosen() -> None:
    records = [
        record("a", "long", 1.0, 0, turns=9),
        record("a", "short", 1.0, 1, turns=2),
        record("a", "half", 0.5, 2),
        record("b", "short", 1.0, 0),
        record("b", "other", 0.6, 1),
        record("c", "broke", None),
    ]
    chosen = select(records, 1, KeepRule())
    assert [(r.task_id, r.messages[1].content) for r in chosen.kept] == [("a", "short")]
    assert chosen.left_out["e"] == {
        "a better episode of its task is kept": 1,
        "the score is too low": 2,
        "duplicate": 1,
        "error_env": 1,
    }
    low = select(records, 2, KeepRule(0.5))
    assert [r.messages[1].content for r in low.kept] == ["short", "long", "other"]
    brief = select(records, 2, KeepRule(max_turns=8))
    assert [r.messages[1].content for r in brief.kept] == ["short"]
    assert brief.left_out["e"]["more turns than allowed"] == 1


def test_agenttrajs_instructions_become_the_system_prompt() -> None:
    turns = [
        {"from": "human", "loss": None, "value": "Rules."},
        {"from": "gpt", "loss": False, "value": "OK. I'll follow them."},
        {"from": "human", "loss": None, "value": "Goal."},
        {"from": "gpt", "loss": True, "value": "Action: look"},
    ]
    messages, trained = messages_of(turns)
    assert [(m.role, m.content) for m in messages] == [
        ("system", "Rules."),
        ("user", "Goal."),
        ("assistant", "Action: look"),
    ]
    assert trained == [True]


@pytest.mark.parametrize("system_prompt", [None, "Craft well."])
@pytest.mark.parametrize("name", ["data.jsonl", "agenttraj.json"])
def test_what_was_generated_is_sft_data(
    name: str, system_prompt: str | None, tmp_path: Path
) -> None:
    generate_dataset(request("expert", rollout={"system_prompt": "Craft."}), tmp_path)
    expected = [row["messages"] for row in rows(tmp_path)]
    told = {"system_prompt": system_prompt} if system_prompt and name != "data.jsonl" else {}
    config = RunConfig(
        env=TEXTCRAFT[0],
        model={"tokenizer": "words", "architecture": "qwen3"},
        tasks={"train": {"name": "env", "args": {"num_tasks": 2}}},
        sft={"data": str(tmp_path / name), "steps": 1},
        rollout=told,
    )  # type: ignore[arg-type]
    found, left_out = read_sft(config, [], [])
    assert not left_out
    assert len({known.task.id for known in found}) == 4
    for known, messages in zip(found, expected, strict=True):
        wanted_opening = system_prompt if told else "Craft."
        assert known.messages[0] == Message(role="system", content=str(wanted_opening))
        assert list(known.messages[1:]) == [Message(**m) for m in messages[1:]]


def test_agentevals_items_are_tasks(tmp_path: Path) -> None:
    path = tmp_path / "eval.json"
    path.write_text(json.dumps([{"item_id": i} for i in ("textcraft_7", "babyai_1")]))
    [task] = read_agentgym(str(path), name="textcraft", maker=TextCraft())
    assert (task.id, task.data) == ("textcraft_7", TextCraft.task(None, 7).data)
    with pytest.raises(DataError, match="babyai_1"):
        read_agentgym(str(path), maker=TextCraft())
    with pytest.raises(ConfigError, match="needs one of"):
        read_agentgym(str(path), maker=None)
    path.write_text("[{")
    with pytest.raises(DataError, match="not JSON"):
        read_agentgym(str(path), maker=TextCraft())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": "experts"}, "--source: 'experts' is unknown"),
        ({"format": "xml"}, "--format: 'xml' is unknown"),
        ({"format": "code"}, "format: code needs a recipe's tools"),
        ({"source": "model"}, "needs --model and --base-url"),
        ({"source": "model", "model": "m", "base_url": "nowhere"}, "base_url"),
        ({"ids": "9-1"}, "not a range"),
        ({"ids": "x"}, "must look like"),
        ({"ids": "1", "tiers": ["depth-1"]}, "give one of"),
    ],
)
def test_wrong_options_are_refused(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = dict.fromkeys(
        ("ids", "items", "tiers", "system_prompt", "max_round", "model", "base_url", "min_score")
    )
    given |= {"source": "expert", "format": "plain", "num_tasks": 1, "first_seed": 0, "seed": 0}
    given |= {"samples": 1, "keep": 1, "max_tokens": 9, "temperature": 1.0, "concurrency": 1}
    with pytest.raises(ConfigError, match=message):
        options.generation(TEXTCRAFT, **{**given, "workers": 1, **change})
