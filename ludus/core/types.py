"""The carriers: the data types between a task and a training step.

    Task -> rollout -> Trajectory -> judge -> Group -> advantages -> Samples -> Batch

Pydantic models cross a wire or a disk (messages, tasks, observations, scores); slots dataclasses
stay inside the process (segments, trajectories, groups, samples).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from enum import StrEnum
from operator import attrgetter
from typing import Any, Literal, SupportsIndex

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ludus.core.versions import Run, all_runs, check_runs

Role = Literal["system", "user", "assistant", "tool"]


class Wire(BaseModel):
    """A carrier that crosses a wire or a disk: unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")


class ToolCall(Wire):
    """A model's tool call: the tool's name and its arguments, parsed from JSON."""

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    id: str | None = None

    def to_openai(self) -> dict[str, Any]:
        """The call in the form of OpenAI's messages: its arguments are a text."""
        function = {"name": self.name, "arguments": json.dumps(self.arguments)}
        return {"id": self.id, "type": "function", "function": function}


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

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        """Most messages have a role and a text: they are pickled in a fifth of pydantic's time."""
        if self._is_plain:
            return _plain_message, (self.role, self.content)
        return super().__reduce_ex__(protocol)

    def to_json(self) -> dict[str, Any]:
        """The fields that differ from their defaults, as JSON values."""
        if self._is_plain and self.content:
            return {"role": self.role, "content": self.content}
        return self.model_dump(exclude_defaults=True)

    @property
    def _is_plain(self) -> bool:
        return self.__pydantic_fields_set__ == _PLAIN and not self.tool_calls


_PLAIN = {"role", "content"}


def _plain_message(role: str, content: str) -> Message:
    """Returns the message that `__reduce_ex__` took apart; it was checked when it was made."""
    message = Message.__new__(Message)
    others: dict[str, Any] = {
        "thinking": None,
        "tool_calls": [],
        "tool_call_id": None,
        "name": None,
    }
    message.__setstate__(
        {
            "__dict__": {"role": role, "content": content, **others},
            "__pydantic_fields_set__": {*_PLAIN},
            "__pydantic_extra__": None,
            "__pydantic_private__": None,
        }
    )
    return message


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


NO_ENV = Spec(name="none")
"""`Task.env` of a task that is played without the run's environment."""


class Task(Wire):
    """The task of one rollout.

    `data` goes to the environment's `reset` (a seed, a goal). `tier` is the level or depth by which
    evaluations are broken down. `source` names the data set or environment of the task. `tools`
    names the functions of the run's tools that are on offer (None: all). `consistency` is the share
    of a model's answers that agree with `answer`, where that is their majority (R-Zero, Agent0: p).
    """

    id: str
    prompt: list[Message] = Field(default_factory=list)
    env: Spec | None = None
    judge: Spec | None = None
    answer: Any = None
    data: dict[str, Any] = Field(default_factory=dict)
    source: str = ""
    tier: str | None = None
    tools: list[str] | None = None
    consistency: float | None = Field(default=None, ge=0, le=1)


class Observation(Wire):
    """The opening messages of an environment."""

    messages: list[Message]
    info: dict[str, Any] = Field(default_factory=dict)


class StepResult(Wire):
    """An environment's answer to one action.

    `reward` is the reward of this step (None: the environment does not score steps).
    `terminated`: the episode ended by itself (goal reached, or lost). `truncated`: a limit of the
    environment ended the episode. The distinction is Gymnasium's.
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
    """A judge's score: the value, which becomes the reward, and its named parts.

    `success` is None where a value of at least 1 is a success.
    """

    value: float
    parts: dict[str, float] = Field(default_factory=dict)
    explanation: str = ""
    success: bool | None = None

    @property
    def succeeded(self) -> bool:
        return self.value >= 1.0 if self.success is None else self.success


class Status(StrEnum):
    """The end of a trajectory. The last six are excluded from training, with a reason."""

    COMPLETED = "completed"
    TRUNCATED_LENGTH = "truncated_length"  # context full, or a turn reached its token limit
    TRUNCATED_TURNS = "truncated_turns"
    UNSCORABLE = "unscorable"  # neither a judge nor the environment gave a reward
    ERROR_ENV = "error_env"
    ERROR_TOOL = "error_tool"
    ERROR_SAMPLER = "error_sampler"
    ERROR_TIMEOUT = "error_timeout"
    ABORTED = "aborted"

    @property
    def trainable(self) -> bool:
        """True if the reward measures the policy."""
        return self in (Status.COMPLETED, Status.TRUNCATED_LENGTH, Status.TRUNCATED_TURNS)

    @property
    def retryable(self) -> bool:
        """True if the infrastructure failed, so that a retry makes sense."""
        return self in (
            Status.ERROR_ENV,
            Status.ERROR_TOOL,
            Status.ERROR_SAMPLER,
            Status.ERROR_TIMEOUT,
        )


DOES_NOT_TRAIN = "does not train"
"""End of `Trajectory.dropped` of a role that a fixed policy plays."""

WITHOUT_TURN = "its role had no turn in the episode"
"""`Trajectory.dropped` of a role besides the first that sampled nothing in an episode that ended
well."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """The constraint on the tokens of a turn (`models.grammars`).

    Args:
        grammar: of the turn's text, in Lark.
        stop_token_ids: the ids that could end it.
    """

    grammar: str
    stop_token_ids: tuple[int, ...]


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

    `logprobs is None` means *appended, not sampled*: no loss. A demonstration's turns carry zeros
    (the expert chose them with probability 1); their `policy_version` is None.

    `policy_version` is the oldest version of the weights that sampled the tokens. Where the weights
    were updated during the turn, `version_runs` has the versions of all tokens (`core.versions`).

    The numbers that an algorithm needs from other models are added after the episode, one per
    token: `learner_logprobs`, of the sampling policy, computed by the learner; `ref_logprobs`, of
    the reference model; `values`, the critic's estimate before each token, and one more value after
    the last token.

    With a `constraint`, the log-probabilities are those among the tokens that it allowed.

    For display only, one per token: `advantages`, that the algorithm assigned; `entropies`, of the
    learner's distribution in nats, where the learner computed the log-probabilities.
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
    version_runs: list[Run] | None = None
    advantages: list[float] | None = None
    entropies: list[float] | None = None
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        if self.logprobs is not None and len(self.logprobs) != len(self.token_ids):
            raise ValueError(
                f"a sampled segment needs one logprob per token: "
                f"{len(self.token_ids)} tokens, {len(self.logprobs)} logprobs"
            )
        if self.version_runs is not None:  # a text-only turn has no ids
            check_runs(self.version_runs, self.policy_version, len(self.token_ids) or None)

    def __reduce__(self) -> tuple[type[Segment], tuple[Any, ...]]:
        """Pickle the fields that are set, without their names."""
        values = _segment_values(self)
        size = len(values)
        while values[size - 1] is None:
            size -= 1
        return Segment, values[:size]

    def copy(self) -> Segment:
        """A shallow copy, in half the time of `dataclasses.replace`."""
        return Segment(*_segment_values(self))

    @property
    def sampled(self) -> bool:
        return self.logprobs is not None

    @property
    def runs(self) -> list[Run]:
        """(version, number of tokens) in order; empty for tokens without a version."""
        return all_runs(self.policy_version, self.version_runs, len(self.token_ids))


_segment_values = attrgetter(*(f.name for f in fields(Segment)))


@dataclass(slots=True)
class Trajectory:
    """One episode: a tree of token segments, a status and a reward.

    `reward` is None until the episode is scored, and stays None where no reward can be computed.
    `scores` are the parts of the judge's score, or the environment's scores; `explanation` is the
    judge's.
    `dropped` is the reason why the trajectory gives no training rows (None: it gives rows).

    An episode of several roles has a trajectory for each: `others` are those of the roles besides
    this one, and `by_role` makes groups of them.
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
    explanation: str | None = None
    error: str | None = None
    dropped: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    others: list[Trajectory] = field(default_factory=list)

    @property
    def fixed(self) -> bool:
        """True if a policy that does not train played its role."""
        return self.dropped is not None and self.dropped.endswith(DOES_NOT_TRAIN)

    @property
    def without_turn(self) -> bool:
        """True for a role that had no turn in its episode: nothing was lost."""
        return self.dropped == WITHOUT_TURN

    def leaves(self) -> list[int]:
        """Indices of the segments without children, in order."""
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
        """The token ids from the root to `leaf`, as the engine saw and sampled them."""
        ids: list[int] = []
        for index in self.path(leaf):
            ids += self.segments[index].token_ids
        return ids

    @property
    def num_turns(self) -> int:
        return sum(segment.logprobs is not None for segment in self.segments)

    @property
    def num_sampled_tokens(self) -> int:
        return sum(len(s.token_ids) for s in self.segments if s.logprobs is not None)

    @property
    def num_tokens(self) -> int:
        """Unique tokens: a prefix shared by branches counts once."""
        return sum(len(segment.token_ids) for segment in self.segments)


@dataclass(slots=True)
class Group:
    """The trajectories of one task, compared with one another."""

    id: str
    task: Task
    trajectories: list[Trajectory]


def by_role(groups: Iterable[Group]) -> list[Group]:
    """Returns a group for each role of each group, so that rewards are compared within a role.

    A group of one role stays as it is.
    """
    found: list[Group] = []
    for group in groups:
        found.append(group)
        others = zip(*(trajectory.others for trajectory in group.trajectories), strict=True)
        for trajectories in others:
            found.append(Group(trajectories[0].group_id, group.task, list(trajectories)))
    return found


@dataclass(slots=True)
class Sample:
    """One training row: a path through a trajectory, with the loss's inputs for each token.

    For P0 = 5 6 7, A0 = 8 9, E0 = 3, A1 = 2 and advantage 0.5 (all lists have the same length):

        token_ids   5    6    7    8     9     3    2
        loss_mask   0    0    0    1     1     0    1
        logprobs    0    0    0   -0.1  -0.7   0   -0.2
        advantages  0    0    0    0.5   0.5   0    0.5

    An entry belongs to the token at its own index, not to the next token. A segment shared by
    several paths has its loss in the first path only: a sampled token trains once.

    `policy_version` is the oldest version that sampled loss tokens. Where they differ, `versions`
    has one for each token: -1 without a loss, or for a demonstration.

    With a critic, `values` are its estimates before each token and `returns` are its targets.
    `consistency` is the task's, for a loss that depends on it (ADPO).
    `constraints` are those of loss tokens: first index, index after the last, constraint.
    """

    token_ids: list[int]
    loss_mask: list[bool]
    logprobs: list[float]
    advantages: list[float]
    trajectory_id: str
    group_id: str = ""
    role: str = "agent"
    policy: str = "policy"
    policy_version: int | None = None
    ref_logprobs: list[float] | None = None
    values: list[float] | None = None
    returns: list[float] | None = None
    versions: list[int] | None = None
    consistency: float | None = None
    constraints: list[tuple[int, int, Constraint]] = field(default_factory=list)

    @property
    def num_loss_tokens(self) -> int:
        return sum(self.loss_mask)

    @property
    def version_counts(self) -> Counter[int]:
        """The number of loss tokens that each version sampled."""
        if self.versions is not None:
            return Counter(version for version in self.versions if version >= 0)
        if self.policy_version is None:
            return Counter()
        return Counter({self.policy_version: self.num_loss_tokens})

    def version_of(self, index: int) -> int | None:
        """The version that sampled the loss token at `index`; None for a demonstration."""
        if self.versions is None:
            return self.policy_version
        return self.versions[index] if self.versions[index] >= 0 else None
