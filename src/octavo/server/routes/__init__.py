"""The table of routes. A new one is a file here with a function that returns its router, and one line."""

from __future__ import annotations

from octavo.registry import Registry

ROUTES = Registry(
    "route",
    {
        "chat": "octavo.server.routes.chat:router",
        "completions": "octavo.server.routes.completions:router",
        "health": "octavo.server.routes.health:router",
        "metrics": "octavo.server.routes.metrics:router",
        "models": "octavo.server.routes.models:router",
        "tokenize": "octavo.server.routes.tokenize:router",
        "version": "octavo.server.routes.version:router",
    },
)
