"""Where KV physically lies: the block pool's tensor and, for swapped-out blocks, the host store's.

Axes: L layers, 2 (keys, values), N blocks, S block size, K kv heads, D head size. A layer's part [2, N, S, K, D] is what an
attention backend reads and writes. Memory is reserved, not touched: the operating system gives pages as blocks are first
written, so an idle pool costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from octavo.model_spec import ModelSpec
from octavo.scheduler.plan import BlockMove, MoveKind


class KVStorage:
    """KV of all layers for `num_blocks` blocks, and for `num_host_blocks` blocks that are swapped out."""

    def __init__(
        self, spec: ModelSpec, *, block_size: int, num_blocks: int, num_host_blocks: int, dtype: torch.dtype
    ) -> None:
        shape = (block_size, spec.num_kv_heads, spec.head_size)
        self._pool = torch.empty(spec.num_layers, 2, num_blocks, *shape, dtype=dtype)
        self._host = torch.empty(spec.num_layers, 2, num_host_blocks, *shape, dtype=dtype)
        self.layers: list[torch.Tensor] = list(self._pool.unbind(0))

    def make(self, moves: Sequence[BlockMove]) -> None:
        """Copy whole blocks, strictly in order: a later move may read what an earlier one wrote."""
        for move in moves:
            source = self._host if move.kind is MoveKind.SWAP_IN else self._pool
            target = self._host if move.kind is MoveKind.SWAP_OUT else self._pool
            target[:, :, move.target].copy_(source[:, :, move.source])
