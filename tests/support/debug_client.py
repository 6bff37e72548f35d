"""A client of debugpy: just enough of the Debug Adapter Protocol to stop, look and go on."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any


class DebugClient:
    """Attaches to 127.0.0.1:`port`; `stopped` is the frames' (name, line), innermost first."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._file = self._socket.makefile("rb")
        self._number = 0
        self.send("initialize", adapterID="test", clientID="test")
        self.until(lambda m: m.get("command") == "initialize")
        self.send("attach", justMyCode=True)
        self.until(lambda m: m.get("event") == "initialized")
        self.send("configurationDone")

    def wait(self) -> list[tuple[str, int]]:
        """Wait until the program stops."""
        self._thread = self.until(lambda m: m.get("event") == "stopped")["body"]["threadId"]
        self.send("stackTrace", threadId=self._thread)
        frames = self.until(lambda m: m.get("command") == "stackTrace")["body"]["stackFrames"]
        self._frame = frames[0]["id"]
        return [(frame["name"], frame["line"]) for frame in frames]

    def value(self, expression: str) -> str:
        self.send("evaluate", expression=expression, frameId=self._frame, context="repl")
        return str(self.until(lambda m: m.get("command") == "evaluate")["body"]["result"])

    def go_on(self) -> None:
        self.send("continue", threadId=self._thread)
        self.until(lambda m: m.get("command") == "continue")

    def leave(self) -> None:
        self.send("disconnect")
        self._file.close()
        self._socket.close()

    def send(self, command: str, **arguments: Any) -> None:
        self._number += 1
        request = {"seq": self._number, "type": "request", "command": command}
        body = json.dumps({**request, "arguments": arguments}).encode()
        self._socket.sendall(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))

    def until(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        while True:
            message = self._read()
            assert message.get("success", True), message
            if wanted(message):
                return message

    def _read(self) -> dict[str, Any]:
        length = 0
        while line := self._file.readline().strip():
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        return dict(json.loads(self._file.read(length)))
