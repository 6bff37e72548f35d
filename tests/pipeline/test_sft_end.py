"""The measured end of SFT."""

from __future__ import annotations

from ludus.config.training import SFTUntilConfig
from ludus.core.types import Message, Task
from ludus.data.conversations import Conversation
from ludus.pipeline.sft_end import not_shown, reason_to_end, unreached


def test_a_target_that_is_not_reached_is_told() -> None:
    until = SFTUntilConfig(success=0.44)
    said = "all of its steps; 25% of the sampled episodes succeed, of 44% (until.success)"
    assert unreached(until, [0.1, 0.2, 0.3]) == said


def test_success_ends_sft() -> None:
    until = SFTUntilConfig(success=0.4)
    assert reason_to_end(until, []) is None
    assert reason_to_end(until, [0.1, 0.39]) is None
    assert "40% of the sampled episodes" in str(reason_to_end(until, [0.1, 0.3, 0.5]))
    assert "45% of the sampled episodes" in str(reason_to_end(until, [0.45]))


def test_one_lucky_measurement_does_not_end_sft() -> None:
    until = SFTUntilConfig(success=0.4)
    assert reason_to_end(until, [0.3, 0.2, 0.42]) is None
    assert reason_to_end(until, [0.3, 0.42, 0.37]) is None


def test_success_that_no_longer_rises_ends_sft() -> None:
    until = SFTUntilConfig(success=0.9, patience=3)
    assert reason_to_end(until, [0.2, 0.1, 0.2]) is None
    assert "above 20% in 3" in str(reason_to_end(until, [0.2, 0.1, 0.2, 0.15]))
    assert reason_to_end(until, [0.2, 0.1, 0.2, 0.25]) is None


def test_sft_goes_on_where_hardly_any_episode_succeeds() -> None:
    until = SFTUntilConfig(success=0.9, patience=3)
    assert reason_to_end(until, [0.0] * 20) is None
    assert reason_to_end(until, [0.05, *[0.01] * 20]) is None


def test_the_tasks_that_a_file_of_conversations_shows_are_known_by_their_questions() -> None:
    """The file's ids are those of its lines, so 32 "unseen" tasks were shown ones."""

    def asked(question: str) -> list[Message]:
        return [Message(role="user", content=question)]

    train = [Task(id=f"rows.jsonl:{n}", prompt=asked(f"{n} + 1?")) for n in range(4)]
    answer = Message(role="assistant", content="3")
    opening = Message(role="system", content="Be short.")
    shown = [
        Conversation(Task(id=f"sft.jsonl:{n}"), [opening, *asked(f"{n} + 1?"), answer], 1.0, True)
        for n in range(1, 3)
    ]
    assert [task.id for task in not_shown(train, shown)] == ["rows.jsonl:0", "rows.jsonl:3"]
    by_id = [Conversation(train[0], [*asked("other"), answer], 1.0, True)]
    assert not_shown(train, by_id) == train[1:]
    worlds = [Task(id="env:1"), Task(id="env:2")]  # an environment opens them
    assert not_shown(worlds, shown) == worlds
