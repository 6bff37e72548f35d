"""A host's engine as a `Sampler`: what those of all hosts share."""

from __future__ import annotations

from typing import Any

from ludus.models.samplers.base import SamplingParams


class Sessionless:
    """An engine that knows no sessions: it finds a cached prefix by its ids."""

    def open(self, session: str) -> None:
        """Does nothing."""

    def close(self, session: str) -> None:
        """Does nothing: nothing is held for a session."""


def engine_settings(params: SamplingParams) -> dict[str, Any]:
    """The settings of a turn by vLLM's names."""
    return {
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        "stop_token_ids": list(params.stop_token_ids),
        **({"stop": list(params.stop)} if params.stop else {}),
        "ignore_eos": True,  # only the template's ids end a turn
    }
