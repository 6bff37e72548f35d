"""Routing of environment requests to the worker that owns the session."""

from __future__ import annotations

import json
import re

from ludus.services.envs import agentjet
from ludus.services.envs.session import parse_id
from ludus.services.server.aggregate import concatenated, health, metrics
from ludus.services.server.peers import Routing

_PATH = re.compile(r"^/(?:sessions|rollouts)/([^/]{1,64})(?:/|$)")
_QUERY = re.compile(rb"(?:^|&)(?:id|env_idx)=(\d{1,40})(?:&|$)")


def id_in(path: str, query: bytes, body: bytes) -> int | None:
    """The number of the session or job in a request, if there is one."""
    if match := _PATH.match(path):
        return parse_id(match[1])
    if path in agentjet.PATHS:
        return agentjet.id_in(body)
    if not path.startswith("/agentgym/"):
        return None
    if id_match := _QUERY.search(query):
        return int(id_match[1])
    try:
        fields = json.loads(body) if body else {}
    except (ValueError, RecursionError):
        return None  # the route reports the error
    if not isinstance(fields, dict):
        return None
    number = fields.get("id", fields.get("env_idx"))
    return number if isinstance(number, int) and not isinstance(number, bool) else None


ROUTING = Routing(
    id_in,
    {"/health": health("sessions"), "/metrics": metrics, "/rollouts": concatenated("seconds")},
)
