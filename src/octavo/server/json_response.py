"""JSON on the way out. Encoded by msgspec, which is fast and cannot write NaN."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi.responses import Response

# Line breaks of Unicode that JSON leaves alone but careless readers of event streams take for the end of a
# line.
_LINE_BREAKS = (("\u2028", b"\\u2028"), ("\u2029", b"\\u2029"), ("\u0085", b"\\u0085"))


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """`body` as a JSON answer."""
    return Response(
        msgspec.json.encode(body), status_code=status, headers=headers, media_type="application/json"
    )


def event(body: Any) -> bytes:
    """`body` as one server-sent event: a single line, whatever line breaks its text has."""
    payload = msgspec.json.encode(body)
    if not payload.isascii():
        for character, escape in _LINE_BREAKS:
            payload = payload.replace(character.encode(), escape)
    return b"data: " + payload + b"\n\n"
