"""The greatest logits of each row, in one total order: greater value first, of equal values the lower id
first.

Library `topk` and `argmax` leave open which of several equal values they return, and may answer differently
in another batch. Logits that come from 16-bit arithmetic are full of equal values, so here the order is
fixed.

The idea for speed: cut a row into chunks and take the greatest value of each chunk, which costs one fast
pass. The k greatest values of the row lie in the k chunks with the greatest maxima, so the slow selection
sees k chunks instead of the vocabulary.

    row      | 3 1 2 | 9 0 4 | 7 7 5 | ...      k = 2
    maxima       3       9       7     ...      the chunks of 9 and 7 hold the 2 greatest: 9 and 7

If the k-th value also occurs beyond the first k ("a tie at the edge"), which ids belong is looked up in the
whole row; that is the only loop over rows, and only over such rows.

Letters: R rows, V vocabulary, C chunks, S chunk size.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

_GREATEST_CHUNK = 256
_RANKED_CHUNK = 64


def greatest(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The greatest value of each row and the lowest id that has it: values [R], ids int64 [R].

    rows: float32 [R, V]. A row with a NaN gives NaN and the id of the first one.
    """
    if rows.shape[1] <= 2 * _GREATEST_CHUNK:
        values, ids = rows.max(dim=1)
        return values, ids
    maxima = _chunk_maxima(rows, _GREATEST_CHUNK)
    chunk = maxima.argmax(dim=1, keepdim=True)
    ids = chunk * _GREATEST_CHUNK + torch.arange(_GREATEST_CHUNK, device=rows.device)
    # Past the end of the row the last token is repeated; the first of equals wins, so the repetition never
    # does.
    ids.clamp_(max=rows.shape[1] - 1)
    place = rows.gather(1, ids).argmax(dim=1, keepdim=True)
    return maxima.gather(1, chunk).squeeze(1), ids.gather(1, place).squeeze(1)


def ranked(rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k greatest values of each row in order, with their ids: values [R, k], ids int64 [R, k].

    rows: float32 [R, V] without NaN. k: from 1; more than V is V. Cost: one pass over the rows, and for each
    row with a tie at the edge one more over that row.
    """
    k = min(k, rows.shape[1])
    values, ids = _top(rows, min(k + 1, rows.shape[1]))
    if values.shape[1] > k:
        tied = (values[:, k - 1] == values[:, k]).nonzero().flatten().tolist()
        values, ids = values[:, :k], ids[:, :k]
        for row in tied:
            edge = float(values[row, -1])
            first = int((values[row] > edge).sum())
            ids[row, first:] = places_of(rows[row], edge)[: k - first]
    # Order by id, then stably by value: equal values end up with the lower id first.
    ids, places = ids.sort(dim=1)
    values, places = values.gather(1, places).sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, places)


def places_of(row: Tensor, value: float) -> Tensor:
    """The ids, ascending, of the tokens whose logit in `row` [V] is `value`."""
    if row.device.type != "cpu":
        return (row == value).nonzero().flatten()
    # NumPy does this ten times faster, and ties at the edge are common in logits of 16-bit arithmetic.
    return torch.from_numpy(np.flatnonzero(row.numpy() == np.float32(value)))


def _top(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` greatest values from great to small; which ids stand for equal values is open.

    An id may lie past the end of the row where the value is -inf. That is a tie at the edge, which `ranked`
    mends.
    """
    vocab_size = rows.shape[1]
    if count * 2 * _RANKED_CHUNK > vocab_size:
        values, ids = rows.topk(count, dim=1)
        return values, ids
    chunks = _chunk_maxima(rows, _RANKED_CHUNK).topk(count, dim=1, sorted=False).indices
    inside = torch.arange(_RANKED_CHUNK, device=rows.device)
    ids = (chunks.unsqueeze(2) * _RANKED_CHUNK + inside).flatten(1)
    found = rows.gather(1, ids.clamp(max=vocab_size - 1))
    if vocab_size % _RANKED_CHUNK:
        found.masked_fill_(ids >= vocab_size, -math.inf)
    values, places = found.topk(count, dim=1)
    return values, ids.gather(1, places)


def _chunk_maxima(rows: Tensor, size: int) -> Tensor:
    """The greatest value of every chunk [R, C]; the last chunk may be short."""
    whole = rows.shape[1] // size * size
    parts = []
    if whole:
        parts.append(rows[:, :whole].view(len(rows), whole // size, size).amax(dim=2))
    if whole < rows.shape[1]:
        parts.append(rows[:, whole:].amax(dim=1, keepdim=True))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
