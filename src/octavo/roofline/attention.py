"""Attention over block-paged keys and values, with the heads of a 135M model: 9 query heads, 3 kv heads of 64 numbers.

A pool has so many layers that the keys and values of all of them do not fit the caches, and layers are attended to in turn.
Tables name blocks in no order, as those of an engine that has been at work for a while.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.kernels.library import load
from octavo.kernels.packed import Format, Number
from octavo.roofline.measured import Measured, summarise
from octavo.roofline.workbench import Workbench

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 9, 3, 64, 16
_KV_CACHES = 2
_MOST_LAYERS = 32


@dataclass(frozen=True)
class Step:
    """Sequences of equal length that compute `new` tokens each, after `shared` + `own` tokens; the shared ones are in the
    same blocks. share: read those once for all."""

    name: str
    num_sequences: int
    new: int
    own: int
    shared: int = 0
    share: bool = True

    @property
    def kept_tokens(self) -> int:
        """Tokens whose keys and values lie in the pool."""
        return self.shared + self.num_sequences * self.own

    @property
    def pairs(self) -> int:
        """Queries times the keys each sees."""
        length = self.shared + self.own
        return self.num_sequences * sum(range(length - self.new + 1, length + 1))


@dataclass(frozen=True)
class Numbers:
    """What products are made in, and whether keys and values are kept as int8."""

    name: str
    number: Number
    quantised: bool

    @property
    def token_bytes(self) -> int:
        """Keys and values of a token in one layer, with their scales."""
        size = 1 if self.quantised else self.number.num_bytes
        return 2 * NUM_KV_HEADS * (HEAD_SIZE * size + (4 if self.quantised else 0))


STEPS = (
    Step("decode, 1 of 4,096", 1, 1, 4096),
    Step("decode, 1 of 32,768", 1, 1, 32768),
    Step("decode, 64 of 512", 64, 1, 512),
    Step("decode, 64 of 1,024, 768 shared", 64, 1, 256, 768),
    Step("the same, each reading all", 64, 1, 256, 768, share=False),
    Step("prefill, 512 new tokens at 0", 1, 512, 512),
    Step("prefill, 512 new tokens at 4,096", 1, 512, 4096 + 512),
)
NUMBERS = (
    Numbers("float32", Number.FLOAT32, False),
    Numbers("bfloat16", Number.BFLOAT16, False),
    Numbers("bfloat16, KV int8", Number.BFLOAT16, True),
)


def measure_attention(bench: Workbench) -> Iterator[Measured]:
    """All steps in all numbers."""
    for step in STEPS:
        for numbers in NUMBERS:
            yield _measure(bench, step, numbers)


def make_pool(numbers: Numbers, num_blocks: int, num_layers: int, *, share: bool = True) -> Any:
    """A native pool that is full of random keys and values."""
    unit = _random_head(numbers)
    count = num_blocks * num_layers * NUM_KV_HEADS
    # In huge pages, as the engine's own pools (runner/native_compute.py).
    mapping = mmap.mmap(-1, count * len(unit))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(mapping, np.uint8)
    memory.reshape(count, len(unit))[:] = unit
    return load().make_pool(
        memory,
        num_blocks,
        num_layers,
        NUM_KV_HEADS,
        HEAD_SIZE,
        BLOCK_SIZE,
        int(numbers.number),
        numbers.quantised,
        share,
    )


def _measure(bench: Workbench, step: Step, numbers: Numbers) -> Measured:
    fetched = step.kept_tokens * numbers.token_bytes
    num_layers = min(_MOST_LAYERS, 1 + math.ceil(_KV_CACHES * bench.cache_bytes / fetched))
    pool = make_pool(numbers, -(-step.kept_tokens // BLOCK_SIZE), num_layers, share=step.share)
    queries = np.random.default_rng(0).standard_normal(
        (step.num_sequences * step.new, NUM_HEADS, HEAD_SIZE), np.float32
    )
    rounds = load().time_attention(
        bench.machine.handle,
        bench.stream,
        pool,
        NUM_KV_HEADS,
        int(numbers.number),
        _items(step),
        queries,
        bench.seconds,
    )
    return summarise(
        "attention",
        step.name,
        numbers.name,
        step.num_sequences * step.new,
        rounds,
        moved_bytes=fetched,
        operations=4 * NUM_HEADS * HEAD_SIZE * step.pairs,
        multiplied_as=Format.BFLOAT16 if numbers.number is Number.BFLOAT16 else Format.FLOAT32,
    )


def _items(step: Step) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """The step as the decoder takes it: start, token ids, block ids of each sequence."""
    blocks = np.random.default_rng(0).permutation(-(-step.kept_tokens // BLOCK_SIZE)).tolist()
    shared, own = blocks[: step.shared // BLOCK_SIZE], blocks[step.shared // BLOCK_SIZE :]
    each = step.own // BLOCK_SIZE
    start = step.shared + step.own - step.new
    return [
        (start, (0,) * step.new, (*shared, *own[i * each : (i + 1) * each]))
        for i in range(step.num_sequences)
    ]


def _random_head(numbers: Numbers) -> npt.NDArray[np.uint8]:
    """Keys and values of one block and kv head, and their scales (csrc/types.h: Cache)."""
    rng = np.random.default_rng(0)
    count = 2 * BLOCK_SIZE * HEAD_SIZE
    if numbers.quantised:
        codes = rng.integers(-127, 128, count, np.int8)
        scales = np.full(2 * BLOCK_SIZE, 0.02, np.float32)
        return np.concatenate([codes.view(np.uint8), scales.view(np.uint8)])
    values = rng.standard_normal(count, np.float32)
    if numbers.number is Number.BFLOAT16:
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return values.view(np.uint8)
