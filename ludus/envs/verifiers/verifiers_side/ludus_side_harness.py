"""verifiers' chat loop with tools, in this process instead of a program that `uv` installs."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack, suppress
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult


class LudusHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    """verifiers' chat loop (the harness `null`), in this process instead of a program of `uv`."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    SUPPORTS_TOOL_INTERCEPTION = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
        tool_interception_url: str | None = None,
    ) -> Any:
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        elif prompt is not None:
            messages += [message_to_wire(message) for message in prompt]
        servers = {
            name: {"url": url, "timeout": self.config.tool_timeout}
            for name, url in mcp_urls.items()
        }
        async with AsyncExitStack() as stack:
            http = await stack.enter_async_context(httpx.AsyncClient(timeout=None))
            http.headers["authorization"] = f"Bearer {secret}"
            tools, dispatch, connections = await connect_mcp({"mcpServers": servers}, stack)
            body = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
            while True:
                answer = await http.post(f"{endpoint}/chat/completions", json=body)
                if answer.status_code != 200:
                    return ProgramResult(exit_code=1, stdout="", stderr=answer.text[:2000])
                message = answer.json()["choices"][0]["message"]
                message = {k: v for k, v in message.items() if v is not None}
                messages.append(message)
                if not message.get("tool_calls"):
                    return ProgramResult(exit_code=0, stdout="", stderr="")
                for call in message["tool_calls"]:
                    gate = tool_interception_url
                    told = await _denied(http, gate, call) if gate else None
                    messages.append(told or await _tool_message(connections, dispatch, call))


async def _denied(http: httpx.AsyncClient, url: str, call: dict[str, Any]) -> dict[str, Any] | None:
    """The message in place of a denied call; None to run it."""
    function = call["function"]
    arguments: Any = function.get("arguments") or "{}"
    with suppress(ValueError):
        arguments = json.loads(arguments)
    asked = {"tool_call_id": call["id"], "name": function["name"], "arguments": arguments}
    decision = (await http.post(url, json=asked)).raise_for_status().json()
    if decision["action"] == "stop":
        raise RuntimeError(decision["reason"])
    message: dict[str, Any] | None = decision["message"] if decision["action"] == "deny" else None
    return message


async def _tool_message(servers: Any, dispatch: Any, call: dict[str, Any]) -> dict[str, Any]:
    name, text = call["function"]["name"], call["function"].get("arguments") or "{}"
    try:
        arguments = json.loads(text)
        if not isinstance(arguments, dict):
            raise ValueError(f"tool arguments must be a JSON object, got {arguments!r:.60}")
        if name in dispatch:
            content = await call_mcp(servers, dispatch, name, arguments)
        else:
            content = f"error: unknown tool {name!r}"
    except ValueError as error:
        content = f"error: {error}"
    return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}
