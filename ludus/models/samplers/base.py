"""Sampler protocol: token ids in, token ids and log-probabilities out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from ludus.core.errors import ContextOverflow
from ludus.core.types import Constraint
from ludus.core.versions import Run, all_runs, check_runs


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one turn.

    Distribution: logits / temperature, truncated to `top_k` tokens (0: all), then to the smallest
    set whose probability reaches `top_p`, renormalised. Temperature 0 is greedy. `seed` fixes the
    turn's random numbers: the same seed and logits give the same tokens in any batch. With a
    `grammar`, the distribution is first restricted to the tokens that it allows.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    grammar: str | None = None

    @property
    def constraint(self) -> Constraint | None:
        """The constraint of the tokens, or None. Such a turn ends with the first of the stop ids,
        the template's end of a turn."""
        return None if self.grammar is None else Constraint(self.grammar, self.stop_token_ids[:1])


@dataclass(slots=True)
class Completion:
    """One sampled turn.

    `logprobs` are under the exact sampling distribution (temperature, top-k and top-p applied).
    `token_ids` include the stop id and the tokens of a stop string: they were sampled, so they
    are trained on.

    `policy_version` is the oldest version of the weights that sampled the tokens. Where the weights
    were updated during the turn, `version_runs` has the versions of all tokens (`core.versions`).
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length"]
    policy_version: int
    version_runs: list[Run] | None = None

    def __post_init__(self) -> None:
        if self.version_runs is not None:
            check_runs(self.version_runs, self.policy_version, len(self.token_ids))

    @property
    def runs(self) -> list[Run]:
        """(version, number of tokens) in order."""
        return all_runs(self.policy_version, self.version_runs, len(self.token_ids))


def check_turn(
    prompt_ids: list[int], params: SamplingParams, context_length: int, num_embeddings: int
) -> None:
    """Check a turn's prompt, length and parameters.

    Errors: ContextOverflow where prompt and max_tokens do not fit the context; ValueError for an
    empty prompt, `max_tokens` below 1, a negative seed, a stop id that is not a 64-bit integer, or
    an id that the model has no embedding for.
    """
    if len(prompt_ids) + params.max_tokens > context_length:
        raise ContextOverflow(
            f"{len(prompt_ids)} prompt tokens and {params.max_tokens} to sample exceed "
            f"model.context_length = {context_length}"
        )
    if not prompt_ids or params.max_tokens < 1:
        raise ValueError("a turn needs at least one prompt token and max_tokens of at least 1")
    if params.seed < 0:
        raise ValueError(f"seed is {params.seed}: it must be 0 or more")
    for id in params.stop_token_ids:
        if not -(2**63) <= id < 2**63:
            raise ValueError(f"stop id {id} is not a 64-bit integer")
    if set(map(type, prompt_ids)) == {int} and (
        min(prompt_ids) >= 0 and max(prompt_ids) < num_embeddings
    ):
        return
    import numpy as np  # here, because services without a model import this module

    ids = np.asarray(prompt_ids)
    if ids.dtype.kind not in "iu" or ids.ndim != 1:
        raise ValueError("token ids must be a list of integers")
    outside = np.flatnonzero((ids < 0) | (ids >= num_embeddings))
    if len(outside):
        raise ValueError(
            f"prompt token {outside[0]} has the id {ids[outside[0]]}; the model has the ids 0 to "
            f"{num_embeddings - 1}"
        )


def num_embeddings(model: Any) -> int:
    """Returns the number of ids that a Hugging Face model accepts."""
    size: int = model.get_input_embeddings().weight.shape[0]
    return size


class Sampler(Protocol):
    """Samples turns for many concurrent episodes.

    A *session* is one episode. The sampler may keep its KV cache between turns. In deterministic
    mode it waits for all open sessions before it computes, so batches do not depend on timing.
    """

    @property
    def context_length(self) -> int:
        """The most tokens of a prompt and its completion together."""

    def open(self, session: str) -> None:
        """Register an episode. Batches are ordered by session name, not by time of registration."""

    def close(self, session: str) -> None:
        """Remove an episode and cancel its running turn. Idempotent."""

    async def sample(
        self, prompt_ids: list[int], params: SamplingParams, *, session: str
    ) -> Completion:
        """Sample one turn; `prompt_ids` is the whole conversation so far.

        Errors: ContextOverflow where prompt and max_tokens do not fit the context.
        """


@runtime_checkable
class Constraining(Protocol):
    """A sampler that follows `SamplingParams.grammar`."""

    def check_grammar(self, grammar: str) -> None:
        """Errors: ConfigError for a grammar that cannot be followed; MissingDependency."""


@runtime_checkable
class Selective(Protocol):
    """A sampler that follows some sampling parameters only."""

    def check_params(self, params: SamplingParams) -> None:
        """Errors: ConfigError for parameters that it does not follow."""


class PolicySampler(Sampler, Protocol):
    """A sampler of the policy being trained, on this machine."""

    @property
    def policy_version(self) -> int:
        """Version of the weights that sample new turns."""

    @property
    def shares_weights(self) -> bool:
        """True if it reads the model's parameters, which must not change while it samples.

        False: its own weights change in `publish` only.
        """

    def publish(self, version: int) -> None:
        """Sample with the model's current weights, under this version.

        A sampler with weights of its own is paused meanwhile, and called from another thread.
        Errors: TrainingError where the sampler refuses the weights or does not use them.
        """

    def pause(self) -> None:
        """Start no step until `resume`, since the weights are about to change.

        Running turns wait. A sampler in another process may continue. Idempotent.
        """

    def resume(self) -> None:
        """Continue after `pause`. Idempotent."""

    def shutdown(self) -> None:
        """Stop the sampler's processes. Idempotent."""
