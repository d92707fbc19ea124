"""GET /version: which release this is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from fastapi import APIRouter, Request, Response

from octavo.server.json_response import json_response


def router() -> APIRouter:
    """The routes of this file."""
    routes = APIRouter()
    routes.add_api_route("/version", show_version, methods=["GET", "HEAD"])
    return routes


async def show_version(request: Request) -> Response:
    """The version of the installed package; "unknown" when run from a source tree."""
    try:
        return json_response({"version": version("octavo")})
    except PackageNotFoundError:
        return json_response({"version": "unknown"})
