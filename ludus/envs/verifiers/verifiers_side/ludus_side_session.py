"""An episode of verifiers, step by step: its conversation, and the request that waits."""

from __future__ import annotations

import asyncio
import json
from typing import Any


class Refused(Exception):
    """A call that cannot be carried out; the message is for the user. `kind`: config or env."""

    def __init__(self, message: str, kind: str = "env") -> None:
        super().__init__(message)
        self.kind = kind


class Session:
    """An episode, its conversation, and the request of the harness that waits for an answer."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.requests: asyncio.Queue[tuple[dict[str, Any], asyncio.Future[dict[str, Any]]]]
        self.requests = asyncio.Queue()
        self.waiting: asyncio.Future[dict[str, Any]] | None = None
        self.history: list[dict[str, Any]] = []
        self.tools: list[dict[str, Any]] = []
        self.episode: asyncio.Task[Any] | None = None
        self.num_calls = 0

    async def next_request(self) -> list[dict[str, Any]] | None:
        """The harness' new messages; None where the episode is over.

        Errors: Refused where the harness did not extend the conversation.
        """
        assert self.episode is not None
        getting = asyncio.ensure_future(self.requests.get())
        await asyncio.wait({getting, self.episode}, return_when=asyncio.FIRST_COMPLETED)
        if not getting.done():
            getting.cancel()
            return None
        body, self.waiting = getting.result()
        conversation, known = body["messages"], len(self.history)
        same = [_essence(m) for m in conversation[:known]] == [_essence(m) for m in self.history]
        if not same or len(conversation) < known:
            raise Refused(
                "the harness rewrote its conversation, or several agents speak to the trained "
                "model: give the other agents a model of their own in `config`, or play the agent "
                "through the gateway"
            )
        self.tools = body.get("tools") or self.tools
        self.history = conversation
        return [_plain(message) for message in conversation[known:]]

    def answer(self, message: dict[str, Any]) -> None:
        """Give the harness the model's answer."""
        calls = []
        for call in message.get("tool_calls") or ():
            self.num_calls += 1
            function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
            id = call.get("id") or f"call_{self.num_calls}"
            calls.append({"id": id, "type": "function", "function": function})
        content = message.get("content") or ("" if not calls else None)
        said: dict[str, Any] = {"role": "assistant", "content": content}
        if calls:
            said["tool_calls"] = calls
        self.history = [*self.history, said]
        assert self.waiting is not None
        self.waiting.set_result(said)
        self.waiting = None


def _essence(message: dict[str, Any]) -> Any:
    """The parts of a message that make it the same as another: role, text, tool calls."""
    calls = [
        (call.get("id"), call["function"]["name"], call["function"].get("arguments"))
        for call in message.get("tool_calls") or ()
    ]
    return message.get("role"), _text(message.get("content")), calls


def _text(content: Any) -> str:
    """A message's text. Errors: Refused for images and sound."""
    if content is None or isinstance(content, str):
        return content or ""
    if any(part.get("type") != "text" for part in content):
        kinds = sorted({str(part.get("type")) for part in content} - {"text"})
        raise Refused(f"the taskset sends {', '.join(kinds)}: ludus' models read text only")
    return "\n".join(part["text"] for part in content)


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """A message of the harness in ludus' fields."""
    fields = {key: message[key] for key in ("tool_call_id", "name") if message.get(key)}
    role = "system" if message["role"] == "developer" else message["role"]
    return {"role": role, "content": _text(message.get("content")), **fields}
