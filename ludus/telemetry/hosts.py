"""The hosts of this process's environments: their state, sessions, failures.

HOSTS.opened("http://10.0.0.7:8000")
HOSTS.metrics()                           # of the time since the last call; from any thread
"""

from __future__ import annotations

from collections import Counter

from ludus.core.names import metric_part

MAX_NAMED = 32
"""Hosts that have a metric of their own."""

EVENTS = ("opened", "lost", "moved", "full", "failures", "drains")
"""Sessions opened; lost with their host; that another host took; refusals for want of room; hosts
that failed; that began to drain."""


class Hosts:
    """States and counts by URL. The state is a word: up, down, draining, refused, new."""

    def __init__(self) -> None:
        self.states: dict[str, str] = {}
        self.sessions: Counter[str] = Counter()
        self._events: Counter[str] = Counter()
        self._opened: Counter[str] = Counter()
        self._wait_s = 0.0

    def count(self, event: str) -> None:
        """Count one of EVENTS."""
        self._events[event] += 1

    def open(self, url: str, wait_s: float) -> None:
        """Count a session that a host has opened after `wait_s`."""
        self._events["opened"] += 1
        self._opened[url] += 1
        self._wait_s += wait_s

    def leave(self, url: str) -> None:
        """Forget a host that is no longer listed."""
        self.states.pop(url, None)

    def metrics(self) -> dict[str, float]:
        """Metrics since the last call; none without a host."""
        events, opened, wait_s = self._events, self._opened, self._wait_s
        self._events, self._opened, self._wait_s = Counter(), Counter(), 0.0
        if not self.states:
            return {}
        states = Counter(self.states.values())
        found = {
            "hosts/listed": float(len(self.states)),
            "hosts/up": float(states["up"]),
            "hosts/draining": float(states["draining"]),
            "hosts/sessions": float(sum(self.sessions.values())),
            "hosts/wait_s": wait_s / max(1, events["opened"]),
        }
        found |= {f"hosts/{event}": float(events[event]) for event in EVENTS}
        for url in sorted(self.states)[:MAX_NAMED]:
            found[f"hosts/opened_{name_of(url)}"] = float(opened[url])
        return found


def name_of(url: str) -> str:
    """A URL as part of a metric's name."""
    return metric_part(url.partition("://")[2].replace("/", "-"))


HOSTS = Hosts()
"""The hosts of this process."""
