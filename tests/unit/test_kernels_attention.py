"""Native attention is right: against the reference backend, and against float64 on the numbers that the kernels have."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_worlds import (
    GARBAGE,
    KINDS,
    MIXED,
    Pool,
    make_world,
    native_attention,
    oracle,
    reference_attention,
    rounded,
    same_bits,
    wanted,
)
from native_machines import ISAS
from octavo.config import BLOCK_SIZES
from octavo.kernels.library import load
from octavo.kernels.packed import Number

each_isa = pytest.mark.parametrize("isa", ISAS)
each_number = pytest.mark.parametrize("number", list(Number))
each_kind = pytest.mark.parametrize(("number", "int8"), KINDS)


@each_number
@pytest.mark.parametrize("size", BLOCK_SIZES)
def test_mixed_steps_match_the_oracle_and_the_reference(number: Number, size: int) -> None:
    world = make_world(MIXED, block_size=size)
    right, reference = wanted(world, number), reference_attention(world)
    for isa in ISAS:
        got = native_attention(world, isa, number, garbage=GARBAGE)
        right.check(got, isa)
        if number is Number.FLOAT32:
            for ours, theirs in zip(got, reference, strict=True):
                np.testing.assert_allclose(ours, theirs, atol=3e-6, rtol=1e-5)


@each_number
@pytest.mark.parametrize("group", [1, 2, 3, 4, 8, 16, 48])
def test_groups_of_query_heads(number: Number, group: int) -> None:
    world = make_world(((0, 60), (300, 1), (131, 2)), heads=(2 * group, 2, 16))
    right = wanted(world, number)
    for isa in ISAS:
        right.check(native_attention(world, isa, number), isa)


@each_number
@pytest.mark.parametrize("head_size", [16, 32, 48, 64, 80, 96, 112, 128, 256])
def test_head_sizes(number: Number, head_size: int) -> None:
    world = make_world(((0, 60), (300, 1), (131, 2)), heads=(3, 1, head_size))
    right = wanted(world, number)
    for isa in ISAS:
        for size in (4, 32):
            resized = replace(world, block_size=size)
            right.check(native_attention(resized, isa, number, garbage=GARBAGE), isa, size)


@each_number
@pytest.mark.parametrize("window", [1, 2, 17, 127, 128, 129, 200, 1000])
@pytest.mark.parametrize("soft_cap", [0.0, 2.0])
def test_sliding_windows_and_soft_caps(number: Number, window: int, soft_cap: float) -> None:
    world = make_world(MIXED, window=window, soft_cap=soft_cap)
    right = wanted(world, number)
    for isa in ISAS:
        for size in (1, 16):
            resized = replace(world, block_size=size)
            right.check(native_attention(resized, isa, number, garbage=GARBAGE), isa, size)


@each_isa
@pytest.mark.parametrize("soft_cap", [0.5, 30.0])
def test_soft_caps_match_the_reference(isa: str, soft_cap: float) -> None:
    world = make_world(MIXED, soft_cap=soft_cap)
    for ours, theirs in zip(native_attention(world, isa), reference_attention(world), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=3e-6, rtol=1e-5)


@each_isa
@each_number
def test_scores_of_any_size_give_weights(isa: str, number: Number) -> None:
    world = make_world(((0, 20), (299, 1), (140, 2)))
    for factor in (0.0, 1e-30, 200.0, 1e10):
        scaled = replace(world, queries=[q * np.float32(factor) for q in world.queries])
        got = native_attention(scaled, isa, number)
        if factor <= 200:
            exact = rounded(scaled, number)
            # Scores of some hundreds: their own rounding counts.
            for ours, theirs, magnitude in zip(got, *oracle(exact), strict=True):
                lost = 1e-5 + (2**-7 if number is Number.BFLOAT16 else 0) + 1e-6 * factor
                assert (np.abs(ours - theirs) <= lost * magnitude + 1e-6).all()
        assert all(np.isfinite(part).all() for part in got)


@each_number
def test_int8_caches_hold_what_rounding_to_bytes_leaves(number: Number) -> None:
    world = make_world(MIXED)
    right = wanted(world, number, int8=True)
    for isa in ISAS:
        for size in (4, 16, 256):
            got = native_attention(replace(world, block_size=size), isa, number, quantised=True)
            right.check(got, isa, size)


@each_isa
def test_int8_caches_stay_close_to_what_was_written(isa: str) -> None:
    world = make_world(MIXED)
    got = native_attention(world, isa, quantised=True)
    for i, (ours, theirs) in enumerate(zip(got, oracle(world)[0], strict=True)):
        # Half a step of a key moves a score by at most `shift`, and each weight by that factor; a value moves half a step.
        half_keys = np.abs(world.keys[i]).max() / 254
        shift = half_keys * np.abs(world.queries[i]).sum(-1).max() * 32**-0.5
        most = np.abs(world.values[i]).max()
        assert np.abs(ours - theirs).max() <= most * np.expm1(2 * shift) + most / 254
        # That is the worst that can be; independent roundings add up to far less.
        assert np.sqrt(np.mean((ours - theirs) ** 2)) <= 0.01


@each_isa
def test_int8_vectors_of_zeros(isa: str) -> None:
    world = make_world(((40, 2),))
    world.keys[0][3] = world.values[0][5] = 0
    got = native_attention(world, isa, quantised=True)
    wanted(world, Number.FLOAT32, int8=True).check(got)
    world.keys[0][7] *= np.float32(1e-42)  # too small for a scale that is a normal number
    assert np.isfinite(native_attention(world, isa, quantised=True)[0]).all()


@each_isa
@each_kind
def test_writing_changes_only_the_slots_of_the_tokens(isa: str, number: Number, int8: bool) -> None:
    for size in (4, 32):
        world = make_world(((0, 70), (0, 70)), block_size=size)
        pool = Pool(world, isa, number, int8)
        pool.write(0, 0, 70)
        pool.write(1, 0, 70)
        clean = pool.memory.copy()
        world.keys[0][41:50] += 1
        pool.write(0, 41, 50)
        changed = np.flatnonzero(pool.memory != clean)
        block_bytes = len(pool.memory) // (max(map(max, pool.tables)) + 2)
        assert set(changed // block_bytes) == {pool.tables[0][p // size] for p in range(41, 50)}
        world.keys[0][41:50] -= 1
        # Adding one and taking it away rounds; what was written first is written again.
        again = make_world(((0, 70), (0, 70)), block_size=size)
        pool.world = again
        pool.write(0, 41, 50)
        assert np.array_equal(pool.memory, clean)


def test_a_copied_block_is_the_same_to_the_byte() -> None:
    world = make_world(((0, 40),))
    pool, other = (Pool(world, ISAS[0], Number.BFLOAT16, garbage=g) for g in (0, 9))
    pool.write_all()
    for block in pool.tables[0]:
        load().copy_block(pool.handle, block, other.handle, block)
    expected = pool.step()
    assert same_bits(other.step(), expected)
    with pytest.raises(ValueError, match="no such block"):
        load().copy_block(pool.handle, 99, other.handle, 0)


# ---- what is not a number


@each_isa
@each_number
@pytest.mark.parametrize("soft_cap", [0.0, 5.0])
@pytest.mark.parametrize("length", [1, 40, 300])
def test_a_query_that_is_not_a_number_gives_none(
    isa: str, number: Number, soft_cap: float, length: int
) -> None:
    world = make_world(((length - 1, 1), (50, 1)), soft_cap=soft_cap)
    clean = native_attention(world, isa, number)
    world.values[0][:] *= np.float32(0.001)
    world.queries[0][0, 2, 7] = np.nan
    got = native_attention(world, isa, number)
    assert same_bits(got[1:], clean[1:])
    assert not np.isfinite(got[0][0, 2]).any()


@each_isa
@each_number
@pytest.mark.parametrize("soft_cap", [0.0, 5.0])
def test_a_key_that_is_not_a_number_reaches_those_who_see_it(
    isa: str, number: Number, soft_cap: float
) -> None:
    world = make_world(((30, 3), (50, 1)), soft_cap=soft_cap)
    world.values[0][:] *= np.float32(0.001)
    world.keys[0][31, 1, 3] = np.nan
    got = native_attention(world, isa, number)[0]
    assert np.isfinite(got[0]).all() and np.isfinite(got[:, :3]).all()
    assert np.isnan(got[1:, 3:]).all()


@each_isa
@each_number
def test_a_chunk_of_keys_that_are_not_numbers_is_not_passed_over(isa: str, number: Number) -> None:
    world = make_world(((300, 1), (290, 30)))
    for keys, values in zip(world.keys, world.values, strict=True):
        values *= np.float32(0.001)
        keys[:128] = np.nan
    for part in native_attention(world, isa, number):
        assert not np.isfinite(part).any()


@each_isa
@each_number
def test_an_int8_cache_does_not_hide_what_is_not_a_number(isa: str, number: Number) -> None:
    world = make_world(((30, 3),))
    world.values[0][31, 1, 3] = np.nan
    got = native_attention(world, isa, number, quantised=True)[0]
    assert np.isfinite(got[:, :3]).all()
    assert np.isnan(got[1:, 3:]).any(-1).all()


# ---- anything


@given(
    lengths=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 20)), min_size=1, max_size=5),
    size=st.sampled_from(BLOCK_SIZES),
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 2, 3, 5, 7]),
    head_size=st.sampled_from([16, 32, 48, 64]),
    window=st.just(0) | st.integers(1, 300),
    soft_cap=st.sampled_from([0.0, 0.5, 20.0]),
    kind=st.sampled_from(KINDS),
    isa=st.sampled_from(ISAS),
    threads=st.integers(1, 3),
    shared=st.integers(0, 300),
    seed=st.integers(0, 100),
)
def test_random_worlds(
    lengths: list[tuple[int, int]],
    size: int,
    kv_heads: int,
    group: int,
    head_size: int,
    window: int,
    soft_cap: float,
    kind: tuple[Number, bool],
    isa: str,
    threads: int,
    shared: int,
    seed: int,
) -> None:
    number, int8 = kind
    # What is shared was computed before the step.
    shared = min(shared, *(start for start, _ in lengths)) // size * size
    world = make_world(
        lengths, heads=(kv_heads * group, kv_heads, head_size), seed=seed, shared=shared, block_size=size,
        window=window, soft_cap=soft_cap,
    )  # fmt: skip
    got = native_attention(world, isa, number, quantised=int8, threads=threads)
    wanted(world, number, int8).check(got)
    last = len(lengths) - 1
    assert same_bits(native_attention(world.only([last]), isa, number, quantised=int8), got[last:])


def test_chunks_are_told_apart_by_their_borders() -> None:
    """Sequences of every length around the borders of tiles and chunks, all in one step."""
    borders = [1, 15, 16, 17, 31, 32, 33, 127, 128, 129, 255, 256, 257, 383, 384, 385]
    assert all(a < b for a, b in pairwise(borders))
    for number in Number:
        world = make_world([(total - 1, 1) for total in borders])
        got = native_attention(world, ISAS[0], number, garbage=GARBAGE)
        wanted(world, number).check(got)
