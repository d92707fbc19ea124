"""GET /health: 200 while requests are taken and the engine is well, else 503 with the reason. The model is not asked."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from octavo.errors import EngineDeadError, OctavoError, ShuttingDownError
from octavo.server.errors import error_body
from octavo.server.json_response import json_response


def router() -> APIRouter:
    """The routes of this file."""
    routes = APIRouter()
    routes.add_api_route("/health", health, methods=["GET", "HEAD"])
    return routes


async def health(request: Request) -> Response:
    """Whether requests can be served."""
    fault: OctavoError | None = None
    if request.app.state.shutting_down:
        fault = ShuttingDownError("the server is stopping")
    elif reason := request.app.state.context.api.health():
        fault = EngineDeadError(reason)
    if fault is None:
        return json_response({"status": "ok"})
    return json_response({"status": "unavailable", "reason": fault.message, **error_body(fault)}, 503)
