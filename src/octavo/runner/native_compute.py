"""Compute by the native kernels: one decoder, one pool of blocks, and a host store for blocks that are swapped out.

    a block:  [layers][kv heads]( keys | values | scales of a quantised cache )      csrc/types.h: Cache

Memory is reserved, not touched: the operating system gives pages as blocks are first written, so an idle pool costs nothing.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from octavo.kernels.decoder import NativeDecoder
from octavo.kernels.library import load
from octavo.kernels.packed import Number
from octavo.model_spec import KVLayout, ModelSpec
from octavo.scheduler.plan import BlockMove, MoveKind, PlanItem


class NativeCompute:
    """See Compute. quantised: keys and values are kept as int8. share: read prefixes that sequences share only once."""

    def __init__(
        self,
        decoder: NativeDecoder,
        layout: KVLayout,
        *,
        num_blocks: int,
        num_host_blocks: int,
        number: Number,
        quantised: bool,
        share: bool = True,
    ) -> None:
        self._decoder = decoder
        self._pool = _pool(decoder.spec, layout, num_blocks, number, quantised, share)
        self._host = _pool(decoder.spec, layout, num_host_blocks, number, quantised, share)

    def move(self, moves: Sequence[BlockMove]) -> None:
        """See Compute."""
        for move in moves:
            source = self._host if move.kind is MoveKind.SWAP_IN else self._pool
            target = self._host if move.kind is MoveKind.SWAP_OUT else self._pool
            load().copy_block(source, move.source, target, move.target)

    def forward(self, items: Sequence[PlanItem]) -> None:
        """See Compute."""
        self._decoder.forward(self._pool, [(item.start, item.token_ids, item.block_ids) for item in items])

    def logits(self, rows: list[int]) -> torch.Tensor:
        """See Compute."""
        return self._decoder.logits(rows)

    def best(self, rows: list[int]) -> tuple[list[float], list[int]]:
        """See Compute."""
        return self._decoder.best(rows)


def _reserved(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Memory that is taken when it is touched, in huge pages where the system has them: blocks lie anywhere in it."""
    memory = mmap.mmap(-1, max(num_bytes, 1))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8, num_bytes)


def _pool(
    spec: ModelSpec, layout: KVLayout, num_blocks: int, number: Number, quantised: bool, share: bool
) -> Any:
    return load().make_pool(
        _reserved(num_blocks * layout.block_bytes),
        num_blocks,
        spec.num_layers,
        spec.num_kv_heads,
        spec.head_size,
        layout.block_size,
        int(number),
        quantised,
        share,
    )
