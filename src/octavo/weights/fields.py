"""Typed reading of what a checkpoint says about itself, with errors that name the file, the field and the value."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Protocol

from octavo.errors import ModelFileError
from octavo.model_spec import ModelSpec


class Values(Protocol):
    """What holds fields: a dict, or the metadata of a GGUF file, which decodes a value when it is asked for."""

    def get(self, key: str, /) -> Any: ...

    def __contains__(self, key: str, /) -> bool: ...


class Fields:
    """The fields of a config or of metadata. `prefix` is put before each key (GGUF keys begin with the architecture).

    A field that is absent or null takes the default; without a default it is required. All readers raise ModelFileError.
    """

    def __init__(self, file: Path, values: Values, prefix: str = "") -> None:
        self.file = file
        self._values = values
        self._prefix = prefix

    def raw(self, key: str) -> Any:
        """The value as it is in the file, None if absent."""
        return self._values.get(self._prefix + key)

    def has(self, key: str) -> bool:
        """Whether the file has the key at all, be it null."""
        return self._prefix + key in self._values

    def integer(self, key: str, default: int | None = None, *, at_least: int = 1) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            raise self.error(key, f"an integer of at least {at_least}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self._value(key, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
            or value <= 0
        ):
            raise self.error(key, "a number above 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One token id or a list of them; absent or null is none, and so is -1, which some tools write for it."""
        value = self.raw(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
            raise self.error(key, "a token id or a list of token ids")
        return tuple(i for i in ids if i >= 0)

    def unsupported(self, what: str, supported: str) -> ModelFileError:
        """The error for something that is understood but not served."""
        return ModelFileError(self.file, f"{what} is not supported; supported: {supported}")

    def error(self, key: str, wanted: str) -> ModelFileError:
        return ModelFileError(self.file, f"{self._prefix}{key} is {self.raw(key)!r}; it must be {wanted}")

    def _value(self, key: str, default: Any) -> Any:
        value = self.raw(key)
        if value is not None:
            return value
        if default is None:
            raise ModelFileError(
                self.file, f"{self._prefix}{key} is missing; the model cannot be built without it"
            )
        return default


def checked(spec: ModelSpec, file: Path) -> ModelSpec:
    """Return `spec` if its numbers fit each other; raises ModelFileError otherwise."""
    if spec.num_heads % spec.num_kv_heads:
        raise ModelFileError(
            file,
            f"{spec.num_heads} query heads cannot share {spec.num_kv_heads} kv heads evenly; one of them is wrong",
        )
    if spec.head_size % 2:
        raise ModelFileError(file, f"head size {spec.head_size} is odd; rotary positions need an even one")
    return spec
