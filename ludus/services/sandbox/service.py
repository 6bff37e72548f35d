"""Sandbox service: untrusted code over HTTP, wire-compatible with ByteDance's SandboxFusion.

    POST /run_code {"code": "print(1)", "language": "python"}
        -> {"status": "Success", "run_result": {"status": "Finished", "stdout": "1\\n", ...}, ...}
    POST /run_jupyter {"cells": ["a = 1", "a"]}: see `jupyter`
    GET /v1/ping -> "pong"

The package `sandbox-fusion` works against it unchanged. As there, a program that ends with another
exit code is `Finished` and the answer's status `Failed`; a sandbox that fails is `SandboxError`.
"""

from __future__ import annotations

import base64
import binascii
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, Field

from ludus.core.errors import ConfigError, ToolError
from ludus.core.types import Spec
from ludus.sandbox import SANDBOXES
from ludus.sandbox.base import Code, Limits, RunResult, RunStatus
from ludus.services.sandbox.jupyter import RunJupyter, RunJupyterAnswer, run_cells
from ludus.services.sandbox.results import CommandResult, command_result
from ludus.services.server.app import ERRORS, ServiceError, Settings, create_app
from ludus.services.server.peers import Peers
from ludus.services.server.serve import ServeOptions, serve


@dataclass(frozen=True)
class SandboxLimits:
    """The most that a request may ask for, and the runs that may wait for their turn."""

    max_run_s: float = 120.0
    max_memory_mb: int = 4096
    default_memory_mb: int = 512
    max_waiting: int = 1024
    max_body_bytes: int = 64_000_000


class RunCode(BaseModel):
    """SandboxFusion's request; `memory_limit_MB` -1 is the service's default."""

    code: str
    language: str
    stdin: str | None = None
    files: dict[str, str | None] = Field(default_factory=dict, max_length=1000)
    fetch_files: list[str] = Field(default_factory=list, max_length=1000)
    compile_timeout: float = Field(10, gt=0, allow_inf_nan=False)
    run_timeout: float = Field(10, gt=0, allow_inf_nan=False)
    memory_limit_MB: int = Field(-1, ge=-1)


class RunCodeAnswer(BaseModel):
    """SandboxFusion's answer; files are base64."""

    status: str
    message: str = ""
    compile_result: CommandResult | None = None
    run_result: CommandResult | None = None
    executor_pod_name: str | None = None
    files: dict[str, str] = Field(default_factory=dict)


def sandbox_service(
    spec: Spec, settings: Settings, limits: SandboxLimits, *, peers: Peers | None = None
) -> FastAPI:
    """An application that runs code in a sandbox.

    Errors: ConfigError.
    """
    sandbox = SANDBOXES.build(spec, "sandbox")
    running = 0

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with sandbox:
            await sandbox.run(Code("", "python"))  # loads the packages before the first request
            yield

    def health() -> Mapping[str, Any]:
        return {"runs": running}

    settings = replace(settings, max_body_bytes=limits.max_body_bytes)
    app = create_app("sandbox", settings, health=health, lifespan=lifespan)

    @asynccontextmanager
    async def turn() -> AsyncIterator[None]:
        """Count a run. Errors: ServiceError."""
        nonlocal running
        if running >= limits.max_waiting:
            raise ServiceError(503, "busy", f"{running} runs wait; send it again later")
        running += 1
        try:
            yield
        except ConfigError as error:
            raise ServiceError(422, "invalid", str(error).removeprefix("sandbox: ")) from None
        finally:
            running -= 1

    @app.post("/run_code", response_model=RunCodeAnswer, responses=ERRORS, tags=["sandbox"])
    async def run_code(body: RunCode) -> RunCodeAnswer:
        """Run code."""
        code, bounds = _code(body), _limits(body, limits)
        async with turn():
            try:
                return answer(await sandbox.run(code, bounds))
            except ToolError as error:
                return RunCodeAnswer(status="SandboxError", message=str(error))

    @app.post("/run_jupyter", response_model=RunJupyterAnswer, responses=ERRORS, tags=["sandbox"])
    async def run_jupyter(body: RunJupyter) -> RunJupyterAnswer:
        """Run cells of a notebook."""
        files = _files(body.files)
        _at_most("total_timeout", body.total_timeout, limits.max_run_s)
        async with turn():
            try:
                return await run_cells(
                    sandbox, body, files, Limits(memory_mb=limits.default_memory_mb)
                )
            except ToolError as error:
                return RunJupyterAnswer(status="SandboxError", message=str(error))

    @app.get("/v1/ping", tags=["sandbox"])
    async def ping() -> str:
        """Answer "pong"."""
        return "pong"

    return app


def serve_sandbox(
    spec: Spec, options: ServeOptions, limits: SandboxLimits, say: Callable[[str], object]
) -> None:
    """`ludus serve sandbox`: serve until stopped.

    Errors: ConfigError.
    """
    serve(
        partial(sandbox_service, spec, limits=limits),
        options,
        lambda address: say(f"sandbox: {address} (description: {address}/docs)"),
    )


def answer(result: RunResult) -> RunCodeAnswer:
    """A run's result in SandboxFusion's form."""
    ended = command_result(result)
    status = "Success" if result.status is RunStatus.FINISHED else "Failed"
    found = RunCodeAnswer(status=status, executor_pod_name=socket.gethostname())
    if result.compile_failed:
        ended.execution_time = result.compile_seconds
        found.compile_result = ended
        return found
    if result.compile_seconds is not None:
        found.compile_result = CommandResult(
            status="Finished", execution_time=result.compile_seconds, return_code=0
        )
    found.run_result = ended
    found.files = {name: base64.b64encode(data).decode() for name, data in result.files.items()}
    return found


def _code(body: RunCode) -> Code:
    stdin = (body.stdin or "").encode("utf-8", "surrogatepass")
    return Code(body.code, body.language, stdin, _files(body.files), body.fetch_files)


def _files(given: Mapping[str, str | None]) -> dict[str, bytes]:
    """Files from base64. Errors: ServiceError."""
    files = {}
    for name, text in given.items():
        if text is None:  # SandboxFusion writes none either
            continue
        try:
            files[name] = base64.b64decode("".join(text.split()), validate=True)
        except (binascii.Error, ValueError):
            shown = name[:100].encode("utf-8", "replace").decode()
            raise ServiceError.invalid(
                f"files.{shown}", "it is not base64: send the file's bytes encoded in base64"
            ) from None
    return files


def _limits(body: RunCode, limits: SandboxLimits) -> Limits:
    memory_mb = limits.default_memory_mb if body.memory_limit_MB <= 0 else body.memory_limit_MB
    _at_most("run_timeout", body.run_timeout, limits.max_run_s)
    _at_most("compile_timeout", body.compile_timeout, limits.max_run_s)
    _at_most("memory_limit_MB", memory_mb, limits.max_memory_mb)
    return Limits(body.run_timeout, body.compile_timeout, memory_mb)


def _at_most(name: str, value: float, most: float) -> None:
    """Errors: ServiceError."""
    if value > most:
        raise ServiceError.invalid(name, f"at most {most:g} on this service")
