"""What this machine offers: CPUs that may be used, their features, and memory that is free. Linux; no torch.

Containers count: affinity masks, cgroup CPU quotas and cgroup memory limits are respected, of both cgroup versions, and of
every group between the process and the root that can be seen. `root` is where /proc and /sys lie; only tests move it.

    version 2   0::/path             /sys/fs/cgroup/path/memory.max                     one tree
    version 1   4:memory:/path       /sys/fs/cgroup/memory/path/memory.limit_in_bytes   one tree for each controller
"""

from __future__ import annotations

import os
from collections.abc import Iterator
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
_ROOT = Path("/")


def patient_threads() -> dict[str, str]:
    """Environment for a process that computes: its threads sleep while they wait for each other.

    By default they spin. On a machine that has anything else to do, and a server's HTTP process is enough, a thread that
    spins keeps the core from the very thread it waits for: decode steps took ten times as long (benchmarks/README.md).
    """
    return {"OMP_WAIT_POLICY": "PASSIVE"}


def usable_cpus(root: Path = _ROOT) -> int:
    """CPUs this process may use: the affinity mask, cut down to the cgroup's quota."""
    count = len(os.sched_getaffinity(0))
    for group in _cgroups(root, "cpu"):
        quota = _read(group / "cpu.max").split()
        quota = quota or [_read(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        if len(quota) == 2 and all(number.isdigit() for number in quota):  # not "max" and not -1
            count = min(count, max(1, int(quota[0]) // int(quota[1])))
    return count


def cpu_features() -> tuple[str, ...]:
    """The notable instruction sets that this CPU has."""
    for line in _read(_ROOT / "proc/cpuinfo").splitlines():
        if line.startswith("flags"):
            flags = set(line.split(":", 1)[1].split())
            return tuple(feature for feature in _NOTABLE_FEATURES if feature in flags)
    return ()


def available_memory_bytes(root: Path = _ROOT) -> int:
    """Memory that can be used without pushing anything out: the machine's, or what the tightest cgroup limit leaves."""
    available = 0
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    return int(min([available, *(_memory_left(group) for group in _cgroups(root, "memory"))]))


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """The cgroups that `controller` limits this process by, from its own one up. Some may not be there to be read:
    inside a container the process may be listed under its path outside."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if controllers else "")
        group = top / path.lstrip("/")
        while group != top:
            yield group
            group = group.parent
        yield top


def _memory_left(group: Path) -> float:
    """Bytes up to the limit of a cgroup; infinite without one. Cached file pages count as free: they give way."""
    limit = _read(group / "memory.max") or _read(group / "memory.limit_in_bytes")
    used = _read(group / "memory.current") or _read(group / "memory.usage_in_bytes")
    if not (limit.strip().isdigit() and used.strip().isdigit()):
        return float("inf")
    stat = dict(line.split(" ", 1) for line in _read(group / "memory.stat").splitlines() if " " in line)
    # Version 1 counts descendants under names of their own; version 2 always does.
    prefix = "total_" if "total_inactive_file" in stat else ""
    cached = sum(int(stat.get(f"{prefix}{name}_file", 0)) for name in ("active", "inactive"))
    return max(0, int(limit) - max(0, int(used) - cached))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
