"""The native library: is it there, and which instruction sets of it can this CPU run?

It is built when Octavo is installed. Without a C++ compiler the install still succeeds, `missing()` says why there is no
library, and the reference backend serves. An instruction set is chosen once, at start: the best that the CPU has, or the one
that is asked for by name (to compare them, or to find out whether a fault lies in one).
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from octavo.errors import ConfigError

ISA_NAMES = ("amx", "avx512_bf16", "avx512", "avx2", "portable")


@cache
def load() -> Any:
    """The extension module. Raises ImportError if it was not built or does not fit this Python."""
    return importlib.import_module("octavo._native")


def missing() -> str | None:
    """Why the native kernels cannot be used; None if they can."""
    try:
        load()
    except ImportError as e:
        return f"the native kernels are not built ({e}); install a C++20 compiler and install Octavo again"
    return None


def instruction_sets() -> tuple[str, ...]:
    """The sets that this CPU can run, the best first.

    >>> instruction_sets()[-1]
    'portable'
    """
    return tuple(load().instruction_sets())


def choose_isa(asked: str) -> str:
    """The set that `asked` names, "auto" being the best. Raises ConfigError, with the list, for one that cannot run."""
    usable = instruction_sets()
    if asked == "auto":
        return usable[0]
    if asked not in usable:
        raise ConfigError(f"--isa is {asked!r}, which this CPU cannot run; it can run: {', '.join(usable)}")
    return asked


def has_bfloat16(isa: str) -> bool:
    """Does this set multiply bfloat16 in hardware?"""
    return isa in ("amx", "avx512_bf16")
