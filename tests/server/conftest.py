"""Servers for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fake_engine import FakeEngine
from server_harness import Running, Serve, start


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start servers: `serve(FakeEngine(...), api_key=...)`. They end with the test."""
    stops: list[Callable[[], None]] = []

    def begin(engine: FakeEngine | None = None, **settings: Any) -> Running:
        running, stop = start(engine, **settings)
        stops.append(stop)
        return running

    yield begin
    for stop in stops:
        stop()


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    """One server with the plain fake engine, for tests that only ask."""
    running, stop = start()
    yield running
    stop()
