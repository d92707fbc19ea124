"""Native machines for tests: one for every instruction set and number of threads, made when first asked for."""

from __future__ import annotations

from functools import cache
from typing import Any

from octavo.kernels.library import instruction_sets, load


def _all_isas() -> tuple[str, ...]:
    """Those that this CPU can run, the best first, and AMX in software where that is built and can run."""
    try:
        load().make_machine(1, "amx_emulated")
    except ValueError:
        return instruction_sets()
    return (*instruction_sets(), "amx_emulated")


ISAS = _all_isas()
# Sets that fuse every multiply with its add: where a kernel differs in the width of vectors only, they agree to the bit.
FUSED_ISAS = tuple(isa for isa in ISAS if isa in ("avx2", "avx512", "avx512_bf16"))
# Unit roundoff of float32 and of bfloat16.
ROUND = 2.0**-24
ROUND_BFLOAT16 = 2.0**-8


@cache
def machine(isa: str, threads: int = 1) -> Any:
    """A native machine; its threads sleep between tests."""
    return load().make_machine(threads, isa)
