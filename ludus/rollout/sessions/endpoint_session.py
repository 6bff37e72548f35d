"""A role of an agent's episode that a served model plays: text in, text out, nothing to train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ludus.config.schema import RolloutConfig
from ludus.core.errors import ConfigError
from ludus.core.seeds import derive_seed
from ludus.core.types import Message, ToolSpec, Trajectory
from ludus.models.samplers.base import Completion, SamplingParams
from ludus.rollout.sessions.agent_session import MAX_CALLS, AgentSession, Gateway
from ludus.rollout.sessions.call_options import (
    DEFAULT,
    AgentRenderers,
    CallOptions,
    CallReply,
    shortened,
)
from ludus.rollout.sessions.calls import Place
from ludus.rollout.sessions.session import sampling_params
from ludus.telemetry.traces import chat

if TYPE_CHECKING:
    from ludus.models.endpoint.client import Endpoint


class EndpointSession(AgentSession):
    """An AgentSession whose calls an endpoint answers. Its segments have messages and no ids."""

    has_tokens = False

    def __init__(
        self,
        trajectory: Trajectory,
        endpoint: Endpoint,
        config: RolloutConfig,
        seed: int,
        max_calls: int = MAX_CALLS,
        gateway: Gateway | None = None,
        others: Sequence[AgentSession] = (),
    ) -> None:
        sampler, renderers = _NoSampler(), _TextRenderers()
        super().__init__(
            trajectory, sampler, renderers, config, seed, max_calls, gateway, others, trains=False
        )
        self._endpoint = endpoint

    async def call(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        options: CallOptions = DEFAULT,
    ) -> list[CallReply]:
        attempt = self._admit(options.n)
        renderer = self.renderers.of(tools)
        places = [attempt.tree.place(messages, renderer) for _ in range(options.n)]

        async def turn(place: Place) -> CallReply:
            params = self._endpoint_params(place, options)
            with chat(self._endpoint.model, params=params) as span:
                reply = await self._endpoint.chat(
                    messages, params, tools, options.schema, strict=True
                )
                span.answered(finish_reason=reply.finish_reason)
            attempt.check()
            completion = Completion([], [], reply.finish_reason, 0)
            message = shortened(reply.message, options)
            message = attempt.tree.add_turn(place, message, completion, trained=True, ours=False)
            attempt.note(reply.finish_reason)
            return CallReply(message, reply.finish_reason, reply.error, [], completion)

        return await self._gathered(attempt, [turn(place) for place in places])

    async def complete(self, ids: Sequence[int], options: CallOptions) -> list[CallReply]:
        raise ConfigError("an endpoint's model cannot continue token ids: send messages")

    def count(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> int:
        raise ConfigError("an endpoint does not count tokens")

    def _endpoint_params(self, place: Place, options: CallOptions) -> SamplingParams:
        config = self._own_config(options)
        seed = derive_seed(self._seed, place.head, place.sibling, str(options.seed))
        limit = min(options.max_tokens or 2**31, config.max_tokens_per_turn)
        return sampling_params(config, limit, seed, (*config.stop, *options.stop))


class _TextRenderers(AgentRenderers):
    def __init__(self) -> None:
        self._of: dict[str, _TextRenderer] = {}

    def of(self, tools: Sequence[ToolSpec]) -> Any:
        key = "\n".join(tool.model_dump_json() for tool in tools)
        return self._of.setdefault(key, _TextRenderer(tuple(tools)))


@dataclass(frozen=True, slots=True, eq=False)
class _TextRenderer:
    """Stands for a renderer where there are no tokens."""

    tools: tuple[ToolSpec, ...]
    thinking: str = "keep"
    tokenizer: None = None

    def open(self, messages: Sequence[Message]) -> list[int]:
        return []

    def extend(self, messages: Sequence[Message], after: Sequence[int]) -> list[int]:
        return []


class _NoSampler:
    """An endpoint keeps no sessions; it tells itself where its context ends."""

    context_length = 2**31

    def open(self, session: str) -> None:
        pass

    def close(self, session: str) -> None:
        pass

    async def sample(
        self, prompt_ids: list[int], params: SamplingParams, *, session: str
    ) -> Completion:
        raise NotImplementedError
