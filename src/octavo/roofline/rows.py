"""What is done to rows between the products: the norm and its result made ready for a matrix, rotary positions and the
write of keys and values into blocks.

In a decoder these rows are in a cache; here there are so many that they come from memory and go there, so that the limit is
the rate of copying. What is above it in the decoder's favour is not claimed; what is below it is time lost.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from octavo.kernels.library import load
from octavo.kernels.packed import GROUP, Format
from octavo.roofline.attention import (
    BLOCK_SIZE,
    HEAD_SIZE,
    NUM_HEADS,
    NUM_KV_HEADS,
    NUMBERS,
    Numbers,
    make_pool,
)
from octavo.roofline.measured import Measured, summarise
from octavo.roofline.workbench import Workbench

_ROW_CACHES = 2
_WIDTHS = (576, 2048)
# Bytes that a float becomes, scales and sums of rows or groups apart.
_FORMATS = (
    ("float32", Format.FLOAT32, 4.0),
    ("bfloat16", Format.BFLOAT16, 2.0),
    ("int8", Format.INT8, 1.0),
    ("8-bit groups", Format.GROUP8, 1.0 + 8 / GROUP),
)


def measure_rows(bench: Workbench) -> Iterator[Measured]:
    """Norms and writes in all numbers."""
    for width in _WIDTHS:
        for name, format, written in _FORMATS:
            yield _measure_norm(bench, width, name, format, written)
    for numbers in NUMBERS:
        yield _measure_rotation(bench, numbers)


def _measure_norm(bench: Workbench, width: int, name: str, format: Format, written: float) -> Measured:
    num_rows = _ROW_CACHES * bench.cache_bytes // (width * 4)
    x = np.random.default_rng(0).standard_normal((num_rows, width), np.float32)
    rounds = load().time_norm(
        bench.machine.handle, bench.stream, x, np.ones(width, np.float32), int(format), bench.seconds
    )
    moved = int(num_rows * width * (4 + written))
    return summarise(
        "norm",
        f"norm and make ready, rows of {width:,}",
        name,
        num_rows,
        rounds,
        moved_bytes=moved,
    )


def _measure_rotation(bench: Workbench, numbers: Numbers) -> Measured:
    width = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_SIZE
    num_blocks = _ROW_CACHES * bench.cache_bytes // (width * 4 * BLOCK_SIZE)
    num_rows = num_blocks * BLOCK_SIZE
    qkv = np.random.default_rng(0).standard_normal((num_rows, width), np.float32)
    slots = np.arange(num_rows, dtype=np.int64)
    rounds = load().time_rotation(
        bench.machine.handle,
        bench.stream,
        make_pool(numbers, num_blocks, 1),
        NUM_HEADS,
        NUM_KV_HEADS,
        int(numbers.number),
        qkv,
        slots,
        bench.seconds,
    )
    queries_bytes = NUM_HEADS * HEAD_SIZE * numbers.number.num_bytes
    moved = num_rows * (width * 4 + queries_bytes + numbers.token_bytes)
    return summarise(
        "rotation",
        "rotate q and k, write k and v",
        numbers.name,
        num_rows,
        rounds,
        moved_bytes=moved,
    )
