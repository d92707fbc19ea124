"""Errors as HTTP answers: the one map from error class to status, and the one shape of a body.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

Everything that is not a success has this shape, from a wrong field to an unknown path and to a fault of our
own. Messages of `OctavoError` are meant for the client; those of any other exception stay in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.errors import (
    AuthenticationError,
    EngineDeadError,
    ModelNotFoundError,
    OctavoError,
    ShuttingDownError,
    ValidationError,
)
from octavo.server.json_response import json_response

logger = logging.getLogger(__name__)

CLIENT_GONE = 499  # never sent: nobody is there to read it; it names the case in access logs


class BodyTooLargeError(ValidationError):
    """The request body is above the limit."""

    code = "body_too_large"


# The first class that fits counts, so subclasses come first.
STATUS: Mapping[type[OctavoError], int] = {
    BodyTooLargeError: 413,
    ValidationError: 400,
    AuthenticationError: 401,
    ModelNotFoundError: 404,
    EngineDeadError: 503,
    ShuttingDownError: 503,
}
_WORDS = {404: "not_found", 405: "method_not_allowed"}


def status_of(error: Exception) -> int:
    """The HTTP status of `error`; 500 for what no client can cause."""
    return next((status for kind, status in STATUS.items() if isinstance(error, kind)), 500)


def error_body(error: Exception) -> dict[str, Any]:
    """The body that tells a client about `error`."""
    status = status_of(error)
    kind = "server_error" if status >= 500 else "invalid_request_error"
    if isinstance(error, OctavoError):
        return _body(error.message, kind, error.param, error.code)
    return _body("the server failed on this request; its log has the cause", kind, None, "internal_error")


def error_response(error: Exception) -> Response:
    """`error` as an answer."""
    status = status_of(error)
    headers = {"www-authenticate": "Bearer"} if status == 401 else None
    return json_response(error_body(error), status, headers)


def install_handlers(app: FastAPI) -> None:
    """Give every kind of failure the same body; what is no `OctavoError` is left to `Faults`."""
    app.add_exception_handler(OctavoError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientDisconnect, _on_client_gone)


class Faults:
    """ASGI middleware that answers a fault of ours with 500 and logs it.

    The framework's own way raises it again, whereupon the server closes a connection that the client may be using already.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on. Raises what happened only if the answer had begun, so that the connection is cut."""
        begun = False

        async def note(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, note)
        except Exception as e:
            if begun or scope["type"] != "http":
                raise
            logger.exception("a request failed")
            await error_response(e)(scope, receive, send)


async def _on_error(request: Request, error: Exception) -> Response:
    return error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path[:200]}"
    message = {
        404: f"{where} leads nowhere; the routes are those of the OpenAI API, /v1/chat/completions and so on",
        405: f"{where} is not possible; see the allow header for the methods of this path",
    }.get(error.status_code, str(error.detail))
    kind = "server_error" if error.status_code >= 500 else "invalid_request_error"
    body = _body(message, kind, None, _WORDS.get(error.status_code))
    return json_response(body, error.status_code, dict(error.headers or {}))


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)


def _body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
