"""Products of rows with packed weights, in every format, at the shapes of a small and a larger model.

Matrices of one shape are multiplied in turn. There are so many of them that none is in a cache when its turn comes, which is
how a decoder meets its weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.kernels.library import load
from octavo.kernels.machine import Machine
from octavo.kernels.packed import Format, Kept, MatrixArrays, MatrixPlan, Number, Rows, matrix, pack
from octavo.roofline.measured import Measured, summarise
from octavo.roofline.workbench import Workbench
from octavo.weights.packed_cache import Arrays, packed_arrays

# Matrices of a shape take this many times the caches.
WEIGHT_CACHES = 2
# Weights of a round of few rows, so that starting it and reading the clock do not count. With many rows one matrix does.
_ROUND_BYTES = 2**24
_FEW_ROWS = 32


@dataclass(frozen=True)
class Shape:
    """gated: half of the outputs are gates, which the kernel joins with the other half (SILU)."""

    name: str
    inputs: int
    outputs: int
    gated: bool = False


SHAPES = (
    Shape("135M gate and up: 576 -> 2 x 1,536", 576, 2 * 1536, gated=True),
    Shape("135M down: 1,536 -> 576", 1536, 576),
    Shape("135M head: 576 -> 49,152", 576, 49152),
    Shape("1B up: 2,048 -> 8,192", 2048, 8192),
)
NUM_ROWS = (1, 4, 16, 64, 512)
# Name, format, whether groups have a minimum, what codes stand above their values.
FORMATS = (
    ("float32", Format.FLOAT32, False, 0),
    ("bfloat16", Format.BFLOAT16, False, 0),
    ("int8", Format.INT8, False, 0),
    ("8-bit groups", Format.GROUP8, False, 128),
    ("4-bit groups", Format.GROUP4, True, 0),
)


def measure_products(bench: Workbench) -> Iterator[Measured]:
    """All shapes, formats and numbers of rows."""
    for shape in SHAPES:
        weights = np.random.default_rng(0).standard_normal((shape.outputs, shape.inputs), np.float32)
        for name, format, has_minimum, offset in FORMATS:
            plan = MatrixPlan(shape.outputs, shape.inputs, format, has_minimum, offset, shape.gated)
            count = matrices_beyond(bench.cache_bytes, plan.data_bytes)
            matrices = _copies(bench.machine, plan, weights, count)
            for num_rows in NUM_ROWS:
                yield _measure(bench, shape, name, plan, matrices, num_rows)


def matrices_beyond(cache_bytes: int, matrix_bytes: int) -> int:
    """How many matrices it takes for none to be in a cache when its turn comes again."""
    return 1 + math.ceil(WEIGHT_CACHES * cache_bytes / matrix_bytes)


def matrices_per_round(num_rows: int, matrix_bytes: int) -> int:
    """How many of them make a round."""
    return math.ceil(_ROUND_BYTES / matrix_bytes) if num_rows <= _FEW_ROWS else 1


def _measure(
    bench: Workbench, shape: Shape, name: str, plan: MatrixPlan, matrices: list[Any], num_rows: int
) -> Measured:
    x = np.random.default_rng(1).standard_normal((num_rows, shape.inputs), np.float32)
    per_round = matrices_per_round(num_rows, plan.data_bytes)
    number = Number.BFLOAT16 if plan.format is Format.BFLOAT16 else Number.FLOAT32
    rounds = load().time_products(
        bench.machine.handle, bench.stream, matrices, x, int(number), per_round, bench.seconds
    )
    return summarise(
        "product",
        shape.name,
        name,
        num_rows,
        rounds,
        per_round=per_round,
        moved_bytes=plan.data_bytes,
        operations=2 * num_rows * shape.outputs * shape.inputs,
        multiplied_as=plan.format,
    )


def _copies(machine: Machine, plan: MatrixPlan, weights: npt.NDArray[np.float32], count: int) -> list[Any]:
    """The same weights so many times, each in memory of its own, laid out as the decoder lays out its matrices."""
    sizes = {}
    for i in range(count):
        sizes[f"{i}.data"] = plan.data_bytes
        sizes[f"{i}.scales"] = sizes[f"{i}.sums"] = plan.num_scales * 4

    def fill(into: Arrays) -> None:
        rows = Rows(Kept.FLOAT32, weights.view(np.uint8), plan.inputs)
        pack(machine.handle, plan, rows, _arrays_of(into, 0))
        for i in range(1, count):
            for part in ("data", "scales", "sums"):
                into[f"{i}.{part}"][:] = into[f"0.{part}"]

    arrays = packed_arrays(None, sizes, fill)
    return [matrix(plan, _arrays_of(arrays, i)) for i in range(count)]


def _arrays_of(arrays: Arrays, index: int) -> MatrixArrays:
    return MatrixArrays(
        arrays[f"{index}.data"],
        arrays[f"{index}.scales"].view(np.float32),
        arrays[f"{index}.sums"].view(np.int32),
    )
