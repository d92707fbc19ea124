"""What happens when a process dies, hangs, cannot start, or is told to stop. Real processes, a tiny model."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from server_process import ServerProcess

LONG = {"prompt": "Once upon a time", "max_tokens": 1500, "temperature": 0, "ignore_eos": True}


def complete(server: ServerProcess, model: str, **body) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json={"model": model, **body}, timeout=120)


def first_event(server: ServerProcess, model: str, started: threading.Event, **body) -> list[str]:
    """Read a stream to its end; `started` is set when the first event is in."""
    lines = []
    url = f"{server.url}/v1/completions"
    with httpx.stream("POST", url, json={"model": model, "stream": True, **body}, timeout=120) as response:
        for line in response.iter_lines():
            if line:
                lines.append(line)
                started.set()
    return lines


def test_a_killed_engine_fails_requests_in_flight_at_once_and_turns_health_red(tiny):
    with (
        ServerProcess(tiny, "--threads", "1", "--served-model-name", "m") as server,
        ThreadPoolExecutor(2) as pool,
    ):
        started = threading.Event()
        stream = pool.submit(first_event, server, "m", started, **LONG)
        plain = pool.submit(complete, server, "m", **LONG)
        assert started.wait(60)
        os.kill(server.engine_pid(), signal.SIGKILL)
        events = stream.result(30)
        assert any('"error"' in line and "SIGKILL" in line for line in events)
        reply = plain.result(30)
        assert reply.status_code >= 500 and "SIGKILL" in reply.json()["error"]["message"]
        health = httpx.get(f"{server.url}/health")
        assert health.status_code == 503 and "SIGKILL" in health.text
        assert complete(server, "m", prompt="Hi", max_tokens=1).status_code >= 500
        server.process.send_signal(signal.SIGTERM)
        server.wait()
        assert "SIGKILL" in [line for line in server.lines if line][-1]


def test_a_stopped_engine_with_work_turns_health_red_and_a_running_one_green_again(tiny):
    with ServerProcess(
        tiny, "--threads", "1", "--served-model-name", "m", "--stall-timeout-s", "1"
    ) as server:
        started = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            stream = pool.submit(first_event, server, "m", started, **LONG)
            assert started.wait(60)
            os.kill(server.engine_pid(), signal.SIGSTOP)
            statuses = poll_health(server, until=503)
            assert statuses[-1] == 503
            os.kill(server.engine_pid(), signal.SIGCONT)
            assert poll_health(server, until=200)[-1] == 200
            assert stream.result(120)[-1] == "data: [DONE]"


def poll_health(server: ServerProcess, until: int) -> list[int]:
    """Ask until the answer is `until`, for some thousand times at most (each takes about a millisecond)."""
    statuses: list[int] = []
    with httpx.Client() as client:
        while len(statuses) < 20_000 and (not statuses or statuses[-1] != until):
            statuses.append(client.get(f"{server.url}/health").status_code)
    return statuses


def test_sigterm_lets_running_requests_finish_and_exits_with_0(tiny):
    with (
        ServerProcess(tiny, "--threads", "1", "--served-model-name", "m") as server,
        ThreadPoolExecutor(1) as pool,
    ):
        started = threading.Event()
        stream = pool.submit(first_event, server, "m", started, **{**LONG, "max_tokens": 300})
        assert started.wait(60)
        server.process.send_signal(signal.SIGTERM)
        events = stream.result(60)
        assert events[-1] == "data: [DONE]" and '"finish_reason":"length"' in "".join(events)
        assert server.wait() == 0


def test_while_requests_finish_after_sigterm_new_ones_get_503(tiny):
    with (
        ServerProcess(tiny, "--threads", "1", "--served-model-name", "m") as server,
        ThreadPoolExecutor(1) as pool,
    ):
        started = threading.Event()
        stream = pool.submit(first_event, server, "m", started, **LONG)
        assert started.wait(60)
        server.process.send_signal(signal.SIGTERM)
        assert poll_health(server, until=503)[-1] == 503
        refused = complete(server, "m", prompt="Hi", max_tokens=1)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
        assert stream.result(120)[-1] == "data: [DONE]"
        assert server.wait() == 0


def test_what_still_runs_when_draining_is_over_gets_an_error(tiny):
    flags = ("--threads", "1", "--served-model-name", "m", "--drain-timeout-s", "0")
    with ServerProcess(tiny, *flags) as server, ThreadPoolExecutor(2) as pool:
        started = threading.Event()
        stream = pool.submit(first_event, server, "m", started, **LONG)
        plain = pool.submit(complete, server, "m", **LONG)
        assert started.wait(60)
        while server.metric("octavo_requests_running") < 2:
            pass
        server.process.send_signal(signal.SIGTERM)
        assert '"error"' in stream.result(30)[-1] and "stopping" in stream.result(30)[-1]
        assert plain.result(30).status_code == 503
        assert server.wait() == 0 and "Traceback" not in "\n".join(server.lines)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_no_engine_is_left_when_the_server_ends_while_it_starts(tiny, how):
    with ServerProcess(tiny, "--threads", "1", expect_ready=False) as server:
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
        while not children.read_text():
            assert server.process.poll() is None
        engine = os.pidfd_open(server.engine_pid())
        server.process.send_signal(how)
        assert server.process.wait(30) == (0 if how is signal.SIGTERM else -signal.SIGKILL)
        assert select.select([engine], [], [], 60)[0], "the engine outlives its server"


def test_the_engine_goes_when_the_server_is_killed(tiny):
    with ServerProcess(tiny, "--threads", "1") as server:
        engine = os.pidfd_open(server.engine_pid())
        server.process.kill()
        server.process.wait()
        assert select.select([engine], [], [], 20)[0], "the engine outlives its server"


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 100), "model.safetensors"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer"),
    ],
)
def test_a_start_that_fails_ends_with_the_root_cause(tiny, tmp_path, break_it, words):
    import shutil

    folder = shutil.copytree(tiny, tmp_path / "broken")
    break_it(folder)
    with ServerProcess(folder, expect_ready=False) as server:
        assert server.wait() == 1
        assert words in server.lines[-1] and "Traceback" not in "\n".join(server.lines)


def test_no_memory_for_the_pool_is_one_line_that_names_what_fits(tiny):
    with ServerProcess(tiny, "--threads", "1", "--num-blocks", "100000000", expect_ready=False) as server:
        assert server.wait() == 2
        assert "--num-blocks" in server.lines[-1] and "Traceback" not in "\n".join(server.lines)


def test_a_port_in_use_is_one_line(tiny):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with ServerProcess(tiny, "--threads", "1", "--port", str(port), expect_ready=False) as server:
            assert server.wait() == 2
            assert str(port) in server.lines[-1]


def test_a_client_that_leaves_frees_its_blocks(tiny_server):
    body = b'{"model":"tiny","prompt":"Hello","max_tokens":200,"ignore_eos":true,"stream":%s}'
    host, port = tiny_server.url.removeprefix("http://").split(":")
    before = tiny_server.metric("octavo_requests_finished_total", '{reason="abort"}')
    for stream in (b"true", b"false"):
        with socket.create_connection((host, int(port))) as connection:
            data = body % stream
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data
            )
            while tiny_server.metric("octavo_blocks_used") == 0:
                pass
    for _ in range(2000):
        if tiny_server.metric("octavo_blocks_used") == 0:
            break
    assert tiny_server.metric("octavo_blocks_used") == tiny_server.metric("octavo_requests_running") == 0
    assert tiny_server.metric("octavo_requests_finished_total", '{reason="abort"}') == before + 2


def test_what_can_never_fit_is_refused_while_others_are_served(tiny_server):
    # The pool holds 512 tokens, the context 256: ask for more than each.
    too_long = complete(tiny_server, "tiny", prompt=[5] * 300, max_tokens=5)
    assert too_long.status_code == 400
    error = too_long.json()["error"]
    assert (
        error["code"] == "context_length_exceeded" and "305" in error["message"] and "256" in error["message"]
    )
    assert complete(tiny_server, "tiny", prompt="Hi", max_tokens=2).status_code == 200
