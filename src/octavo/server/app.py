"""The HTTP server put together: routes, the door in front of them, errors.

    CORS (if on) -> Gate (key, stopping) -> Faults (500) -> routes (routes/__init__.py) -> EngineAPI

This is the one place that knows all parts. Routes find what they need in `app.state.context`.
"""

from __future__ import annotations

import time

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from octavo.server.engine_api import EngineAPI
from octavo.server.errors import Faults, install_handlers
from octavo.server.fields import IGNORED_HEADER
from octavo.server.gate import Gate
from octavo.server.routes import ROUTES
from octavo.server.settings import Context, ServerSettings


def create_app(api: EngineAPI, settings: ServerSettings) -> FastAPI:
    """An ASGI application that serves `api`.

    `app.state.shutting_down` is False; whoever stops the server sets it to True, and from then on new
    requests are refused with 503 and /health says so, while running ones may finish.
    """
    # No generated documentation: bodies are read by hand, so it would be wrong, and it would be open to all.
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.context = Context(api, settings, int(time.time()))
    app.state.shutting_down = False
    for name in ROUTES.names():
        app.include_router(ROUTES.load(name)())
    install_handlers(app)
    app.add_middleware(Faults)
    app.add_middleware(Gate, api_key=settings.api_key)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[IGNORED_HEADER],
        )
    return app
