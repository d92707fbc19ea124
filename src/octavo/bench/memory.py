"""Memory of a process and all its descendants, out of /proc, while a benchmark runs.

Resident memory (RSS) counts a page once for each process that maps it; proportional memory (PSS) splits it among them.
RSS is read twice a second, which costs little. Reading PSS makes the kernel walk all page tables, so it is read only when
RSS has grown by a twentieth since, and at the end.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from octavo.errors import ConfigError

_PERIOD_S = 0.5
_GROWTH_RATIO = 1.05
_PROC = Path("/proc")


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Highest values seen, in bytes, of all processes together."""

    peak_rss_bytes: int
    peak_pss_bytes: int


def process_tree(pid: int) -> list[int]:
    """`pid` and all its living descendants. Cost: one read for each process of the machine."""
    children: dict[int, list[int]] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            # A process may end while we look.
            with suppress(OSError, IndexError):
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for member in found:
        found += children.get(member, [])
    return found


def rss_bytes(pids: list[int]) -> int:
    """Resident memory of these processes together."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            total += int((_PROC / str(pid) / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return total


def pss_bytes(pids: list[int]) -> int:
    """Proportional memory of these processes together."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            for line in (_PROC / str(pid) / "smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total


class MemoryWatch:
    """Watches the tree of `pid` while it is entered (asynchronously); `use` has what it saw.

    Raises ConfigError for a process that is not there.
    """

    def __init__(self, pid: int) -> None:
        if not (_PROC / str(pid) / "statm").exists():
            raise ConfigError(
                f"--server-pid is {pid}, but /proc has no such process; give the server's own id"
            )
        self._pid = pid
        self._peak_rss = 0
        self._peak_pss = 0
        self._rss_at_pss = 0.0
        self._task: asyncio.Task[None] | None = None

    @property
    def use(self) -> MemoryUse:
        return MemoryUse(peak_rss_bytes=self._peak_rss, peak_pss_bytes=self._peak_pss)

    async def __aenter__(self) -> MemoryWatch:
        self._look()
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._look(always_pss=True)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_PERIOD_S)
            self._look()

    def _look(self, *, always_pss: bool = False) -> None:
        pids = process_tree(self._pid)
        rss = rss_bytes(pids)
        self._peak_rss = max(self._peak_rss, rss)
        if always_pss or rss > _GROWTH_RATIO * self._rss_at_pss:
            self._peak_pss = max(self._peak_pss, pss_bytes(pids))
            self._rss_at_pss = max(self._rss_at_pss, rss)
