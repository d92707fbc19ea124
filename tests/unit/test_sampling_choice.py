"""Random choice: the right distribution, no impossible token, and the same token in any company."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from octavo.random_stream import uniform
from octavo.sampling import choice
from octavo.sampling.choice import Draw, choose
from octavo.sampling.weights import weight_bits, whole_weights
from octavo.sampling_params import SamplingParams

LAST_BELOW_ONE = 1 - 2.0**-53
HOSTILE = [0.0, 5e-324, 2.0**-53, 0.25, 0.5, 1 - 2.0**-30, LAST_BELOW_ONE]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 50, "temperature": 1.7},
    {"top_k": 1500, "temperature": 3.0},
    {"top_p": 0.9},
    {"top_p": 0.999, "temperature": 4.0},
    {"top_p": 1e-6},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"min_p": 0.02, "top_p": 0.8},
    {"top_k": 30, "top_p": 0.7},
    {"top_k": 30, "top_p": 0.95, "min_p": 0.03, "temperature": 1.4},
    {"top_k": 2000, "top_p": 0.5, "min_p": 0.001, "temperature": 5.0},
    {"top_k": 10**9, "top_p": 0.9},
]


def _oracle(row: torch.Tensor, params: SamplingParams) -> NDArray[np.float64]:
    """The probabilities that tokens are to be chosen with, written plainly in float64."""
    logits = row.numpy().astype(np.float64)
    order = np.argsort(-logits, kind="stable")
    scores = np.exp((logits[order] - logits.max()) / params.temperature)
    if params.top_k > 0:
        scores[params.top_k :] = 0
    scores[scores < params.min_p * scores[0]] = 0
    scores /= scores.sum()
    before = np.concatenate([[0.0], np.cumsum(scores)[:-1]])
    if params.top_p < 1:
        scores[before >= params.top_p] = 0
    probabilities = np.zeros(len(scores))
    probabilities[order] = scores / scores.sum()
    return probabilities


def _rows(seed: int, count: int, size: int, levels: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, size, generator=generator) * 3
    return (rows * levels).round() / levels if levels else rows


def _choose(rows: torch.Tensor, params: list[SamplingParams], uniforms: list[float]) -> list[int]:
    draws = [Draw(p, u) for p, u in zip(params, uniforms, strict=True)]
    return choose(rows, rows.amax(dim=1), draws)


@pytest.mark.parametrize("options", SETTINGS, ids=str)
@pytest.mark.parametrize(("size", "levels"), [(300, 0), (5000, 0), (3001, 4)])
def test_every_token_gets_its_share_of_the_unit_interval(
    options: dict[str, Any], size: int, levels: int
) -> None:
    # With evenly spaced numbers a token of probability p must come up p * draws times, give or take one.
    params = SamplingParams(**options)
    row = _rows(size, 1, size, levels)
    draws = 1000
    found: list[int] = []
    for start in range(0, draws, 100):
        grid = [(start + i + 0.5) / draws for i in range(100)]
        found += _choose(row.expand(100, size), [params] * 100, grid)
    counts = np.bincount(found, minlength=size)
    expected = _oracle(row[0], params) * draws
    assert np.abs(counts - expected).max() < 1.001
    assert not counts[expected == 0].any()


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_frequencies_match_the_oracle(options: dict[str, Any]) -> None:
    params = SamplingParams(**options)
    row = _rows(11, 1, 1000)
    draws = 3000
    found: list[int] = []
    for start in range(0, draws, 200):
        numbers = [uniform(99, start + i) for i in range(200)]
        found += _choose(row.expand(200, 1000), [params] * 200, numbers)
    _assert_chi_square(np.bincount(found, minlength=1000), _oracle(row[0], params) * draws)


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_hostile_numbers_never_choose_an_impossible_token(options: dict[str, Any]) -> None:
    params = SamplingParams(**options)
    for size in (2, 255, 256, 257, 1024, 9000):
        rows = _rows(size, 8, size)
        rows[1, 1:] = -math.inf
        rows[2, :-1] = -math.inf
        rows[3] = 0
        rows[4, ::2] = -math.inf
        rows[5, 0], rows[5, 1:] = 80.0, -80.0
        rows[6, size // 2 :] = -math.inf
        rows[7, : size // 2] = -math.inf
        for row in rows:
            possible = _oracle(row, params) > 0
            for token in _choose(row.expand(len(HOSTILE), size), [params] * len(HOSTILE), HOSTILE):
                assert possible[token]


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 2**30),
    st.integers(1, 2500),
    st.sampled_from([0, 1, 5]),
    st.sampled_from(SETTINGS),
    st.one_of(st.sampled_from(HOSTILE), st.floats(0, LAST_BELOW_ONE)),
)
def test_any_row_and_number_choose_a_possible_token(
    seed: int, size: int, levels: int, options: dict[str, Any], number: float
) -> None:
    params = SamplingParams(**options)
    row = _rows(seed, 1, size, levels)
    row[0, torch.randperm(size, generator=torch.Generator().manual_seed(seed))[: size // 3]] = -math.inf
    token = _choose(row, [params], [number])[0]
    assert row[0, token] > -math.inf
    # A hair's breadth of tolerance in the filters, none for forbidden tokens.
    loose = SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        min_p=params.min_p * (1 - 1e-7),
        top_p=min(1.0, params.top_p * (1 + 1e-5)),
    )
    assert _oracle(row[0], loose)[token] > 0


def test_a_row_gives_the_same_token_alone_and_in_any_company() -> None:
    params = [SamplingParams(**options) for options in SETTINGS]
    rows = _rows(3, 33, 6000, 8)
    checked = 0
    for round_ in range(40):
        own = params[round_ % len(params)]
        mixed = [params[(round_ * 7 + i * 5) % len(params)] for i in range(33)]
        numbers = [uniform(round_, i) for i in range(33)]
        alone = [_choose(rows[i : i + 1], [mixed[i]], [numbers[i]])[0] for i in range(33)]
        assert _choose(rows, mixed, numbers) == alone
        backwards = _choose(rows.flip(0), mixed[::-1], numbers[::-1])
        assert backwards[::-1] == alone
        same = _choose(rows, [own] * 33, numbers)
        assert same[17] == _choose(rows[17:18], [own], [numbers[17]])[0]
        checked += 67
    assert checked > 2600


def test_the_number_of_threads_does_not_move_a_token() -> None:
    rows = _rows(4, 3, 70_000)
    params = [SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(top_k=40)]
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append([_choose(rows, params, [uniform(i, j) for j in range(3)]) for i in range(4)])
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]


def test_the_short_and_the_long_way_to_a_nucleus_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = _rows(8, 40, 4000, 6)
    params = [SamplingParams(top_p=(i + 1) / 41, temperature=0.5 + i / 20) for i in range(40)]
    numbers = [[uniform(i, j) for j in range(40)] for i in range(10)]
    usual = [_choose(rows, params, row) for row in numbers]
    for candidates in (1, 4000):
        monkeypatch.setattr(choice, "_NUCLEUS_CANDIDATES", candidates)
        assert [_choose(rows, params, row) for row in numbers] == usual


def test_equal_logits_rank_by_id() -> None:
    rows = torch.zeros(1, 700)
    for number in HOSTILE:
        assert _choose(rows, [SamplingParams(top_k=1)], [number]) == [0]
        assert _choose(rows, [SamplingParams(top_p=1e-9)], [number]) == [0]
    assert _choose(rows, [SamplingParams(top_k=10)], [LAST_BELOW_ONE]) == [9]
    assert _choose(rows, [SamplingParams(top_p=0.5)], [LAST_BELOW_ONE]) == [349]
    assert _choose(rows, [SamplingParams(min_p=1.0)], [LAST_BELOW_ONE]) == [699]


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-30, 1e-8, 1e-3])
def test_tiny_temperatures_choose_the_greatest(temperature: float) -> None:
    rows = torch.tensor([[-3e38, 1.0, 3e38, 2.9e38], [0.0, 1.5, 1.0, -math.inf]])
    for options in ({}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}):
        params = SamplingParams(temperature=temperature, **options)
        for number in HOSTILE:
            assert _choose(rows, [params, params], [number, number]) == [2, 1]


def test_huge_logits_at_the_highest_temperature() -> None:
    rows = torch.tensor([[-3e38, 3e38, -math.inf, 3e38]])
    params = SamplingParams(temperature=100)
    assert {_choose(rows, [params], [number])[0] for number in HOSTILE} == {1, 3}


def test_weights_are_whole_and_sum_exactly() -> None:
    for size in (1, 1000, 49_152, 262_144):
        rows = torch.zeros(1, size)
        rows[0, : size // 2] = torch.linspace(-20, 0, size // 2)
        weights = whole_weights(rows, rows.amax(dim=1, keepdim=True), size)
        assert torch.equal(weights, weights.round())
        exact = sum(int(weight) for weight in weights[0].tolist())
        assert exact < 2**53
        for shuffled in (
            weights,
            weights.flip(1),
            weights[:, torch.randperm(size, generator=torch.Generator().manual_seed(1))],
        ):
            assert int(shuffled.sum()) == exact
            assert int(shuffled.cumsum(dim=1)[0, -1]) == exact


def test_exp_of_an_element_does_not_depend_on_its_place() -> None:
    # The one property of the tensor library that batch independence rests on.
    x = torch.linspace(-50, 40, 70_003, dtype=torch.float64)
    whole = x.exp()
    for offset in range(20):
        for length in (1, 3, 7, 16, 33, 2049, 40_000):
            part = slice(offset, offset + length)
            assert torch.equal(x[part].exp(), whole[part])
            assert torch.equal(x[part].clone().exp_(), whole[part])


def test_weight_bits_fit_float64() -> None:
    for size in (1, 2, 32_000, 49_152, 128_256, 2**18, 2**22):
        assert size * 2 ** weight_bits(size) <= 2**52


def _assert_chi_square(counts: NDArray[np.int64], expected: NDArray[np.float64]) -> None:
    """Tokens expected at least five times each, the others together, at six standard deviations."""
    often = expected >= 5
    observed = np.append(counts[often], counts[~often].sum())
    wanted = np.append(expected[often], expected[~often].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    degrees = max(1, len(wanted) - 1)
    chi_square = float(((observed - wanted) ** 2 / wanted).sum())
    assert chi_square < degrees + 6 * math.sqrt(2 * degrees)
    assert counts[expected == 0].sum() == 0
