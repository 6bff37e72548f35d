"""Valid and invalid requests, generated from the OpenAPI description."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from service_world import OBEYS

from ludus.core.types import Spec
from ludus.services.envs.manager import SessionLimits
from ludus.services.envs.service import environment_service
from ludus.services.server.app import Settings

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")

APP = environment_service(
    [Spec(name="textcraft"), Spec(name=OBEYS)],
    Settings(),
    SessionLimits(max_sessions=100_000),
)
SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", APP)


@SCHEMA.parametrize()
@settings(
    max_examples=4,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_no_request_causes_a_server_error(case: schemathesis.Case) -> None:
    answer = case.call()
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        assert set(answer.json()["error"]) == {"type", "message"}
