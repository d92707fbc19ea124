"""What everything is measured on: the machine, memory to compare with, and how long a case may take."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.kernels.library import load
from octavo.kernels.machine import Machine

# Taken for the last-level cache where the system does not tell.
_UNKNOWN_CACHE_BYTES = 2**26
# Memory so many times as large as all caches leaves nothing of itself in them for the next pass.
_STREAM_CACHES = 4


@dataclass(frozen=True)
class Workbench:
    """cache_bytes: of all last-level caches together. stream: native memory that is read and copied. seconds: for a case."""

    machine: Machine
    cache_bytes: int
    stream: Any
    seconds: float


def make_workbench(machine: Machine, seconds: float) -> Workbench:
    """Reserves memory of eight times the caches, half to be read, half to be written."""
    cache_bytes = last_level_cache_bytes()
    return Workbench(machine, cache_bytes, load().make_stream(_STREAM_CACHES * cache_bytes), seconds)


def last_level_cache_bytes(root: Path = Path("/")) -> int:
    """Bytes of the last-level caches that the CPUs of this process have, each counted once. root: moved by tests."""
    caches: dict[tuple[int, str], int] = {}
    for cpu in sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else ():
        for folder in (root / f"sys/devices/system/cpu/cpu{cpu}/cache").glob("index*"):
            try:
                level = int((folder / "level").read_text())
                shared_by = (folder / "shared_cpu_list").read_text().strip()
                caches[level, shared_by] = _size((folder / "size").read_text().strip())
            except (OSError, ValueError):
                continue
    last = max((level for level, _ in caches), default=0)
    total = sum(size for (level, _), size in caches.items() if level == last)
    return total or _UNKNOWN_CACHE_BYTES


def _size(text: str) -> int:
    """
    >>> _size("32768K")
    33554432
    """
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    return int(text.rstrip("KMG")) * units.get(text[-1:], 1)
