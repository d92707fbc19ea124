"""How `generate` and `chat` come to an engine in their own process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.cli.options import EngineOptions
from octavo.cli.terminal import find_model
from octavo.engine.machine import patient_threads
from octavo.errors import ValidationError

if TYPE_CHECKING:
    from octavo.llm import LLM


def open_llm(model: str, options: EngineOptions) -> LLM:
    """Find the model and start an engine on it, in this process.

    Raises ConfigError, ModelUnavailableError, ModelFileError.
    """
    options.config(model, Path(model))  # bad options are refused before a download
    config = options.config(model, find_model(model))

    for name, value in patient_threads().items():
        os.environ.setdefault(name, value)  # before torch is imported, which reads it once

    from octavo.llm import LLM

    return LLM.from_config(config)


@contextmanager
def refused_requests() -> Iterator[None]:
    """The offline API reports what can never be served as ValueError; here it is an error like any other."""
    try:
        yield
    except ValueError as e:
        if isinstance(e.__cause__, ValidationError):
            raise e.__cause__ from None
        raise
