"""GET /v1/models and /v1/models/{id}: the names under which the model is served. Names may contain slashes."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from octavo.server.json_response import json_response
from octavo.server.settings import Context


def router() -> APIRouter:
    """The routes of this file."""
    routes = APIRouter()
    routes.add_api_route("/v1/models", list_models, methods=["GET"])
    routes.add_api_route("/v1/models/{model_id:path}", retrieve_model, methods=["GET"])
    return routes


async def list_models(request: Request) -> Response:
    """All names."""
    context: Context = request.app.state.context
    return json_response({"object": "list", "data": [_card(context, name) for name in context.model_names]})


async def retrieve_model(request: Request, model_id: str) -> Response:
    """One name. Raises ModelNotFoundError (404) for another."""
    context: Context = request.app.state.context
    return json_response(_card(context, context.require_model(model_id)))


def _card(context: Context, name: str) -> dict[str, Any]:
    facts = context.api.facts
    return {
        "id": name,
        "object": "model",
        "created": context.created_s,
        "owned_by": "octavo",
        "root": facts.model,
        "parent": None,
        "max_model_len": facts.max_model_len,
    }
