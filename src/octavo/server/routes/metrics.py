"""GET /metrics: all numbers of the server, for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from octavo.engine.metrics import CONTENT_TYPE


def router() -> APIRouter:
    """The routes of this file."""
    routes = APIRouter()
    routes.add_api_route("/metrics", metrics, methods=["GET", "HEAD"])
    return routes


async def metrics(request: Request) -> Response:
    """The page as it is now."""
    return Response(request.app.state.context.api.metrics.render(), headers={"content-type": CONTENT_TYPE})
