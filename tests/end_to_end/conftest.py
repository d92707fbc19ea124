"""Models and servers shared by the end-to-end tests; starting one costs seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from served_model import real_model, tiny_served_model
from server_process import ServerProcess


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_served_model(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="session")
def tiny_server(tiny: Path) -> Iterator[ServerProcess]:
    """A tiny model on a pool of about eight requests of the stress test, with all invariants checked."""
    flags = (
        "--dtype",
        "float32",
        "--block-size",
        "8",
        "--num-blocks",
        "64",
        "--max-model-len",
        "256",
        "--check",
    )
    with ServerProcess(tiny, "--threads", "1", *flags, "--served-model-name", "tiny") as server:
        yield server


@pytest.fixture(scope="session")
def real_server() -> Iterator[ServerProcess]:
    """The real model with its defaults, in float32."""
    with ServerProcess(real_model(), "--dtype", "float32", "--served-model-name", "smollm2") as server:
        yield server
