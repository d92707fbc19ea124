"""Softmax weights as whole numbers, so that sums of them do not depend on the order of summation.

Sums of floats depend on the order in which they are added, and that order depends on the shape of the batch,
the number of threads and the device. A token chosen by comparing a random number with such a sum could
change with its neighbours. So the weight of a token is the whole number nearest to `2**bits * exp((logit -
peak) / temperature)`, kept in float64, where `peak` is the greatest logit of the row. All sums of a row stay
below 2**53, where float64 is exact: every order gives the same number, and a short path over few candidates
agrees to the bit with a long path over the whole vocabulary.

What is lost: with 49,152 tokens `bits` is 36, so a token 2**37 times less likely than the likeliest gets
weight 0, and all such tokens together held less than one part in a million.

What must hold besides: `exp` of one element must not depend on where in a tensor it stands (tested). It is
taken in float32, whose relative error of 1e-7 no sample can show, and which halves the time of a pass.

Letters: R rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

_EXACT_BITS = 52
_MOST_BITS = 40
# exp of this times 2**40 is far below one half.
_WEIGHTLESS = -80.0
# Small on a CPU so that one slice stays in the cache; large elsewhere to keep launches few.
_CPU_SLICE_ELEMENTS = 2**19
_DEVICE_SLICE_ELEMENTS = 2**24


def weight_bits(vocab_size: int) -> int:
    """The weight of the likeliest token is 2 to this power; a whole row then sums to less than 2**53."""
    return min(_MOST_BITS, _EXACT_BITS - vocab_size.bit_length())


def whole_weights(
    logits: Tensor,
    peaks: Tensor,
    vocab_size: int,
    temperatures: Tensor | None = None,
    floors: list[float] | None = None,
) -> Tensor:
    """Weights of `logits` as whole numbers in float64 [R, n], for any choice of n columns.

    logits: float32 [R, n], not changed. peaks: greatest logit of each whole row, float32 [R, 1].
    temperatures: float32 [R, 1], above 0; None is 1. floors: per row, a token whose (logit - peak) /
    temperature is below gets weight 0. vocab_size: V, which fixes the scale, so that columns taken apart
    weigh what they weigh in the row.
    """
    x = logits - peaks
    if temperatures is not None:
        x.div_(temperatures)
    for row, floor in enumerate(floors or ()):
        if floor > -math.inf:
            _cut_below(x[row], floor)
    # Rounds to weight 0 just as well, and spares `exp` its slow way with infinities and underflow.
    x.clamp_(min=_WEIGHTLESS)
    # Both steps are exact or round once, so the order of float32 and float64 does not matter.
    return x.exp_().mul_(2.0 ** weight_bits(vocab_size)).round_().to(torch.float64)


def log_totals(rows: Tensor, peaks: Tensor) -> list[float]:
    """log(sum(exp(logit - peak))) of each row [R, V]; NaN where logits are. peaks: float32 [R, 1]."""
    vocab_size = rows.shape[1]
    scale = weight_bits(vocab_size) * math.log(2)
    totals: list[float] = []
    for part in slices(len(rows), rows):
        totals += whole_weights(rows[part], peaks[part], vocab_size).sum(dim=1).tolist()
    return [math.log(total) - scale for total in totals]


def slices(count: int, rows: Tensor) -> Iterator[slice]:
    """Cuts `count` rows as wide as `rows` [R, V] into slices of a size to work on at once."""
    elements = _CPU_SLICE_ELEMENTS if rows.device.type == "cpu" else _DEVICE_SLICE_ELEMENTS
    step = max(1, elements // max(1, rows.shape[1]))
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def take(column: Tensor, members: list[int]) -> Tensor:
    """Rows `members` (ascending) of a tensor; a view if they are neighbours, which saves a copy."""
    first, last = members[0], members[-1]
    return column[first : last + 1] if last - first + 1 == len(members) else column[members]


def _cut_below(row: Tensor, floor: float) -> None:
    """Set what is below `floor` to -inf, in place. A mask would take ten times as long as `threshold`."""
    below = torch.nextafter(torch.tensor(floor), torch.tensor(-math.inf))
    torch.threshold_(row, float(below), -math.inf)
