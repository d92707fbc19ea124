"""What the machine can do at most: bytes per second from memory, operations per second on registers.

Measured with all threads and the kernels' own instructions (csrc/kernels/limits.h), before and after everything else: what
ran beside the one measurement may be gone in the other. The rate of memory is measured beside each kernel as well
(`measured.py`), for on a machine that others share it changes from second to second.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from octavo.kernels.library import load
from octavo.kernels.packed import Format
from octavo.roofline.workbench import Workbench

_KINDS = {Format.FLOAT32: "float32", Format.BFLOAT16: "bfloat16", Format.INT8: "int8"}
# Everything is judged by the limits, so they get the time of so many cases each.
_LIMIT_CASES = 3


@dataclass(frozen=True)
class Limits:
    """The best that was seen. cache_bytes: of all last-level caches. Rates are those of all threads, per second.

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


def measure_limits(bench: Workbench) -> Limits:
    """Measure each limit for as long as a few cases."""
    native, handle, seconds = load(), bench.machine.handle, _LIMIT_CASES * bench.seconds
    return Limits(
        bench.cache_bytes,
        max(memory_rates(bench, native.read_rate, seconds)),
        max(memory_rates(bench, native.copy_rate, seconds)),
        {name: max(native.peak_rates(handle, int(kind), seconds)) for kind, name in _KINDS.items()},
    )


def memory_rates(bench: Workbench, rate: Callable[[Any, Any, int], float], seconds: float) -> list[float]:
    """What `rate` says of as many rounds as fit into `seconds`, at least three."""
    rates: list[float] = []
    began = time.perf_counter()
    while len(rates) < 3 or time.perf_counter() - began < seconds:
        rates.append(rate(bench.machine.handle, bench.stream, len(rates)))
    return rates
