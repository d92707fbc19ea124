"""Clients that go away, engines that die, and the one merged stream between them."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from fake_engine import FakeEngine
from octavo.errors import EngineDeadError, ValidationError
from octavo.outputs import RequestDelta
from octavo.server.json_response import event
from octavo.server.replies import ScoreGate
from octavo.server.streaming import merge, until_disconnect
from server_harness import MODEL, Running, Serve

BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "Hi"}),
    ("/v1/completions", {"prompt": ["a", "b", "c"], "n": 2}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "n": 2}),
]


def send_raw(server: Running, path: str, body: dict[str, Any]) -> socket.socket:
    """A request on a socket of our own, which the test may close at any moment."""
    raw = json.dumps({"model": MODEL, "max_tokens": 20, **body}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    connection.sendall(head.encode() + raw)
    return connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [0, 3], ids=["queued", "running"])
@pytest.mark.parametrize(("path", "body"), BODIES)
def test_client_that_leaves_ends_its_request(
    serve: Serve, path: str, body: dict[str, Any], after: int, stream: bool
) -> None:
    server = serve(FakeEngine(pause_after=after))
    connection = send_raw(server, path, {**body, "stream": stream})
    if stream and after:
        assert connection.recv(10) == b"HTTP/1.1 2"
    assert server.engine.paused.wait(20)
    connection.close()
    assert server.engine.idle.wait(20), "the generators have been closed"
    assert server.engine.num_closed_early == len(server.engine.requests) > 0
    server.engine.pause_after = None
    assert server.complete().status_code == 200


def test_nothing_is_left_behind_by_requests(serve: Serve) -> None:
    server = serve()

    async def count() -> int:
        return len(asyncio.all_tasks())

    def num_tasks() -> int:
        return asyncio.run_coroutine_threadsafe(count(), server.loop).result(20)

    before = num_tasks()
    for stream in (False, True):
        assert server.complete(prompt=["a", "b"], stream=stream).status_code == 200
        assert server.chat(stream=stream).status_code == 200
        assert server.complete(prompt="x" * 600, stream=stream).status_code == 400
    server.engine.pause_after = 2
    connections = [
        send_raw(server, "/v1/completions", {"prompt": ["a", "b"], "stream": s}) for s in (False, True)
    ]
    assert server.engine.paused.wait(20)
    for connection in connections:
        connection.close()
    server.engine.pause_after = None
    assert server.complete().status_code == 200
    assert server.engine.idle.wait(20)
    # The last task to go may still be on its way when the engine is idle.
    assert any(num_tasks() <= before for _ in range(1000)), "a watcher or a pump is still there"


def test_many_clients_that_leave_at_once(serve: Serve) -> None:
    server = serve(FakeEngine(pause_after=2))
    path, body = BODIES[0]
    connections = [send_raw(server, path, {**body, "stream": i % 2 == 0}) for i in range(60)]
    assert server.engine.paused.wait(20)
    for connection in connections:
        connection.close()
    server.engine.pause_after = None
    assert server.complete().status_code == 200
    assert server.engine.idle.wait(20) and server.engine.num_active == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), BODIES)
def test_engine_that_fails_before_the_first_token_gives_a_status(
    serve: Serve, path: str, body: dict[str, Any], stream: bool
) -> None:
    server = serve(FakeEngine(fail_after=0))
    response = server.post(path, {"model": MODEL, "stream": stream, **body})
    assert response.status_code == 503
    error = response.json()["error"]
    assert error["code"] == "engine_dead" and "out of memory" in error["message"]
    assert error["type"] == "server_error"
    server.engine.error = ValidationError("no", param="prompt")
    assert server.post(path, {"model": MODEL, "stream": stream, **body}).status_code == 400


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_engine_that_fails_in_mid_stream_gives_one_error_event(
    serve: Serve, path: str, body: dict[str, Any]
) -> None:
    server = serve(FakeEngine(fail_after=3))
    response = server.post(path, {"model": MODEL, "stream": True, **body})
    assert response.status_code == 200, "it had begun"
    events = [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n") if line]
    assert [list(e) for e in events if "error" in e] == [["error"]] and "error" in events[-1]
    assert events[-1]["error"]["code"] == "engine_dead"
    assert "[DONE]" not in response.text, "[DONE] would say that the reply is complete"


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_engine_that_fails_in_mid_reply_gives_a_status(serve: Serve, path: str, body: dict[str, Any]) -> None:
    response = serve(FakeEngine(fail_after=3)).post(path, {"model": MODEL, **body})
    assert response.status_code == 503 and response.json()["error"]["code"] == "engine_dead"


def test_fault_of_ours_is_a_500_without_details(serve: Serve) -> None:
    engine = FakeEngine(fail_after=0, error=RuntimeError("secret"))
    server = serve(engine)
    for stream in (False, True):
        response = server.complete(stream=stream)
        assert response.status_code == 500 and "secret" not in response.text
        assert response.json()["error"]["code"] == "internal_error"
    engine.fail_after = 2
    response = server.complete(stream=True)
    assert "secret" not in response.text and "internal_error" in response.text


def test_headers_of_a_stream(server: Running) -> None:
    headers = server.complete(stream=True).headers
    assert headers["content-type"].startswith("text/event-stream")
    assert headers["cache-control"] == "no-cache"


def test_event_is_one_line_for_every_reader() -> None:
    text = "a\u2028b\u2029c\x85d\ne\r\x0b\x0c\x1c é 🎉"
    raw = event({"text": text})
    assert len(raw.decode().splitlines()) == 2
    assert json.loads(raw.decode().removeprefix("data: ")) == {"text": text}


class Stream:
    """A stream that says how it ended."""

    def __init__(self, deltas: list[RequestDelta | Exception], *, stay: bool = False) -> None:
        self.closed = False
        self._deltas = deltas
        self._stay = stay

    async def run(self) -> AsyncGenerator[RequestDelta, None]:
        try:
            for delta in self._deltas:
                await asyncio.sleep(0)
                if isinstance(delta, Exception):
                    raise delta
                yield delta
            if self._stay:
                await asyncio.Event().wait()
        finally:
            self.closed = True


def run(work: Callable[[], Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work(), 20))


def test_merge_loses_nothing_and_keeps_the_order_of_each_stream() -> None:
    streams = [Stream([RequestDelta(0, f"{i}.{k}") for k in range(i * 3)]) for i in range(5)]

    async def work() -> list[tuple[int, str]]:
        return [(i, delta.text) async for i, delta in merge([stream.run() for stream in streams])]

    seen = run(work)
    for i in range(5):
        assert [text for j, text in seen if j == i] == [f"{i}.{k}" for k in range(i * 3)]


def test_error_of_one_stream_closes_all() -> None:
    streams = [
        Stream([RequestDelta(0, "a")], stay=True),
        Stream([EngineDeadError("dead")]),
        Stream([RequestDelta(0, "b")], stay=True),
    ]

    async def work() -> None:
        async with aclosing(merge([stream.run() for stream in streams])) as merged:
            async for _ in merged:
                pass

    with pytest.raises(EngineDeadError):
        run(work)
    assert all(stream.closed for stream in streams)


@pytest.mark.parametrize("count", [1, 3])
def test_closing_the_merged_stream_closes_all(count: int) -> None:
    streams = [Stream([RequestDelta(0, "a")], stay=True) for _ in range(count)]

    async def work() -> None:
        async with aclosing(merge([stream.run() for stream in streams])) as merged:
            for _ in range(count):
                await anext(merged)

    run(work)
    assert all(stream.closed for stream in streams)


def test_work_is_cancelled_when_the_client_leaves_or_the_server_stops() -> None:
    async def work() -> list[str]:
        ended: list[str] = []

        async def long() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("work")

        async def gone() -> dict[str, Any]:
            return {"type": "http.disconnect"}

        async def stays() -> dict[str, Any]:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("watcher")
            return {}

        with pytest.raises(ClientDisconnect):
            await until_disconnect(gone, long())
        task = asyncio.ensure_future(until_disconnect(stays, long()))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return ended

    assert sorted(run(work)) == ["watcher", "work", "work"]


def test_scores_are_waited_for() -> None:
    gate = ScoreGate(wait=True)
    early, first = RequestDelta(1, "b", finish_reason="stop"), RequestDelta(0, "a", prompt_logprobs=(None,))
    assert gate.pass_on(early) == []
    assert gate.pass_on(first) == [early, first]
    assert gate.scores == (None,)
    assert gate.pass_on(early) == [early]
    lost = ScoreGate(wait=True)
    assert lost.pass_on(early) == [] and lost.flush() == [early]
