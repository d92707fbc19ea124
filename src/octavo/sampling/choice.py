"""Choosing a token at random: temperature, top-k, min-p, top-p, then the inverse of the cumulative sum.

Given logits after edits and one number u from [0, 1) per row, the token is the first whose cumulative weight
exceeds `floor(u * total)`. Weights are whole numbers (`weights.py`), so the comparison is exact: a token of
weight 0 is never chosen, not even for u next to 0 or 1, and a row's token depends on nothing but that row.

Each filter sees what the one before it left: top-k keeps the k greatest, min-p those with at least min_p of
the greatest probability, top-p the shortest run from the greatest down that holds at least top_p of what is
left. Equal logits rank by id.

This is the specification, and what runs without native kernels; `kernels/sampling.py` does the same with them.

A row goes one of four ways; the choice of a way is a matter of speed:

    in order   no top-k, no top-p       sum in the order of ids, by chunks; nothing is sorted
    ranked     top-k up to 1,024        the k greatest are enough
    nucleus    top-p alone              the greatest 128, if they hold top_p of the whole row; else sorted
    sorted     the rest                 what may be kept is sorted, row by row

Letters: R rows, V vocabulary, C chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.sampling.ranking import ranked
from octavo.sampling.weights import slices, take, whole_weights
from octavo.sampling_params import SamplingParams

_MOST_RANKED = 1024
_NUCLEUS_CANDIDATES = 128
_CHUNK = 256
# A smaller one is 0 in float32, and 0 / 0 is no number.
LEAST_TEMPERATURE = 1e-30


@dataclass(frozen=True)
class Draw:
    """What is to be drawn for one row: its parameters and its random number from [0, 1)."""

    params: SamplingParams
    uniform: float


def choose(rows: Tensor, peaks: Tensor, draws: Sequence[Draw]) -> list[int]:
    """One token id per row.

    rows: float32 [R, V] without NaN, not changed; -inf forbids a token. peaks: the greatest value of each
    row [R], finite. draws: one per row, with a temperature above 0.
    """
    ways: dict[_Way, list[int]] = {}
    for row, draw in enumerate(draws):
        ways.setdefault(_way(draw.params, rows.shape[1]), []).append(row)
    tokens = [0] * len(draws)
    for way, members in ways.items():
        # Ranking needs little memory per row; the other ways work on weights of whole rows, in slices.
        parts = [slice(None)] if way is _choose_ranked else slices(len(members), rows)
        for part in parts:
            batch = _Batch.of(rows, peaks, draws, members[part])
            for row, token in zip(members[part], way(batch), strict=True):
                tokens[row] = token
    return tokens


@dataclass(frozen=True)
class _Batch:
    """Rows that go the same way, with their parameters as columns [R, 1].

    Float32 where they meet logits (temperatures), float64 where they meet weights; top_k is int64.
    """

    rows: Tensor
    peaks: Tensor
    temperatures: Tensor
    floors: list[float]
    top_k: Tensor
    top_p: Tensor
    uniforms: Tensor

    @classmethod
    def of(cls, rows: Tensor, peaks: Tensor, draws: Sequence[Draw], members: list[int]) -> _Batch:
        chosen = [draws[row] for row in members]
        params = [draw.params for draw in chosen]
        vocab_size = rows.shape[1]

        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64).to(rows.device).unsqueeze(1)

        return cls(
            rows=take(rows, members),
            peaks=take(peaks, members).unsqueeze(1),
            temperatures=column([max(p.temperature, LEAST_TEMPERATURE) for p in params]).float(),
            floors=[math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params],
            top_k=column([p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]).long(),
            top_p=column([p.top_p for p in params]),
            uniforms=column([draw.uniform for draw in chosen]),
        )

    def weights(self, logits: Tensor) -> Tensor:
        """Weights of `logits` [R, n]: some columns of the rows, or all."""
        return whole_weights(logits, self.peaks, self.rows.shape[1], self.temperatures, self.floors)


_Way = Callable[[_Batch], list[int]]


def _way(params: SamplingParams, vocab_size: int) -> _Way:
    cuts = 0 < params.top_k < vocab_size
    if cuts and params.top_k <= _MOST_RANKED:
        return _choose_ranked
    if cuts or params.top_p < 1:
        return _choose_sorted if cuts else _choose_nucleus
    return _choose_in_order


def _choose_in_order(batch: _Batch) -> list[int]:
    """Inverse of the cumulative sum in the order of ids: first which chunk, then which token of it."""
    weights = batch.weights(batch.rows)
    size = weights.shape[1]
    whole = size // _CHUNK * _CHUNK
    sums = weights[:, :whole].view(len(weights), whole // _CHUNK, _CHUNK).sum(dim=2)
    ends = torch.cat([sums, weights[:, whole:].sum(dim=1, keepdim=True)], dim=1).cumsum_(dim=1)
    target = _target(batch.uniforms, ends[:, -1:])
    chunk = _first_beyond(ends, target)
    before = ends.gather(1, (chunk - 1).clamp(min=0)).masked_fill(chunk == 0, 0)
    ids = chunk * _CHUNK + torch.arange(_CHUNK, device=weights.device)
    # Past the end of the row the last token is repeated; the sought place lies before any repetition.
    inside = weights.gather(1, ids.clamp_(max=size - 1)).cumsum_(dim=1)
    return list(ids.gather(1, _first_beyond(inside, target - before)).flatten().tolist())


def _choose_ranked(batch: _Batch) -> list[int]:
    count = int(batch.top_k.max())
    values, ids = ranked(batch.rows, count)
    weights = batch.weights(values)
    weights.masked_fill_(torch.arange(count, device=weights.device) >= batch.top_k, 0)
    places, _ = _pick(weights, batch, weights.sum(dim=1, keepdim=True))
    return list(ids.gather(1, places).flatten().tolist())


def _choose_nucleus(batch: _Batch) -> list[int]:
    weights = batch.weights(batch.rows)
    values, ids = ranked(batch.rows, _NUCLEUS_CANDIDATES)
    places, complete = _pick(batch.weights(values), batch, weights.sum(dim=1, keepdim=True))
    tokens = list(ids.gather(1, places).flatten().tolist())
    for row, enough in enumerate(complete.flatten().tolist()):
        if not enough:
            tokens[row] = _choose_from_sorted(batch, weights, row)
    return tokens


def _choose_sorted(batch: _Batch) -> list[int]:
    weights = batch.weights(batch.rows)
    return [_choose_from_sorted(batch, weights, row) for row in range(len(weights))]


def _choose_from_sorted(batch: _Batch, weights: Tensor, row: int) -> int:
    """The general way, one row at a time in NumPy, which sorts bare values ten times faster than torch.

    Values and weights are sorted apart: of equal values, the place among them tells the id.
    """
    logits, all_weights = batch.rows[row].cpu().numpy(), weights[row].cpu().numpy()
    top_k, top_p = int(batch.top_k[row]), float(batch.top_p[row])
    if top_k < len(logits):
        candidates = logits >= np.partition(logits, -top_k)[-top_k]
    else:
        # All tokens lighter than this weigh less together than what top-p leaves out, so they are left out.
        candidates = all_weights >= (1 - top_p) * float(all_weights.sum()) / len(logits) * 0.999
    ids = np.flatnonzero(candidates)
    values = np.sort(logits[ids])[::-1]
    ends = np.sort(all_weights[ids])[::-1][:top_k].cumsum()
    total = float(ends[-1] if top_k < len(logits) else all_weights.sum())
    kept = min(int(np.searchsorted(ends, top_p * total)) + 1, len(ends))
    target = min(math.floor(float(batch.uniforms[row]) * float(ends[kept - 1])), float(ends[kept - 1]) - 1)
    place = int(np.searchsorted(ends, target, side="right"))
    rank = int(np.count_nonzero(values[:place] == values[place]))
    return int(np.flatnonzero(logits == values[place])[rank])


def _pick(weights: Tensor, batch: _Batch, totals: Tensor) -> tuple[Tensor, Tensor]:
    """Places chosen from descending weights [R, n] under top-p, [R, 1], and whether the n columns were
    enough to tell.

    totals: the weight of all tokens that top-p has to share out, also of those that are not among the
    columns.
    """
    ends = weights.cumsum(dim=1)
    share = batch.top_p * totals
    # A token is kept while those before it do not yet hold the share.
    kept = (torch.searchsorted(ends, share) + 1).clamp_(max=weights.shape[1])
    target = _target(batch.uniforms, ends.gather(1, kept - 1))
    return _first_beyond(ends, target).clamp_(max=weights.shape[1] - 1), ends[:, -1:] >= share


def _target(uniforms: Tensor, totals: Tensor) -> Tensor:
    """A whole number from 0 to totals - 1; the minimum is for products that round up to the total."""
    return torch.minimum((uniforms * totals).floor_(), totals - 1)


def _first_beyond(ends: Tensor, target: Tensor) -> Tensor:
    """The first place [R, 1] whose cumulative weight exceeds the target; its own weight is then above 0."""
    return torch.searchsorted(ends, target, right=True)
