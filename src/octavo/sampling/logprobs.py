"""Log probabilities of tokens, as raw log-softmax of the model's logits.

Raw means before penalties, bias, masks and temperature: what the model says, not how the token was chosen.
The value of a token does not depend on how many alternatives were asked for, nor on the batch: the
normaliser is an exact sum of whole numbers (see `weights.py`), and alternatives come in the one total order
of `ranking.py`.

Rows are worked on in slices. On a CPU extra memory stays below 16 MiB however many rows there are (measured:
6 MiB with 49,152 tokens and 20 alternatives), unless one row alone needs more: 12 bytes per token of the
vocabulary.

Letters: R rows, V vocabulary.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from torch import Tensor

from octavo.outputs import TokenLogprobs
from octavo.sampling.ranking import ranked
from octavo.sampling.row_math import RowMath

# Ranking takes little memory per row, so its slices are larger than those of the weights.
_SLICE_ELEMENTS = 2**22
_SLICE_ROWS = 256
_GREATEST_SINGLE = 3.4028234663852886e38


def prompt_logprobs(
    logits: Tensor, target_ids: Sequence[int], num_alternatives: int, row_math: RowMath = RowMath()
) -> tuple[TokenLogprobs, ...]:
    """The log probability of `target_ids[i]` after row i, with alternatives; one dict per row.

    logits: float32 [R, V], not changed. target_ids: R token ids below V. num_alternatives: 0 reports only
    the target. Each dict has the target first, then the alternatives from likely to unlikely; a target among
    them is not repeated, so there are num_alternatives or one more entries.
    """
    return tuple(token_logprobs(logits, target_ids, [num_alternatives] * len(target_ids), row_math=row_math))


def token_logprobs(
    logits: Tensor,
    token_ids: Sequence[int],
    num_alternatives: Sequence[int],
    peaks: Tensor | None = None,
    row_math: RowMath = RowMath(),
) -> list[TokenLogprobs]:
    """As `prompt_logprobs`, with a number of alternatives for each row.

    peaks: the greatest logit of each row [R], if the caller has them.
    """
    assert len(token_ids) == len(num_alternatives) == logits.shape[0]
    result: list[TokenLogprobs] = []
    step = max(1, min(_SLICE_ROWS, _SLICE_ELEMENTS // logits.shape[1]))
    for start in range(0, len(token_ids), step):
        part = slice(start, start + step)
        rows = logits[part]
        greatest_logits = row_math.greatest(rows)[0] if peaks is None else peaks[part]
        totals = row_math.log_totals(rows, greatest_logits.unsqueeze(1))
        result += _slice_logprobs(rows, greatest_logits, totals, token_ids[part], num_alternatives[part])
    return result


def _slice_logprobs(
    rows: Tensor, peaks: Tensor, totals: list[float], token_ids: Sequence[int], counts: Sequence[int]
) -> list[TokenLogprobs]:
    targets = rows[range(len(token_ids)), token_ids].tolist()
    best: list[list[float]] = [[] for _ in token_ids]
    best_ids: list[list[int]] = [[] for _ in token_ids]
    if any(counts):
        best, best_ids = (found.tolist() for found in ranked(rows, max(counts)))
    result = []
    for row, (token, peak) in enumerate(zip(token_ids, peaks.tolist(), strict=True)):
        entry = {token: _single(targets[row] - peak - totals[row])}
        count = counts[row]
        for other, value in zip(best_ids[row][:count], best[row][:count], strict=True):
            entry.setdefault(other, _single(value - peak - totals[row]))
        result.append(entry)
    return result


def _single(value: float) -> float:
    """`value` rounded to float32, in which log probabilities are reported; -inf below its range."""
    if value < -_GREATEST_SINGLE:
        return -math.inf
    return float(struct.unpack("f", struct.pack("f", value))[0])
