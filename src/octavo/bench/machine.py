"""Where and with what a benchmark ran: what a reader needs to judge a figure, and to run it again."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("octavo", "aiohttp", "torch", "transformers")
# The features that decide how fast matrix products can be.
_CPU_FEATURES = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "bf16",
    "sve",
)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine and the programs of one benchmark. load_average: of one minute, before it began."""

    cpu: str
    cpu_features: tuple[str, ...]
    num_cpus: int
    memory_bytes: int
    system: str
    python: str
    packages: dict[str, str]
    load_average: float
    command: str
    began: str


def this_machine() -> Machine:
    """What this machine is now. The command is that of this process, with secrets left out."""
    cpu, features = _cpu()
    return Machine(
        cpu=cpu,
        cpu_features=features,
        num_cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        system=platform.platform(),
        python=platform.python_version(),
        packages=_versions(),
        load_average=os.getloadavg()[0],
        command=command_line(sys.argv),
        began=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def command_line(arguments: list[str]) -> str:
    """The command as one would type it; the program without its folder, and no API key.

    >>> command_line(["/home/me/bin/octavo", "bench", "--api-key", "secret"])
    'octavo bench --api-key ...'
    """
    shown, hide = [Path(arguments[0]).name], False
    for argument in arguments[1:]:
        name, _, value = argument.partition("=")
        shown.append("..." if hide else f"{name}=..." if name == "--api-key" and value else argument)
        hide = argument == "--api-key"
    return " ".join(word if word.endswith("...") else shlex.quote(word) for word in shown)


def _cpu() -> tuple[str, tuple[str, ...]]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine(), ()
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = {*fields.get("flags", "").split(), *fields.get("Features", "").split()}
    return fields.get("model name", platform.machine()), tuple(f for f in _CPU_FEATURES if f in flags)


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
