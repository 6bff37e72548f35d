"""Valid and invalid requests, generated from the evaluation service's OpenAPI description."""

from __future__ import annotations

from typing import Any

import pytest
from fuzzing import Link, fuzz
from service_world import command

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")


@pytest.mark.parametrize("examples", [30, pytest.param(400, marks=pytest.mark.long)])
def test_no_request_causes_a_server_error(examples: int) -> None:
    """Every route answers 2xx to some, and every refusal has the form of errors."""
    names = ["answer", "choice", "code", "format", "math", "qa"]
    words = ("--judges", ",".join(names), "--deadline", "5", "--max-deadline", "9")
    with command(*words, verb="evaluation") as started:
        schema = schemathesis.openapi.from_url(f"{started.url}/openapi.json")
        statuses = fuzz(schema, examples, link_to(names), check)
    assert statuses.never_succeeded() == [], str(statuses)
    assert statuses["POST /evaluate"][422], str(statuses)


def link_to(names: list[str]) -> Link:
    """A judge that exists for each case."""
    sent = 0

    def link(case: Any, valid: bool) -> None:
        nonlocal sent
        if case.path != "/evaluate":
            return
        sent += 1
        generated = case.body if isinstance(case.body, dict) and not valid else {}
        name = names[sent % len(names)]
        args = {"thinking": "forbidden"} if name == "format" else {}
        body = {**generated, "judge": {"name": name, "args": args}}
        if "items" not in body:
            body.setdefault("output", "The answer is 7.")
        if "deadline_s" in body and isinstance(body["deadline_s"], float):
            body["deadline_s"] = min(body["deadline_s"], 5.0)
        case.body = body

    return link


def check(case: Any, answer: Any) -> None:
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        assert set(answer.json()["error"]) == {"type", "message"}
    elif case.path == "/evaluate":
        for result in answer.json()["results"]:
            assert (result["value"] is None) == (result["status"] != "scored"), result
