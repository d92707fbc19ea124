"""The tiles of AMX, in software on CPUs that have none: against float64, against vectors, and to the bit in any batch.

`amx_emulated` is the set `amx` with its instructions done by csrc/kernels/amx_emulation.h, which ends the process where the
instructions would raise an exception. What it computes, and where it reads, is so proven without the hardware; its speed is
not. Where the CPU has AMX, all tests but one run on the instructions too.

Axes: M rows, N outputs, K inputs, D head size.
"""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import replace

import numpy as np
import pytest

from kv_worlds import GARBAGE, Pool, World, make_world, native_attention, same_bits, wanted
from native_machines import ISAS, ROUND_BFLOAT16, machine
from octavo.errors import ConfigError
from octavo.kernels.library import choose_isa, instruction_sets, load
from octavo.kernels.packed import MatrixArrays, Number, matrix, pack
from packed_weights import F32, GROUPED, bfloat16, expected, multiply, native, packed

pytestmark = pytest.mark.skipif(
    "avx512_bf16" not in ISAS, reason="needs AVX-512 with bfloat16 and byte products"
)

VECTORS = "avx512_bf16"
EMULATED = "amx_emulated"
AMX = (EMULATED, "amx") if "amx" in ISAS else (EMULATED,)
each_isa = pytest.mark.parametrize("isa", AMX)

INTEGERS = ("int8", *GROUPED)
# Below a tile, a tile and a half, whole tiles, and many; whole groups for grouped formats.
INPUTS = (16, 24, 64, 96, 576, 1536, 4096)
# One row to several tiles and their borders. From 4 rows (bytes) and 8 (groups) on, integers go through tiles.
SOME_ROWS = (1, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 65, 70)
BY_FORMAT = [
    (name, inputs)
    for name in ("bfloat16", *INTEGERS)
    for inputs in INPUTS
    if name not in GROUPED or inputs % 32 == 0
]


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(F32)


def test_the_emulated_set_is_for_tests_only() -> None:
    assert EMULATED not in instruction_sets()
    with pytest.raises(ConfigError, match="cannot run"):
        choose_isa(EMULATED)
    assert machine(EMULATED).isa == EMULATED


# ---- products


@each_isa
@pytest.mark.parametrize(("name", "inputs"), BY_FORMAT)
def test_products_are_right_and_those_of_integers_equal_vectors_to_the_bit(
    isa: str, name: str, inputs: int
) -> None:
    outputs = 100 if inputs < 1000 else 33
    what = packed(name, noise(outputs, inputs, seed=1))
    tiles, vectors = native(machine(isa), what), native(machine(VECTORS), what)
    x = noise(70, inputs, seed=2) * F32(10) ** np.random.default_rng(3).integers(-3, 4, (70, 1))
    values, tolerance = expected(what, x)
    for count in range(1, 71) if inputs < 100 else SOME_ROWS:
        got = multiply(machine(isa), tiles, x[:count], outputs)
        by_vectors = multiply(machine(VECTORS), vectors, x[:count], outputs)
        assert (np.abs(got - values[:count]) <= tolerance[:count]).all(), count
        if name in INTEGERS:
            assert got.tobytes() == by_vectors.tobytes(), count
        else:  # both are float32 sums of the same products, in different orders
            assert (np.abs(got - by_vectors) <= 2 * tolerance[:count]).all(), count


@pytest.mark.parametrize("inputs", [1, 2, 16, 24, 31, 32, 33, 576, 2051])
def test_bfloat16_products_are_to_the_bit_what_the_manual_says(inputs: int) -> None:
    """In tiles of 32 inputs: sums of even and of odd inputs, each in order, are added, and that to the sum of tiles before.

    A product of two bfloat16 numbers is a float32 number, so numpy's sums are those of fused multiply-adds.
    """
    weights, x = bfloat16(noise(45, inputs, seed=4)), bfloat16(noise(37, inputs, seed=5))
    total = np.zeros((37, 45), F32)
    for first in range(0, inputs, 32):
        even, odd = np.zeros_like(total), np.zeros_like(total)
        for k in range(first, min(first + 32, inputs)):
            (odd if k % 2 else even)[:] += x[:, k : k + 1] * weights[None, :, k]
        total += even + odd
    got = multiply(machine(EMULATED), native(machine(EMULATED), packed("bfloat16", weights)), x, 45)
    assert np.array_equal(got, total)


@each_isa
@pytest.mark.parametrize("name", ("bfloat16", *INTEGERS))
def test_a_row_is_the_same_to_the_bit_in_any_batch_on_any_threads(isa: str, name: str) -> None:
    inputs = (
        1120 if name in GROUPED else 1133
    )  # more steps than rows go through at a time, and no whole tile at the end
    what = packed(name, noise(70, inputs, seed=6))
    m, x = native(machine(isa), what), noise(200, inputs, seed=7)
    alone = np.concatenate([multiply(machine(isa), m, row[None], 70) for row in x])
    for threads in (1, 2, 3):
        for count in (2, 3, 4, 5, 8, 15, 16, 17, 31, 33, 40, 49, 100, 193, 200):
            first = (7 * count) % (200 - count + 1)
            got = multiply(machine(isa, threads), m, x[first : first + count], 70)
            assert got.tobytes() == alone[first : first + count].tobytes(), (threads, count)


@each_isa
@pytest.mark.parametrize("name", ("bfloat16", *INTEGERS))
def test_nothing_is_read_behind_the_panels(isa: str, name: str) -> None:
    for inputs in (32, 96, 128, 1056) if name in GROUPED else (1, 2, 16, 24, 96, 100, 1030):
        what = packed(name, noise(33, inputs, seed=8))
        plan, x = what.plan, noise(40, inputs, seed=9)
        into = MatrixArrays(
            fenced(plan.data_bytes), np.zeros(plan.num_scales, F32), np.zeros(plan.num_scales, np.int32)
        )
        pack(machine(isa), plan, what.rows, into)
        values, tolerance = expected(what, x)
        for count in (1, 8, 40):
            got = multiply(machine(isa), matrix(plan, into, None), x[:count], 33)
            assert (np.abs(got - values[:count]) <= tolerance[:count]).all()


@each_isa
def test_what_is_not_a_number_stays_in_its_row_and_output(isa: str) -> None:
    weights, x = noise(45, 80, seed=10), noise(20, 80, seed=11)
    weights[33, 70], x[17, 3], x[2, 79] = np.nan, np.nan, np.inf
    got = multiply(machine(isa), native(machine(isa), packed("bfloat16", weights)), x, 45)
    assert np.isnan(got[17]).all() and np.isnan(got[:, 33]).all() and not np.isfinite(got[2]).any()
    assert np.isfinite(np.delete(np.delete(got, [2, 17], 0), 33, 1)).all()


# ---- attention

# Several chunks of 128 keys, tiles of keys that are not full, one to many rows.
LENGTHS = ((0, 20), (299, 1), (140, 2), (0, 131), (120, 9))


@each_isa
@pytest.mark.parametrize("head_size", [16, 32, 48, 64, 80, 96, 128])
@pytest.mark.parametrize("int8", [False, True])
def test_attention_is_right_and_close_to_that_of_vectors(isa: str, head_size: int, int8: bool) -> None:
    world = make_world(LENGTHS, heads=(6, 2, head_size), seed=head_size)
    got = native_attention(world, isa, Number.BFLOAT16, quantised=int8)
    wanted(world, Number.BFLOAT16, int8).check(got)
    # Sums in other orders: a weight, and the result, may be rounded to the next number.
    for ours, theirs in zip(
        got, native_attention(world, VECTORS, Number.BFLOAT16, quantised=int8), strict=True
    ):
        assert np.abs(ours - theirs).max() <= 2 * ROUND_BFLOAT16 * max(1, np.abs(theirs).max())


@each_isa
@pytest.mark.parametrize("group", [1, 3, 5, 8, 16, 48])
def test_groups_of_query_heads(isa: str, group: int) -> None:
    world = make_world(LENGTHS, heads=(2 * group, 2, 64), seed=group)
    got = native_attention(world, isa, Number.BFLOAT16)
    wanted(world, Number.BFLOAT16).check(got)


@each_isa
@pytest.mark.parametrize(("window", "soft_cap"), [(1, 0.0), (17, 0.0), (129, 2.0), (200, 0.0)])
def test_windows_and_soft_caps(isa: str, window: int, soft_cap: float) -> None:
    world = make_world(LENGTHS, heads=(6, 2, 80), window=window, soft_cap=soft_cap)
    got = native_attention(world, isa, Number.BFLOAT16)
    wanted(world, Number.BFLOAT16).check(got)


@each_isa
@pytest.mark.parametrize(("head_size", "window", "int8"), [(64, 0, False), (80, 100, False), (16, 0, True)])
def test_attention_is_the_same_to_the_bit_in_any_batch_and_blocks_on_any_threads(
    isa: str, head_size: int, window: int, int8: bool
) -> None:
    world = make_world(LENGTHS, heads=(6, 2, head_size), window=window)
    kinds = {"isa": isa, "number": Number.BFLOAT16, "quantised": int8}
    whole = native_attention(world, **kinds)
    for i, theirs in enumerate(whole):
        assert native_attention(world.only([i]), **kinds)[0].tobytes() == theirs.tobytes()
    for size, threads in ((1, 1), (8, 2), (16, 3), (32, 2), (128, 1)):
        again = native_attention(replace(world, block_size=size), threads=threads, garbage=GARBAGE, **kinds)
        assert same_bits(again, whole), (size, threads)
    _assert_cut_prompts_are_the_same(world, whole, kinds)


def _assert_cut_prompts_are_the_same(world: World, whole: list[np.ndarray], kinds: dict) -> None:
    pool = Pool(world, **kinds).write_all()
    for i, (start, count) in enumerate(world.lengths):
        for size in (1, 7, 17):
            pieces = [(i, start + at, min(size, count - at)) for at in range(0, count, size)]
            cut = np.concatenate([pool.attend([piece], 2)[0][0] for piece in pieces])
            assert cut.tobytes() == whole[i].tobytes(), (i, size)


@each_isa
@pytest.mark.parametrize("head_size", [16, 48, 64])
def test_nothing_is_read_behind_the_pool(isa: str, head_size: int) -> None:
    world = make_world(((0, 40), (130, 3)), heads=(4, 2, head_size))
    pool = Pool(world, isa, Number.BFLOAT16)
    used = max(max(table) for table in pool.tables) + 1
    pool.memory = fenced(used * 2 * 2 * world.block_size * 2 * head_size)
    pool.handle = load().make_pool(
        pool.memory, used, 1, 2, head_size, world.block_size, int(Number.BFLOAT16), False, True
    )
    wanted(world, Number.BFLOAT16).check(pool.write_all().step())


_FENCED = []  # kept mapped, and so fenced, until the process ends


def fenced(size: int) -> np.ndarray:
    """Zero bytes whose end is the end of what may be read."""
    page = mmap.PAGESIZE
    pages = -(-size // page)
    memory = mmap.mmap(-1, (pages + 1) * page)
    _FENCED.append(memory)
    whole = np.frombuffer(memory, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(whole.ctypes.data + pages * page), ctypes.c_size_t(page), 0) == 0
    return whole[pages * page - size : pages * page]
