"""transformers with static batches, in its own process and environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from models import make_hf_folder
from peer import Place, installed_version, make_venv
from pins import TRANSFORMERS

_BATCH_SIZE = 32


class Transformers:
    name = "transformers"
    venv_name = "transformers"
    extra_body: Mapping[str, Any] = {}

    def install(self, place: Place) -> None:
        make_venv(place, self.venv_name, TRANSFORMERS)
        make_hf_folder(place)

    def version(self, place: Place) -> str:
        return f"{installed_version(place, self.venv_name, 'transformers')}, static batches of {_BATCH_SIZE}"

    def command(self, place: Place, workload: Path, batch_size: int, time_limit_s: float) -> Sequence[str]:
        return [
            str(place.python(self.venv_name)),
            str(Path(__file__).with_name("static_batches.py")),
            "--model", str(make_hf_folder(place)),
            "--workload", str(workload),
            "--batch-size", str(min(batch_size, _BATCH_SIZE)),
            "--threads", str(place.num_cpus),
            "--time-limit-s", str(time_limit_s),
        ]  # fmt: skip
