"""Keys, health, shutdown, CORS, models, the tokenizer's routes, and what the process loads."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fake_engine import FakeEngine
from server_harness import MODEL, Running, Serve, refused

ROOT = Path(__file__).resolve().parents[2]
GUARDED = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("GET", f"/v1/models/{MODEL}"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/metrics"),
    ("GET", "/nothing"),
    ("GET", "/openapi.json"),
    ("GET", "//health"),
]


def test_every_route_but_health_and_version_needs_the_key(serve: Serve) -> None:
    server = serve(api_key="schlüssel")
    right = "schlüssel".encode()
    wrong = (None, b"", b"Bearer", b"Bearer wrong", right, b"Basic " + right, b"Bearer " + right + b"x")
    for method, path in GUARDED:
        for header in wrong:
            headers = {} if header is None else {"authorization": header}
            response = server.http.request(method, path, headers=headers, content=b"{}")
            refused(response, status=401, code="invalid_api_key")
        for scheme in (b"Bearer ", b"bearer "):
            headers = {"authorization": scheme + right}
            assert server.http.request(method, path, headers=headers, content=b"{}").status_code != 401
    assert server.engine.requests == []


def test_odd_bytes_in_the_key_are_just_wrong(serve: Serve) -> None:
    server = serve(api_key="key")
    for odd in (b"Bearer \xc3\xa9", b"Bearer \xff\xfe", b"\xff", b"Bearer " + b"x" * 10_000):
        refused(server.http.get("/v1/models", headers={"authorization": odd}), status=401)


def test_health_and_version_are_open(serve: Serve) -> None:
    server = serve(api_key="key")
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/version").json()["version"]


def test_health_tells_the_reason(serve: Serve) -> None:
    server = serve()
    assert server.http.get("/health").json() == {"status": "ok"}
    assert server.http.head("/health").status_code == 200
    server.engine.reason_unwell = "no step for 30 s"
    response = server.http.get("/health")
    assert response.status_code == 503 and response.json()["reason"] == "no step for 30 s"
    assert response.json()["error"]["message"] == "no step for 30 s"
    assert server.http.head("/health").status_code == 503


def test_stopping_server_refuses_new_requests_and_finishes_running_ones(serve: Serve) -> None:
    server = serve(FakeEngine(says="Hello"))
    with server.http.stream(
        "POST", "/v1/completions", json={"model": MODEL, "prompt": "Hi", "stream": True}
    ) as running:
        server.app.state.shutting_down = True
        refused(server.complete(), status=503, code="shutting_down")
        refused(server.chat(stream=True), status=503, code="shutting_down")
        refused(server.http.get("/v1/models"), status=503)
        assert server.http.get("/health").status_code == 503
        assert server.http.get("/metrics").status_code == 200
        assert b"[DONE]" in running.read()


def test_models(server: Running) -> None:
    (card,) = server.http.get("/v1/models").json()["data"]
    assert card["id"] == MODEL and card["object"] == "model" and type(card["created"]) is int
    assert server.http.get(f"/v1/models/{MODEL}").json() == card
    assert server.http.get(f"/v1/models/{MODEL.replace('/', '%2F')}").json() == card
    for other in ("nope", "nope/nope", "", "org", "%F0%9F%8E%89", "%ff"):
        refused(server.http.get(f"/v1/models/{other}"), "model", 404, "model_not_found")


def test_served_names_replace_the_model_s_own(serve: Serve) -> None:
    server = serve(served_model_names=("alpha", "be/ta"))
    assert [card["id"] for card in server.http.get("/v1/models").json()["data"]] == ["alpha", "be/ta"]
    for name in ("alpha", "be/ta"):
        assert server.complete(model=name).json()["model"] == name
        assert server.chat(model=name).json()["model"] == name
    refused(server.complete(), "model", 404)


def test_cors(serve: Serve) -> None:
    ask = {"origin": "http://here", "access-control-request-method": "POST"}
    off = serve()
    assert off.http.options("/v1/completions", headers=ask).status_code == 405
    on = serve(api_key="key", allowed_origins=("http://here",))
    response = on.http.options("/v1/completions", headers=ask)
    assert response.status_code == 200 and response.headers["access-control-allow-origin"] == "http://here"
    assert on.http.options("/v1/completions", headers={**ask, "origin": "http://there"}).status_code == 400
    refusal = on.http.get("/v1/models", headers={"origin": "http://here"})
    assert refusal.status_code == 401 and refusal.headers["access-control-allow-origin"] == "http://here"


def test_tokenize_and_back(server: Running) -> None:
    text = " 🎉 日本語 naïve\n\n  x"
    for field in ("prompt", "content"):
        reply = server.post("/tokenize", {"model": MODEL, field: text}).json()
        assert reply == {"tokens": list(text.encode()), "count": len(text.encode()), "max_model_len": 512}
    assert server.post("/tokenize", {"prompt": text, "content": text}).status_code == 200
    assert server.post("/detokenize", {"tokens": reply["tokens"]}).json() == {"prompt": text}
    assert server.post("/detokenize", {"tokens": [256]}).json() == {"prompt": "<|end|>"}
    assert server.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}
    assert server.post("/tokenize", {"prompt": ""}).json()["tokens"] == []
    named = server.post("/tokenize", {"prompt": "ab", "return_token_strs": True}).json()
    assert named["token_strs"] == ["a", "b"]


def test_tokenize_a_chat(server: Running) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    count = server.post("/tokenize", {"messages": messages}).json()["count"]
    assert count == server.chat().json()["usage"]["prompt_tokens"]


def test_tokenizer_routes_refuse(server: Running) -> None:
    refused(server.post("/tokenize", {}), "prompt")
    refused(server.post("/tokenize", {"prompt": "a", "content": "b"}), "prompt")
    refused(server.post("/tokenize", {"prompt": "a", "messages": [{}]}), "prompt")
    refused(server.post("/tokenize", {"prompt": 5}), "prompt")
    refused(server.post("/tokenize", {"prompt": "a", "x": 1}), "x")
    refused(server.post("/tokenize", {"prompt": "a", "model": "nope"}), "model", 404)
    refused(server.post("/detokenize", {}), "tokens")
    for bad in ([-1], [259], [2**40], [2**70], ["a"], [True], 5, None):
        response = server.post("/detokenize", {"tokens": bad})
        refused(response)
        assert response.json()["error"]["param"].startswith("tokens")


@pytest.mark.parametrize(
    "raw",
    [
        b"GET /health HTTP/1.1\r\nHost: x\r\nAuthorization: \xff\xfe\r\nX: \x80\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"GET /v1/models/\xff HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /%ff%00?%ff HTTP/1.1\r\nHost: x\r\n\r\n",
        b"nonsense\r\n\r\n",
    ],
)
def test_odd_bytes_on_the_wire_are_not_a_fault_of_ours(server: Running, raw: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(raw)
        answer = connection.recv(1000)
    assert answer.startswith((b"HTTP/1.1 2", b"HTTP/1.1 4")), answer
    assert server.http.get("/health").status_code == 200


def test_http_process_loads_no_tensors() -> None:
    code = """
import sys
from fake_engine import FakeEngine
from octavo.server.app import create_app
from octavo.server.settings import ServerSettings
import uvicorn
create_app(FakeEngine(), ServerSettings())
print(sorted({"torch", "numpy", "transformers", "tokenizers"} & set(sys.modules)))
"""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests/server")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "[]\n", done.stderr
