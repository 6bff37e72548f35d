"""A Python interpreter, in the sandbox: `tools: [python]`.

Each call is a fresh interpreter; with `stateful: true`, the calls of an episode share one, and
variables stay from call to call. The calls of a turn then run one after another, in their order.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from ludus.core.errors import ConfigError
from ludus.core.types import Spec, ToolCall, ToolSpec
from ludus.sandbox import SANDBOXES
from ludus.sandbox.base import Code, Limits, RunResult, RunStatus
from ludus.telemetry.queues import queued
from ludus.tools.base import Tool, ToolResult

FRESH = "Each call is a new interpreter: variables of earlier calls are gone."
KEPT = "Variables stay from call to call."
JAIL = Spec(name="jail")
NO_OUTPUT = "(no output; print what you want to see)"


class PythonTool(Tool):
    """A function `python(code)` that runs code in a sandbox.

    Its result is what the code printed, and a traceback if it raised. Code that raises or exceeds a
    limit is a failed result. A sandbox that fails is a ToolError.
    """

    def __init__(
        self,
        stateful: Annotated[
            bool, Field(description="Keep variables from one call to the next of an episode.")
        ] = False,
        timeout_s: Annotated[float, Field(gt=0, description="Seconds that a call may run.")] = 10.0,
        memory_mb: Annotated[int, Field(ge=16, description="Memory of a call.")] = 512,
        name: Annotated[str, Field(description="The function's name for the model.")] = "python",
        sandbox: Annotated[Spec, Field(description="The sandbox that runs the code.")] = JAIL,
    ) -> None:
        self._stateful, self._name = stateful, name
        self._limits = Limits(run_s=timeout_s, memory_mb=memory_mb)
        self._sandbox = SANDBOXES.build(sandbox, "sandbox")
        if stateful and not self._sandbox.has_sessions:
            raise ConfigError(
                f"the sandbox {sandbox.name!r} keeps no variables from call to call: set "
                "`stateful` to false, or take the sandbox jail"
            )
        self._entered = False
        self._turns: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def specs(self) -> Sequence[ToolSpec]:
        if not self._entered:
            await self._sandbox.__aenter__()
            self._entered = True
        kept = KEPT if self._stateful else FRESH
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The program."}},
            "required": ["code"],
            "additionalProperties": False,
        }
        description = f"Run a Python program and read what it prints. {kept}"
        return [ToolSpec(name=self._name, description=description, parameters=schema)]

    async def call(self, call: ToolCall, episode: str) -> ToolResult:
        code = Code(call.arguments["code"], "python")
        if not self._stateful:
            return self._told(await self._sandbox.run(code, self._limits))
        async with queued(self._turns[episode]):
            result = await self._sandbox.run(code, self._limits, session=episode)
        return self._told(result)

    @property
    def keeps_state(self) -> bool:
        return self._stateful

    async def end(self, episode: str) -> None:
        if self._turns.pop(episode, None) is not None:
            await self._sandbox.close_session(episode)

    async def close(self) -> None:
        if self._entered:
            self._entered = False
            await self._sandbox.__aexit__(None, None, None)
        else:
            await self._sandbox.close()

    def _told(self, result: RunResult) -> ToolResult:
        """A run as the model reads it: stdout, stderr, and the limit that stopped it."""
        parts = [result.stdout.rstrip("\n"), result.stderr.rstrip("\n")]
        limits = self._limits
        stopped = {
            RunStatus.TIME_LIMIT: f"stopped after {limits.run_s:g} s",
            RunStatus.MEMORY_LIMIT: f"stopped: more than {limits.memory_mb} MB of memory",
            RunStatus.OUTPUT_LIMIT: f"stopped: more than {limits.output_bytes:,} bytes printed",
        }.get(result.status, "")
        if stopped:
            lost = "; all variables are gone" if self._stateful else ""
            parts.append(f"({stopped}{lost})")
        elif result.status is RunStatus.ERROR and not result.stderr.strip():
            code = result.exit_code
            parts.append("(killed)" if code is None else f"(ended with exit code {code})")
        text = "\n".join(part for part in parts if part) or NO_OUTPUT
        return ToolResult(content=text, failed=result.status is not RunStatus.FINISHED)
