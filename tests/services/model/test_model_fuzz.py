"""Valid and invalid requests, generated from the model service's OpenAPI description."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from model_world import make_folder

from ludus.core.types import Spec
from ludus.services.model.policy import ModelOverrides, load_policy
from ludus.services.model.service import ModelOptions, model_service
from ludus.services.model.serving import make_engine
from ludus.services.server.app import Settings

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = make_folder(tmp_path_factory.mktemp("fuzzed") / "model", 1)
    policy = load_policy(str(folder), "nowhere", ModelOverrides(context_length=64))
    engine = make_engine(policy, Spec(name="in_process"), Path("unused"))
    options = ModelOptions("tiny", max_turns=64)
    yield schemathesis.openapi.from_asgi(
        "/openapi.json", model_service(policy, engine, Settings(), options)
    )
    engine.close()


SETTINGS = settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def test_no_request_causes_a_server_error(described: Any) -> None:
    statuses: Counter[tuple[str, int]] = Counter()
    for found in described.get_all_operations():
        operation = found.ok()

        @SETTINGS
        @given(case=operation.as_strategy())
        def check(case: schemathesis.Case) -> None:
            if isinstance(case.body, dict) and "model" in case.body:
                case.body["model"] = "tiny"  # another would be refused before all else
            answer = case.call()
            statuses[case.path, answer.status_code] += 1
            assert answer.status_code < 500, answer.text
            if answer.status_code >= 400:
                assert {"type", "message"} <= set(answer.json()["error"])

        check()
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert statuses[path, 200], statuses
        assert statuses[path, 400], statuses
