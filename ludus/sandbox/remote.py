"""A sandbox by URL: `ludus serve sandbox`, or a SandboxFusion.

    sandbox: {name: remote, args: {url: "http://10.0.0.7:8080"}}

A failure of the transport or of the server is a ToolError, after retries within the deadline: a run
has no effect beyond its result, so it may be sent twice.
"""

from __future__ import annotations

import asyncio
import base64
import json
from functools import partial
from typing import Annotated, Any, Self

from pydantic import BaseModel, Field, ValidationError

from ludus.core.errors import ConfigError, ToolError
from ludus.core.remote import Blamed, RefusedError, RemoteClient
from ludus.sandbox.base import Code, Limits, RunResult, RunStatus, Sandbox
from ludus.telemetry.queues import queued

WIRE_NAMES = {"javascript": "nodejs", "js": "nodejs", "node": "nodejs", "py": "python"}
MAX_BYTES = 128_000_000
START_S = 10.0
"""Seconds in which the server has to answer at the start."""


class _Command(BaseModel):
    status: str
    execution_time: float | None = None
    return_code: int | None = None
    stdout: str | None = None
    stderr: str | None = None
    limit: str | None = None


class _Answer(BaseModel):
    status: str
    message: str = ""
    compile_result: _Command | None = None
    run_result: _Command | None = None
    files: dict[str, str] = {}


class RemoteSandbox(Sandbox):
    """Runs code on a server. It has no sessions: SandboxFusion has none."""

    has_sessions = False

    def __init__(
        self,
        url: Annotated[str, Field(description="The server's address, http://host:port.")],
        deadline_s: Annotated[
            float, Field(gt=0, description="Seconds of a call beyond its limits, with retries.")
        ] = 60.0,
        max_in_flight: Annotated[int, Field(ge=1, description="Calls at the same time.")] = 64,
        token_env: Annotated[
            str | None, Field(description="Environment variable with the server's token.")
        ] = None,
    ) -> None:
        self._connect = partial(
            RemoteClient,
            url,
            attempts=None,
            max_bytes=MAX_BYTES,
            failed=_failure,
            max_in_flight=max_in_flight,
            token_env=token_env,
            idempotent=True,
        )
        try:
            self._client = self._connect()
        except ConfigError as error:
            raise ConfigError(f"sandbox: {error}") from None
        self._deadline_s, self._turns = deadline_s, asyncio.Semaphore(max_in_flight)

    async def __aenter__(self) -> Self:
        """Check that the server answers.

        Errors: ToolError, ConfigError with its address.
        """
        try:
            await self._post(_request(Code(""), Limits()), min(START_S, self._deadline_s))
        except ToolError as error:
            await self.close()
            raise ToolError(
                f"{error}: start it with `ludus serve sandbox`, or correct `url`"
            ) from error
        except BaseException:
            await self.close()
            raise
        return self

    async def run(
        self, code: Code, limits: Limits | None = None, *, session: str | None = None
    ) -> RunResult:
        if session is not None:
            raise ConfigError(
                "sandbox: remote has no sessions; use the sandbox jail for a stateful interpreter"
            )
        limits = limits or Limits()
        body = _request(code, limits)
        seconds = limits.run_s + limits.compile_s + self._deadline_s
        async with queued(self._turns):  # the deadline begins with the turn
            return _result(await self._post(body, seconds), limits)

    async def close_session(self, session: str) -> None:
        return

    async def close(self) -> None:
        await self._client.close()
        self._client = self._connect()

    async def _post(self, body: dict[str, Any], seconds: float) -> _Answer:
        """Errors: ConfigError for a request or an address that is wrong, ToolError."""
        given = None
        try:
            given = await self._client.post(body, "/run_code", deadline_s=seconds)
            return _Answer.model_validate(given)
        except (Blamed, RefusedError) as error:
            raise ConfigError(f"sandbox {_plain(error, self._client.url)}") from None
        except ToolError as error:
            raise ToolError(f"sandbox {_plain(error, self._client.url)}") from None
        except ValidationError:
            url, told = self._client.url, json.dumps(given)[:300]
            raise ToolError(f"sandbox {url}: not SandboxFusion's answer: {told}") from None


def _plain(error: Exception, url: str) -> str:
    """The error's text, which begins with the server's address."""
    told = str(error)
    return told if told.startswith(url) else f"{url}: {told}"


def _failure(answer: Any) -> str | None:
    """The message of a SandboxError: the server failed, and not the code."""
    if isinstance(answer, dict) and answer.get("status") == "SandboxError":
        return f"SandboxError: {answer.get('message')!s:.300}"
    return None


def _request(code: Code, limits: Limits) -> dict[str, Any]:
    name = code.language.lower()
    return {
        "code": code.text.encode("utf-8", "replace").decode(),  # lone surrogates
        "language": WIRE_NAMES.get(name, name),
        "stdin": code.stdin.decode("utf-8", "replace"),
        "files": {path: base64.b64encode(data).decode() for path, data in code.files.items()},
        "fetch_files": list(code.fetch),
        "compile_timeout": limits.compile_s,
        "run_timeout": limits.run_s,
        "memory_limit_MB": limits.memory_mb,
    }


def _result(answer: _Answer, limits: Limits) -> RunResult:
    compiled = answer.compile_result
    failed = compiled is not None and answer.run_result is None
    ended = compiled if failed else answer.run_result
    try:
        files = {path: base64.b64decode(data) for path, data in answer.files.items()}
    except ValueError:
        raise ToolError("sandbox: the answer has a file that is not base64") from None
    if ended is None:
        raise ToolError("sandbox: the answer has neither a run_result nor a compile_result")
    status = RunStatus.FINISHED if answer.status == "Success" else RunStatus.ERROR
    if ended.status == "TimeLimitExceeded":
        status = RunStatus.TIME_LIMIT
    elif ended.limit in set(RunStatus):
        status = RunStatus(ended.limit)
    stdout, stderr = ended.stdout or "", ended.stderr or ""
    if max(len(stdout), len(stderr)) > limits.output_bytes:  # SandboxFusion has no such limit
        status = RunStatus.OUTPUT_LIMIT
    return RunResult(
        status=status,
        stdout=stdout[: limits.output_bytes],
        stderr=stderr[: limits.output_bytes],
        exit_code=ended.return_code,
        seconds=0.0 if failed else ended.execution_time or 0.0,
        compile_seconds=compiled.execution_time if compiled else None,
        compile_failed=failed,
        files=files,
    )
