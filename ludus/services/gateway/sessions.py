"""The sessions of a gateway by key."""

from __future__ import annotations

import secrets
from collections import OrderedDict

from ludus.core.types import Message
from ludus.rollout.sessions.agent_session import AgentSession

MAX_ENDED = 10_000
"""Keys of ended episodes that are remembered, to tell a late call from a wrong key."""


class Sessions:
    """The sessions by key. Used by two threads: one adds and removes, the other looks up."""

    def __init__(self) -> None:
        self._by_key: dict[str, AgentSession] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._responses: dict[str, dict[str, list[Message]]] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def add(self, session: AgentSession) -> str:
        key = f"sk-ludus-{secrets.token_hex(16)}"
        self._by_key[key] = session
        return key

    def remove(self, key: str) -> None:
        self._responses.pop(key, None)
        if self._by_key.pop(key, None) is not None:
            self._ended[key] = None
            if len(self._ended) > MAX_ENDED:
                self._ended.popitem(last=False)

    def find(self, key: str) -> AgentSession | None:
        return self._by_key.get(key)

    def responses(self, key: str) -> dict[str, list[Message]]:
        """The conversations of a session's responses by their ids."""
        return self._responses.setdefault(key, {})

    def has_ended(self, key: str) -> bool:
        return key in self._ended
