"""Products of rows with packed matrices, in every instruction set and format, against float64.

Three kinds of proof: whole numbers, whose products float32 holds exactly, must come out exactly; random numbers within the
rounding of their sums (packed_weights.expected); and a row must come out the same to the bit in every batch, on any number
of threads.
"""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from native_machines import FUSED_ISAS, ISAS, ROUND, machine
from octavo.kernels.library import load
from octavo.kernels.packed import Kept, Number
from packed_weights import (
    F32,
    GROUPED,
    NAMES,
    PLAIN,
    bfloat16,
    blocks,
    expected,
    group_values,
    multiply,
    native,
    packed,
    quantised_groups,
)

# (N, K): not whole panels, odd inputs, more inputs than are summed at a time (1024 words, of one to four numbers each).
SHAPES = [(1, 1), (5, 3), (33, 31), (32, 32), (31, 65), (70, 2049), (64, 4100), (100, 5003)]
GROUPED_SHAPES = [(1, 32), (33, 64), (64, 96), (70, 2080), (100, 4128)]
# Tiles of rows are 2 to 12 high, units of work up to 192.
ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 25, 47, 192, 193, 300]
SEVERAL = [(name, shape) for name in NAMES for shape in (GROUPED_SHAPES if name in GROUPED else SHAPES)]


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(F32)


def whole(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-9, 10, shape).astype(F32)


def rows_for(inputs: int) -> list[int]:
    return ROWS if inputs < 200 else [1, 5, 14]


def assert_close(got: np.ndarray, right: tuple[np.ndarray, np.ndarray], *case: object) -> None:
    values, tolerance = right
    off = np.abs(got.astype(np.float64) - values)
    worst = np.nanmax(off / np.maximum(tolerance, 1e-300))
    assert (off <= tolerance).all(), (*case, f"off by {worst:.3g} tolerances")


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("shape", SHAPES)
def test_whole_numbers_come_out_exactly(name: str, shape: tuple[int, int]) -> None:
    weights = whole(*shape, seed=1)
    what = packed(name, weights)
    matrices = {isa: native(machine(isa), what) for isa in ISAS}
    for count in rows_for(shape[1]):
        x = whole(count, shape[1], seed=count)
        exact = x @ weights.T
        for isa, m in matrices.items():
            assert np.array_equal(multiply(machine(isa), m, x, shape[0]), exact), (isa, count)


@pytest.mark.parametrize(("name", "shape"), SEVERAL)
def test_random_numbers_come_out_within_the_rounding_of_their_sums(name: str, shape: tuple[int, int]) -> None:
    what = packed(name, noise(*shape, seed=2))
    matrices = {isa: native(machine(isa), what) for isa in ISAS}
    for count in rows_for(shape[1]):
        x = noise(count, shape[1], seed=count)
        # Rows of very different sizes: a scale that is taken from a neighbour shows.
        x *= F32(10) ** np.random.default_rng(count).integers(-3, 4, (count, 1))
        right = expected(what, x)
        for isa, m in matrices.items():
            assert_close(multiply(machine(isa), m, x, shape[0]), right, isa, count)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", NAMES)
def test_biases_are_added(isa: str, name: str) -> None:
    what, bias = packed(name, noise(45, 64, seed=3)), noise(45, seed=4)
    x = noise(7, 64, seed=5)
    values, tolerance = expected(what, x)
    got = multiply(machine(isa), native(machine(isa), what, bias), x, 45)
    without = multiply(machine(isa), native(machine(isa), what), x, 45)
    assert np.array_equal(got, without + bias)
    assert_close(got, (values + bias, tolerance + ROUND * np.abs(values + bias)))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("inner", [1, 16, 39])
def test_gates_and_ups_lie_side_by_side_and_are_joined(isa: str, name: str, biased: bool, inner: int) -> None:
    weights = noise(2 * inner, 96, seed=6)
    bias = noise(2 * inner, seed=7) if biased else np.zeros(2 * inner, F32)
    m = native(machine(isa), packed(name, weights, interleaved=True), bias if biased else None)
    x = noise(13, 96, seed=8) / F32(8)
    padded = -(-inner // 16) * 16
    got = multiply(machine(isa), m, x, padded)
    values, tolerance = expected(packed(name, weights), x)
    values = values + bias
    tolerance = tolerance + ROUND * np.abs(values)
    gate, up = values[:, :inner], values[:, inner:]
    silu = gate / (1 + np.exp(-gate))
    # The slope of silu is at most 1.1; the exponential, the quotient and the product lose less than 1e-6 together.
    off = 1.1 * tolerance[:, :inner] * np.abs(up) + tolerance[:, inner:] * np.abs(silu)
    assert_close(got[:, :inner], (silu * up, off + 1e-6 * np.abs(silu * up)))
    assert (got[:, inner:] == 0).all()


@pytest.mark.parametrize("isa", ISAS)
def test_silu_of_extreme_gates_is_finite(isa: str) -> None:
    gates = np.array([-1e4, -200, -88, -30, -1e-6, 0, 1e-6, 30, 88, 200, 1e30], F32)
    weights = np.concatenate([gates, np.ones_like(gates)])[:, None]
    m = native(machine(isa), packed("float32", weights, interleaved=True))
    got = multiply(machine(isa), m, np.ones((1, 1), F32), 16)[0, : len(gates)]
    wide = gates.astype(np.float64)
    np.testing.assert_allclose(got, wide / (1 + np.exp(-np.maximum(wide, -700))), rtol=1e-6, atol=1e-33)


INVARIANT = [(name, (70, 96)) for name in NAMES] + [("bfloat16", (40, 2113)), ("group4", (40, 2112))]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("name", "shape"), INVARIANT)
def test_a_row_is_the_same_to_the_bit_in_any_batch_on_any_threads(
    isa: str, name: str, shape: tuple[int, int]
) -> None:
    what = packed(name, noise(*shape, seed=9))
    x = noise(300, shape[1], seed=10)
    m = native(machine(isa), what)
    alone = np.concatenate([multiply(machine(isa), m, row[None], shape[0]) for row in x])
    for threads in (1, 2, 3):
        for count in (2, 3, 5, 11, 12, 13, 24, 25, 100, 192, 193, 300):
            first = (7 * count) % (300 - count + 1)
            got = multiply(machine(isa, threads), m, x[first : first + count], shape[0])
            assert got.tobytes() == alone[first : first + count].tobytes(), (threads, count)


@pytest.mark.parametrize("isa", ISAS)
def test_packing_does_not_depend_on_threads(isa: str) -> None:
    x = noise(5, 96, seed=11)
    for name in NAMES:
        what = packed(name, noise(333, 96, seed=12))
        by_one = multiply(machine(isa), native(machine(isa), what), x, 333)
        assert np.array_equal(multiply(machine(isa), native(machine(isa, 3), what), x, 333), by_one)


@pytest.mark.parametrize(("name", "isas"), [(n, ISAS if n == "int8" else FUSED_ISAS) for n in NAMES])
def test_sets_that_do_the_same_arithmetic_agree_to_the_bit(name: str, isas: tuple[str, ...]) -> None:
    if name == "bfloat16":
        # The hardware's product of pairs treats subnormal numbers and the order of a pair in its own way.
        isas = tuple(isa for isa in isas if isa != "avx512_bf16")
    if len(isas) < 2:
        pytest.skip("this CPU has only one of the sets")
    what, x = packed(name, noise(70, 2080, seed=13)), noise(20, 2080, seed=14)
    results = [multiply(machine(isa), native(machine(isa), what), x, 70) for isa in isas]
    assert all(np.array_equal(result, results[0]) for result in results[1:])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["int8", *GROUPED])
def test_rows_and_weights_of_nothing_but_zeros(isa: str, name: str) -> None:
    weights = noise(40, 64, seed=15)
    weights[3] = 0
    weights[:, :32] *= (np.arange(40) % 2)[:, None]
    x = noise(4, 64, seed=16)
    x[1] = 0
    x[2, 32:] = 0
    what = packed(name, weights)
    got = multiply(machine(isa), native(machine(isa), what), x, 40)
    assert_close(got, expected(what, x))
    assert (got[1] == 0).all() and (got[:, 3] == 0).all()


def one_at_a_time(inputs: int) -> np.ndarray:
    """Rows that pick one input each; 127, so that the scale of a row of bytes is 1."""
    return 127 * np.eye(inputs, dtype=F32)


def gguf_blocks(name: str, rows: int, groups: int) -> np.ndarray:
    """Random blocks; scales and minima are small multiples of 1/64, so that every value is a float32 number."""
    rng = np.random.default_rng(17)
    size = {"q4_0": 18, "q4_1": 20, "q8_0": 34}[name]
    raw = rng.integers(0, 256, (rows, groups, size), dtype=np.uint8)
    for at in (0, 2) if name == "q4_1" else (0,):
        numbers = (rng.integers(-100, 101, (rows, groups, 1)) / 64).astype(np.float16)
        raw[..., at : at + 2] = numbers.view(np.uint8).reshape(rows, groups, 2)
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q8_0"])
def test_gguf_blocks_are_used_as_they_are_to_the_bit(isa: str, name: str) -> None:
    what = packed(name, np.zeros((45, 96), F32))
    raw = gguf_blocks(name, 45, 3)
    what.rows.raw[:] = raw
    values = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name.upper()])
    got = multiply(machine(isa), native(machine(isa), what), one_at_a_time(96), 45)
    assert np.array_equal(got, 127 * values.T)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q8_0"])
def test_gguf_blocks_that_gguf_wrote(isa: str, name: str) -> None:
    what = packed(name, noise(45, 96, seed=18))
    values = gguf.quants.dequantize(what.rows.raw, gguf.GGMLQuantizationType[name.upper()])
    assert np.array_equal(group_values(*blocks(name, what.rows.raw)).astype(F32), values)
    got = multiply(machine(isa), native(machine(isa), what), one_at_a_time(96), 45)
    np.testing.assert_allclose(got, 127 * values.T, rtol=2 * ROUND)


@pytest.mark.parametrize("kind", ["F32", "BF16", "F16", "Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("threads", [1, 3])
def test_conversion_of_rows_equals_gguf(kind: str, threads: int) -> None:
    weights = noise(37, 64, seed=19)
    weights[0, :6] = [
        1e-6,
        -3e-8,
        0,
        65504,
        -1e-40,
        -0.0,
    ]  # half precision knows the first two as subnormal numbers
    which = gguf.GGMLQuantizationType[kind]
    kept_so = np.ascontiguousarray(gguf.quants.quantize(weights, which))
    raw, values = kept_so.view(np.uint8), gguf.quants.dequantize(kept_so, which)
    kept = Kept[{"F32": "FLOAT32", "BF16": "BFLOAT16", "F16": "FLOAT16"}.get(kind, kind)]
    for number in Number:
        out = np.full(37 * 64 * number.num_bytes, 0xA5, np.uint8)
        load().convert(machine("portable", threads), int(kept), raw, 64, int(number), out)
        assert np.array_equal(_as_float(out, number), _rounded(values, number).reshape(-1))


@pytest.mark.parametrize("name", ["group4", "group8"])
def test_groups_are_quantised_no_worse_than_by_their_range(name: str) -> None:
    most = 15 if name == "group4" else 255
    weights = noise(64, 256, seed=20)
    weights *= F32(10) ** np.random.default_rng(21).integers(-4, 3, (64, 1))
    weights[0] = 0.7
    weights[1] = 0
    weights[2, ::5] = 1000
    what = packed(name, weights)
    isa = ISAS[0]
    got = multiply(machine(isa), native(machine(isa), what), one_at_a_time(256), 64).T / 127.0
    # What is packed is what numpy packs ...
    np.testing.assert_allclose(got, what.values, rtol=4 * ROUND, atol=1e-6 * np.abs(what.minima).max())
    # ... and as good as spreading the codes over the range of each group, with half-precision scale and minimum.
    pieces = weights.reshape(64, -1, 32).astype(np.float64)
    low, high = pieces.min(-1, keepdims=True), pieces.max(-1, keepdims=True)
    step = (high - low) / most
    codes = np.rint((pieces - low) / np.where(step > 0, step, 1))
    plain = ((codes * step + low - pieces) ** 2).sum(-1)
    ours = ((what.values.reshape(pieces.shape) - pieces) ** 2).sum(-1)
    lost = 32 * (2.0**-11 * (np.abs(low) + high - low) + 2.0**-25 * most)[..., 0] ** 2
    assert (ours <= 1.1 * plain + 3 * lost).all()
    assert np.abs(ours[:2]).max() <= (0.7 * 2.0**-11) ** 2 * 32


@pytest.mark.parametrize("isa", ISAS)
def test_groups_around_zero_lose_no_more_than_half_a_step(isa: str) -> None:
    weights = noise(64, 256, seed=24)
    weights *= F32(10) ** np.random.default_rng(25).integers(-2, 4, (64, 1))
    weights[0], weights[1, ::7] = 0, -3000
    got = (
        multiply(machine(isa), native(machine(isa), packed("even8", weights)), one_at_a_time(256), 64).T
        / 127.0
    )
    most = np.abs(weights.reshape(64, -1, 32)).max(-1, keepdims=True)
    # A scale may be off by 2 ** -11 of itself, or by half the least half-precision number; so are 127 steps of it.
    lost = most / 254 + 2.0**-11 * most + 127 * 2.0**-25
    assert (np.abs(got - weights).reshape(64, -1, 32) <= 1.001 * lost).all()


def test_groups_whose_numbers_half_precision_cannot_hold_stay_finite() -> None:
    weights = np.zeros((3, 32), F32)
    weights[0, ::2] = 1e9
    weights[1] = np.linspace(1e-9, 2e-9, 32)
    weights[2] = -1e9
    codes, scales, minima = quantised_groups(weights, 15)
    assert np.isfinite(scales).all() and np.isfinite(minima).all()
    what = packed("group4", weights)
    got = multiply(machine(ISAS[0]), native(machine(ISAS[0]), what), one_at_a_time(32), 3).T / 127.0
    np.testing.assert_allclose(got, group_values(codes, scales, minima), rtol=4 * ROUND, atol=1e-9)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_what_is_not_a_number_is_not_hidden(isa: str, name: str, odd: float) -> None:
    x = noise(3, 64, seed=22)
    x[1, 5] = odd
    what = packed(name, np.abs(noise(40, 64, seed=23)) + 1)
    got = multiply(machine(isa), native(machine(isa), what), x, 40)
    assert not np.isfinite(got[1]).any()
    assert np.isfinite(got[[0, 2]]).all()


def _rounded(values: np.ndarray, number: Number) -> np.ndarray:
    return bfloat16(values) if number is Number.BFLOAT16 else values


def _as_float(raw: np.ndarray, number: Number) -> np.ndarray:
    if number is Number.FLOAT32:
        return raw.view(F32)
    return (raw.view(np.uint16).astype(np.uint32) << 16).view(F32)
