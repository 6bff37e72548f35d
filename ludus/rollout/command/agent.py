"""The agent `command`: a program of any language plays each episode.

    agent: {command: ["{python}", agent.py], timeout_s: 60}

The program finds the model by its environment variables (`base.environment`), the prompt on its
standard input or as `{prompt}` in the command, the task as JSON at $LUDUS_TASK. Its working folder
is its own, and is removed with it. A file `outcome.json` there is its Outcome; without one, the
judge scores the episode.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ludus.core.errors import ConfigError, EnvError, Unscorable, first_fault, printable
from ludus.core.types import Task
from ludus.rollout.command.base import MAX_OUTCOME_BYTES, OUTCOME_FILE, Ended, Program, Run
from ludus.rollout.command.local import LocalProgram
from ludus.rollout.command.sandboxed import SandboxedProgram
from ludus.rollout.outcome import Outcome
from ludus.rollout.workflow import Model
from ludus.sandbox.languages import PATH

NUM_LINES, NUM_CHARACTERS = 8, 1000
"""The end of a program's output that its error shows."""


class CommandAgent:
    """Starts a program for each episode, and ends it with the episode."""

    def __init__(
        self,
        command: Annotated[
            list[str],
            Field(
                min_length=1,
                description="program and arguments; {prompt}, {task} (path of the task as JSON), "
                "{python}, {base_url}, {api_key} and {model} are replaced",
            ),
        ],
        folder: Annotated[
            Path | None,
            Field(description="folder that is copied into the working folder of each episode"),
        ] = None,
        variables: Annotated[
            Mapping[str, str] | None,
            Field(description="more environment variables, with the same replacements"),
        ] = None,
        stdin: Annotated[
            bool | None,
            Field(
                description="the prompt on standard input; default: where the command has no "
                "{prompt}"
            ),
        ] = None,
        timeout_s: Annotated[
            float | None,
            Field(gt=0, le=1e6, description="default: rollout.episode_deadline_s alone"),
        ] = None,
        max_output_mb: Annotated[
            int, Field(ge=1, le=1000, description="of stdout and of stderr; beyond, it is stopped")
        ] = 10,
        outcome: Annotated[
            bool,
            Field(
                description="read outcome.json; false where the model itself can write files and "
                "a judge scores"
            ),
        ] = True,
        answer: Annotated[
            bool, Field(description="the task's `answer` and `judge` in the file of the task")
        ] = False,
        sandbox: Annotated[
            bool, Field(description="in the jail: no network but the gateway, no files but these")
        ] = False,
        packages: Annotated[
            list[str] | None, Field(description="Python packages in the sandbox; default: none")
        ] = None,
        memory_mb: Annotated[
            int | None, Field(ge=16, description="of the sandbox; default: 1024")
        ] = None,
        num_processes: Annotated[
            int | None, Field(ge=2, description="processes and threads; default: 64")
        ] = None,
        disk_mb: Annotated[
            int | None, Field(ge=1, description="of the sandbox; default: 64")
        ] = None,
    ) -> None:
        own = {"packages": packages, "memory_mb": memory_mb}
        own |= {"num_processes": num_processes, "disk_mb": disk_mb}
        if not sandbox and (given := [name for name, value in own.items() if value is not None]):
            raise ConfigError(
                f"agent.{given[0]}: it is a setting of the sandbox: set `sandbox: true`, or "
                "remove it"
            )
        _check(command, folder, variables or {})
        self.needs_socket = sandbox
        self._command, self._variables = _located(command, folder, sandbox), dict(variables or {})
        self._stdin = not any("{prompt}" in part for part in command) if stdin is None else stdin
        self._timeout_s, self._max_output = timeout_s, max_output_mb * 1_000_000
        self._outcome, self._answer = outcome, answer
        self._program: Program
        if sandbox:
            self._program = SandboxedProgram(
                folder, packages or [], memory_mb or 1024, num_processes or 64, disk_mb or 64
            )
        else:
            self._program = LocalProgram(folder)

    async def __call__(self, task: Task, model: Model) -> Outcome | None:
        """Play an episode. Errors: EnvError, EpisodeTimeout, Unscorable, ToolError."""
        prompt = "\n\n".join(message.content for message in task.prompt)
        hidden = set() if self._answer else {"answer", "judge"}
        given = task.model_dump_json(exclude=hidden, exclude_none=True)
        run = Run(
            self._command,
            self._variables,
            {"prompt": prompt, "model": model.name, "api_key": model.api_key},
            given.encode("utf-8", "replace"),
            prompt.encode("utf-8", "replace") if self._stdin else b"",
            self._timeout_s,
            self._max_output,
        )
        ended = await self._program.run(model, run)
        if ended.exit_code:
            raise EnvError(f"the command {_how(ended.exit_code)}{_last_lines(ended)}")
        return read_outcome(ended.outcome) if self._outcome else None

    async def close(self) -> None:
        await self._program.close()


class OutcomeFile(BaseModel):
    """`outcome.json`."""

    model_config = ConfigDict(extra="forbid", strict=True)
    reward: float | None = None
    success: bool | None = None
    scores: dict[str, float] = {}
    metrics: dict[str, float] = {}
    explanation: str = ""


def read_outcome(data: bytes | None) -> Outcome | None:
    """The outcome in a file; None without one. Errors: Unscorable that names the fault."""
    if data is None:
        return None
    if len(data) > MAX_OUTCOME_BYTES:
        raise Unscorable(f"{OUTCOME_FILE}: it has more than {MAX_OUTCOME_BYTES:,} bytes")
    try:
        found = OutcomeFile.model_validate(json.loads(data))
    except ValidationError as error:
        raise Unscorable(f"{OUTCOME_FILE}: {first_fault(error)}") from None
    except (ValueError, RecursionError) as error:
        raise Unscorable(f"{OUTCOME_FILE}: it is no JSON: {error}") from None
    return Outcome(**dict(found))


def _check(command: Sequence[str], folder: Path | None, variables: Mapping[str, str]) -> None:
    """Errors: ConfigError."""
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"agent.folder: there is no folder {folder}")
    if not command[0].strip():
        raise ConfigError("agent.command.0: it is empty; name a program")
    if bad := [part for part in command if "\0" in part]:
        raise ConfigError(f"agent.command: {bad[0]!r:.80} has a NUL character")
    for name, value in variables.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or "\0" in value:
            raise ConfigError(
                f"agent.variables: {name!r:.80} is no environment variable: letters, digits and _ "
                "as the name, no NUL character in the value"
            )


def _located(command: Sequence[str], folder: Path | None, sandbox: bool) -> list[str]:
    """The command with the absolute paths of the files that it names, for its working folder is
    another. Files in `folder` keep their names.

    Errors: ConfigError for a program that does not exist.
    """

    def located(part: str, number: int) -> str:
        copied = folder is not None and os.path.exists(folder / part)
        script = (number == 0 and "/" in part) or Path(part).suffix
        if copied or os.path.isabs(part) or not script or not os.path.isfile(part):
            return part
        if sandbox:
            raise ConfigError(
                f"agent.command.{number}: {part} is not in the sandbox: set `folder` to a folder "
                "that holds it"
            )
        return str(Path(part).absolute())

    found = [located(part, number) for number, part in enumerate(command)]
    name = found[0]
    if "{" in name:
        return found
    in_folder = folder is not None and "/" in name and (folder / name).is_file()
    if not in_folder and shutil.which(name, path=PATH if sandbox else None) is None:
        where = f" on {PATH}, the path of the sandbox" if sandbox else ""
        raise ConfigError(f"agent.command.0: there is no program {name!r}{where}")
    return found


def _how(code: int) -> str:
    return f"ended with exit code {code}" if code > 0 else f"was killed by signal {-code}"


def _last_lines(ended: Ended) -> str:
    """The end of what a program wrote, preferably of its errors."""
    text = (ended.stderr.strip() or ended.stdout.strip()).decode("utf-8", "replace")
    last = "\n".join(text.splitlines()[-NUM_LINES:])[-NUM_CHARACTERS:]
    return f":\n{printable(last)}" if last else ", and wrote nothing"
