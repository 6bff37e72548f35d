"""Valid and invalid requests to a service with a challenger, from its OpenAPI description."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fuzzing import fuzz
from model_world import make_folder
from rollout_service import QUICK
from starlette.testclient import TestClient

from ludus.core.types import Spec
from ludus.services.model.policy import ModelOverrides, load_policy
from ludus.services.model.rollout.log import RolloutLog
from ludus.services.model.rollout.replay import replay
from ludus.services.model.rollout.service import rollout_service
from ludus.services.model.service import ModelOptions
from ludus.services.model.serving import make_engine
from ludus.services.server.app import Settings

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")


@pytest.mark.slow
def test_no_request_causes_a_server_error_or_a_log_that_cannot_be_replayed(tmp_path: Path) -> None:
    policy = load_policy(
        str(make_folder(tmp_path / "model", 1)), "nowhere", ModelOverrides(context_length=64)
    )
    engine = make_engine(policy, Spec(name="in_process"), tmp_path / "sampler")
    ids = ["cmpl-champion-0"]

    def link(case: Any, valid: bool) -> None:
        if "model" in case.path_parameters:
            case.path_parameters["model"] = "tiny"
        generated = case.body if isinstance(case.body, dict) and not valid else {}
        if case.path == "/v1/completions":
            case.body = {"prompt": "go", "max_tokens": 2, **generated, "model": "tiny"}
        elif case.path == "/v1/chat/completions":
            messages = [{"role": "user", "content": "go"}]
            case.body = {"messages": messages, "max_tokens": 2, **generated, "model": "tiny"}
        elif case.path == "/feedback" and valid:
            case.body = {"id": ids[-1], "score": 0.5}

    def check(case: Any, answer: Any) -> None:
        assert answer.status_code < 500, answer.text
        if answer.status_code >= 400:
            assert {"type", "message"} <= set(answer.json()["error"])
        elif "completions" in case.path and "json" in answer.headers["content-type"]:
            ids.append(answer.json()["id"])

    origins = (policy.origin, policy.origin)
    log = tmp_path / "log.jsonl"
    with closing(engine), closing(RolloutLog.open(log, *origins, QUICK, 1.0)) as rollout:
        both = (policy, engine), (policy, engine)
        options = ModelOptions("tiny", max_turns=64)
        app = rollout_service(*both, Settings(), options, rollout)
        asked = {"model": "tiny", "prompt": "go", "max_tokens": 2}
        ids.append(TestClient(app).post("/v1/completions", json=asked).json()["id"])
        schema = schemathesis.openapi.from_asgi("/openapi.json", app)
        statuses = fuzz(schema, 60, link, check, headers={})
    assert statuses.never_succeeded() == ["POST /admin/weights"], str(statuses)
    assert statuses["POST /feedback"][404], str(statuses)
    assert replay(log).decisions == rollout.decisions
    assert replay(log).num_events > 10
