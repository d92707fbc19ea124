"""The door: who may come in, and whether anybody still may.

Plain ASGI, in front of all routes, so that an unknown path tells a stranger nothing and no body is read
before the key is checked. /health and /version are open to all. /metrics needs the key like every other
route: Prometheus sends one with `authorization: {credentials: KEY}` in its scrape config.
"""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.errors import AuthenticationError, OctavoError, ShuttingDownError
from octavo.server.errors import error_response

OPEN = frozenset({"/health", "/version"})
OPEN_WHILE_STOPPING = OPEN | {"/metrics"}


class Gate:
    """ASGI middleware. Whether the server is stopping is read from `app.state.shutting_down`, which the
    command sets.
    """

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app = app
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401 or 503."""
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await error_response(refusal)(scope, receive, send)

    def _refusal(self, scope: Scope) -> OctavoError | None:
        path = scope["path"]
        if path not in OPEN and not self._has_key(scope):
            return AuthenticationError("the API key is missing or wrong; send `Authorization: Bearer KEY`")
        if path not in OPEN_WHILE_STOPPING and scope["app"].state.shutting_down:
            return ShuttingDownError("the server is stopping and takes no new requests; ask another one")
        return None

    def _has_key(self, scope: Scope) -> bool:
        if self._key is None:
            return True
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._key)
