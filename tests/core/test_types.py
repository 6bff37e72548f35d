"""The carriers: segment trees, specs, statuses."""

from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ludus.core.types import (
    Constraint,
    Message,
    Sample,
    Segment,
    Spec,
    Status,
    StepResult,
    Task,
    ToolCall,
    Trajectory,
)


def tree() -> Trajectory:
    """The docstring's example, with a second attempt from A0 on as segment 4."""
    return Trajectory(
        "t",
        "g",
        "task",
        [
            Segment(-1, [5, 6, 7]),
            Segment(0, [8, 9], [-0.1, -0.7]),
            Segment(1, [3, 3, 4]),
            Segment(2, [8, 2], [-0.2, -0.1]),
            Segment(1, [1], [-0.5]),
        ],
    )


def test_paths_through_a_tree():
    trajectory = tree()
    assert trajectory.leaves() == [3, 4]
    assert trajectory.path(3) == [0, 1, 2, 3]
    assert trajectory.path() == [0, 1, 4]
    assert trajectory.path(-2) == [0, 1, 2, 3]
    assert trajectory.token_ids(3) == [5, 6, 7, 8, 9, 3, 3, 4, 8, 2]
    assert trajectory.token_ids() == [5, 6, 7, 8, 9, 1]


def test_counts_of_a_tree():
    trajectory = tree()
    assert (trajectory.num_turns, trajectory.num_sampled_tokens, trajectory.num_tokens) == (
        3,
        5,
        11,
    )


def test_an_empty_trajectory():
    trajectory = Trajectory("t", "g", "task")
    assert trajectory.leaves() == []
    assert trajectory.path() == []
    assert trajectory.token_ids() == []


@given(st.lists(st.integers(0, 10), min_size=1, max_size=12))
def test_every_segment_lies_on_the_path_of_some_leaf(draws):
    segments = [Segment(draw % (i + 1) - 1 if i else -1, [i]) for i, draw in enumerate(draws)]
    trajectory = Trajectory("t", "g", "task", segments)
    seen = {index for leaf in trajectory.leaves() for index in trajectory.path(leaf)}
    assert seen == set(range(len(segments)))
    for leaf in trajectory.leaves():
        path = trajectory.path(leaf)
        assert path[-1] == leaf
        assert [segments[i].parent for i in path] == [-1, *path[:-1]]


def test_a_sampled_segment_needs_one_logprob_a_token():
    with pytest.raises(ValueError, match="one logprob per token: 2 tokens, 1 logprobs"):
        Segment(-1, [1, 2], [-0.1])


def test_spec_from_a_name():
    assert Spec.model_validate("babyai") == Spec(name="babyai", args={})
    assert Task.model_validate({"id": "1", "env": "babyai"}).env == Spec(name="babyai")


def test_wire_carriers_refuse_unknown_fields():
    with pytest.raises(ValidationError, match="extra_forbidden"):
        Message.model_validate({"role": "user", "text": "x"})


@pytest.mark.parametrize(
    ("status", "trainable", "retryable"),
    [
        (Status.COMPLETED, True, False),
        (Status.TRUNCATED_LENGTH, True, False),
        (Status.TRUNCATED_TURNS, True, False),
        (Status.UNSCORABLE, False, False),
        (Status.ERROR_ENV, False, True),
        (Status.ERROR_TOOL, False, True),
        (Status.ERROR_SAMPLER, False, True),
        (Status.ERROR_TIMEOUT, False, True),
        (Status.ABORTED, False, False),
    ],
)
def test_statuses(status, trainable, retryable):
    assert (status.trainable, status.retryable) == (trainable, retryable)


def test_all_statuses_are_tested():
    assert len(Status) == 9


def test_done_means_terminated_or_truncated():
    assert not StepResult().done
    assert StepResult(terminated=True).done
    assert StepResult(truncated=True).done


def test_loss_tokens_of_a_sample():
    sample = Sample([5, 8, 9], [False, True, True], [0, -0.1, -0.7], [0, 0.5, 0.5], "t")
    assert sample.num_loss_tokens == 2


@pytest.mark.parametrize(
    "message",
    [
        Message(role="user", content="hello"),
        Message(role="assistant"),
        Message(role="assistant", content="", tool_calls=[ToolCall(name="add")]),
        Message(role="tool", content="3", tool_call_id="1", name="add"),
        Message(role="assistant", content="x", thinking="y"),
    ],
)
def test_messages_survive_pickling(message: Message) -> None:
    again = pickle.loads(pickle.dumps(message))
    assert again == message
    assert again.model_fields_set == message.model_fields_set
    assert again.model_copy(update={"content": "z"}).content == "z"


def test_a_tool_call_that_was_added_later_survives_pickling() -> None:
    message = Message(role="assistant", content="x")
    message.tool_calls.append(ToolCall(name="add"))
    assert pickle.loads(pickle.dumps(message)) == message


def test_segments_survive_pickling() -> None:
    segments = [
        *tree().segments,
        Segment(0, [1], [-1.0], Message(role="user", content="q"), 3, 0.5, {"a": 1.0}),
        Segment(0, [1], [-1.0], values=[0.5, 0.25], constraint=Constraint("g", (1, 2))),
    ]
    assert pickle.loads(pickle.dumps(segments)) == segments
    assert copy.copy(segments[-1]) == segments[-1]
    assert copy.deepcopy(segments) == segments
