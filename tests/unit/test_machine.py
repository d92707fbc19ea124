"""What a container may use: the limits of cgroups, both versions, on a made-up /proc and /sys."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from octavo.engine.machine import available_memory_bytes, usable_cpus

GIB = 2**30


def machine(root: Path, cgroup: str, **files: str) -> Path:
    """A root with 64 GiB of free memory, where the process is in `cgroup`. files: path below /sys/fs/cgroup -> content."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {64 * 2**20} kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, content in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    return root


def v2(group: str, limit: int | str, used: int, cached: int = 0) -> dict[str, str]:
    return {
        f"{group}memory.max": str(limit),
        f"{group}memory.current": str(used),
        f"{group}memory.stat": f"anon 7\ninactive_file {cached // 2}\nactive_file {cached - cached // 2}",
    }


def v1(group: str, limit: int, used: int, cached: int = 0) -> dict[str, str]:
    return {
        f"memory{group}/memory.limit_in_bytes": str(limit),
        f"memory{group}/memory.usage_in_bytes": str(used),
        f"memory{group}/memory.stat": f"inactive_file 1\ntotal_inactive_file {cached}\ntotal_active_file 0",
    }


def test_without_a_limit_all_free_memory_is_available(tmp_path: Path) -> None:
    assert available_memory_bytes(machine(tmp_path / "a", "0::/\n")) == 64 * GIB
    assert available_memory_bytes(machine(tmp_path / "b", "0::/\n", **v2("", "max", GIB))) == 64 * GIB
    unlimited = v1("", 2**63 - 4096, GIB)
    assert available_memory_bytes(machine(tmp_path / "c", "4:memory:/\n0::/\n", **unlimited)) == 64 * GIB


def test_a_memory_limit_of_either_version_counts(tmp_path: Path) -> None:
    assert available_memory_bytes(machine(tmp_path / "a", "0::/\n", **v2("", 4 * GIB, GIB))) == 3 * GIB
    limited = v1("", 4 * GIB, GIB)
    # Inside a container the path is that of the host, and the tree that is seen begins at the container.
    listed = "5:cpu,cpuacct:/docker/1\n4:memory:/docker/1\n"
    assert available_memory_bytes(machine(tmp_path / "b", listed, **limited)) == 3 * GIB


def test_the_tightest_group_on_the_way_up_counts(tmp_path: Path) -> None:
    groups = {**v2("system/octavo/", "max", GIB), **v2("system/", 8 * GIB, 2 * GIB), **v2("other/", GIB, GIB)}
    assert available_memory_bytes(machine(tmp_path, "0::/system/octavo\n", **groups)) == 6 * GIB


@pytest.mark.parametrize("group", [v2("", 4 * GIB, 4 * GIB, 3 * GIB), v1("", 4 * GIB, 4 * GIB, 3 * GIB)])
def test_cached_file_pages_are_free(tmp_path: Path, group: dict[str, str]) -> None:
    assert available_memory_bytes(machine(tmp_path, "4:memory:/\n0::/\n", **group)) == 3 * GIB


@pytest.mark.parametrize(
    "files",
    [
        {"cpu.max": "150000 100000"},
        {"cpu/cpu.cfs_quota_us": "150000", "cpu/cpu.cfs_period_us": "100000"},
    ],
)
def test_a_cpu_quota_of_either_version_counts(tmp_path: Path, files: dict[str, str]) -> None:
    assert usable_cpus(machine(tmp_path, "5:cpu,cpuacct:/docker/1\n0::/\n", **files)) == 1


@pytest.mark.parametrize(
    "files",
    [{"cpu.max": "max 100000"}, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}],
)
def test_without_a_quota_the_affinity_mask_counts(tmp_path: Path, files: dict[str, str]) -> None:
    assert usable_cpus(machine(tmp_path, "1:cpu:/\n0::/\n", **files)) == len(os.sched_getaffinity(0))
