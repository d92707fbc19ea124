"""What the machine can do at most: bytes per second from memory, operations per second on registers.

Both are measured with all threads and the kernels' own instructions (csrc/kernels/limits.h), before and after everything
else: what ran beside the one measurement may be gone in the other.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from octavo.kernels.library import load
from octavo.kernels.machine import Machine
from octavo.kernels.packed import Format

# Taken for the last-level cache where the system does not tell.
_UNKNOWN_CACHE_BYTES = 2**26
# A buffer so many times as large as all caches leaves nothing of itself in them for the next pass.
_BUFFER_CACHES = 4
_KINDS = {Format.FLOAT32: "float32", Format.BFLOAT16: "bfloat16", Format.INT8: "int8"}


@dataclass(frozen=True)
class Limits:
    """cache_bytes: of all last-level caches together. Rates are those of all threads together, per second.

    peak_operations: of each kind of number that weights are multiplied as; a multiply-add is two operations. copy counts
    what is read and what is written.
    """

    cache_bytes: int
    read_bytes: float
    copy_bytes: float
    peak_operations: dict[str, float]

    def peak_of(self, format: Format) -> float:
        """Operations per second of the numbers that a format is multiplied as: grouped formats are bytes."""
        return self.peak_operations[_KINDS[min(format, Format.INT8)]]

    def best_of(self, other: Limits) -> Limits:
        """The higher of each rate."""
        return Limits(
            self.cache_bytes,
            max(self.read_bytes, other.read_bytes),
            max(self.copy_bytes, other.copy_bytes),
            {kind: max(rate, other.peak_operations[kind]) for kind, rate in self.peak_operations.items()},
        )


def measure_limits(machine: Machine, seconds: float) -> Limits:
    """Measure each limit for so many seconds."""
    native, handle = load(), machine.handle
    cache_bytes = last_level_cache_bytes()
    buffer_bytes = _BUFFER_CACHES * cache_bytes
    return Limits(
        cache_bytes,
        max(native.read_rates(handle, buffer_bytes, seconds)),
        max(native.copy_rates(handle, buffer_bytes // 2, seconds)),
        {name: max(native.peak_rates(handle, int(kind), seconds)) for kind, name in _KINDS.items()},
    )


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
