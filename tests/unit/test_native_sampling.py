"""The native choice of tokens: exactly what plain sorting in float64 chooses from the same weights, in any company, on any
number of threads, with any instruction set.

The oracle sorts whole rows and takes the weights from the kernel (`weigh`), which are tested against `exp` on their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

pytest.importorskip("octavo._native")

from octavo.kernels.library import instruction_sets, load
from octavo.kernels.machine import Machine, make_machine
from octavo.kernels.sampling import row_math
from octavo.random_stream import uniform
from octavo.sampling import weights
from octavo.sampling.choice import LEAST_TEMPERATURE, Draw
from octavo.sampling.choice import choose as choose_in_torch
from octavo.sampling.row_math import RowMath
from octavo.sampling_params import SamplingParams

Floats = NDArray[np.float32]
ISAS = instruction_sets()
# They fuse each multiply with its add, so their `exp` agrees to the bit, whatever the width of vectors.
FUSED = [isa for isa in ISAS if isa != "portable"]
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
    {"top_p": 0.99, "temperature": 20.0},
    {"top_p": 1e-6},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"min_p": 0.02, "top_p": 0.8},
    {"top_k": 30, "top_p": 0.7},
    {"top_k": 30, "top_p": 0.95, "min_p": 0.03, "temperature": 1.4},
    {"top_k": 2000, "top_p": 0.5, "min_p": 0.001, "temperature": 5.0},
    {"top_k": 10**9, "top_p": 0.9},
]


@cache
def _machine(isa: str = ISAS[0], threads: int = 1) -> Machine:
    return make_machine(threads, isa)


@cache
def _math(isa: str = ISAS[0], threads: int = 1) -> RowMath:
    return row_math(_machine(isa, threads))


def _choose(
    rows: Floats,
    params: Sequence[SamplingParams],
    uniforms: Sequence[float],
    isa: str = ISAS[0],
    threads: int = 1,
) -> list[int]:
    draws = [Draw(p, u) for p, u in zip(params, uniforms, strict=True)]
    return _math(isa, threads).choose(torch.from_numpy(rows), torch.from_numpy(rows.max(axis=1)), draws)


def _weigh(
    row: Floats, temperature: float = 1.0, min_p: float = 0.0, isa: str = ISAS[0]
) -> NDArray[np.float64]:
    out = np.empty(len(row))
    load().weigh(_machine(isa).handle, row, float(row.max()), max(temperature, LEAST_TEMPERATURE), min_p, out)
    return out


def _oracle(row: Floats, params: SamplingParams, number: float, isa: str = ISAS[0]) -> int:
    """The token, by a full sort: the head of sampling/choice.py, word by word."""
    whole = _weigh(row, params.temperature, params.min_p, isa)
    cuts = 0 < params.top_k < len(row)
    ranks = cuts or params.top_p < 1
    order = np.argsort(-row.astype(np.float64), kind="stable") if ranks else np.arange(len(row))
    if cuts:
        order = order[: params.top_k]
    ends = [int(end) for end in np.cumsum(whole[order])]
    if params.top_p < 1:
        share = params.top_p * float(ends[-1])
        ends = ends[: next(i for i, end in enumerate(ends) if end >= share) + 1]
    target = min(math.floor(number * float(ends[-1])), ends[-1] - 1)
    return int(order[next(i for i, end in enumerate(ends) if end > target)])


def _rows(seed: int, count: int, size: int, levels: int = 0) -> Floats:
    rows = np.random.default_rng(seed).standard_normal((count, size)).astype(np.float32) * 3
    return ((rows * levels).round() / levels).astype(np.float32) if levels else rows


# Weights


@pytest.mark.parametrize("isa", ISAS)
def test_weights_are_the_whole_numbers_nearest_to_e_to_the_x(isa: str) -> None:
    for size, temperature in ((1, 1.0), (17, 0.8), (1003, 3.0), (49_152, 1.0)):
        row = _rows(size, 1, size)[0]
        found = _weigh(row, temperature, isa=isa)
        x = (row - row.max()) / np.float32(temperature)
        exact = np.exp(x.astype(np.float64)) * 2.0 ** weights.weight_bits(size)
        assert np.array_equal(found, np.round(found))
        # Relative error of the kernels' exp, and half a unit for the rounding.
        assert (np.abs(found - exact) <= 4e-7 * exact + 0.5).all()
        assert found[row.argmax()] == 2.0 ** weights.weight_bits(size)


@pytest.mark.parametrize("isa", ISAS)
def test_a_weight_does_not_depend_on_the_place_of_its_logit(isa: str) -> None:
    row = _rows(1, 1, 1000)[0]
    row[0] = 20.0
    whole = _weigh(row, 0.7, 0.001, isa)
    for first in range(1, 40):
        part = np.concatenate([row[:1], row[first : first + 333]])
        padded = np.concatenate([part, np.full(1000 - len(part), -np.inf, np.float32)])
        assert np.array_equal(_weigh(padded, 0.7, 0.001, isa)[1 : len(part)], whole[first : first + 333])


@pytest.mark.parametrize("isa", FUSED)
def test_weights_agree_between_sets_that_fuse(isa: str) -> None:
    row = _rows(2, 1, 20_001)[0]
    assert np.array_equal(_weigh(row, 0.8, 0.01, isa), _weigh(row, 0.8, 0.01, FUSED[0]))


def test_min_p_leaves_out_what_is_below_it() -> None:
    row = np.log(np.array([1.0, 0.26, 0.24, 0.5], np.float32))
    assert (_weigh(row, min_p=0.25) > 0).tolist() == [True, True, False, True]
    assert (_weigh(row, min_p=1.0) > 0).tolist() == [True, False, False, False]


# The choice

_VALUES = st.one_of(
    st.floats(-12, 12, width=32),
    st.sampled_from([-math.inf, 0.0, -0.0, 1.0, 1.5, 2.0, -3e38, 3e38, 1e-40]),
)
_PARAMS = st.builds(
    SamplingParams,
    temperature=st.one_of(st.floats(0.05, 3), st.sampled_from([1e-300, 1e-30, 1e-3, 1.0, 100.0])),
    top_k=st.one_of(st.just(0), st.integers(1, 12), st.integers(1, 400)),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 1), st.sampled_from([1e-9, 0.5, LAST_BELOW_ONE])),
    min_p=st.one_of(st.just(0.0), st.floats(0, 1), st.sampled_from([1e-12, 1.0])),
)
_UNIFORMS = st.one_of(st.sampled_from(HOSTILE), st.floats(0, LAST_BELOW_ONE))


@settings(max_examples=400, deadline=None)
@given(
    st.lists(_VALUES, min_size=1, max_size=300).filter(lambda values: max(values) > -math.inf),
    _PARAMS,
    _UNIFORMS,
    st.sampled_from(ISAS),
)
@example([-math.inf, 2.0, -math.inf], SamplingParams(top_k=2, top_p=0.5), 0.7, ISAS[-1])
@example([-0.0, 0.0, -0.0, 0.0], SamplingParams(top_k=3), LAST_BELOW_ONE, ISAS[0])
def test_any_row_chooses_what_the_oracle_chooses(
    values: list[float], params: SamplingParams, number: float, isa: str
) -> None:
    row = np.array(values, np.float32)
    assert _choose(row[None], [params], [number], isa) == [_oracle(row, params, number, isa)]


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 2**30),
    st.integers(1, 3000),
    st.sampled_from([0, 1, 5]),
    st.sampled_from([0, 3, 1]),
    _PARAMS,
    st.lists(_UNIFORMS, min_size=3, max_size=3),
    st.sampled_from(ISAS),
)
def test_rows_of_many_pieces_choose_what_the_oracle_chooses(
    seed: int,
    size: int,
    levels: int,
    forbidden: int,
    params: SamplingParams,
    numbers: list[float],
    isa: str,
) -> None:
    rows = _rows(seed, 3, size, levels)
    if forbidden and size > 1:  # one in three is allowed, or one alone
        places = np.random.default_rng(seed).permutation(size)
        rows[:, places[: size - size // forbidden] if forbidden > 1 else places[1:]] = -np.inf
    rows[~np.isfinite(rows).any(axis=1), 0] = 0
    expected = [_oracle(row, params, number, isa) for row, number in zip(rows, numbers, strict=True)]
    assert _choose(rows, [params] * 3, numbers, isa) == expected


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("levels", [0, 2])
def test_a_whole_vocabulary_chooses_what_the_oracle_chooses(isa: str, levels: int) -> None:
    params = [SamplingParams(**options) for options in SETTINGS]
    rows = _rows(5, len(params), 49_152, levels)
    for round_ in range(3):
        numbers = [uniform(round_, i) for i in range(len(params))]
        expected = [_oracle(row, p, u, isa) for row, p, u in zip(rows, params, numbers, strict=True)]
        assert _choose(rows, params, numbers, isa, threads=2) == expected


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_hostile_numbers_choose_what_the_oracle_chooses(options: dict[str, Any]) -> None:
    params = SamplingParams(**options)
    for size in (2, 63, 64, 65, 256, 1024, 9000):
        rows = _rows(size, 8, size)
        rows[1, 1:] = -math.inf
        rows[2, :-1] = -math.inf
        rows[3] = 0
        rows[4, ::2] = -math.inf
        rows[5, 0], rows[5, 1:] = 80.0, -80.0
        rows[6, size // 2 :] = -math.inf
        rows[7, : size // 2] = -math.inf
        for number in HOSTILE:
            expected = [_oracle(row, params, number) for row in rows]
            assert _choose(rows, [params] * 8, [number] * 8) == expected


@pytest.mark.parametrize("isa", ISAS)
def test_equal_logits_rank_by_id(isa: str) -> None:
    rows = np.zeros((1, 700), np.float32)
    rows[0, ::2] = -0.0
    for number in HOSTILE:
        assert _choose(rows, [SamplingParams(top_k=1)], [number], isa) == [0]
        assert _choose(rows, [SamplingParams(top_p=1e-9)], [number], isa) == [0]
    assert _choose(rows, [SamplingParams(top_k=10)], [LAST_BELOW_ONE], isa) == [9]
    assert _choose(rows, [SamplingParams(top_p=0.5)], [LAST_BELOW_ONE], isa) == [349]
    assert _choose(rows, [SamplingParams(min_p=1.0)], [LAST_BELOW_ONE], isa) == [699]


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_every_token_gets_its_share_of_the_unit_interval(options: dict[str, Any]) -> None:
    # With evenly spaced numbers a token of probability p must come up p * draws times, give or take one.
    params, draws = SamplingParams(**options), 2000
    row = _rows(7, 1, 3001)[0]
    grid = [(i + 0.5) / draws for i in range(draws)]
    found: list[int] = []
    for start in range(0, draws, 500):
        found += _choose(np.tile(row, (500, 1)), [params] * 500, grid[start : start + 500])
    counts = np.bincount(found, minlength=len(row))
    expected = _probabilities(row, params) * draws
    assert np.abs(counts - expected).max() < 1.002
    assert not counts[expected == 0].any()


def _probabilities(row: Floats, params: SamplingParams) -> NDArray[np.float64]:
    """What tokens are to be chosen with, in float64 and without the kernel's weights."""
    logits = row.astype(np.float64)
    order = np.argsort(-logits, kind="stable")
    scores = np.exp((logits[order] - logits.max()) / params.temperature)
    if params.top_k > 0:
        scores[params.top_k :] = 0
    scores[scores < params.min_p * scores[0]] = 0
    scores /= scores.sum()
    if params.top_p < 1:
        scores[np.concatenate([[0.0], np.cumsum(scores)[:-1]]) >= params.top_p] = 0
    probabilities = np.zeros(len(scores))
    probabilities[order] = scores / scores.sum()
    return probabilities


# Company, threads, instruction sets


def test_a_row_gives_the_same_token_alone_and_in_any_company() -> None:
    params = [SamplingParams(**options) for options in SETTINGS]
    rows = _rows(3, 33, 6000, 8)
    for round_ in range(12):
        mixed = [params[(round_ * 7 + i * 5) % len(params)] for i in range(33)]
        numbers = [uniform(round_, i) for i in range(33)]
        alone = [_choose(rows[i : i + 1], [mixed[i]], [numbers[i]])[0] for i in range(33)]
        assert _choose(rows, mixed, numbers) == alone
        backwards = _choose(np.ascontiguousarray(rows[::-1]), mixed[::-1], numbers[::-1])
        assert backwards[::-1] == alone


@pytest.mark.parametrize("count", [1, 2, 3, 7, 20])
def test_the_number_of_threads_does_not_move_a_token(count: int) -> None:
    # Few rows are worked on in parts, many as wholes.
    params = [SamplingParams(**SETTINGS[(i * 3 + count) % len(SETTINGS)]) for i in range(count)]
    rows = _rows(4, count, 20_011)
    for round_ in range(4):
        numbers = [uniform(round_, i) for i in range(count)]
        found = [_choose(rows, params, numbers, threads=threads) for threads in (1, 2, 3)]
        assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("isa", FUSED)
def test_the_instruction_set_does_not_move_a_token_where_weights_agree(isa: str) -> None:
    params = [SamplingParams(**options) for options in SETTINGS]
    rows = _rows(6, len(params), 10_007, 16)
    for round_ in range(4):
        numbers = [uniform(round_, i) for i in range(len(params))]
        assert _choose(rows, params, numbers, isa) == _choose(rows, params, numbers, FUSED[0])


def test_no_rows_give_no_tokens() -> None:
    for threads in (1, 2):
        assert _math(threads=threads).choose(torch.zeros(0, 100), torch.zeros(0), []) == []


def test_torch_chooses_the_same_but_for_the_last_bits_of_weights() -> None:
    params = [SamplingParams(**options) for options in SETTINGS] * 4
    rows = _rows(9, len(params), 5000)
    numbers = [uniform(1, i) for i in range(len(params))]
    draws = [Draw(p, u) for p, u in zip(params, numbers, strict=True)]
    tensor = torch.from_numpy(rows)
    assert _choose(rows, params, numbers) == choose_in_torch(tensor, tensor.amax(dim=1), draws)


def test_what_does_not_fit_is_refused() -> None:
    chooser = load().Chooser(_machine().handle)
    logits, one = np.zeros((1, 10), np.float32), np.ones(1)
    token, top_k, peak = np.zeros(1, np.int32), np.ones(1, np.int32), np.zeros(1, np.float32)
    chooser.choose(logits, peak, one, top_k, one, 0 * one, 0 * one, token)
    with pytest.raises(ValueError, match="for each row"):
        chooser.choose(logits, peak, np.ones(2), top_k, one, 0 * one, 0 * one, token)
    with pytest.raises(ValueError, match="not finite"):
        chooser.choose(logits, peak + np.float32(np.nan), one, top_k, one, 0 * one, 0 * one, token)
    with pytest.raises(ValueError, match="below 1"):
        chooser.choose(logits, peak, one, top_k, one, 0 * one, one, token)
    with pytest.raises(ValueError, match="top_p"):
        chooser.choose(logits, peak, one, top_k, 0 * one, 0 * one, 0 * one, token)
