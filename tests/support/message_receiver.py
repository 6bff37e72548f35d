"""A receiver of notifications: apprise's `json://` posts a JSON object."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from threaded_server import body_of, reply, serving


@dataclass
class Inbox:
    """`url` is for apprise; `status` is the answer to every message."""

    url: str = ""
    status: int = 200
    messages: list[dict[str, Any]] = field(default_factory=list)

    def wait(self) -> dict[str, Any]:
        """Returns the first message."""
        deadline = time.monotonic() + 60
        while not self.messages:
            assert time.monotonic() < deadline, "no message came"
            time.sleep(0.02)
        return self.messages[0]


@contextmanager
def inbox(status: int = 200) -> Iterator[Inbox]:
    box = Inbox(status=status)

    def take(request: BaseHTTPRequestHandler) -> None:
        box.messages.append(json.loads(body_of(request)))
        reply(request, box.status, b"")

    with serving(take) as port:
        box.url = f"json://me:hunter2@127.0.0.1:{port}/path"
        yield box
