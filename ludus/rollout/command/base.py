"""A run of a program for an episode: command, variables, end."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ludus.rollout.workflow import Model

TASK_FILE = "task.json"
OUTCOME_FILE = "outcome.json"
MAX_OUTCOME_BYTES = 1_000_000

LOOPBACK = "127.0.0.1,localhost"


@dataclass(frozen=True, slots=True)
class Run:
    """A program to run.

    Args:
        command, variables: with placeholders such as {prompt}.
        values: those of the placeholders that do not depend on the place of the run.
        task: content of the task's file.
        timeout_s: None: it may run as long as its episode.
        max_output: bytes of stdout and of stderr.
    """

    command: Sequence[str]
    variables: Mapping[str, str]
    values: Mapping[str, str]
    task: bytes
    stdin: bytes
    timeout_s: float | None
    max_output: int

    def placed(self, **values: str) -> tuple[list[str], dict[str, str]]:
        """Command and variables for a place, with its `base_url`, `task` and `python`."""
        values = {**self.values, **values}
        command = [filled(part, values) for part in self.command]
        own = {name: filled(text, values) for name, text in self.variables.items()}
        return command, environment(values) | own


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a program.

    `exit_code` is negative for a signal, `stdout` and `stderr` are the last bytes, `outcome` is the
    content of its outcome file.
    """

    exit_code: int
    stdout: bytes
    stderr: bytes
    outcome: bytes | None


class Program(Protocol):
    """Runs the programs of episodes."""

    async def run(self, model: Model, run: Run) -> Ended:
        """Errors: EnvError where it does not start, or exceeds a limit; EpisodeTimeout;
        ToolError where the sandbox failed."""

    async def close(self) -> None:
        """End all that was started. Idempotent; `run` may be called again."""


def filled(text: str, values: Mapping[str, str]) -> str:
    """The text with its placeholders replaced, once; other braces stay."""
    return re.sub(r"\{(\w+)\}", lambda found: values.get(found[1], found[0]), text)


def environment(values: Mapping[str, str]) -> dict[str, str]:
    """Environment variables that point SDKs to the gateway."""
    url, key, model = values["base_url"], values["api_key"], values["model"]
    return {
        "OPENAI_BASE_URL": url,
        "OPENAI_API_BASE": url,
        "OPENAI_API_KEY": key,
        "OPENAI_MODEL": model,
        "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_AUTH_TOKEN": key,
        "ANTHROPIC_MODEL": model,
        "LUDUS_TASK": values["task"],
    }


def too_much(name: str, max_output: int) -> str:
    """The error of a program that prints too much."""
    return (
        f"the command wrote more than {max_output / 1e6:g} MB to {name}, and was stopped "
        "(`agent.max_output_mb`)"
    )


def too_long(timeout_s: float | None) -> str:
    """The error of a program that runs too long."""
    return f"the command took longer than agent.timeout_s = {timeout_s or 0:g} s"
