"""Valid and invalid requests, generated from the model service's OpenAPI description."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fuzzing import fuzz
from model_world import make_folder

from ludus.core.types import Spec
from ludus.services.model.policy import ModelOverrides, load_policy
from ludus.services.model.service import ModelOptions, model_service
from ludus.services.model.serving import make_engine
from ludus.services.server.app import Settings

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")

ADMIN = "an-administrators-token"


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path]]:
    folder = make_folder(tmp_path_factory.mktemp("fuzzed") / "model", 1)
    policy = load_policy(str(folder), "nowhere", ModelOverrides(context_length=64))
    engine = make_engine(policy, Spec(name="in_process"), Path("unused"))
    options = ModelOptions("tiny", max_turns=64, admin_token=ADMIN)
    app = model_service(policy, engine, Settings(), options)
    yield schemathesis.openapi.from_asgi("/openapi.json", app), folder
    engine.close()


@pytest.mark.parametrize("examples", [15, pytest.param(100, marks=pytest.mark.slow)])
def test_no_request_causes_a_server_error(examples: int, described: tuple[Any, Path]) -> None:
    """Every route answers 2xx to some, and every refusal has the form of errors."""
    schema, folder = described
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "open the door", "max_tokens": 2},
        "/v1/chat/completions": {
            "messages": [{"role": "user", "content": "open the door"}],
            "max_tokens": 2,
        },
    }

    def link(case: Any, valid: bool) -> None:
        if "model" in case.path_parameters:
            case.path_parameters["model"] = "tiny"
        if case.path == "/admin/weights":
            case.body = {"checkpoint": str(folder)}
        elif case.path in bodies:
            generated = case.body if isinstance(case.body, dict) and not valid else {}
            case.body = {**bodies[case.path], **generated, "model": "tiny"}

    def check(case: Any, answer: Any) -> None:
        assert answer.status_code < 500, answer.text
        if answer.status_code >= 400:
            assert {"type", "message"} <= set(answer.json()["error"])

    admin = {"authorization": f"Bearer {ADMIN}"}
    statuses = fuzz(schema, examples, link, check, headers=admin)
    assert statuses.never_succeeded() == [], str(statuses)
    for path in bodies:
        assert statuses[f"POST {path}"][400], str(statuses)
