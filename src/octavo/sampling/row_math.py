"""The passes over whole rows of logits that sampling needs, as a seam: torch here, native kernels in `kernels/sampling.py`.

Both take whole-number weights (`weights.py`), so a row's token depends neither on its neighbours nor on threads. Weights of
the two differ where their `exp` do, in the last bit: a seed gives the same tokens on the same kernels.

Letters: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from octavo.sampling.choice import Draw, choose
from octavo.sampling.ranking import greatest
from octavo.sampling.weights import log_totals


@dataclass(frozen=True)
class RowMath:
    """Functions of rows, float32 [R, V]; torch's unless others are given.

    greatest: `ranking.greatest`. choose: `choice.choose`. log_totals: `weights.log_totals`.
    """

    greatest: Callable[[Tensor], tuple[Tensor, Tensor]] = greatest
    choose: Callable[[Tensor, Tensor, Sequence[Draw]], list[int]] = choose
    log_totals: Callable[[Tensor, Tensor], list[float]] = log_totals
