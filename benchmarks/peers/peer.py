"""What the driver needs to know of a peer. Adding one is one file with one class, and one line in `registry.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


class PeerError(Exception):
    """A peer that cannot be installed, started or measured; the message says what to do."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where everything lies. venvs: a folder for each peer. models: made from the packaged model, once.

    octavo_flags: further flags of `octavo serve`.
    """

    venvs: Path
    gguf: Path
    num_cpus: int
    octavo_flags: tuple[str, ...] = ()

    def venv(self, name: str) -> Path:
        return self.venvs / name

    def python(self, name: str) -> Path:
        """The interpreter of a peer's own environment. Raises PeerError if it is not installed."""
        python = self.venv(name) / "bin" / "python"
        if not python.exists():
            raise PeerError(f"{name} is not installed in {self.venv(name)}; run: run.py install {name}")
        return python

    @property
    def hf_folder(self) -> Path:
        """The model as transformers and vLLM read it, in bfloat16."""
        return self.venvs / "models" / "hf-bfloat16"

    @property
    def bf16_gguf(self) -> Path:
        """The same as a GGUF file in bfloat16."""
        return self.venvs / "models" / "bfloat16.gguf"


@dataclass(frozen=True, kw_only=True)
class Start:
    """How a server is started. ready_path answers 200 once it takes requests. env: on top of the driver's own."""

    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    ready_path: str = "/health"


class Peer(Protocol):
    """A server to compare, or an engine that runs in its own process and takes the whole workload at once.

    name: what `--peers` calls it. venv_name: its environment, which peers may share. extra_body: fields for every request.
    """

    name: str
    venv_name: str
    extra_body: Mapping[str, Any]

    def install(self, place: Place) -> None:
        """Make its environment, and the model in its form."""

    def version(self, place: Place) -> str:
        """What is installed, for the table."""


class ServerPeer(Peer, Protocol):
    def start(self, place: Place, port: int) -> Start:
        """How to start it on a free port of this machine."""


class OfflinePeer(Peer, Protocol):
    def command(self, place: Place, workload: Path, batch_size: int, time_limit_s: float) -> Sequence[str]:
        """A program that answers a workload, and writes JSON as `static_batches.py` describes."""


def make_venv(place: Place, name: str, packages: Sequence[str], env: Mapping[str, str] | None = None) -> Path:
    """A fresh environment with these packages from the package index; returns its interpreter. Takes minutes."""
    venv = place.venv(name)
    print(f"installing {', '.join(packages)} into {venv}", flush=True)
    run([sys.executable, "-m", "venv", "--clear", str(venv)])
    python = venv / "bin" / "python"
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
    run(command, env)
    return python


def run(command: Sequence[str], env: Mapping[str, str] | None = None) -> str:
    """Run a program to its end and return what it wrote on stdout. Raises PeerError with its last lines if it fails."""
    done = subprocess.run(command, env={**os.environ, **(env or {})}, capture_output=True, text=True)
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise PeerError(f"{' '.join(command)} failed with {done.returncode}:\n{tail}")
    return done.stdout


def installed_version(place: Place, venv_name: str, package: str) -> str:
    """The version of a package in a peer's environment."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return run([str(place.python(venv_name)), "-c", code]).strip()
