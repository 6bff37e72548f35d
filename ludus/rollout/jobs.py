"""Episodes against an OpenAI-compatible endpoint: one model, one environment -> one EpisodeRecord.

What `agent.py` does in token ids, for a model that is only known by its messages. There is no tree:
the endpoint renders the whole conversation anew each turn.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from pydantic import Field

from ludus.config.schema import RolloutConfig
from ludus.core.errors import ContextOverflow, EnvError, EpisodeError, Unscorable
from ludus.core.seeds import derive_seed
from ludus.core.types import Message, Status, Task, ToolSpec, Wire
from ludus.envs.base import Env
from ludus.models.endpoint.client import Endpoint, Reply
from ludus.models.samplers.base import SamplingParams
from ludus.rollout.acting import act
from ludus.rollout.host import HostedEnv
from ludus.rollout.status import status_of
from ludus.rollout.threads import EnvThread
from ludus.tasks.mixture import for_part


class TokenRow(Wire):
    """Ids that the endpoint read and sampled, as one row. `mask` is 1 on the sampled ones.

    `logprobs` are the endpoint's own, 0 where the mask is 0.
    """

    token_ids: list[int]
    mask: list[int]
    logprobs: list[float]


class EpisodeRecord(Wire):
    """What became of one id.

    `reward` is the sum of what the steps earned, `score` where it lies in the environment's range,
    from 0 to 1; both are None where the episode could not be scored, which is never a reward of 0.
    `policy_versions` has one of each turn, None where the endpoint told none, and is None where it
    told none at all. `rows` is None where the endpoint told no ids. A new row begins where the
    endpoint rendered the conversation otherwise than it had sampled it: rows are never joined by
    their text.
    """

    id: int | str
    task_id: str = ""
    tier: str | None = None
    sample: int = 0
    reward: float | None = None
    score: float | None = None
    success: bool = False
    conversation: list[Message] = Field(default_factory=list)
    num_turns: int = 0
    status: Status = Status.ABORTED
    error: str | None = "it was not started"
    policy_versions: list[int | None] | None = None
    rows: list[TokenRow] | None = None
    seconds: float = 0.0

    @property
    def scored(self) -> bool:
        """Whether its reward says something about the model."""
        return self.status.trainable and self.reward is not None


class Made(Protocol):
    """Where environments come from.

    `make` gives one that plays one episode; `release` has the last word on it, even where it hangs;
    `tools` are known without one, for asking one may block.
    """

    blocking: bool

    def make(self) -> Env: ...

    def release(self, env: Env) -> None: ...

    def tools(self) -> Sequence[ToolSpec]: ...


@dataclass(frozen=True, slots=True)
class ChatAgent:
    """Plays episodes with the model of an endpoint; `config` as for any rollout."""

    endpoint: Endpoint
    env: Made
    config: RolloutConfig
    seed: int = 0

    async def play(self, task: Task, episode: EpisodeRecord, seat: EnvThread) -> None:
        """Fill `episode`; whatever goes wrong inside it ends up as its status and error.

        Failures of the infrastructure are tried again, `config.max_retries` times. Where the caller
        cancels, what was played so far stays.
        """
        started = time.monotonic()
        try:
            for _ in range(1 + self.config.max_retries):
                episode.conversation, episode.rows, episode.num_turns = [], [], 0
                episode.policy_versions = []
                await self._attempt(task, episode, seat)
                if not episode.status.retryable:
                    break
        finally:
            episode.seconds = round(time.monotonic() - started, 3)
            episode.rows = episode.rows or None
            if all(version is None for version in episode.policy_versions or []):
                episode.policy_versions = None

    async def _attempt(self, task: Task, episode: EpisodeRecord, seat: EnvThread) -> None:
        episode.status, episode.error = Status.ABORTED, "it was stopped"
        deadline = self.config.episode_deadline_s
        made: list[Env] = []

        def make() -> Env:
            made.append(self.env.make())
            return made[-1]

        blocking = self.env.blocking
        host = HostedEnv(make, seat, self.config.step_deadline_s, blocking=blocking)
        try:
            async with asyncio.timeout(deadline) as timer:
                await self._episode(task, episode, host)
        except EpisodeError as error:
            episode.status, episode.error = status_of(error), str(error)
        except TimeoutError:
            if not timer.expired():
                raise
            episode.status = Status.ERROR_TIMEOUT
            episode.error = f"the episode took longer than {deadline:g} s"
        finally:
            try:
                await host.close()
            finally:
                for env in made:
                    self.env.release(env)

    async def _episode(self, task: Task, episode: EpisodeRecord, host: HostedEnv) -> None:
        rewards: list[float] = []
        try:
            status = await self._turns(task, episode, host, rewards)
            error = None
        except ContextOverflow as overflow:  # an end like any other: what it earned so far counts
            status, error = Status.TRUNCATED_LENGTH, str(overflow)
            if not episode.num_turns:
                raise EnvError(f"the opening does not fit the model: {overflow}") from overflow
        if not rewards and status is Status.COMPLETED:
            raise Unscorable("the environment gave no reward")
        low, high = host.env.score_range
        episode.reward = sum(rewards)
        episode.score = (episode.reward - low) / (high - low) if high > low else None
        episode.success = episode.reward >= host.env.success_at
        episode.status, episode.error = status, error

    async def _turns(
        self, task: Task, episode: EpisodeRecord, host: HostedEnv, rewards: list[float]
    ) -> Status:
        config, conversation = self.config, episode.conversation
        opening = [*task.prompt, *(await host.reset(task)).messages]
        if config.system_prompt:
            conversation.append(Message(role="system", content=config.system_prompt))
        conversation += opening
        if not opening:
            raise EnvError("reset returned no messages, and the task has no prompt")
        tools = self._tools()
        limit = for_part(config.max_turns, task)
        for turn in range(limit or host.env.max_turns):
            params = self._params(derive_seed(self.seed, str(episode.id), episode.sample, turn))
            reply = await self.endpoint.chat(conversation, params, tools)
            conversation.append(reply.message)
            episode.num_turns += 1
            episode.rows = grown(episode.rows, reply)
            episode.policy_versions = [*(episode.policy_versions or []), reply.policy_version]
            if reply.finish_reason == "length":
                return Status.TRUNCATED_LENGTH
            result = await act(host, reply.message, reply.error, self.config.format, _refusal)
            conversation += result.messages
            if result.reward is not None:
                rewards.append(result.reward)
            if result.done:
                return Status.COMPLETED
        return Status.TRUNCATED_TURNS

    def _tools(self) -> Sequence[ToolSpec]:
        if self.config.format != "tools":
            return []
        if tools := self.env.tools():
            return tools
        raise EnvError("the environment has no tools: use the format plain or react")

    def _params(self, seed: int) -> SamplingParams:
        config = self.config
        return SamplingParams(
            max_tokens=config.max_tokens_per_turn,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            stop=tuple(config.stop),
            seed=seed,
        )


def grown(rows: list[TokenRow] | None, reply: Reply) -> list[TokenRow] | None:
    """The rows with one more turn; None from the first turn on whose ids were not told."""
    prompt, ids, logprobs = reply.prompt_ids, reply.token_ids, reply.logprobs
    if rows is None or prompt is None or ids is None or logprobs is None:
        return None
    row = rows[-1] if rows else None
    if row is None or prompt[: len(row.token_ids)] != row.token_ids:
        row = TokenRow(token_ids=[], mask=[], logprobs=[])
        rows = [*rows, row]
    given = prompt[len(row.token_ids) :]
    row.token_ids += given + ids
    row.mask += [0] * len(given) + [1] * len(ids)
    row.logprobs += [0.0] * len(given) + logprobs
    return rows


class RolloutJob:
    """Many ids, `config.concurrency` at a time. `episodes` is whole at any moment.

    Consumes tasks, waits for the endpoint and the environments, is unblocked by whichever episode
    ends first. A deadline or `stop` ends it early: what is done stays, what is under way or was not
    started has the status `error_timeout` or `aborted`.
    """

    def __init__(
        self,
        agent: ChatAgent,
        work: list[tuple[Task, EpisodeRecord]],
        *,
        deadline_s: float | None = None,
        on_episode: Callable[[EpisodeRecord], object] = lambda _: None,
    ) -> None:
        self.episodes = [episode for _, episode in work]
        self.stopped: str | None = None
        """Why it ended early: "deadline" or "cancelled"."""
        self._agent, self._deadline_s, self._on_episode = agent, deadline_s, on_episode
        self._waiting = list(reversed(work))
        self._seats: list[asyncio.Task[None]] = []
        self._under_way: set[int] = set()

    async def run(self) -> list[EpisodeRecord]:
        """Play all of it. Errors: what is no episode's fault, such as a wrong configuration."""
        num_seats = min(self._agent.config.concurrency, len(self._waiting))
        self._seats = [asyncio.create_task(self._seat()) for _ in range(num_seats)]
        try:
            async with asyncio.timeout(self._deadline_s) as timer:
                await asyncio.gather(*self._seats)
        except TimeoutError:
            if not timer.expired():
                raise
            self.stopped = "deadline"
        except asyncio.CancelledError:
            if self.stopped is None:  # not by `stop`: our caller is cancelled
                self.stopped = "cancelled"
                raise
        finally:
            for seat in self._seats:
                seat.cancel()
            await asyncio.gather(*self._seats, return_exceptions=True)
            self._mark()
        return self.episodes

    def stop(self) -> None:
        """End it; `run` returns with what there is."""
        if self.stopped is None:
            self.stopped = "cancelled"
            for seat in self._seats:
                seat.cancel()

    async def _seat(self) -> None:
        seat = EnvThread()
        try:
            while self._waiting and self.stopped is None:
                task, episode = self._waiting.pop()
                self._under_way.add(id(episode))
                await self._agent.play(task, episode, seat)
                self._under_way.discard(id(episode))
                self._on_episode(episode)
        finally:
            with suppress(RuntimeError):
                seat.close()

    def _mark(self) -> None:
        """Say of each episode that has no end what kept it from one."""
        late = self.stopped == "deadline"
        for episode in self.episodes:
            if id(episode) in self._under_way:
                episode.status = Status.ERROR_TIMEOUT if late else Status.ABORTED
                episode.error = (
                    f"the batch's deadline of {self._deadline_s:g} s passed"
                    if late
                    else "the batch was cancelled"
                )
                episode.reward = episode.score = None


def _refusal(turn: Message, error: str) -> list[Message]:
    """OpenAI's form wants an answer to every call."""
    if not turn.tool_calls:
        return [Message(role="user", content=error)]
    return [
        Message(role="tool", content=error, tool_call_id=call.id, name=call.name)
        for call in turn.tool_calls
    ]
