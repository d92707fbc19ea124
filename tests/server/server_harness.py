"""A real server on a real socket, in a thread of the test process, and what tests ask of its answers."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import httpx
import openai
import uvicorn
from fastapi import FastAPI

from fake_engine import FakeEngine
from octavo.server.app import create_app
from octavo.server.settings import ServerSettings

MODEL = "org/fake-model"


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.event_loop = asyncio.get_running_loop()
        self.ready.set()


@dataclass
class Running:
    """A server under test. `post` sends a dict as JSON, anything else as it is."""

    engine: FakeEngine
    app: FastAPI
    port: int
    http: httpx.Client
    loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        how = {"json": body} if isinstance(body, dict) else {"content": body}
        return self.http.post(path, **how, **options)

    def complete(self, **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"model": MODEL, "prompt": "Hi", **fields})

    def chat(self, **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "Hi"}]
        return self.post("/v1/chat/completions", {"model": MODEL, "messages": messages, **fields})

    def openai(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def async_openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)


Serve = Callable[..., Running]


def start(engine: FakeEngine | None = None, **settings: Any) -> tuple[Running, Callable[[], None]]:
    """A running server, and what stops it."""
    engine = engine or FakeEngine()
    app = create_app(engine, replace(ServerSettings(), **settings))
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
    server = _Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    assert server.ready.wait(20)
    port = listener.getsockname()[1]
    http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20, trust_env=False)

    def stop() -> None:
        http.close()
        server.should_exit = server.force_exit = True  # its thread ends by itself; waiting would be idle time

    return Running(engine, app, port, http, server.event_loop), stop


def chunks(text: str) -> list[dict[str, Any]]:
    """The events of a stream that ended well."""
    events = [line.removeprefix("data: ") for line in text.split("\n") if line]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def refused(
    response: httpx.Response, param: str | None = None, status: int = 400, code: str | None = None
) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert {*error} == {"message", "type", "param", "code"} and error["message"] and error["type"]
    if param is not None:
        assert error["param"] == param, error
    if code is not None:
        assert error["code"] == code, error
