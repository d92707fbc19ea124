"""The passes of sampling over rows of logits in the native kernels, on all threads: csrc/sampling.h.

What is computed is what `sampling/choice.py`, `ranking.py` and `weights.py` say, with the kernels' own `exp`.

Letters: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.kernels.library import load
from octavo.kernels.machine import Machine
from octavo.sampling.choice import LEAST_TEMPERATURE, Draw
from octavo.sampling.row_math import RowMath


def row_math(machine: Machine) -> RowMath:
    """The functions of `RowMath` on the threads of `machine`; not to be called while it does something else."""
    rows = _Rows(machine)
    return RowMath(rows.greatest, rows.choose, rows.log_totals)


class _Rows:
    def __init__(self, machine: Machine) -> None:
        self._chooser: Any = load().Chooser(machine.handle)

    def greatest(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        values = torch.empty(len(rows))
        ids = torch.empty(len(rows), dtype=torch.int64)
        self._chooser.greatest(_array(rows), values.numpy(), ids.numpy())
        return values, ids

    def choose(self, rows: Tensor, peaks: Tensor, draws: Sequence[Draw]) -> list[int]:
        params = [draw.params for draw in draws]
        vocab_size = rows.shape[1]
        tokens = np.empty(len(draws), np.int32)
        self._chooser.choose(
            _array(rows),
            _array(peaks),
            np.array([max(p.temperature, LEAST_TEMPERATURE) for p in params], np.float64),
            np.array([p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params], np.int32),
            np.array([p.top_p for p in params], np.float64),
            np.array([p.min_p for p in params], np.float64),
            np.array([draw.uniform for draw in draws], np.float64),
            tokens,
        )
        return list(tokens.tolist())

    def log_totals(self, rows: Tensor, peaks: Tensor) -> list[float]:
        totals = np.empty(len(rows), np.float64)
        self._chooser.log_totals(_array(rows), _array(peaks.flatten()), totals)
        return list(totals.tolist())


def _array(tensor: Tensor) -> npt.NDArray[np.float32]:
    array: npt.NDArray[np.float32] = tensor.contiguous().numpy()
    return array
