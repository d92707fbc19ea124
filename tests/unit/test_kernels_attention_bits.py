"""Native attention gives the same to the bit however its work is cut: batches, blocks, chunks, threads, shared prefixes.

And what lies in slots that a sequence does not own never matters.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kv_worlds import GARBAGE, KINDS, MIXED, Pool, World, make_world, native_attention, same_bits, wanted
from native_machines import ISAS
from octavo.config import BLOCK_SIZES
from octavo.kernels.packed import Number

each_isa = pytest.mark.parametrize("isa", ISAS)
each_kind = pytest.mark.parametrize(("number", "int8"), KINDS)


def chunked(world: World, isa: str, number: Number, chunk: int, int8: bool) -> list[np.ndarray]:
    """Each sequence alone, keys and values written chunk by chunk: what lies behind is no number."""
    pool = Pool(world, isa, number, int8, garbage=GARBAGE)
    parts: list[list[np.ndarray]] = [[] for _ in world.lengths]
    for i, (start, count) in enumerate(world.lengths):
        pool.write(i, 0, start)
        for first in range(start, start + count, chunk):
            end = min(first + chunk, start + count)
            pool.write(i, first, end)
            parts[i] += pool.attend([(i, first, end - first)])[0]
    return [np.concatenate(rows) for rows in parts]


@each_isa
@each_kind
@pytest.mark.parametrize("window", [0, 100])
def test_the_same_to_the_bit_however_a_prompt_is_cut(
    isa: str, number: Number, int8: bool, window: int
) -> None:
    world = make_world(((0, 270), (120, 20), (500, 9)), window=window)
    whole = native_attention(world, isa, number, quantised=int8)
    for size, chunk in ((16, 1), (16, 3), (4, 4), (64, 5), (256, 7), (1, 16), (32, 17), (8, 100)):
        resized = replace(world, block_size=size)
        assert same_bits(chunked(resized, isa, number, chunk, int8), whole), (size, chunk)


@each_isa
@each_kind
@pytest.mark.parametrize("window", [0, 100])
def test_the_same_to_the_bit_in_any_batch_and_block_size_on_any_threads(
    isa: str, number: Number, int8: bool, window: int
) -> None:
    world = make_world(MIXED, heads=(8, 2, 48), window=window)
    whole = native_attention(world, isa, number, quantised=int8)
    for threads in (1, 2, 3):
        assert same_bits(native_attention(world, isa, number, quantised=int8, threads=threads), whole)
    for size in BLOCK_SIZES:
        resized = replace(world, block_size=size)
        assert same_bits(native_attention(resized, isa, number, quantised=int8, threads=2), whole), size
    for which in ([0], [3, 1], [6], [9, 8, 7, 6], [5, 2, 0, 4]):
        got = native_attention(world.only(which), isa, number, quantised=int8)
        assert same_bits(got, [whole[i] for i in which]), which


@each_isa
@each_kind
@pytest.mark.parametrize("size", [1, 8, 16, 64, 256])
def test_bytes_that_nobody_wrote_change_nothing(isa: str, number: Number, int8: bool, size: int) -> None:
    world = make_world(MIXED[1:], block_size=size)
    clean = native_attention(world, isa, number, quantised=int8)
    for garbage in (0xFF, 0x7F, 0x80):  # not a number; huge; tiny and negative
        assert same_bits(native_attention(world, isa, number, quantised=int8, garbage=garbage), clean)


@each_isa
@each_kind
def test_blocks_of_other_sequences_change_nothing(isa: str, number: Number, int8: bool) -> None:
    world = make_world(MIXED)
    others = [i for i in range(len(MIXED)) if i not in (1, 6)]
    pool = Pool(world, isa, number, int8).write_all()
    before = pool.attend([(1, 200, 40), (6, 700, 1)])[0]
    for i in others:
        world.keys[i][:], world.values[i][:] = np.nan, np.inf
        pool.write(i, 0, len(world.keys[i]))
    assert same_bits(pool.attend([(1, 200, 40), (6, 700, 1)])[0], before)


# ---- sequences that begin alike


@each_kind
def test_shared_prefixes_are_read_once_and_change_no_bit(number: Number, int8: bool) -> None:
    lengths = ((520, 1), (513, 1), (600, 3), (700, 1), (512, 4), (530, 6))
    items = [(i, *length) for i, length in enumerate(lengths)]
    world = make_world(lengths, shared=512)
    right = wanted(world, number, int8)
    for isa in ISAS:
        alone = [native_attention(world.only([i]), isa, number, quantised=int8)[0] for i in range(6)]
        right.check(alone, isa)
        for size in (1, 16, 128, 256):
            for share in (True, False):
                pool = Pool(replace(world, block_size=size), isa, number, int8, share).write_all()
                got, reads = pool.attend(items, threads=2)
                assert same_bits(got, alone), (isa, size, share)
                # Five sequences cut by chunks of keys share four chunks; six new tokens are cut otherwise.
                assert reads == (4 * 4 if share else 0)


@pytest.mark.parametrize("group", [1, 5, 48])
def test_more_sequences_than_rows_of_a_task_share_a_prefix(group: int) -> None:
    lengths = tuple((256 + 3 * i, 1 + i % 4) for i in range(30))
    items = [(i, *length) for i, length in enumerate(lengths)]
    world = make_world(lengths, shared=256, heads=(group, 1, 16))
    right = wanted(world, Number.FLOAT32)
    for isa in ISAS:
        got, reads = Pool(world, isa, Number.FLOAT32).write_all().attend(items, threads=3)
        assert reads == 29 * 2
        right.check(got, isa)
        assert same_bits(got, native_attention(world, isa, share=False))


def test_only_whole_chunks_of_the_same_blocks_are_shared() -> None:
    isa = ISAS[0]
    for shared, start, reads in ((112, 300, 0), (128, 300, 1), (240, 300, 1), (256, 300, 2), (256, 255, 2)):
        world = make_world(((start, 1), (start, 1)), shared=shared)
        items = [(0, start, 1), (1, start, 1)]
        got, found = Pool(world, isa, Number.FLOAT32).write_all().attend(items)
        assert found == reads, (shared, start)
        wanted(world, Number.FLOAT32).check(got)
    # The first of two new tokens does not see the last key of the chunk, so the chunk is not read for both together.
    world = make_world(((254, 2), (300, 1)), shared=256)
    assert Pool(world, isa, Number.FLOAT32).write_all().attend([(0, 254, 2), (1, 300, 1)])[1] == 1


def test_two_chunks_of_one_block_are_not_taken_for_each_other() -> None:
    """A block of 256 tokens is all of chunk 0 and all of chunk 1. With many tables, some meet in the hash table."""
    for count in range(4, 64, 2):
        world = make_world(((300, 1),) * count, heads=(1, 1, 16), block_size=256)
        items = [(i, 300, 1) for i in range(count)]
        assert Pool(world, ISAS[0], Number.FLOAT32).attend(items)[1] == 0


def test_a_window_ends_inside_a_shared_prefix() -> None:
    for window in (1, 100, 300, 400):
        world = make_world(((520, 1), (600, 2), (700, 1)), shared=512, window=window)
        items = [(0, 520, 1), (1, 600, 2), (2, 700, 1)]
        got, reads = Pool(world, ISAS[0], Number.FLOAT32).write_all().attend(items)
        assert reads == 8
        wanted(world, Number.FLOAT32).check(got)
