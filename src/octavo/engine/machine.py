"""What this machine offers: CPUs that may be used, their features, and memory that is free. Linux; no torch.

Containers count: affinity masks, cgroup CPU quotas and cgroup memory limits are respected.
"""

from __future__ import annotations

import os
from pathlib import Path

# Features that decide which kernels run, in the kernel's spelling.
_NOTABLE_FEATURES = (
    "avx2",
    "fma",
    "avx512f",
    "avx512_bf16",
    "avx512_vnni",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
)
_CGROUP = Path("/sys/fs/cgroup")


def usable_cpus() -> int:
    """CPUs this process may use: the affinity mask, cut down to the cgroup's quota."""
    count = len(os.sched_getaffinity(0))
    quota = _read(_CGROUP / "cpu.max").split()
    if len(quota) == 2 and quota[0] != "max":
        count = min(count, max(1, int(quota[0]) // int(quota[1])))
    return count


def cpu_features() -> tuple[str, ...]:
    """The notable instruction sets that this CPU has."""
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("flags"):
            flags = set(line.split(":", 1)[1].split())
            return tuple(feature for feature in _NOTABLE_FEATURES if feature in flags)
    return ()


def available_memory_bytes() -> int:
    """Memory that can be used without pushing anything out: the machine's, or what the cgroup's limit leaves."""
    available = 0
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit, used = _read(_CGROUP / "memory.max").strip(), _read(_CGROUP / "memory.current").strip()
    if limit.isdigit() and used.isdigit():
        available = min(available, max(0, int(limit) - int(used)))
    return available


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
