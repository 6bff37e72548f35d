"""The model's texts: prompts, requests of the endpoints, and the journal's records."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

from ludus.core.errors import ContextOverflow, DataError, SamplerError
from ludus.core.seeds import derive_seed
from ludus.core.types import Message, Wire
from ludus.data.augmentation.request import AugmentRequest, Model, Seed
from ludus.models.endpoint.client import Endpoint
from ludus.models.samplers.base import SamplingParams

MAX_FAILURES = 8
"""Failures of an endpoint in a row after which it counts as down."""

JOURNAL = "texts.jsonl"


class Text(Wire):
    """A text of the model, or of the solver: the answer to one request.

    `failure`: there is none, for this reason; `again`: the endpoint failed, so the next run asks
    again. `cut`: it reached the limit of tokens. `solved`: the judge's verdict on an attempt, None
    where it has none.
    """

    kind: Literal["task", "attempt"]
    number: int
    attempt: int = 0
    text: str = ""
    cut: bool = False
    failure: str | None = None
    again: bool = False
    solved: bool | None = None

    @property
    def key(self) -> tuple[str, int, int]:
        return self.kind, self.number, self.attempt


class Asker:
    """Asks one model, and counts its failures in a row."""

    def __init__(self, model: Model, timeout_s: float) -> None:
        self._model = model
        self._endpoint = Endpoint(
            model.base_url, model.name, model.api_key, timeout_s=timeout_s, tokens=False
        )
        self._failures = 0

    async def close(self) -> None:
        await self._endpoint.__aexit__()

    async def ask(self, messages: Sequence[Message], seed: int, blank: Text) -> Text:
        """The answer. Errors: DataError where the endpoint is down."""
        model = self._model
        params = SamplingParams(model.max_tokens, temperature=model.temperature, seed=seed)
        try:
            reply = await self._endpoint.chat(messages, params)
        except ContextOverflow as error:
            return blank.model_copy(update={"failure": f"the context is too long: {error}"})
        except SamplerError as error:
            self._failures += 1
            if self._failures >= MAX_FAILURES:
                raise DataError(
                    f"{model.name} failed {self._failures} times in a row: {error}; the same "
                    "command continues"
                ) from error
            return blank.model_copy(update={"failure": str(error), "again": True})
        self._failures = 0
        text = reply.message.content.encode("utf-8", "replace").decode()
        return blank.model_copy(update={"text": text, "cut": reply.finish_reason == "length"})


def shots_of(request: AugmentRequest, number: int) -> list[Seed]:
    """The seeds that a request shows, by its number alone: requests may run in any order."""
    draw = random.Random(derive_seed(request.seed, "augment", number))
    return draw.sample(list(request.seeds), min(request.shots, len(request.seeds)))


def prompt_of(shots: Sequence[Seed], instructions: str | None) -> list[Message]:
    """The request of a new task."""
    examples = "\n\n".join(seed.form for seed in shots)
    further = f"\n\n{instructions.strip()}" if instructions else ""
    text = (
        "Write one new task of the kind of these examples. Each is a question between <question> "
        "and </question>, and then its answer in \\boxed{}.\n\n"
        f"{examples}\n\n"
        "The new task differs from every example in more than its numbers and names, needs nothing "
        f"but its own text, and has exactly one right answer.{further}\n\n"
        "Work the answer out first. End with the task in the form of the examples: "
        "<question>...</question> and then \\boxed{answer}."
    )
    return [Message(role="user", content=text)]
