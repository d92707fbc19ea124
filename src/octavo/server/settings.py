"""What can be set about the HTTP server, and the few things that every route needs."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.errors import ModelNotFoundError
from octavo.server.engine_api import EngineAPI

DEFAULT_MAX_BODY_BYTES = 32 * 2**20


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Options of the HTTP server.

    served_model_names: names that requests may use; empty means the model's own. Replies repeat the one that
        was used.
    api_key: if given, every route but /health and /version asks for `Authorization: Bearer <key>`; /metrics
        does, too.
    allowed_origins: origins whose browsers may call (CORS); empty means off, "*" means all.
    max_body_bytes: larger request bodies are refused with 413.
    drain_timeout_s: seconds that running requests get to finish when the server is told to stop.
    stall_timeout_s: an engine that has work but finishes no step for so many seconds is reported as not well.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: tuple[str, ...] = ()
    api_key: str | None = None
    allowed_origins: tuple[str, ...] = ()
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    drain_timeout_s: int = 30
    stall_timeout_s: float = 60.0


@dataclass(frozen=True)
class Context:
    """What routes work with; made once by `create_app`. created_s is the wall-clock time of start (Unix
    seconds).
    """

    api: EngineAPI
    settings: ServerSettings
    created_s: int

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names under which the model is served, never empty."""
        return self.settings.served_model_names or (self.api.facts.model,)

    def require_model(self, name: str) -> str:
        """Return `name` if it is served. Raises ModelNotFoundError."""
        if name not in self.model_names:
            shown = name if len(name) <= 120 else name[:119] + "…"
            raise ModelNotFoundError(
                f"model {shown!r} is not served here; use {' or '.join(map(repr, self.model_names))}",
                param="model",
            )
        return name
