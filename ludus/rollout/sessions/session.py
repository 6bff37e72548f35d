"""Sessions sample the turns of an episode and record its trajectory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ludus.config.schema import RolloutConfig
from ludus.core.errors import ConfigError, ContextOverflow, EnvError
from ludus.core.seeds import derive_seed
from ludus.core.types import Message, Segment, Status, StepResult, ToolSpec, Trajectory, Wire
from ludus.core.versions import Run, all_runs, expand
from ludus.models.samplers.base import Completion, Sampler, SamplingParams
from ludus.telemetry.traces import Span, chat

if TYPE_CHECKING:
    from ludus.models.chat.renderer import Renderer
    from ludus.models.endpoint.client import Endpoint, Reply


def with_system_prompt(messages: Sequence[Message], system_prompt: str | None) -> list[Message]:
    """The messages with the system prompt first, unless they already begin with it."""
    system = Message(role="system", content=system_prompt or "")
    return [system, *messages] if system_prompt and system not in messages[:1] else list(messages)


MAX_EXPLANATION = 4000
"""Characters of a judge's explanation that are kept."""


class TreeBuilder:
    """Appends segments to one trajectory; `head` is the segment that the next one extends.

    P0, A0, E0 in chat form:

        builder.add_messages([system, question], ids)           2 segments; the second has all ids
        builder.add_turn(message, ids, logprobs, versions)      A0
        builder.add_replies([result], renderer)                 E0

    Messages rendered together share one run of ids. The last of them carries the ids, the others
    carry none.
    """

    def __init__(self, trajectory: Trajectory) -> None:
        self.trajectory = trajectory
        self.head = -1

    @property
    def prompt_ids(self) -> list[int]:
        """All ids from the root to the head: the prompt of the next turn."""
        return self.trajectory.token_ids(self.head) if self.head >= 0 else []

    @property
    def messages(self) -> list[Message]:
        """The messages from the root to the head."""
        path = self.trajectory.path(self.head) if self.head >= 0 else []
        segments = [self.trajectory.segments[index] for index in path]
        return [segment.message for segment in segments if segment.message is not None]

    def add_messages(self, messages: Sequence[Message], token_ids: list[int]) -> None:
        """Append messages that were not sampled: no loss."""
        for message in messages[:-1]:
            self._append(Segment(self.head, [], message=message))
        last = messages[-1] if messages else None
        if last is not None or token_ids:
            self._append(Segment(self.head, token_ids, message=last))

    def add_turn(
        self,
        message: Message,
        token_ids: list[int],
        logprobs: list[float],
        version: int | None,
        version_runs: list[Run] | None = None,
    ) -> None:
        turn = Segment(self.head, token_ids, logprobs, message, version, version_runs=version_runs)
        self._append(turn)

    def add_replies(self, replies: Sequence[Message], renderer: Renderer) -> None:
        """Append the replies to the last turn, up to the start of the next one.

        Under `strip`, a turn with thinking becomes the leaf of its own branch, where it trains. The
        conversation continues in another branch, which has the turn without its thinking.
        """
        if renderer.result_markers is not None and all(m.role == "tool" for m in replies):
            for reply in replies:
                self.add_messages([reply], renderer.inline(reply))
            return
        segment = self.trajectory.segments[self.head]
        after, turn = segment.token_ids, segment.message
        if turn is not None and turn.thinking and renderer.thinking == "strip":
            after = renderer.strip_thinking(after)
            self.head = segment.parent
            self.add_messages([turn.model_copy(update={"thinking": None})], after)
        self.add_messages(replies, renderer.extend(replies, after))

    def _append(self, segment: Segment) -> None:
        self.trajectory.segments.append(segment)
        self.head = len(self.trajectory.segments) - 1


@dataclass(frozen=True, slots=True)
class Turn:
    """A sampled turn. `error` tells the model why the turn cannot be parsed, or is None."""

    message: Message
    error: str | None
    finish_reason: Literal["stop", "length"]


class Session:
    """One episode: samples its turns, and owns its trajectory.

    The driver (`rollout.episode`) calls for each attempt: `start`, `end`, `close`. Between them the
    built-in agent calls the methods of a TurnSession; an agent of the user's calls the model of an
    AgentSession.
    """

    score: float | None = None
    """The reward, scaled from the environment's score range to 0..1."""

    def __init__(self, trajectory: Trajectory) -> None:
        self.trajectory = trajectory
        self._tree = TreeBuilder(trajectory)

    def start(self) -> None:
        """Begin an attempt: clear what an earlier one left."""
        trajectory = self.trajectory
        trajectory.segments, trajectory.scores, trajectory.metrics = [], {}, {}
        trajectory.reward = self.score = trajectory.explanation = None
        self._tree = TreeBuilder(trajectory)
        self.end(Status.ABORTED)

    def end(self, status: Status, error: str | None = None) -> None:
        """Record how the attempt ended."""
        self.trajectory.status, self.trajectory.error = status, error

    def played(self) -> bool:
        """False, with the reason in `dropped`, where the policy sampled nothing: such an episode
        must not count."""
        if not self.trajectory.num_turns:
            reason = self.trajectory.error or "the agent made no call that trains"
            self.trajectory.dropped = f"nothing was sampled: {reason}"
        return bool(self.trajectory.num_turns)

    def share_reward(self) -> None:
        """Give the reward to the episode's other roles."""

    def set_reward(
        self,
        reward: float,
        parts: dict[str, float],
        *,
        success: bool,
        score_range: tuple[float, float] = (0.0, 1.0),
        explanation: str = "",
    ) -> None:
        """Record what the attempt earned."""
        trajectory, (low, high) = self.trajectory, score_range
        trajectory.reward, trajectory.scores = reward, parts
        trajectory.explanation = explanation[:MAX_EXPLANATION] or None
        trajectory.metrics["success"] = float(success)
        self.score = (reward - low) / (high - low) if high > low else None

    def close(self) -> None:
        """Release what the session holds."""


class TurnSession(Session, ABC):
    """A session of the built-in agent: `open`, then `turn` and `answer` in alternation."""

    @abstractmethod
    def open(self, messages: Sequence[Message]) -> None:
        """Record the opening messages."""

    @abstractmethod
    async def turn(self) -> Turn:
        """Sample a turn. Errors: ContextOverflow, SamplerError."""

    def answer(self, result: StepResult, *, turn_follows: bool) -> None:
        """Record the reward of the last turn, and the environment's messages."""
        self.trajectory.segments[self._tree.head].reward = result.reward
        self._tree.add_messages(result.messages, [])

    @abstractmethod
    def refusal(self, turn: Message, error: str) -> list[Message]:
        """The messages that tell the model what is wrong with its turn."""


class TokenSession(TurnSession):
    """Samples token ids; grows the token tree.

    `seed` is the episode's; each turn derives its own from it. The trajectory's id names the
    session of the sampler, which is open from `start` to `close`.
    """

    def __init__(
        self,
        trajectory: Trajectory,
        sampler: Sampler,
        renderer: Renderer,
        config: RolloutConfig,
        seed: int,
    ) -> None:
        super().__init__(trajectory)
        self._sampler, self._renderer, self._config, self._seed = sampler, renderer, config, seed

    def start(self) -> None:
        super().start()
        self._sampler.open(self.trajectory.id)

    def close(self) -> None:
        self._sampler.close(self.trajectory.id)

    def open(self, messages: Sequence[Message]) -> None:
        self._tree.add_messages(messages, self._renderer.open(messages))

    async def turn(self) -> Turn:
        prompt, params = self._request(tuple(self._config.stop))
        with chat(params=params) as span:
            completion = await self._sampler.sample(prompt, params, session=self.trajectory.id)
            self._record(span, prompt, completion)
        parsed = self._renderer.parse(completion.token_ids)
        self._add(completion, parsed.message)
        return Turn(parsed.message, parsed.error, completion.finish_reason)

    def _record(self, span: Span, prompt: list[int], completion: Completion) -> None:
        """Set the answer to a call on its span."""
        span.answered(
            input_tokens=len(prompt),
            output_tokens=len(completion.token_ids),
            finish_reason=completion.finish_reason,
        )
        if span.has_content:
            answer = self._renderer.parse(completion.token_ids).message
            span.messages(self._tree.messages, answer, completion.finish_reason)

    def _request(self, stop: tuple[str, ...]) -> tuple[list[int], SamplingParams]:
        """All ids so far, and the parameters of what is sampled after them. Errors:
        ContextOverflow."""
        prompt, number = self._tree.prompt_ids, self.trajectory.num_turns
        available = self._sampler.context_length - len(prompt)
        if available < 1:
            raise ContextOverflow(
                f"the conversation has {len(prompt)} tokens before turn {number + 1}; "
                f"model.context_length is {self._sampler.context_length}"
            )
        params = sampling_params(
            self._config,
            max_tokens=min(self._config.max_tokens_per_turn, available),
            seed=derive_seed(self._seed, number),
            stop=stop,
            stop_token_ids=tuple(self._renderer.stop_token_ids),
        )
        return prompt, params

    def _add(self, completion: Completion, message: Message) -> None:
        self._tree.add_turn(
            message,
            completion.token_ids,
            completion.logprobs,
            completion.policy_version,
            completion.version_runs,
        )

    def answer(self, result: StepResult, *, turn_follows: bool) -> None:
        if result.done:
            super().answer(result, turn_follows=False)  # without ids: the model never sees them
            return
        self.trajectory.segments[self._tree.head].reward = result.reward
        if turn_follows:
            self._tree.add_replies(result.messages, self._renderer)

    def refusal(self, turn: Message, error: str) -> list[Message]:
        return [Message(role="tool" if turn.tool_calls else "user", content=error)]


class TokenRow(Wire):
    """Token ids that the endpoint read and sampled. `mask` is 1 on the sampled ones.

    `logprobs` are the endpoint's own, 0 where the mask is 0. `policy_versions` are the versions of
    the weights, None where the mask is 0 or the endpoint sent none; the list is None where the
    endpoint sent none at all.
    """

    token_ids: list[int]
    mask: list[int]
    logprobs: list[float]
    policy_versions: list[int | None] | None = None


class TextSession(TurnSession):
    """Samples from an OpenAI-compatible endpoint, which renders the whole conversation each turn.

    The segments carry messages and no ids. `rows` holds the token ids where the endpoint returned
    them for every turn, else None. `tools` returns the functions on offer. `seed_keys` are what the
    seeds of the turns derive from.
    """

    def __init__(
        self,
        trajectory: Trajectory,
        endpoint: Endpoint,
        config: RolloutConfig,
        tools: Callable[[], Sequence[ToolSpec]],
        seed_keys: tuple[int, str, int],
    ) -> None:
        super().__init__(trajectory)
        if config.format == "code":
            raise ConfigError(
                "rollout.format, or that of a part in rollout.parts: code is not possible with an "
                "endpoint, whose API cannot continue a turn after a result: use the format tools, "
                "with a system prompt for it"
            )
        self._endpoint, self._config, self._read_tools = endpoint, config, tools
        self._seed_keys = seed_keys
        self._tools: Sequence[ToolSpec] = ()
        self.rows: list[TokenRow] | None = []

    @property
    def messages(self) -> list[Message]:
        return [s.message for s in self.trajectory.segments if s.message is not None]

    def start(self) -> None:
        super().start()
        self.rows = []

    def open(self, messages: Sequence[Message]) -> None:
        self._tree.add_messages(messages, [])
        self._tools = self._read_tools()
        if self._config.format == "tools" and not self._tools:
            raise EnvError("the environment has no tools: use the format plain or react")

    async def turn(self) -> Turn:
        number = self.trajectory.num_turns
        seed = derive_seed(*self._seed_keys, number)
        config = self._config
        params = sampling_params(config, config.max_tokens_per_turn, seed, tuple(config.stop))
        try:
            reply = await self._chat(params)
        except ContextOverflow as error:
            if number == 0:
                raise EnvError(f"the opening does not fit the model: {error}") from error
            raise
        self._tree.add_turn(reply.message, [], [], reply.policy_version, reply.version_runs)
        self.rows = extend_rows(self.rows, reply)
        return Turn(reply.message, reply.error, reply.finish_reason)

    async def _chat(self, params: SamplingParams) -> Reply:
        with chat(self._endpoint.model, params=params) as span:
            reply = await self._endpoint.chat(self.messages, params, self._tools)
            span.answered(
                input_tokens=None if reply.prompt_ids is None else len(reply.prompt_ids),
                output_tokens=None if reply.token_ids is None else len(reply.token_ids),
                finish_reason=reply.finish_reason,
            )
            span.messages(self.messages, reply.message, reply.finish_reason)
        return reply

    def refusal(self, turn: Message, error: str) -> list[Message]:
        """OpenAI's API requires a reply to every tool call."""
        if not turn.tool_calls:
            return [Message(role="user", content=error)]
        return [
            Message(role="tool", content=error, tool_call_id=call.id, name=call.name)
            for call in turn.tool_calls
        ]


def extend_rows(rows: list[TokenRow] | None, reply: Reply) -> list[TokenRow] | None:
    """The rows with one more turn; None as soon as a turn came without ids.

    A new row begins where the endpoint rendered the conversation in other ids than it had sampled:
    rows are never joined by their text.
    """
    prompt, ids, logprobs = reply.prompt_ids, reply.token_ids, reply.logprobs
    if rows is None or prompt is None or ids is None or logprobs is None:
        return None
    if rows and prompt[: len(rows[-1].token_ids)] == rows[-1].token_ids:
        *complete, row = rows
    else:
        complete, row = rows, TokenRow(token_ids=[], mask=[], logprobs=[])
    read = prompt[len(row.token_ids) :]
    runs = all_runs(reply.policy_version, reply.version_runs, len(ids))
    versions = list(row.policy_versions or [None] * len(row.token_ids))
    versions += [None] * len(read)
    versions += expand(runs) or [None] * len(ids)
    extended = TokenRow(
        token_ids=row.token_ids + read + ids,
        mask=row.mask + [0] * len(read) + [1] * len(ids),
        logprobs=row.logprobs + [0.0] * len(read) + logprobs,
        policy_versions=versions if any(v is not None for v in versions) else None,
    )
    return [*complete, extended]


def sampling_params(
    config: RolloutConfig,
    max_tokens: int,
    seed: int,
    stop: tuple[str, ...],
    stop_token_ids: tuple[int, ...] = (),
) -> SamplingParams:
    """The sampling parameters of one turn."""
    sampling = (config.temperature, config.top_p, config.top_k, stop)
    return SamplingParams(max_tokens, *sampling, stop_token_ids, seed)
