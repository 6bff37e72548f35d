"""The carriers: what flows from a task to a training step.

    Task -> rollout -> Trajectory -> judge -> Group -> advantages -> Samples -> Batch

Pydantic models cross a wire or a disk (messages, tasks, observations, scores); slots dataclasses
stay inside (segments, trajectories, groups, samples).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Role = Literal["system", "user", "assistant", "tool"]


class Wire(BaseModel):
    """A carrier that crosses a wire or a disk: unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")


class ToolCall(Wire):
    """A call that a model made: the tool's name and its arguments, already parsed from JSON."""

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    id: str | None = None


class ToolSpec(Wire):
    """A tool as the model sees it. `parameters` is a JSON schema of type "object"."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})


class Message(Wire):
    """One message of a conversation.

    `thinking` is the text of a reasoning block, without its markers; `tool_calls` are set on
    assistant messages, `tool_call_id` and `name` on tool messages.
    """

    role: Role
    content: str = ""
    thinking: str | None = None
    tool_calls: list[ToolCall] = Field(default_factory=list)
    tool_call_id: str | None = None
    name: str | None = None


class Spec(Wire):
    """A plug-in by name, with its arguments: `babyai`, or `{name: babyai, args: {...}}`.

    `name` is a row of the registry, an entry point, or "module:Class".
    """

    name: str
    args: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value


class Task(Wire):
    """What one rollout has to do.

    `data` goes to the environment's `reset` (a seed, a goal); `tier` is the level or depth that
    evaluations are broken down by; `source` names the data set or environment it came from.
    """

    id: str
    prompt: list[Message] = Field(default_factory=list)
    env: Spec | None = None
    judge: Spec | None = None
    answer: Any = None
    data: dict[str, Any] = Field(default_factory=dict)
    source: str = ""
    tier: str | None = None


class Observation(Wire):
    """What an environment says first: the opening messages."""

    messages: list[Message]
    info: dict[str, Any] = Field(default_factory=dict)


class StepResult(Wire):
    """What an environment answers to one action.

    `reward` is what this step earned (None: this environment does not score steps);
    `terminated` means that the episode came to its own end (goal reached, or lost),
    `truncated` that a limit of the environment cut it (Gymnasium's distinction).
    """

    messages: list[Message] = Field(default_factory=list)
    reward: float | None = None
    terminated: bool = False
    truncated: bool = False
    info: dict[str, Any] = Field(default_factory=dict)

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated


class Score(Wire):
    """A judge's verdict: the value that becomes the reward, and its named parts."""

    value: float
    parts: dict[str, float] = Field(default_factory=dict)
    explanation: str = ""


class Status(StrEnum):
    """How a trajectory ended. The last six are excluded from training, with a reason."""

    COMPLETED = "completed"
    TRUNCATED_LENGTH = "truncated_length"  # the context or a turn's token limit was reached
    TRUNCATED_TURNS = "truncated_turns"
    UNSCORABLE = "unscorable"  # no judge and no environment could give a reward
    ERROR_ENV = "error_env"
    ERROR_TOOL = "error_tool"
    ERROR_SAMPLER = "error_sampler"
    ERROR_TIMEOUT = "error_timeout"
    ABORTED = "aborted"

    @property
    def trainable(self) -> bool:
        """Whether the reward of such a trajectory says something about the policy."""
        return self in (Status.COMPLETED, Status.TRUNCATED_LENGTH, Status.TRUNCATED_TURNS)

    @property
    def retryable(self) -> bool:
        """Whether the failure lies in the infrastructure, so that trying again makes sense."""
        return self in (
            Status.ERROR_ENV,
            Status.ERROR_TOOL,
            Status.ERROR_SAMPLER,
            Status.ERROR_TIMEOUT,
        )


@dataclass(slots=True)
class Segment:
    """The tokens that one event added to a trajectory.

    A question P0, a sampled answer A0 that calls a tool, its result E0, a sampled answer A1:

        index  segment  parent  token_ids  logprobs       trained
        0      P0       -1      5 6 7      None           no, it was given
        1      A0        0      8 9        -0.1 -0.7      yes
        2      E0        1      3 3 4      None           no, the tool wrote it
        3      A1        2      8 2        -0.2 -0.1      yes

    A second attempt from A0 on would be a segment 4 with parent 1: a branch, not a copy.

    `logprobs is None` means *appended, not sampled*: no loss. A demonstration's turns carry zeros,
    for the expert that wrote them chose them with probability 1; their `policy_version` is None.

    What an algorithm asks of other models is filled in after the episode, one number a token:
    `learner_logprobs`, those of the policy that sampled, computed by the learner;
    `ref_logprobs`, those of the reference model; `values`, what the critic expects before each
    token, and, as one more number, after the last.
    """

    parent: int
    token_ids: list[int]
    logprobs: list[float] | None = None
    message: Message | None = None
    policy_version: int | None = None
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    learner_logprobs: list[float] | None = None
    ref_logprobs: list[float] | None = None
    values: list[float] | None = None

    def __post_init__(self) -> None:
        if self.logprobs is not None and len(self.logprobs) != len(self.token_ids):
            raise ValueError(
                f"a sampled segment needs one logprob a token: "
                f"{len(self.token_ids)} tokens, {len(self.logprobs)} logprobs"
            )

    @property
    def sampled(self) -> bool:
        return self.logprobs is not None


@dataclass(slots=True)
class Trajectory:
    """One episode: a tree of token segments, its status, and what it earned.

    `reward` is None until something scored it, and stays None where nothing can. `dropped` is the
    reason why it gives no training rows (None: it gives rows).
    """

    id: str
    group_id: str
    task_id: str
    segments: list[Segment] = field(default_factory=list)
    role: str = "agent"
    policy: str = "policy"
    status: Status = Status.COMPLETED
    reward: float | None = None
    scores: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    dropped: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    def leaves(self) -> list[int]:
        """Indices of the segments that no other segment extends, in order."""
        parents = {segment.parent for segment in self.segments}
        return [i for i in range(len(self.segments)) if i not in parents]

    def path(self, leaf: int = -1) -> list[int]:
        """Segment indices from the root to `leaf` (default: the last segment)."""
        if not self.segments:
            return []
        index = leaf if leaf >= 0 else len(self.segments) + leaf
        path: list[int] = []
        while index >= 0:
            path.append(index)
            index = self.segments[index].parent
        return path[::-1]

    def token_ids(self, leaf: int = -1) -> list[int]:
        """The token ids from the root to `leaf`: what the engine saw and sampled."""
        return [t for i in self.path(leaf) for t in self.segments[i].token_ids]

    @property
    def num_turns(self) -> int:
        return sum(segment.sampled for segment in self.segments)

    @property
    def num_sampled_tokens(self) -> int:
        return sum(len(segment.token_ids) for segment in self.segments if segment.sampled)

    @property
    def num_tokens(self) -> int:
        """Unique tokens: a prefix that branches share counts once."""
        return sum(len(segment.token_ids) for segment in self.segments)


@dataclass(slots=True)
class Group:
    """The trajectories of one task that are compared with one another."""

    id: str
    task: Task
    trajectories: list[Trajectory]


@dataclass(slots=True)
class Sample:
    """One training row: a path through a trajectory, with what the loss needs for each token.

    For P0 = 5 6 7, A0 = 8 9, E0 = 3, A1 = 2 and advantage 0.5 (all lists have the same length):

        token_ids   5    6    7    8     9     3    2
        loss_mask   0    0    0    1     1     0    1
        logprobs    0    0    0   -0.1  -0.7   0   -0.2
        advantages  0    0    0    0.5   0.5   0    0.5

    A token's entry speaks of the token itself (not of the one after it). A segment that several
    paths share has its loss in the first of them only: a sampled token trains once.

    With a critic, `values` are what it expected before each token, and `returns` what it should
    have expected.
    """

    token_ids: list[int]
    loss_mask: list[bool]
    logprobs: list[float]
    advantages: list[float]
    trajectory_id: str
    group_id: str = ""
    role: str = "agent"
    policy_version: int | None = None
    ref_logprobs: list[float] | None = None
    values: list[float] | None = None
    returns: list[float] | None = None

    @property
    def num_loss_tokens(self) -> int:
        return sum(self.loss_mask)
