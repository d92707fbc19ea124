"""One kernel on one case: how long it took, what memory could do meanwhile, and so how near it came to the limit.

Memory is judged by medians of rounds that took turns, one of the kernel and one that only reads (or copies): whatever slowed
memory down then slowed both. Computing is judged by the best round and the best rate on registers, which nothing slows down
but a thread's losing its CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from octavo.kernels.packed import Format
from octavo.roofline.limits import Limits


@dataclass(frozen=True, kw_only=True)
class Measured:
    """kernel: "product", "attention", "norm" or "rotation". case: what it worked on. numbers: what it reads or writes.

    num_rows: rows of a product, new tokens else. seconds, median_s: of the best round, and of the one in the middle.
    moved_bytes: what must come from memory, and, for kernels that are compared with copying, what must go there.
    memory_rate: bytes per second of the rounds that took turns, the one in the middle. operations: those on numbers of the
    kind that `multiplied_as` is multiplied as.
    """

    kernel: str
    case: str
    numbers: str
    num_rows: int
    seconds: float
    median_s: float
    num_rounds: int
    moved_bytes: int
    memory_rate: float
    operations: int
    multiplied_as: Format


@dataclass(frozen=True)
class Judged:
    """bound: what limits the kernel, "memory" or "compute". ratio: the share of that limit that it reached."""

    measured: Measured
    bound: str
    ratio: float


def summarise(
    kernel: str,
    case: str,
    numbers: str,
    num_rows: int,
    rounds: tuple[Sequence[float], Sequence[float]],
    *,
    per_round: int = 1,
    moved_bytes: int,
    operations: int = 0,
    multiplied_as: Format = Format.FLOAT32,
) -> Measured:
    """A result from rounds: their seconds, and the rates of memory beside them. A round ran the kernel `per_round` times."""
    each = [seconds / per_round for seconds in rounds[0]]
    return Measured(
        kernel=kernel,
        case=case,
        numbers=numbers,
        num_rows=num_rows,
        seconds=min(each),
        median_s=median(each),
        num_rounds=len(each),
        moved_bytes=moved_bytes,
        memory_rate=median(rounds[1]),
        operations=operations,
        multiplied_as=multiplied_as,
    )


def judge(result: Measured, limits: Limits) -> Judged:
    """Compare with the limit that is reached first.

    >>> limits = Limits(2**25, read_bytes=100.0, copy_bytes=50.0, peak_operations={"float32": 10.0})
    >>> result = summarise("product", "", "", 1, ([8.0, 4.0], [100.0, 100.0]), moved_bytes=100, operations=20)
    >>> judge(result, limits).ratio
    0.5
    """
    memory = result.moved_bytes / result.memory_rate / result.median_s
    compute = result.operations / limits.peak_of(result.multiplied_as) / result.seconds
    return Judged(result, "memory", memory) if memory >= compute else Judged(result, "compute", compute)
