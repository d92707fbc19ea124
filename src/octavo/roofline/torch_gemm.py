"""torch's product of bfloat16 rows with packed weights (oneDNN), at the same shapes and from memory too: a yardstick.

Weights are packed for the very number of rows, which an engine could not do; the call's own cost is in the time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from octavo.kernels.library import load
from octavo.kernels.packed import Format
from octavo.models.linear import can_pack
from octavo.roofline.measured import Measured, summarise
from octavo.roofline.products import NUM_ROWS, SHAPES, Shape, matrices_beyond, matrices_per_round
from octavo.roofline.workbench import Workbench


def measure_torch(bench: Workbench) -> Iterator[Measured]:
    """All shapes and numbers of rows; nothing where this torch, on this CPU, does not pack bfloat16."""
    if not can_pack(torch.bfloat16):
        return
    before = torch.get_num_threads()
    torch.set_num_threads(bench.machine.num_threads)
    try:
        with torch.inference_mode():
            for shape in SHAPES:
                for num_rows in NUM_ROWS:
                    yield _measure(bench, shape, num_rows)
    finally:
        torch.set_num_threads(before)


def _measure(bench: Workbench, shape: Shape, num_rows: int) -> Measured:
    weight = torch.randn(shape.outputs, shape.inputs).to(torch.bfloat16)
    count = matrices_beyond(bench.cache_bytes, weight.nbytes)
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight, num_rows) for _ in range(count)]
    x = torch.randn(num_rows, shape.inputs).to(torch.bfloat16)
    per_round = matrices_per_round(num_rows, weight.nbytes)
    rounds_s: list[float] = []
    rates: list[float] = []
    began = time.perf_counter()
    at = 0
    while len(rounds_s) < 2 or time.perf_counter() - began < bench.seconds:
        rates.append(load().read_rate(bench.machine.handle, bench.stream, len(rates)))
        start = time.perf_counter()
        for _ in range(per_round):
            torch.ops.mkldnn._linear_pointwise(x, packed[at % count], None, "none", [], "")
            at += 1
        rounds_s.append(time.perf_counter() - start)
    return summarise(
        "product",
        shape.name,
        "torch bfloat16",
        num_rows,
        (rounds_s[1:], rates[1:]),  # the first sets up what is kept for the shape
        per_round=per_round,
        moved_bytes=weight.nbytes,
        operations=2 * num_rows * shape.outputs * shape.inputs,
        multiplied_as=Format.BFLOAT16,
    )
