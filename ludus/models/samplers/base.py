"""The protocol between rollouts and whatever samples: token ids in, token ids out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from ludus.core.errors import ContextOverflow


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one turn is sampled.

    The distribution: logits / temperature, cut to `top_k` (0: all), then to the smallest set whose
    probability reaches `top_p`, renormalised. Temperature 0 is greedy. `seed` fixes the turn's
    random numbers: the same seed and the same logits give the same tokens, whatever else is in
    the batch.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0


@dataclass(slots=True)
class Completion:
    """One sampled turn.

    `logprobs` are under the exact sampling distribution (temperature, top-k and top-p applied).
    A stop id is part of `token_ids` (it was sampled, and trains); so are a stop string's tokens.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length"]
    policy_version: int


def check_turn(prompt_ids: list[int], params: SamplingParams, context_length: int) -> None:
    """Refuse a turn that no sampler can take.

    Errors: ContextOverflow where prompt and max_tokens do not fit the context; ValueError where
    there is nothing to start from, or nothing to sample.
    """
    if len(prompt_ids) + params.max_tokens > context_length:
        raise ContextOverflow(
            f"{len(prompt_ids)} tokens of prompt and {params.max_tokens} to sample exceed "
            f"model.context_length = {context_length}"
        )
    if not prompt_ids or params.max_tokens < 1:
        raise ValueError("a turn needs at least one token of prompt, and one to sample")


class Sampler(Protocol):
    """Samples turns for many episodes at once.

    A *session* is one episode: the sampler may keep its KV cache between turns, and (in
    deterministic mode) waits for all open sessions before it computes, so that the composition of a
    batch does not depend on timing.
    """

    @property
    def context_length(self) -> int:
        """The most tokens that a prompt and its completion may have together."""
        ...

    def open(self, session: str) -> None:
        """Announce an episode. Its name, not the time, decides its place among the others."""
        ...

    def close(self, session: str) -> None:
        """Forget an episode; a turn of it that is still running is dropped. Idempotent."""
        ...

    async def sample(
        self, prompt_ids: list[int], params: SamplingParams, *, session: str
    ) -> Completion:
        """Sample one turn after `prompt_ids`, the whole conversation so far.

        Errors: ContextOverflow where prompt and max_tokens do not fit the context.
        """
        ...


class PolicySampler(Sampler, Protocol):
    """A sampler of the policy under training, on this machine."""

    @property
    def policy_version(self) -> int:
        """The version of the weights that new turns are sampled with."""
        ...

    def publish(self, version: int) -> None:
        """Sample with the model's weights as they are now, under this version.

        Errors: TrainingError where the sampler cannot take them, or samples from others.
        """
        ...

    def pause(self) -> None:
        """Compute with the model's weights no more until `resume`: they are about to change.

        Turns under way wait. A sampler that has weights of its own may go on. Idempotent.
        """
        ...

    def resume(self) -> None:
        """Go on. Idempotent."""
        ...

    def shutdown(self) -> None:
        """End what the sampler started. Idempotent."""
        ...
