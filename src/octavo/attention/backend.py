"""What attention needs to know of one step, and what an attention backend must offer.

The tokens of a step are the new tokens of all its sequences, one sequence after the other, flattened into one axis: only
attention knows where one ends and the next begins. A sequence with `start` tokens already in the cache brings `count` new
ones; after `write_kv` its keys and values of positions [0, start + count) are in the cache, and token `start + i` sees
positions [0, start + i]. Prefill, chunked prefill and decode differ in these numbers only.

                     sequence 0        sequence 1   sequence 2
    tokens of step   [ 5  6  7 ]       [ 12 ]       [ 0  1  2  3 ]         (their positions)
    query_starts      0                 3            4             8
    kv_lengths       [ 8,                13,          4 ]

Axes: T tokens of the step, B sequences, H query heads, K kv heads, D head size, N blocks, S block size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from octavo.registry import Registry

BACKENDS = Registry("attention backend", {"reference": "octavo.attention.reference:ReferenceAttention"})


@dataclass(frozen=True)
class AttentionStep:
    """Where the tokens of one step live in the blocks of one cache group. All tensors are on the CPU.

    query_starts: int32 [B + 1], cumulative numbers of new tokens. kv_lengths: int32 [B], tokens of each sequence in the
    cache after this step. block_tables: int32 [B, most blocks], padded with 0 behind what kv_lengths needs.
    slot_mapping: int64 [T], `block_id * block_size + offset` of each new token.
    query_lens, kv_lens: the same as Python integers, so that no loop reads numbers out of tensors.
    """

    query_starts: torch.Tensor
    kv_lengths: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    block_size: int
    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return self.slot_mapping.shape[0]


def attention_step(
    starts: Sequence[int], counts: Sequence[int], block_tables: Sequence[Sequence[int]], block_size: int
) -> AttentionStep:
    """Metadata of a step whose sequence i computes positions [starts[i], starts[i] + counts[i]).

    block_tables[i] must reach position starts[i] + counts[i] - 1; entries beyond are ignored. O(tokens + blocks in use).

    >>> attention_step([3], [2], [[7, 9]], 4).slot_mapping.tolist()
    [31, 36]
    """
    kv_lens = tuple(start + count for start, count in zip(starts, counts, strict=True))
    used = [-(-length // block_size) for length in kv_lens]
    tables = np.zeros((len(kv_lens), max(used, default=0)), dtype=np.int32)
    slots: list[int] = []
    for i, (start, length, table) in enumerate(zip(starts, kv_lens, block_tables, strict=True)):
        assert len(table) >= used[i], (
            f"{length} tokens need {used[i]} blocks of {block_size}, not {len(table)}"
        )
        tables[i, : used[i]] = table[: used[i]]
        slots.extend(table[p // block_size] * block_size + p % block_size for p in range(start, length))
    query_starts = np.zeros(len(kv_lens) + 1, dtype=np.int32)
    np.cumsum(counts, out=query_starts[1:])
    return AttentionStep(
        query_starts=torch.from_numpy(query_starts),
        kv_lengths=torch.tensor(kv_lens, dtype=torch.int32),
        block_tables=torch.from_numpy(tables),
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        block_size=block_size,
        query_lens=tuple(counts),
        kv_lens=kv_lens,
    )


class AttentionBackend(Protocol):
    """Reads and writes one layer's part of the KV cache: a tensor [2, N, S, K, D], keys at index 0, values at 1."""

    name: str
    default_block_size: int

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Store `key` and `value`, [T, K, D] each (strides may be any), in the slots of `cache`, which is changed."""
        ...

    def attend(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        step: AttentionStep,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
    ) -> torch.Tensor:
        """Attention of every new token over its own sequence, causal; returns [T, H, D] in the dtype of `query`.

        query: [T, H, D], strides may be any; head h reads kv head h // (H // K). The step's own keys and values are
        already written. scale: factor of the scores. window: a token sees so many positions, itself included; None means
        all. soft_cap: scores become soft_cap * tanh(score / soft_cap).
        """
        ...
