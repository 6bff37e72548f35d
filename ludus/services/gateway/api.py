"""The application of the gateway: OpenAI's and Anthropic's APIs over the sessions of agents."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from ludus.services.gateway.chat import ChatRoutes
from ludus.services.gateway.messages import MessagesRoutes, anthropic_error
from ludus.services.gateway.responses import ResponsesRoutes
from ludus.services.gateway.sessions import Sessions
from ludus.services.model.requests import ApiError
from ludus.services.server.app import ServiceError, Settings, create_app

MAX_BODY_BYTES = 4_000_000


def gateway_app(sessions: Sessions) -> FastAPI:
    """The application."""

    def health() -> dict[str, Any]:
        return {"sessions": len(sessions)}

    settings = Settings((), MAX_BODY_BYTES, error_body=error_body)
    app = create_app("gateway", settings, health=health, errors=ApiError)
    for routes in (ChatRoutes(sessions), ResponsesRoutes(sessions), MessagesRoutes(sessions)):
        routes.add_to(app)
    return app


def error_body(path: str, error: ServiceError) -> dict[str, Any]:
    """An error in the form of the API to which a path belongs."""
    return anthropic_error(error) if path.startswith("/v1/messages") else error.body
