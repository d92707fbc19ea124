"""What this machine can do at this moment, through torch: the yardstick for every figure of the same run.

    python benchmarks/peers/calibrate.py        writes JSON, takes about 20 s

linear: TFLOP/s of x @ w.T with x of M rows, K = 2048, N = 8192, in turn over four matrices, which do not fit a cache
together, as layers of a model do not. At M = 1 that is weight streaming, given in GB/s as well. copy: GB/s read and written.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable

import torch

K, N = 2048, 8192
ROWS = (1, 16, 64, 512, 2048)
_NUM_WEIGHTS = 4
_LEAST_S = 0.25
_COPY_BYTES = 2**28


def best_s(work: Callable[[], object], tries: int = 3) -> float:
    """Seconds of one call: the best mean of a few series that are long enough to be timed."""
    work()
    best = float("inf")
    for _ in range(tries):
        count, began = 0, time.perf_counter()
        while time.perf_counter() - began < _LEAST_S:
            work()
            count += 1
        best = min(best, (time.perf_counter() - began) / count)
    return best


def linear_s(rows: int, dtype: torch.dtype) -> float:
    """Seconds of one product with `rows` rows."""
    x = torch.randn(rows, K).to(dtype)
    weights = [torch.randn(N, K).to(dtype) for _ in range(_NUM_WEIGHTS)]

    def work() -> None:
        for weight in weights:
            torch.nn.functional.linear(x, weight)

    return best_s(work) / _NUM_WEIGHTS


@torch.inference_mode()
def calibrate(threads: int) -> dict[str, object]:
    """All figures, and the load average before they were taken."""
    torch.set_num_threads(threads)
    load_average = os.getloadavg()[0]
    linear, streaming = {}, {}
    for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32)):
        seconds = {rows: linear_s(rows, dtype) for rows in ROWS}
        linear[name] = {str(rows): round(2 * rows * K * N / s / 1e12, 4) for rows, s in seconds.items()}
        streaming[name] = round(K * N * dtype.itemsize / seconds[1] / 1e9, 2)
    source, target = (torch.ones(_COPY_BYTES // 4) for _ in range(2))
    copy = 2 * _COPY_BYTES / best_s(lambda: target.copy_(source)) / 1e9
    return {
        "threads": threads,
        "load_average": load_average,
        "linear_tflops": linear,
        "weights_gb_per_s": streaming,
        "copy_gb_per_s": round(copy, 2),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    print(json.dumps(calibrate(parser.parse_args().threads)))
