"""Evaluation service: outputs of models in, scores out.

    POST /evaluate {"output": "so \\\\boxed{7}", "truth": "7"}
        -> {"judge": "math", "results": [{"status": "scored", "value": 1.0, "success": true, ...}]}
    GET /judges -> the judges by name, with the arguments that clients may set

Model outputs are untrusted, and so are clients. A judge runs with the operator's limits; what a
client may set has no effect on what the judge may reach or use (`config.CLIENT_ARGS`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from fastapi import Body, FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.middleware import Middleware

from ludus.judges import JUDGES
from ludus.judges.remote.wire import EvaluationRequest, Evaluations
from ludus.services.evaluation.config import ServedJudge, check_judges
from ludus.services.evaluation.evaluator import EvaluationLimits, Evaluator
from ludus.services.server.aggregate import health as health_of_all
from ludus.services.server.aggregate import metrics
from ludus.services.server.app import ERRORS, Settings, create_app
from ludus.services.server.disconnect import Disconnected, unless_disconnected
from ludus.services.server.peers import Peers, Routing, WorkerRouter
from ludus.services.server.serve import ServeOptions, serve
from ludus.services.server.shares import client_of

ROUTING = Routing(
    lambda path, query, body: None, {"/health": health_of_all("evaluations"), "/metrics": metrics}
)
"""Any worker answers; health and metrics are those of all."""

EXAMPLES: dict[str, Any] = {
    "one": {
        "summary": "One output",
        "value": {"output": "14 / 2 is \\boxed{7}", "truth": "7", "judge": "math"},
    },
    "many": {
        "summary": "Many outputs, with a deadline",
        "value": {
            "items": [
                {"id": "a", "output": "It is \\boxed{\\frac{1}{2}}", "truth": "0.5"},
                {"id": "b", "output": "I do not know", "truth": "0.5"},
            ],
            "judge": {"name": "math", "args": {"extract": "boxed"}},
            "deadline_s": 20,
        },
    },
    "choice": {
        "summary": "A multiple choice, the output as messages",
        "value": {
            "output": [{"role": "assistant", "content": "The answer is (B)."}],
            "truth": "Rome",
            "data": {"options": ["Paris", "Rome"]},
            "judge": "choice",
        },
    },
}

RESULT = {
    "judge": "math",
    "results": [
        {
            "status": "scored",
            "value": 1.0,
            "success": True,
            "parts": {"correct": 1.0, "found": 1.0, "in_time": 1.0},
            "explanation": "'7', equal to '7'",
            "error": None,
            "id": None,
        }
    ],
    "seconds": 0.004,
}


class JudgeInfo(BaseModel):
    """A judge that clients may name; `args` is the JSON schema of what they may set."""

    name: str
    judge: str
    summary: str
    args: dict[str, Any]


def evaluation_service(
    judges: Sequence[ServedJudge],
    settings: Settings,
    limits: EvaluationLimits,
    *,
    peers: Peers | None = None,
) -> FastAPI:
    """An application that scores outputs with `judges`."""
    evaluator = Evaluator(judges, limits, len(settings.tokens), settings.registry)
    infos = [_info(served) for served in judges]

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await evaluator.close()
            if peers is not None:
                await peers.close()

    def health() -> Mapping[str, Any]:
        return {"evaluations": evaluator.num_items, "judges": [info.name for info in infos]}

    settings = replace(settings, max_body_bytes=limits.max_body_bytes)
    app = create_app(
        "evaluation",
        settings,
        health=health,
        lifespan=lifespan,
        middleware=[Middleware(WorkerRouter, peers=peers, routing=ROUTING)] if peers else [],
    )
    answers: dict[int | str, dict[str, Any]] = {
        200: {"content": {"application/json": {"example": RESULT}}},
        **ERRORS,
    }

    @app.post("/evaluate", response_model=Evaluations, responses=answers, tags=["evaluation"])
    async def evaluate(
        request: Request, body: Annotated[EvaluationRequest, Body(openapi_examples=EXAMPLES)]
    ) -> Response:
        """Score one output, or many. The results are in the order of the outputs.

        `status` is `scored`; `unscorable`: the judge has no score to give; `failed`: a sandbox, an
        endpoint or the judge failed; `deadline`: not scored in time. Only `scored` has a value.
        """
        work = evaluator.evaluate(body, client_of(request.scope).tenant)
        try:
            done = await unless_disconnected(request, work)
        except Disconnected:
            return Response(status_code=499)
        return Response(done.model_dump_json(), media_type="application/json")

    @app.get("/judges", responses=ERRORS, tags=["evaluation"])
    async def read_judges() -> list[JudgeInfo]:
        """The judges, with the arguments that clients may set."""
        return infos

    return app


def _info(served: ServedJudge) -> JudgeInfo:
    schema = JUDGES.arguments(served.spec.name).model_json_schema()
    properties = schema.get("properties", {})
    args = {
        "type": "object",
        "properties": {key: properties[key] for key in served.client_args if key in properties},
        "additionalProperties": False,
    }
    if "$defs" in schema:
        args["$defs"] = schema["$defs"]
    summary = JUDGES.row(served.spec.name).summary
    return JudgeInfo(name=served.name, judge=served.spec.name, summary=summary, args=args)


def serve_evaluation(
    judges: Sequence[ServedJudge],
    options: ServeOptions,
    limits: EvaluationLimits,
    say: Callable[[str], object],
) -> None:
    """`ludus serve evaluation`: serve until stopped.

    Errors: ConfigError, MissingDependency.
    """
    asyncio.run(check_judges(judges))  # report mistakes before the service listens
    names = ", ".join(served.name for served in judges)
    serve(
        partial(evaluation_service, tuple(judges), limits=limits),
        options,
        lambda address: say(f"judges {names}: {address} (description: {address}/docs)"),
    )
