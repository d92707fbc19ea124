"""Sequences with their keys and values, in a native block pool or in a torch cache: what attention is tested on.

Axes: T new tokens of all sequences, H query heads, K kv heads, D head size, S block size, L tokens of one sequence.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from native_machines import ROUND, ROUND_BFLOAT16, machine
from octavo.attention.backend import attention_step
from octavo.attention.reference import ReferenceAttention
from octavo.kernels.library import load
from octavo.kernels.packed import Number
from packed_weights import F32, bfloat16, quantised

REFERENCE = ReferenceAttention()
# A whole prompt, a piece of one, single tokens near the borders of chunks (128 keys) and far out, a few tokens at once.
MIXED = ((0, 150), (200, 40), (0, 1), (126, 1), (127, 1), (128, 1), (700, 1), (255, 3), (380, 4), (10, 5))
# Numbers, and whether keys and values are kept as int8.
KINDS = [(number, int8) for number in Number for int8 in (False, True)]
GARBAGE = 0xFF  # not a number, in every kind of number


def same_bits(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


@dataclass(frozen=True)
class World:
    """lengths: (tokens before the step, tokens of the step) of each sequence. keys, values: [L, K, D] each.

    Sequences begin with the first `shared` tokens of the first one, in the same blocks (so `shared` is in whole blocks).
    """

    lengths: tuple[tuple[int, int], ...]
    queries: list[np.ndarray]
    keys: list[np.ndarray]
    values: list[np.ndarray]
    block_size: int = 16
    window: int = 0
    soft_cap: float = 0.0
    shared: int = 0

    @property
    def heads(self) -> tuple[int, int, int]:
        """(H, K, D)."""
        return self.queries[0].shape[1], self.keys[0].shape[1], self.keys[0].shape[2]

    def tables(self) -> list[tuple[int, ...]]:
        """Block tables, in no order."""
        size, common = self.block_size, self.shared // self.block_size
        needed = [-(-(start + count) // size) - common for start, count in self.lengths]
        ids = list(range(common + sum(needed) + 2))
        random.Random(size).shuffle(ids)
        first = [ids.pop() for _ in range(common)]
        return [tuple(first + [ids.pop() for _ in range(n)]) for n in needed]

    def only(self, which: Sequence[int]) -> World:
        """The same sequences, without the others."""
        return replace(
            self,
            lengths=tuple(self.lengths[i] for i in which),
            queries=[self.queries[i] for i in which],
            keys=[self.keys[i] for i in which],
            values=[self.values[i] for i in which],
        )


def make_world(
    lengths: Sequence[tuple[int, int]],
    *,
    heads: tuple[int, int, int] = (6, 2, 32),
    shared: int = 0,
    seed: int = 0,
    **options: Any,
) -> World:
    """Random numbers; queries are scaled so that scores are about 1 with the scale of D ** -0.5. options: of World."""
    rng = np.random.default_rng(seed)
    num_heads, kv_heads, head_size = heads

    def noise(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(F32)

    world = World(
        tuple(lengths),
        [noise(count, num_heads, head_size) for _, count in lengths],
        [noise(start + count, kv_heads, head_size) for start, count in lengths],
        [noise(start + count, kv_heads, head_size) for start, count in lengths],
        shared=shared,
        **options,
    )
    for part in (world.keys, world.values):
        for numbers in part[1:]:
            numbers[:shared] = part[0][:shared]
    return world


class Pool:
    """A native pool of one layer for a world, filled with `garbage` bytes."""

    def __init__(
        self,
        world: World,
        isa: str,
        number: Number,
        quantised: bool = False,
        share: bool = True,
        garbage: int = 0,
    ) -> None:
        _, kv_heads, head_size = world.heads
        self.world, self.isa, self.number, self.tables = world, isa, number, world.tables()
        vector = head_size + 4 if quantised else head_size * number.num_bytes
        num_blocks = max((max(t) for t in self.tables), default=0) + 2
        self.memory = np.full(num_blocks * 2 * world.block_size * kv_heads * vector, garbage, np.uint8)
        size = world.block_size
        self.handle = load().make_pool(
            self.memory, num_blocks, 1, kv_heads, head_size, size, int(number), quantised, share
        )

    def write(self, i: int, first: int, end: int) -> None:
        """Keys and values of positions [first, end) of sequence i."""
        size, table = self.world.block_size, self.tables[i]
        slots = np.array([table[p // size] * size + p % size for p in range(first, end)], np.int64)
        keys, values = self.world.keys[i][first:end], self.world.values[i][first:end]
        load().write_kv(machine(self.isa), self.handle, 0, int(self.number), keys, values, slots)

    def write_all(self) -> Pool:
        """What all sequences hold after the step."""
        for i, keys in enumerate(self.world.keys):
            self.write(i, 0, len(keys))
        return self

    def attend(self, items: Sequence[tuple[int, int, int]], threads: int = 1) -> tuple[list[np.ndarray], int]:
        """Of each item (sequence, start, count), [count, H, D]; and how many reads of chunks were shared.

        Positions are taken from the end of what World.queries has: its row 0 is the first token of the step.
        """
        num_heads, kv_heads, head_size = self.world.heads
        rows = [self.world.queries[i][self._row(i, start) :][:count] for i, start, count in items]
        queries = np.concatenate(rows)
        out = np.full((len(queries), num_heads, head_size), np.nan, F32)
        native = [(start, (0,) * count, self.tables[i]) for i, start, count in items]
        world = self.world
        scale, cap = head_size**-0.5, world.soft_cap
        shared = load().attend(
            machine(self.isa, threads), self.handle, 0, kv_heads, int(self.number), native, queries, out, scale,
            world.window, cap,
        )  # fmt: skip
        ends = np.cumsum([count for _, _, count in items])[:-1]
        return np.split(out, ends), shared

    def step(self, threads: int = 1) -> list[np.ndarray]:
        """Attention of all new tokens of all sequences in one call."""
        return self.attend([(i, *length) for i, length in enumerate(self.world.lengths)], threads)[0]

    def _row(self, i: int, start: int) -> int:
        return start - self.world.lengths[i][0]


def native_attention(
    world: World, isa: str, number: Number = Number.FLOAT32, **options: Any
) -> list[np.ndarray]:
    """Everything written, one step. options: threads, and those of Pool."""
    threads = options.pop("threads", 1)
    return Pool(world, isa, number, **options).write_all().step(threads)


def reference_attention(world: World) -> list[np.ndarray]:
    """The same by ReferenceAttention, in float32."""
    _, kv_heads, head_size = world.heads
    tables = world.tables()
    starts, counts = zip(*world.lengths, strict=True)
    num_blocks = max(max(t) for t in tables) + 1
    cache = torch.full((2, num_blocks, world.block_size, kv_heads, head_size), torch.nan)
    totals = [start + count for start, count in world.lengths]
    whole = attention_step([0] * len(totals), totals, tables, world.block_size)
    keys, values = (torch.from_numpy(np.concatenate(part)) for part in (world.keys, world.values))
    REFERENCE.write_kv(keys, values, cache, whole.slot_mapping)
    out = REFERENCE.attend(
        torch.from_numpy(np.concatenate(world.queries)),
        cache,
        attention_step(starts, counts, tables, world.block_size),
        scale=head_size**-0.5,
        window=world.window or None,
        soft_cap=world.soft_cap or None,
    )
    return np.split(out.numpy(), np.cumsum(counts)[:-1])


def rounded(world: World, number: Number, int8: bool = False) -> World:
    """The world in the numbers that the kernels have: bfloat16, or keys and values as bytes with a scale each."""
    same = bfloat16 if number is Number.BFLOAT16 else np.asarray
    kept = _as_bytes if int8 else same
    return replace(
        world,
        queries=[same(q) for q in world.queries],
        keys=[kept(k) for k in world.keys],
        values=[kept(v) for v in world.values],
    )


def _as_bytes(vectors: np.ndarray) -> np.ndarray:
    rows = vectors.reshape(-1, vectors.shape[-1])
    codes, scales = quantised(rows, rows.shape[1])
    return (codes * scales.astype(np.float64)).reshape(vectors.shape)


def oracle(world: World) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """From the definition, in float64: the result of each sequence, and the same with magnitudes of values."""
    results, magnitudes = [], []
    for (start, count), q, keys, values in zip(
        world.lengths, world.queries, world.keys, world.values, strict=True
    ):
        group = q.shape[1] // keys.shape[1]
        k, v = (np.repeat(x.astype(np.float64), group, axis=1) for x in (keys, values))
        scores = np.einsum("nhd,lhd->hnl", q.astype(np.float64), k) * q.shape[-1] ** -0.5
        if world.soft_cap:
            scores = world.soft_cap * np.tanh(scores / world.soft_cap)
        mine, theirs = np.arange(start, start + count)[:, None], np.arange(start + count)
        seen = theirs <= mine
        if world.window:
            seen &= theirs > mine - world.window
        scores = np.where(seen, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        results.append(np.einsum("hnl,lhd->nhd", weights, v))
        magnitudes.append(np.einsum("hnl,lhd->nhd", weights, np.abs(v)))
    return results, magnitudes


@dataclass(frozen=True)
class Wanted:
    """What attention must give, and how far off it may be: [n, H, D] of each sequence, float64."""

    results: list[np.ndarray]
    tolerances: list[np.ndarray]

    def check(self, got: list[np.ndarray], *case: object) -> None:
        for ours, theirs, tolerance in zip(got, self.results, self.tolerances, strict=True):
            off = np.abs(ours - theirs)
            assert (off <= tolerance).all(), (*case, f"off by {np.nanmax(off / tolerance):.3g} tolerances")


def wanted(world: World, number: Number, int8: bool = False) -> Wanted:
    """From the definition, in float64, of numbers rounded as the kernels have them.

    float32: a score is off by a few roundings of its size, which the exponential turns into as many of its weight; the
    kernels' exponential is off by 3e-7; sums of weights are of like signs. So all is off by some 5e-6 of the weighted
    magnitudes. bfloat16 adds one rounding of each weight, and one of the result.
    """
    results, magnitudes = oracle(rounded(world, number, int8))
    coarse = ROUND_BFLOAT16 if number is Number.BFLOAT16 else 0.0
    return Wanted(
        results,
        [
            (5e-6 + coarse) * magnitude + coarse * np.abs(result) + ROUND
            for result, magnitude in zip(results, magnitudes, strict=True)
        ],
    )
