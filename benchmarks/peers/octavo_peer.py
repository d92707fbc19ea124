"""Octavo itself, out of the environment that runs the driver."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo import __version__
from peer import Place, Start


class Octavo:
    """quantization: how it keeps its weights, beyond what `--octavo-args` says."""

    venv_name = ""
    extra_body: Mapping[str, Any] = {}

    def __init__(self, quantization: str = "none") -> None:
        self.name = "octavo" if quantization == "none" else f"octavo-{quantization}"
        self._flags = [] if quantization == "none" else ["--quantization", quantization]

    def install(self, place: Place) -> None:
        """Nothing: it is what runs the driver."""

    def version(self, place: Place) -> str:
        here = Path(__file__).parent
        found = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty"], capture_output=True, text=True
        )
        return f"{__version__} ({found.stdout.strip() or 'no git'})"

    def start(self, place: Place, port: int) -> Start:
        command = [sys.executable, "-m", "octavo.cli", "serve", str(place.gguf), "--port", str(port)]
        return Start(command=[*command, *self._flags, *place.octavo_flags], ready_path="/v1/models")
