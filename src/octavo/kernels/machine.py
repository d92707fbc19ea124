"""The threads that compute, with the kernels they run: made once, at start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo.kernels.library import choose_isa, load


@dataclass(frozen=True)
class Machine:
    """handle: the native object. isa: the instruction set in use. num_threads: all of them, the caller's included."""

    handle: Any
    isa: str
    num_threads: int


def make_machine(num_threads: int, isa: str = "auto") -> Machine:
    """Threads are started here and sleep until they are needed. Raises ConfigError for a set this CPU cannot run."""
    chosen = choose_isa(isa)
    return Machine(load().make_machine(num_threads, chosen), chosen, num_threads)
