"""From raw bytes to a checked body. Whatever a client sends, the outcome is a body or a 4xx.

    bytes -> size -> JSON object -> known fields without a schema are taken out -> unknown ones refused -> types

We read and parse ourselves because the framework's own way answers with another error shape, tries to be
lenient about types, and sets no limit on size. The JSON parser refuses deep nesting, broken UTF-8 and NaN by
itself.
"""

from __future__ import annotations

from typing import Any, TypeVar

import pydantic
from fastapi import Request
from pydantic_core import from_json

from octavo.errors import ValidationError
from octavo.server.errors import BodyTooLargeError
from octavo.server.fields import take_known
from octavo.server.schemas import Body

BodyT = TypeVar("BodyT", bound=Body)
_SHOWN = 80


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body. Raises BodyTooLargeError above `max_bytes`, before reading it if its length is
    declared.
    """
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and (len(declared) > 18 or int(declared) > max_bytes):
        raise _too_large(max_bytes)
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size > max_bytes:
            raise _too_large(max_bytes)
        pieces.append(piece)
    return b"".join(pieces)


def parse_body(raw: bytes, model: type[BodyT], kind: str | None = None) -> tuple[BodyT, list[str]]:
    """Check `raw` against `model`; return the body and the names of given fields that have no effect.

    kind: "completion" or "chat", which says what other fields are known; None if none are.
    Raises ValidationError naming the field at fault.
    """
    try:
        fields = from_json(raw, allow_inf_nan=False)
    except ValueError as e:
        raise ValidationError(f"the body is not valid JSON: {e}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise ValidationError(f"the body is a JSON {type(fields).__name__}; it must be an object")
    ignored = take_known(fields, kind) if kind else []
    for name in fields:
        if name not in model.model_fields:
            raise ValidationError(
                f"{_shown(name)} is not a field of this request; leave it out",
                param=name[:_SHOWN],
                code="unknown_field",
            )
    try:
        return model.model_validate(fields), ignored
    except pydantic.ValidationError as e:
        raise _first_fault(e) from None


def _first_fault(error: pydantic.ValidationError) -> ValidationError:
    fault = error.errors(include_url=False, include_context=False)[0]
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in fault["loc"])
    name = name.lstrip(".")[:_SHOWN]
    if fault["type"] == "missing":
        return ValidationError(f"{name} is missing; it is required", param=name, code="missing_field")
    if fault["type"] == "extra_forbidden":
        return ValidationError(f"{name} is not known; leave it out", param=name, code="unknown_field")
    reason = fault["msg"].replace("Input should", "it should")
    return ValidationError(f"{name} is {_shown(fault['input'])}; {reason}", param=name)


def _too_large(max_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"the request body is larger than {max_bytes:,} bytes; send less at once")


def _shown(value: Any) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = repr(value[:_SHOWN]) if isinstance(value, str) else repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
