"""A server as a child process: started on a free port, waited for, stopped with all that it started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from peer import PeerError, Start

_POLL_S = 0.1
_STOP_TIMEOUT_S = 30
_TAIL_LINES = 25


@dataclass(frozen=True)
class Running:
    """A server that takes requests. ready_s: from its start until it did."""

    url: str
    pid: int
    ready_s: float


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(start: Start, port: int, log: Path, timeout_s: float) -> Iterator[Running]:
    """The server while the context lasts. Raises PeerError with the end of its log if it does not become ready."""
    env = {**os.environ, **start.env}
    with log.open("ab") as sink:
        began = time.perf_counter()
        # A session of its own, so that what it starts can be ended with it.
        process = subprocess.Popen(
            start.command, env=env, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(process, url + start.ready_path, log, began + timeout_s)
        yield Running(url, process.pid, time.perf_counter() - began)
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ask it to end, wait, then end whatever of its session is left."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_TIMEOUT_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def log_tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])


def _wait(process: subprocess.Popen[bytes], url: str, log: Path, deadline: float) -> None:
    while True:
        if process.poll() is not None:
            raise PeerError(f"the server ended with {process.returncode}; the end of {log}:\n{log_tail(log)}")
        if time.perf_counter() > deadline:
            raise PeerError(
                f"the server was not ready in time (--start-timeout-s); the end of {log}:\n{log_tail(log)}"
            )
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(_POLL_S)
