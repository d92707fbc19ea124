"""A real server process: `octavo serve` as a user starts it, on a free port."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType

import httpx

_READY = re.compile(r"ready\s+(http://\S+)/v1")


class ServerProcess:
    """`octavo serve MODEL --port 0 FLAGS...`; usable once entered, killed when left.

    lines: everything it printed so far, standard error included.
    """

    def __init__(self, model: Path | str, *flags: str, expect_ready: bool = True) -> None:
        command = [sys.executable, "-m", "octavo.cli", "serve", str(model), "--port", "0", *flags]
        self.lines: list[str] = []
        self.url = ""
        self._ready = threading.Event()
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if expect_ready:
            self._ready.wait(120)
            assert self.url, f"the server did not get ready: {self.lines}"

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def wait(self, timeout_s: float = 60) -> int:
        """Wait for its end and for all it printed; returns the exit code."""
        code = self.process.wait(timeout_s)
        self._reader.join(10)
        return code

    def engine_pid(self) -> int:
        """The process id of the engine process, its only child."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        (child,) = children
        return int(child)

    def metric(self, name: str, labels: str = "") -> float:
        """The value of one sample of /metrics."""
        page = httpx.get(f"{self.url}/metrics").text
        found = re.search(rf"^{re.escape(name + labels)} (\S+)$", page, re.MULTILINE)
        assert found, f"no {name}{labels} in /metrics"
        return float(found[1])

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            found = _READY.match(line)
            if found:
                self.url = found[1]
                self._ready.set()
        self._ready.set()
