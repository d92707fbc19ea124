"""What a user or a peer can cause, as types.

Every error says what happened, the value, and what to do about it. Faults of our own are `assert`s and ordinary
exceptions; running out of blocks is a return value, not an error. The HTTP status of each class is mapped in one place,
`server/errors.py`; the offline API turns `ValidationError` into the built-in `ValueError`.
"""

from __future__ import annotations


class OctavoError(Exception):
    """Root of every error that a user or a peer can cause.

    `code` is a stable machine-readable word (the `code` of an OpenAI error body); `param` names the field at fault.
    """

    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class ValidationError(OctavoError, ValueError):
    """A request or a parameter that can never be served as it stands."""

    code = "invalid_value"


class ContextLengthError(ValidationError):
    """Prompt plus requested tokens do not fit the context, or the whole block pool."""

    code = "context_length_exceeded"


class UnsupportedError(ValidationError):
    """A known option that this version does not offer. Refused, never ignored."""

    code = "unsupported"


class AuthenticationError(OctavoError):
    """The API key is missing or wrong."""

    code = "invalid_api_key"


class ModelNotFoundError(OctavoError):
    """A request names a model that this server does not serve."""

    code = "model_not_found"


class ConfigError(OctavoError, ValueError):
    """A start-up option that cannot be used, with the values that can."""

    code = "invalid_config"


class ModelUnavailableError(OctavoError):
    """A model name or path that leads to nothing here; the message says what to type."""

    code = "model_unavailable"


class ModelFileError(OctavoError):
    """A model file that is missing, truncated, corrupt or of an unsupported kind.

    `file` is the path, `tensor` the tensor at fault (None if the fault is not in one).
    """

    code = "model_file"

    def __init__(self, file: object, reason: str, *, tensor: str | None = None) -> None:
        where = f"{file}: tensor {tensor}" if tensor else f"{file}"
        super().__init__(f"{where}: {reason}")
        self.file = str(file)
        self.tensor = tensor
        self.reason = reason


class EngineDeadError(OctavoError):
    """The engine process has ended; requests in flight are answered with its root cause."""

    code = "engine_dead"


class ShuttingDownError(OctavoError):
    """The server no longer takes requests because it is stopping."""

    code = "shutting_down"


class BenchmarkError(OctavoError):
    """A server under measurement that cannot be reached, or answers with what cannot be measured."""

    code = "benchmark"
