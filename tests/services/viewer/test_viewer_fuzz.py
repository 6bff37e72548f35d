"""Valid and invalid requests, generated from the viewer's OpenAPI description."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ab_rollout_logs import opened
from fuzzing import Link, fuzz
from viewer_world import RUN, make_runs, viewer

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")


@pytest.mark.parametrize("examples", [30, pytest.param(400, marks=pytest.mark.long)])
def test_no_request_causes_a_server_error(tmp_path: Path, examples: int) -> None:
    """Every route answers 2xx to some, and every refusal has the form of errors."""
    make_runs(tmp_path)
    log = str(tmp_path / "log.jsonl")
    opened(Path(log)).close()
    with viewer(tmp_path) as url:
        schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        statuses = fuzz(schema, examples, link_to(log), check)
    assert statuses.never_succeeded() == [], str(statuses)
    assert statuses["GET /api/rollouts"][422], str(statuses)


def link_to(log: str) -> Link:
    """The run, a rollout, a step and a log that exist."""

    def link(case: Any, valid: bool) -> None:
        if not case.path.startswith("/api/") or case.path in ("/api/runs", "/api/ab-rollouts"):
            return
        if case.path == "/api/ab-rollout":
            generated = {} if valid or not isinstance(case.query, dict) else case.query
            case.query = {**generated, "log": log}
            return
        here = {"run": [RUN] if case.path == "/api/curves" else RUN}
        if case.path == "/api/rollout":
            here["id"] = "rl-000001/g0000/e000"
        if case.path == "/api/step":
            here |= {"stage": "rl", "step": 1}  # type: ignore[dict-item]
        given = {} if valid or not isinstance(case.query, dict) else case.query
        case.query = {**given, **here}

    return link


def check(case: Any, answer: Any) -> None:
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        assert set(answer.json()["error"]) == {"type", "message"}
