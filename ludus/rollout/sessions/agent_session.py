"""Sessions of agents that call the model themselves; every call is recorded with its exact tokens.

    AgentSession.call    place the call in the token tree, sample, record, return the message

It runs in the event loop of the rollouts. `Model` (rollout.workflow) calls it from any thread, the
gateway (services.gateway) for HTTP clients.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ludus.config.schema import RolloutConfig
from ludus.core.errors import (
    ConfigError,
    ContextOverflow,
    LudusError,
    SchemaError,
    did_you_mean,
)
from ludus.core.seeds import derive_seed
from ludus.core.types import (
    DOES_NOT_TRAIN,
    WITHOUT_TURN,
    Message,
    Status,
    ToolSpec,
    Trajectory,
)
from ludus.models.grammars import grammar_for
from ludus.models.samplers.base import Completion, Sampler, SamplingParams
from ludus.rollout.hosts.threads import is_cancelled
from ludus.rollout.sessions.call_options import (
    DEFAULT,
    Address,
    AgentRenderers,
    CallOptions,
    CallRefused,
    CallReply,
    shortened,
)
from ludus.rollout.sessions.calls import CallTree, Place
from ludus.rollout.sessions.session import Session, sampling_params
from ludus.telemetry.traces import chat

if TYPE_CHECKING:
    import httpx

    from ludus.models.chat.renderer import Renderer

T = TypeVar("T")

MAX_CALLS = 200
"""Calls of an episode where `rollout.max_turns` sets no limit."""

ENDED_MEANWHILE = "the episode has ended while this call was being answered"


class Gateway(Protocol):
    """Gives sessions an address."""

    def admit(self, session: AgentSession) -> Address:
        """Answer calls with the key of the returned address by this session."""

    def dismiss(self, session: AgentSession) -> None:
        """Refuse later calls of the session. Idempotent."""

    def transport(self) -> httpx.AsyncBaseTransport:
        """Reaches the gateway from this process without a socket, from any event loop."""

    def close(self) -> None:
        """Stop answering. Idempotent."""


class AgentSession(Session):
    """An episode of an agent that calls the model itself.

    Args:
        seed: the episode's; a turn's seed derives from it and the turn's place in the tree.
        max_calls: later calls are refused; the episode is then truncated.
        gateway: gives the session an address for HTTP clients; None: calls in process only.
        others: the sessions of the episode's other roles; they begin and end with this one.
        trains: False for a fixed policy, whose turns have no loss.
    """

    has_tokens = True
    """False where a served model answers, which takes messages only."""

    def __init__(
        self,
        trajectory: Trajectory,
        sampler: Sampler,
        renderers: AgentRenderers,
        config: RolloutConfig,
        seed: int,
        max_calls: int = MAX_CALLS,
        gateway: Gateway | None = None,
        others: Sequence[AgentSession] = (),
        trains: bool = True,
    ) -> None:
        super().__init__(trajectory)
        self.roles = {session.trajectory.role: session for session in (self, *others)}
        self._others, self._trains = others, trains
        self.renderers = renderers
        self._sampler, self._config, self._seed = sampler, config, seed
        self._max_calls, self._gateway = max_calls, gateway
        self._loop: asyncio.AbstractEventLoop | None = None
        self._attempt = _Attempt(CallTree(trajectory))
        self._attempt.ended = True
        self._rewarded = False
        self.address: Address | None = None

    @property
    def context_length(self) -> int:
        return self._sampler.context_length

    @property
    def gateway(self) -> Gateway | None:
        return self._gateway

    @property
    def cut(self) -> tuple[Status, str] | None:
        """The reason for which this role counts as truncated, or None."""
        return self._attempt.cut

    @property
    def any_cut(self) -> tuple[Status, str] | None:
        """The reason for which a role counts as truncated, or None."""
        return next((role.cut for role in self.roles.values() if role.cut is not None), None)

    @property
    def refused(self) -> tuple[Status, str] | None:
        """The limit at which the last call of a role was refused, or None. An agent that raises
        then has met the limit; one that raises at other times has a fault."""
        attempts = (role._attempt for role in self.roles.values())
        return next((attempt.cut for attempt in attempts if attempt.refused), None)

    @property
    def failure(self) -> LudusError | None:
        """The failure of a role's sampler, which is not the agent's."""
        failures = (role._attempt.failure for role in self.roles.values())
        return next((failure for failure in failures if failure is not None), None)

    @property
    def trained_roles(self) -> list[str]:
        """The roles whose policy trains."""
        return [name for name, role in self.roles.items() if role._trains]

    def role(self, name: str) -> AgentSession:
        """The session of a role. Errors: ConfigError for an unknown one."""
        if name not in self.roles:
            near = did_you_mean(name[:200], self.roles)
            raise ConfigError(
                f"the agent asks for the role {name[:200]!r}{near}: add it to `roles` in the "
                "configuration, with its policy"
            )
        return self.roles[name]

    def start(self) -> None:
        for other in self._others:
            other.start()
        super().start()
        self._rewarded = False
        self._loop = asyncio.get_running_loop()
        self._attempt = _Attempt(CallTree(self.trajectory))
        if self._gateway is not None:
            self.address = self._gateway.admit(self)

    def end(self, status: Status, error: str | None = None) -> None:
        """Record how the attempt ended. Where it ended by itself, a role that reached a limit of
        its own counts as truncated."""
        super().end(status, error)
        for other in self._others:
            own = (other.cut or (Status.COMPLETED, None)) if status.trainable else (status, error)
            other.end(*own)
        if not self._trains:
            self.trajectory.dropped = f"the policy {self.trajectory.policy!r} {DOES_NOT_TRAIN}"

    def played(self) -> bool:
        for other in self._others:
            if not other.played() and other.trajectory.status is Status.COMPLETED:
                other.trajectory.dropped = WITHOUT_TURN
        return not self._trains or super().played()

    def set_rewards(self, rewards: Mapping[str, float], *, explanation: str = "") -> None:
        """Record the reward of each role; at least 1 is a success. No other role gets one."""
        self._rewarded = True
        for name, reward in rewards.items():
            self.roles[name].set_reward(reward, {}, success=reward >= 1, explanation=explanation)

    def share_reward(self) -> None:
        """Give the reward of this role to those that have none."""
        if self._rewarded or (reward := self.trajectory.reward) is None:
            return
        success = bool(self.trajectory.metrics["success"])
        for other in self._others:
            if other.trajectory.reward is None:
                other.set_reward(reward, {}, success=success)

    def close(self) -> None:
        for other in self._others:
            other.close()
        self._attempt.ended = True
        if self._gateway is not None:
            self._gateway.dismiss(self)
        for name in self._attempt.opened:
            self._sampler.close(name)
        self._attempt.opened.clear()

    async def at_home(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the event loop of the rollouts, from any loop."""
        if asyncio.get_running_loop() is self._loop:
            return await work
        if self._loop is None or self._attempt.ended:
            work.close()
            raise CallRefused("the episode has ended: its model answers no more calls")
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def call(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        options: CallOptions = DEFAULT,
    ) -> list[CallReply]:
        """Answer a conversation with `options.n` turns.

        Errors: CallRefused; ContextOverflow; ConfigError for messages or tools that the chat
        template cannot show; SamplerError.
        """
        attempt, options = self._admit(options.n), self._own(options)
        renderer = self.renderers.of(tools)
        grammar = None
        if options.schema is not None:
            grammar = await grammar_for(options.schema, renderer, self._sampler)
        places = [attempt.tree.place(messages, renderer) for _ in range(options.n)]
        return await self._answer(attempt, places, renderer, options, grammar)

    async def complete(self, ids: Sequence[int], options: CallOptions) -> list[CallReply]:
        """Continue token ids. Errors: as `call`."""
        attempt, options = self._admit(options.n), self._own(options)
        places = [attempt.tree.place_ids(ids) for _ in range(options.n)]
        return await self._answer(attempt, places, self.renderers.of(()), options)

    def count(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> int:
        """The number of tokens that a call with these messages would read.

        Errors: ConfigError for messages or tools that the chat template cannot show.
        """
        return self._attempt.tree.count(messages, self.renderers.of(tools))

    def note_reward(self, reward: float | None) -> None:
        """Record the reward of a step of the environment at the last turn of this role."""
        turns = [s for s in self.trajectory.segments if s.sampled]
        if turns and reward is not None:
            turns[-1].reward = (turns[-1].reward or 0.0) + reward

    def set_turn_rewards(self, rewards: Sequence[float]) -> bool:
        """Record the rewards of this role's turns, in place of those noted; False where they are
        not as many. A fixed policy's turns need none."""
        turns = [segment for segment in self.trajectory.segments if segment.sampled]
        if not self._trains:
            return True
        if len(turns) != len(rewards):
            return False
        for segment in self.trajectory.segments:
            segment.reward = None
        for turn, reward in zip(turns, rewards, strict=True):
            turn.reward = reward
        return True

    def _own(self, options: CallOptions) -> CallOptions:
        return options if self._trains else replace(options, trained=False)

    def _admit(self, num: int) -> _Attempt:
        attempt = self._attempt
        attempt.check()
        if attempt.num_calls + num > self._max_calls:
            told = f"the episode has made {attempt.num_calls} calls; the limit is {self._max_calls}"
            attempt.cut, attempt.refused = (Status.TRUNCATED_TURNS, told), True
            raise CallRefused(told)
        attempt.num_calls += num
        return attempt

    async def _answer(
        self,
        attempt: _Attempt,
        places: list[Place],
        renderer: Renderer,
        options: CallOptions,
        grammar: str | None = None,
    ) -> list[CallReply]:
        turns = [self._turn(attempt, place, renderer, options, grammar) for place in places]
        return await self._gathered(attempt, turns)

    @staticmethod
    async def _gathered(
        attempt: _Attempt, turns: Sequence[Coroutine[Any, Any, CallReply]]
    ) -> list[CallReply]:
        """The replies; an error that ends the episode is noted."""
        try:
            return list(await asyncio.gather(*turns))
        except ContextOverflow as error:
            attempt.cut, attempt.refused = (Status.TRUNCATED_LENGTH, str(error)), True
            raise
        except SchemaError:  # the call's fault
            raise
        except LudusError as error:
            attempt.failure = error
            raise

    async def _turn(
        self,
        attempt: _Attempt,
        place: Place,
        renderer: Renderer,
        options: CallOptions,
        grammar: str | None,
    ) -> CallReply:
        params = replace(self._params(place, renderer, options), grammar=grammar)
        attempt.check()
        name = attempt.take(place, self.trajectory)
        completion = await self._sample(attempt, name, place.prompt_ids, params)
        if not self._trains:
            self.trajectory.metrics["weights_version"] = float(completion.policy_version)
        parsed = renderer.parse(completion.token_ids)
        message = shortened(parsed.message, options)
        whole = parsed.message.content
        message = attempt.tree.add_turn(
            place,
            message,
            completion,
            trained=options.trained,
            whole=whole,
            ours=self._trains,
            constraint=params.constraint,
        )
        attempt.give_back(name, len(self.trajectory.segments) - 1)
        attempt.note(completion.finish_reason)
        return CallReply(
            message, completion.finish_reason, parsed.error, place.prompt_ids, completion
        )

    async def _sample(
        self, attempt: _Attempt, name: str, ids: list[int], params: SamplingParams
    ) -> Completion:
        """Sample in the sampler's session `name`, which is opened if need be."""
        if name not in attempt.opened:
            attempt.opened.add(name)
            self._sampler.open(name)
        try:
            with chat(params=params) as span:
                completion = await self._sampler.sample(ids, params, session=name)
                span.answered(
                    input_tokens=len(ids),
                    output_tokens=len(completion.token_ids),
                    finish_reason=completion.finish_reason,
                )
        except BaseException as error:
            self._sampler.close(name)
            attempt.opened.discard(name)
            # The end of the episode has closed the sampler's session, which cancels its turn.
            if isinstance(error, asyncio.CancelledError) and attempt.ended and not is_cancelled():
                raise CallRefused(ENDED_MEANWHILE) from None
            raise
        if attempt.ended:
            raise CallRefused(ENDED_MEANWHILE)
        return completion

    def _own_config(self, options: CallOptions) -> RolloutConfig:
        """The sampling settings of a call: the run's, unless it has no loss."""
        if options.trained and self._trains:
            return self._config
        own = {"temperature": options.temperature, "top_p": options.top_p, "top_k": options.top_k}
        return self._config.model_copy(update={k: v for k, v in own.items() if v is not None})

    def _params(self, place: Place, renderer: Renderer, options: CallOptions) -> SamplingParams:
        """Errors: ContextOverflow."""
        available = self._sampler.context_length - len(place.prompt_ids)
        if available < 1:
            raise ContextOverflow(
                f"the conversation has {len(place.prompt_ids)} tokens; the context has "
                f"{self._sampler.context_length}"
            )
        config = self._own_config(options)
        keys: list[str | int] = [place.depth]
        if place.sibling or not place.first or options.seed is not None or not options.trained:
            keys += [place.sibling, str(options.seed), options.trained, str(place.prompt_ids)]
        return sampling_params(
            config,
            max_tokens=min(options.max_tokens or 2**31, config.max_tokens_per_turn, available),
            seed=derive_seed(self._seed, *keys),
            stop=(*config.stop, *options.stop),
            stop_token_ids=tuple(renderer.stop_token_ids),
        )


@dataclass(slots=True)
class _Attempt:
    """State of one attempt at an episode; late calls of an earlier one do not touch it.

    The sampler's sessions keep keys and values: a turn that extends another goes on in its session,
    a branch begins a new one.
    """

    tree: CallTree
    opened: set[str] = field(default_factory=set)
    num_calls: int = 0
    num_sessions: int = 0
    ended: bool = False
    cut: tuple[Status, str] | None = None
    refused: bool = False
    failure: LudusError | None = None
    _idle: dict[int, str] = field(default_factory=dict)

    def note(self, finish_reason: str) -> None:
        """Note how the last turn ended."""
        self.cut, self.refused = None, False
        if finish_reason == "length":
            self.cut = Status.TRUNCATED_LENGTH, "the last turn reached its limit of tokens"

    def check(self) -> None:
        """Errors: CallRefused after the episode's end."""
        if self.ended:
            raise CallRefused("the episode has ended: its model answers no more calls")

    def take(self, place: Place, trajectory: Trajectory) -> str:
        """The sampler's session for a turn at a place."""
        turns = self.tree.turns_on(place.head)
        if turns and turns[-1] in self._idle:
            return self._idle.pop(turns[-1])
        self.num_sessions += 1
        return f"{trajectory.id}#{self.num_sessions}" if self.num_sessions > 1 else trajectory.id

    def give_back(self, name: str, turn: int) -> None:
        self._idle[turn] = name
