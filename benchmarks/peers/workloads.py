"""Which workloads there are and how each is sent. Why they are as they are: `../workloads/README.md`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from octavo.bench.load import Load

FOLDER = Path(__file__).parents[1] / "workloads"
WARMUP = FOLDER / "warmup.jsonl"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One workload under one load. key: its name in the table. batch_size: how many a static batch may hold."""

    key: str
    title: str
    file: Path
    load: Load
    batch_size: int = 32

    @property
    def is_open_loop(self) -> bool:
        return self.load.rate is not None


def _case(key: str, file: str, title: str, load: Load, batch_size: int = 32) -> Case:
    return Case(key=key, title=title, file=FOLDER / f"{file}.jsonl", load=load, batch_size=batch_size)


def cases(keys: list[str], rates: list[float]) -> list[Case]:
    """The cases of these workloads in their order; w5 is one for each rate. Raises KeyError for an unknown one."""
    every = {
        "w1": [_case("w1", "w1_chat_offline", "96 chats at once", Load())],
        "w2": [_case("w2", "w2_shared_prefix", "64 prompts that share 768 tokens", Load())],
        "w3": [_case("w3", "w3_single_stream", "one at a time, 128 in, 256 out", Load(concurrency=1), 1)],
        "w4": [_case("w4", "w4_long_prefill", "one at a time, 4,096 in, 16 out", Load(concurrency=1), 1)],
        "w5": [
            _case(f"w5@{rate:g}", "w5_online", f"chats, {rate:g} a second (Poisson)", Load(rate=rate))
            for rate in rates
        ],
        "w6": [_case("w6", "w6_parallel_n4", "16 prompts, 4 answers each", Load())],
    }
    return [case for key in keys for case in every[key]]
