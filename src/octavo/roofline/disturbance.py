"""How much did other programs take part in a measurement? What the kernel says of this process's threads, on Linux.

A thread that could run and had no CPU waited. On a machine of one's own that hardly happens; where it does, the best rounds
are still told apart from the rest, but long ones have no undisturbed round.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_THREADS = Path("/proc/self/task")


@dataclass(frozen=True)
class CpuTimes:
    """Of all threads that live: time on a CPU, and time of waiting for one."""

    ran_ns: int
    waited_ns: int


def cpu_times(threads: Path = _THREADS) -> CpuTimes | None:
    """The times so far; None where the system does not tell. threads: moved by tests."""
    ran = waited = 0
    try:
        for thread in threads.iterdir():
            fields = (thread / "schedstat").read_text().split()
            ran, waited = ran + int(fields[0]), waited + int(fields[1])
    except (OSError, ValueError, IndexError):
        return None
    return CpuTimes(ran, waited)


def waited_ratio(before: CpuTimes | None, after: CpuTimes | None) -> float | None:
    """Of the time in which threads wanted a CPU, the share in which they had none.

    >>> waited_ratio(CpuTimes(100, 0), CpuTimes(400, 100))
    0.25
    """
    if before is None or after is None:
        return None
    ran, waited = after.ran_ns - before.ran_ns, after.waited_ns - before.waited_ns
    return max(0.0, waited / (ran + waited)) if ran + waited > 0 else None
