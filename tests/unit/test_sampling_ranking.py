"""Ranking of logits: one total order (greater first, of equals the lower id), in any batch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.sampling.ranking import greatest, ranked

SIZES = [1, 2, 63, 64, 65, 255, 256, 257, 1000, 8192, 8193, 20_001]


def _rows(seed: int, count: int, size: int, levels: int) -> torch.Tensor:
    """Random rows; few levels make many ties, 0 makes none."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, size, generator=generator) * 3
    return (rows * levels).round() / levels if levels else rows


def _in_order(row: torch.Tensor, k: int) -> list[int]:
    values = row.tolist()
    return sorted(range(len(values)), key=lambda token: (-values[token], token))[:k]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("levels", [0, 1, 8])
def test_greatest_is_the_lowest_id_of_the_maximum(size: int, levels: int) -> None:
    rows = _rows(size, 9, size, levels)
    values, ids = greatest(rows)
    assert ids.tolist() == [int(np.argmax(row)) for row in rows.numpy()]
    assert torch.equal(values, rows.amax(dim=1))


def test_greatest_shows_nan_and_infinities() -> None:
    rows = _rows(0, 4, 1000, 0)
    rows[0, 700] = math.nan
    rows[1] = -math.inf
    rows[2, 999] = math.inf
    values, ids = greatest(rows)
    assert math.isnan(values[0]) and ids[0] == 700
    assert values[1] == -math.inf
    assert values[2] == math.inf and ids[2] == 999
    assert math.isfinite(values[3])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("levels", [0, 1, 8])
@pytest.mark.parametrize("k", [1, 2, 5, 20, 50])
def test_ranked_follows_the_total_order(size: int, levels: int, k: int) -> None:
    rows = _rows(size + k, 5, size, levels)
    values, ids = ranked(rows, k)
    assert ids.tolist() == [_in_order(row, k) for row in rows]
    assert torch.equal(values, rows.gather(1, ids))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**30),
    st.integers(1, 3000),
    st.integers(1, 60),
    st.integers(0, 40),
    st.sampled_from([0, 1, 4]),
)
def test_ranked_with_forbidden_tokens(seed: int, size: int, k: int, finite: int, levels: int) -> None:
    rows = _rows(seed, 3, size, levels)
    for row in rows[:2]:
        keep = torch.randperm(size, generator=torch.Generator().manual_seed(seed))[:finite]
        kept = row[keep].clone()
        row.fill_(-math.inf)
        row[keep] = kept
    values, ids = ranked(rows, k)
    assert ids.tolist() == [_in_order(row, k) for row in rows]
    assert torch.equal(values, rows.gather(1, ids))


def test_ranked_does_not_depend_on_the_batch_or_on_k() -> None:
    rows = _rows(5, 33, 9000, 2)
    together = ranked(rows, 60)[1]
    for row in range(0, 33, 8):
        for k in (1, 7, 59):
            assert torch.equal(ranked(rows[row : row + 1], k)[1][0], together[row, :k])


def test_ranked_does_not_change_its_input() -> None:
    rows = _rows(6, 4, 5000, 1)
    before = rows.clone()
    ranked(rows, 40)
    greatest(rows)
    assert torch.equal(rows, before)
