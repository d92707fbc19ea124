"""Attention over block-paged KV, in plain torch: the specification that every faster kernel is tested against.

It is not optimised, but it takes no needless detours, since it also serves where no kernel runs. For each sequence it
gathers the blocks once, multiplies all heads in one batched product, masks what a token must not see, and weighs the
values. Scores, softmax and the weighted sum are float32, whatever the cache holds.

    keys seen by the token at position p:   (p - window, p]    or   [0, p] without a window

Blocks that no token of the step can see (before the window) are not gathered. Query heads that share a kv head become rows
of the same matrix, so grouped heads cost no copies of keys.

Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", SOSP 2023, for
block tables; Ainslie et al., "GQA", EMNLP 2023, for grouped heads.

Axes: T tokens of the step, n tokens and L visible keys of one sequence, H query heads, K kv heads, G = H / K, D head size,
N blocks, S block size.
"""

from __future__ import annotations

import torch

from octavo.attention.backend import AttentionStep

# Queries of one sequence whose scores exist at the same time, so that a long prompt needs no more memory than a short one.
_ROWS_AT_ONCE = 128


class ReferenceAttention:
    """The backend that needs nothing but torch and states what is right."""

    name = "reference"
    default_block_size = 16

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """See AttentionBackend. Slots must be distinct; `cache` must be contiguous."""
        _, num_blocks, block_size, num_kv_heads, head_size = cache.shape
        slots = cache.view(2, num_blocks * block_size, num_kv_heads, head_size)
        slots[0].index_copy_(0, slot_mapping, key.to(cache.dtype))
        slots[1].index_copy_(0, slot_mapping, value.to(cache.dtype))

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
        """See AttentionBackend. Peak extra memory: three times H * _ROWS_AT_ONCE * L float32 numbers, for the scores."""
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        scaled = query.float() * scale
        end = 0
        for i, (count, kv_len) in enumerate(zip(step.query_lens, step.kv_lens, strict=True)):
            begin, end = end, end + count
            if count == 0:
                continue
            start = kv_len - count
            first = 0 if window is None else max(0, start - window + 1)
            keys, values = _gather(cache, step, i, first, kv_len)
            for low in range(0, count, _ROWS_AT_ONCE):
                high = min(low + _ROWS_AT_ONCE, count)
                seen = start + high - first
                mask = (
                    None
                    if count == 1
                    else _hidden(start + low, high - low, first, seen, window, query.device)
                )
                rows = slice(begin + low, begin + high)
                output[rows] = _attend_one(scaled[rows], keys[:seen], values[:seen], mask, soft_cap)
        return output


def _gather(
    cache: torch.Tensor, step: AttentionStep, sequence: int, first: int, kv_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of positions [first, kv_len) of a sequence, float32 [L, K, D] each."""
    size = step.block_size
    first_block = first // size
    block_ids = step.block_tables[sequence, first_block : -(-kv_len // size)]
    blocks = cache.index_select(1, block_ids)
    shift = first_block * size
    seen = blocks.flatten(1, 2)[:, first - shift : kv_len - shift].float()
    return seen[0], seen[1]


def _hidden(
    start: int, count: int, first: int, num_keys: int, window: int | None, device: torch.device
) -> torch.Tensor:
    """[n, L], true where the query at position start + row must not see the key at position first + column."""
    queries = torch.arange(start, start + count, device=device).unsqueeze(1)
    keys = torch.arange(first, first + num_keys, device=device)
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    return hidden


def _attend_one(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    hidden: torch.Tensor | None,
    soft_cap: float | None,
) -> torch.Tensor:
    """One sequence: query [n, H, D] (scaled), keys and values [L, K, D] -> [n, H, D]; all float32."""
    count, num_heads, head_size = query.shape
    length, num_kv_heads, _ = keys.shape
    group = num_heads // num_kv_heads
    rows = query.view(count, num_kv_heads, group, head_size).permute(1, 2, 0, 3)
    rows = rows.reshape(num_kv_heads, group * count, head_size)
    scores = torch.bmm(rows, keys.permute(1, 2, 0))
    if soft_cap is not None:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    if hidden is not None:
        scores.view(num_kv_heads, group, count, length).masked_fill_(hidden, float("-inf"))
    weighted = torch.bmm(torch.softmax(scores, dim=-1), values.transpose(0, 1))
    per_head = weighted.view(num_kv_heads, group, count, head_size)
    return per_head.permute(2, 0, 1, 3).reshape(count, num_heads, head_size)
