"""The random stream: fixed for ever, in range, well mixed for neighbouring seeds and positions."""

from __future__ import annotations

import math
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from octavo.random_stream import derived_seed, uniform

UNIFORMS_OF_0 = [0.5744863976557276, 0.8486686868248087, 0.4768500368905104]
DERIVED_OF_0 = [-386623278445749028, 4349619916390103928]
WORDS = st.integers(-(2**63), 2**63 - 1)


def test_numbers_never_change_between_versions() -> None:
    # A stored seed must give the same text for ever; these values may only change with a note to users.
    assert [uniform(0, i) for i in range(3)] == UNIFORMS_OF_0
    assert [derived_seed(0, i) for i in range(2)] == DERIVED_OF_0


@given(WORDS, st.integers(0, 2**40))
def test_uniform_is_in_range_and_repeatable(seed: int, position: int) -> None:
    value = uniform(seed, position)
    assert 0.0 <= value < 1.0
    assert value == uniform(seed, position)


@given(WORDS, st.integers(0, 2**20), st.integers(0, 2**20))
def test_different_indices_give_different_seeds(seed: int, first: int, second: int) -> None:
    a, b = derived_seed(seed, first), derived_seed(seed, second)
    assert (a == b) == (first == second)
    assert -(2**63) <= a < 2**63


@given(WORDS)
def test_seeds_count_as_64_bit_words(seed: int) -> None:
    assert uniform(seed, 5) == uniform(seed + 2**64, 5)
    assert derived_seed(seed, 5) == derived_seed(seed - 2**64, 5)


def test_one_stream_is_uniform() -> None:
    _assert_uniform([uniform(1234, i) for i in range(20_000)])


def test_neighbouring_seeds_are_unrelated() -> None:
    _assert_uniform([uniform(seed, 0) for seed in range(-10_000, 10_000)])
    _assert_uniform([uniform(derived_seed(seed, 0), 0) for seed in range(20_000)])
    _assert_uniform([uniform(derived_seed(9, index), 0) for index in range(20_000)])
    # Differences of neighbours are uniform too (modulo 1), which a weak mixing of the seed would break.
    pairs = [(uniform(seed, i), uniform(seed + 1, i)) for seed in range(2_000) for i in range(10)]
    _assert_uniform([(b - a) % 1.0 for a, b in pairs])
    pairs = [(uniform(seed, i), uniform(seed, i + 1)) for seed in range(2_000) for i in range(10)]
    _assert_uniform([(b - a) % 1.0 for a, b in pairs])


def test_every_bit_of_the_seed_moves_half_of_the_result() -> None:
    flips = [
        bin((derived_seed(seed, 0) ^ derived_seed(seed ^ (1 << bit), 0)) & (2**64 - 1)).count("1")
        for bit in range(63)
        for seed in range(100, 140)
    ]
    assert 31.5 < sum(flips) / len(flips) < 32.5
    assert min(flips) >= 12


def _assert_uniform(values: list[float], bins: int = 64) -> None:
    """Chi-square over equal bins at six standard deviations, plus mean and serial correlation."""
    counts = [0] * bins
    for value in values:
        counts[int(value * bins)] += 1
    expected = len(values) / bins
    chi_square = sum((count - expected) ** 2 / expected for count in counts)
    assert chi_square < bins - 1 + 6 * math.sqrt(2 * (bins - 1))
    assert abs(sum(values) / len(values) - 0.5) < 6 / math.sqrt(12 * len(values))
    serial = sum((a - 0.5) * (b - 0.5) for a, b in pairwise(values)) / len(values)
    assert abs(serial) < 6 / (12 * math.sqrt(len(values)))
