"""One kernel on one case: how long it took, and, given the limits of the machine, how long it must take."""

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
    moved_bytes: what must come from memory; if `writes`, also what must go there. operations: those on numbers of the kind
    that `multiplied_as` is multiplied as.
    """

    kernel: str
    case: str
    numbers: str
    num_rows: int
    seconds: float
    median_s: float
    num_rounds: int
    moved_bytes: int
    writes: bool
    operations: int
    multiplied_as: Format


@dataclass(frozen=True)
class Judged:
    """limit_s: the least time of the kernel; bound: what sets it, "memory" or "compute"."""

    measured: Measured
    limit_s: float
    bound: str

    @property
    def ratio(self) -> float:
        """The share of the limit that was reached."""
        return self.limit_s / self.measured.seconds


def summarise(
    kernel: str,
    case: str,
    numbers: str,
    num_rows: int,
    rounds_s: Sequence[float],
    *,
    per_round: int = 1,
    moved_bytes: int,
    writes: bool = False,
    operations: int = 0,
    multiplied_as: Format = Format.FLOAT32,
) -> Measured:
    """A result from the seconds of each round, in which the kernel ran `per_round` times."""
    each = [seconds / per_round for seconds in rounds_s]
    return Measured(
        kernel=kernel,
        case=case,
        numbers=numbers,
        num_rows=num_rows,
        seconds=min(each),
        median_s=median(each),
        num_rounds=len(each),
        moved_bytes=moved_bytes,
        writes=writes,
        operations=operations,
        multiplied_as=multiplied_as,
    )


def judge(result: Measured, limits: Limits) -> Judged:
    """Compare with the limit that is reached first.

    >>> limits = Limits(2**25, read_bytes=100.0, copy_bytes=50.0, peak_operations={"float32": 10.0})
    >>> judge(summarise("product", "", "", 1, [8.0, 4.0], moved_bytes=100, operations=20), limits).ratio
    0.5
    """
    memory_s = result.moved_bytes / (limits.copy_bytes if result.writes else limits.read_bytes)
    compute_s = result.operations / limits.peak_of(result.multiplied_as)
    if memory_s >= compute_s:
        return Judged(result, memory_s, "memory")
    return Judged(result, compute_s, "compute")
