"""Messages of environment services, and reading them: everything that comes is untrusted."""

from __future__ import annotations

import json
import os
from functools import cache
from typing import Any, TypeVar

from pydantic import BaseModel, FiniteFloat, TypeAdapter, ValidationError

from ludus.core.errors import EnvError, first_fault
from ludus.core.types import ToolSpec

MAX_BYTES = 16_000_000
"""Limit of an answer's size."""

EXPERT_S = 150.0
"""Seconds for a call of the expert, where the service does not report its deadline."""

MAX_RETRY_AFTER_S = 30.0
"""Limit of the seconds that a host may ask to wait."""

T = TypeVar("T")


class ErrorPart(BaseModel):
    """`type` is for programs, `message` for people."""

    type: str
    message: str


class Answer(BaseModel):
    """An answer on the WebSocket; an error's status is not 200."""

    status: int
    result: Any = None
    error: ErrorPart = ErrorPart(type="", message="no error is told")
    retry_after: FiniteFloat = 1.0


class Refusal(BaseModel):
    """The body of an HTTP answer whose status is not 200."""

    error: ErrorPart


class Schema(BaseModel):
    """`GET /envs/NAME`, as far as it is read here."""

    tools: list[ToolSpec]
    score_range: tuple[FiniteFloat, FiniteFloat]
    success_at: FiniteFloat
    max_turns: int
    expert_deadline_s: FiniteFloat = EXPERT_S
    tiers: list[str] = []
    args: dict[str, Any] | None = None


class Health(BaseModel):
    """`GET /health`, as far as it is read here."""

    status: str
    version: str = ""
    sessions: int = 0


class SessionOpened(BaseModel):
    """An open session's id."""

    session: str


class ExpertAction(BaseModel):
    """An expert's action, and what it writes before it."""

    action: str
    steps: str = ""


class Gone(Exception):
    """The host is unavailable, perhaps for a short time."""


class Full(Gone):
    """The host has no room for another session; ask again after `retry_after_s`."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = min(max(retry_after_s, 0.1), MAX_RETRY_AFTER_S)


class Draining(Gone):
    """The host opens no new sessions, because it will stop."""


class Refused(Gone):
    """The host will not do as it is: a wrong token, another environment, another version."""


def parse(url: str, text: str | bytes) -> Any:
    """Returns JSON. Errors: EnvError."""
    try:
        return json.loads(text)
    except (RecursionError, ValueError) as error:
        raise EnvError(no_answer(url, error)) from error


def read(url: str, kind: type[T], answer: Any) -> T:
    """Returns an answer as `kind`. Errors: EnvError where it is something else."""
    try:
        hashable: Any = kind
        validated: T = _adapter(hashable).validate_python(answer)
        return validated
    except ValidationError as error:
        raise EnvError(
            f"{url} does not answer as an environment service: {first_fault(error)}"
        ) from error


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def headers() -> dict[str, str]:
    """Of a request: the token, if there is one."""
    token = os.environ.get("LUDUS_TOKEN", "")
    return {"Authorization": f"Bearer {token}"} if token else {}


def reason(error: BaseException) -> str:
    """An error as text that is not empty."""
    return str(error) or type(error).__name__


def no_answer(url: str, error: BaseException) -> str:
    """Message for an address at which nothing answers."""
    problem = f"no environment service answers at {url} ({reason(error)})"
    return f"{problem}: start it with `ludus serve env`"
